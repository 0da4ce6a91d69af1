"""A directory of safetensors: config.json and one file, or shards named by an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlab.model.weights import CheckpointError, Shape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F32", "F16", "BF16", "F64")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SafetensorsFiles:
    """The tensors of a directory, known by shape at once and read one by one.

    Raises CheckpointError for pickled weights, absent shards, truncated or corrupt files, quantised tensors.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._handles = {}
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        for name, listed in self._files().items():
            handle = self._handles[name] = _open(directory / name)
            stored = set(handle.keys())
            for tensor in listed if listed is not None else sorted(stored):
                if tensor not in stored:
                    raise CheckpointError(
                        f"{directory / name}: tensor {tensor} is missing, though {INDEX} says it "
                        "is there; download the checkpoint again"
                    )
                self._add(name, tensor)

    def _add(self, name: str, tensor: str) -> None:
        piece = self._handles[name].get_slice(tensor)
        if piece.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"{self.directory / name}: tensor {tensor} is stored as {piece.get_dtype()}: kvlab "
                "reads fp32, fp16 and bf16; get the checkpoint that is not quantised"
            )
        self._file_of[tensor] = name
        self.shapes[tensor] = tuple(piece.get_shape())

    def read(self, tensor: str) -> Tensor:
        """Return one tensor as it is stored."""
        path = self.directory / self._file_of[tensor]
        try:
            return self._handles[path.name].get_tensor(tensor)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: tensor {tensor} cannot be read ({_line(error)}); download it again"
            ) from None

    def _files(self) -> dict[str, list[str] | None]:
        """Return file -> the tensors that the index expects in it, or None for all it holds."""
        index = self.directory / INDEX
        if index.exists():
            return self._sharded(index)
        found = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if SINGLE in found or len(found) == 1:
            return {SINGLE if SINGLE in found else found[0]: None}
        if found:
            raise CheckpointError(
                f"{self.directory}: {len(found)} safetensors files but no {INDEX} that says which "
                "tensor is where; download it too"
            )
        pickled = sorted(path.name for path in self.directory.iterdir() if path.suffix in PICKLES)
        if pickled:
            raise CheckpointError(
                f"{self.directory / pickled[0]} is a pickle, which can run any code when it is "
                "opened, so kvlab never reads it: convert it with transformers' "
                "save_pretrained(…), which writes safetensors"
            )
        raise CheckpointError(f"{self.directory}: no weights: expected {SINGLE} or {INDEX}")

    def _sharded(self, index: Path) -> dict[str, list[str] | None]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map: download it again")
        files: dict[str, list[str] | None] = {}
        for tensor, name in weight_map.items():
            is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) < 256
            if not is_name or Path(name).name != name:
                raise CheckpointError(
                    f"{index}: tensor {tensor} lies in {name!r}, which is not a file beside the index"
                )
            files.setdefault(name, []).append(tensor)
        absent = sorted(name for name in files if not (self.directory / name).is_file())
        if absent:
            more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
            raise CheckpointError(
                f"{self.directory / absent[0]} is missing{more}, though {INDEX} names it: download the checkpoint again"
            )
        return files


def read_json(path: Path) -> dict:
    """Return a JSON object; raises CheckpointError naming the file where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a checkpoint's directory needs it beside the weights") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({_line(error)}); download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a JSON object; download it again")
    return content


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or corrupt ({_line(error)}); download it again") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
