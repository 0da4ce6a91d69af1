"""Opening a checkpoint: a directory of safetensors, a hub id, or a GGUF file. Tensors are read one by one.

Nothing here unpickles: a pickle can run any code, and safetensors and GGUF cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from kvlab.config import ModelConfig
from kvlab.configs.hub import is_reachable
from kvlab.model.gguf_file import GGUFFile
from kvlab.model.gguf_model import hugging_face_config, hugging_face_name, read_tensor
from kvlab.model.safetensors_files import SafetensorsFiles, read_json
from kvlab.model.weights import CheckpointError, Shape, check_shapes, parts_of

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")  # owner/name, or owner/name@revision


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, checked against its config, by Hugging Face's tensor names.

    config    the model's shape
    shapes    tensor name -> shape
    read      returns one tensor by name (fp32 from GGUF, else as stored)
    source    where the tokenizer is found too: the directory, or the open GGUF file
    """

    config: ModelConfig
    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]
    source: Path | GGUFFile

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return every tensor, as stored or in `dtype`."""
        return {name: self.read(name).to(dtype) if dtype else self.read(name) for name in self.shapes}


def open_checkpoint(source: str | Path, *, name: str | None = None, revision: str | None = None) -> Checkpoint:
    """Open a directory, a GGUF file, or a hub id ("owner/name", "owner/name@revision"; fetched once, cached).

    Raises CheckpointError where it cannot be read or run, ConfigError where its config contradicts itself.
    """
    path = Path(source)
    if path.is_dir():
        alone = [] if (path / "config.json").exists() else list(path.glob("*.gguf"))
        if len(alone) != 1:
            return _open_directory(path, name or path.resolve().name)
        path = alone[0]
    if path.is_file():
        return _open_file(path, name or path.stem)
    if HUB_ID.fullmatch(str(source)) and path.suffix != ".gguf":
        hub_id, _, wanted = str(source).partition("@")
        return _open_directory(download(hub_id, revision or wanted or None), name or hub_id)
    raise CheckpointError(f"{source}: no such directory or file, and not a hub id (owner/name)")


def _open_directory(directory: Path, name: str) -> Checkpoint:
    raw = read_json(directory / "config.json")
    if raw.get("quantization_config"):
        stated = raw["quantization_config"]
        method = stated.get("quant_method", "unknown") if isinstance(stated, Mapping) else stated
        raise CheckpointError(
            f"{directory / 'config.json'}: the weights are quantised ({method}), which kvlab does "
            "not read: use the original checkpoint, or a GGUF file"
        )
    config = _runnable(ModelConfig.from_dict(raw, name=name, source=str(directory)), directory)
    config = _with_stop_tokens(config, directory / "generation_config.json")
    files = SafetensorsFiles(directory)
    check_shapes(files.shapes, config, str(directory))
    _check_tied(files, config)
    return Checkpoint(config, files.shapes, files.read, directory)


def _open_file(path: Path, name: str) -> Checkpoint:
    if path.suffix != ".gguf":
        way_out = "give the directory that holds it and its config.json"
        if path.suffix != ".safetensors":
            way_out = "kvlab reads directories of safetensors and GGUF files, never pickles; convert it"
        raise CheckpointError(f"{path} cannot be opened by itself: {way_out}")
    file = GGUFFile(path)
    raw = hugging_face_config(file)
    config = _runnable(ModelConfig.from_dict(raw, name=name, source=str(path)), path)
    stored = {hugging_face_name(tensor): tensor for tensor in file.tensors if tensor != "rope_freqs.weight"}
    shapes = {tensor: file.tensors[original].shape for tensor, original in stored.items()}
    check_shapes(shapes, config, str(path))
    return Checkpoint(config, shapes, lambda tensor: read_tensor(file, stored[tensor], raw), file)


def _check_tied(files: SafetensorsFiles, config: ModelConfig) -> None:
    """Old tied checkpoints store the output matrix once more; a different one would be left out silently."""
    if not config.tie_word_embeddings or "lm_head.weight" not in files.shapes:
        return
    if not torch.equal(files.read("lm_head.weight"), files.read("model.embed_tokens.weight")):
        raise CheckpointError(
            f"{files.directory}: the config says tie_word_embeddings is true, but lm_head.weight is not "
            "model.embed_tokens.weight: set it to false, or get the checkpoint that belongs to this config"
        )


def _runnable(config: ModelConfig, where: Path) -> ModelConfig:
    if config.cannot_run:
        raise CheckpointError(f"{where}: kvlab can size {config.name} but not run it: {config.cannot_run}")
    return config


def _with_stop_tokens(config: ModelConfig, path: Path) -> ModelConfig:
    """Chat models often name their end-of-turn token only in generation_config.json."""
    if not path.exists():
        return config
    ids = read_json(path).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if any(type(token) is not int for token in ids):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, not {ids}: mend it")
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ids))))


def download(hub_id: str, revision: str | None) -> Path:
    """Fetch a hub repository's config, tokenizer and safetensors; offline, return what was fetched before.

    Raises CheckpointError where the hub refuses or does not answer.
    """
    from huggingface_hub import constants, errors, snapshot_download  # here: only hub ids need it

    offline = constants.HF_HUB_OFFLINE or not is_reachable(constants.ENDPOINT)
    try:
        directory = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=["*.safetensors", "*.json", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],
            local_files_only=offline,
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        if offline:
            why = f"not fetched before, and {constants.ENDPOINT} is silent: connect, or use a directory"
        else:
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise CheckpointError(f"{hub_id} cannot be fetched: {why}") from None
    return Path(directory)


@torch.no_grad()
def fill(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint into a transformer's parameters, fusing as it goes.

    One tensor is in memory beside the model at a time; dtype and device are the parameters' own. Raises
    CheckpointError for values that are not finite.
    """
    with _one_thread():
        _fill(model, checkpoint)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Waking torch's threads for each of hundreds of short copies took four times as long as the copies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fill(model: nn.Module, checkpoint: Checkpoint) -> None:
    for name, parameter in model.named_parameters():
        parts = parts_of(name)
        for part, rows in zip(parts, parameter.split([checkpoint.shapes[part][0] for part in parts]), strict=True):
            tensor = checkpoint.read(part)
            if not all(isfinite(bound) for bound in tensor.aminmax()):  # NaN spreads to both bounds
                raise CheckpointError(
                    f"{checkpoint.config.name}: tensor {part} holds values that are not finite: "
                    "the file is corrupt; download it again"
                )
            rows.copy_(tensor)
