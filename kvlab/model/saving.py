"""Writing a model as a directory that kvlab and transformers read: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from kvlab.model.safetensors_files import SINGLE
from kvlab.model.tokenizer import Tokenizer
from kvlab.model.transformer import Transformer
from kvlab.model.weights import expected_shapes, parts_of


def write_directory(
    directory: Path, model: Transformer, raw_config: Mapping, tokenizer: Tokenizer, dtype: torch.dtype = torch.float16
) -> None:
    """Write `model` with its Hugging Face config; each file is complete or absent. Raises ValueError where `dtype`
    cannot hold a weight (fp16 ends at 65,504)."""
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in separate(model).items()}
    overflown = next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)
    if overflown is not None:
        raise ValueError(f"tensor {overflown} holds values that {dtype} cannot: write it in a wider dtype")
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / "config.json", (json.dumps(dict(raw_config), indent=2) + "\n").encode())
    replace_file(directory / "tokenizer.json", tokenizer.backend.to_str().encode())
    replace_file(directory / SINGLE, save(tensors, {"format": "pt"}))


def separate(model: Transformer) -> dict[str, Tensor]:
    """The parameters under Hugging Face's names: rows of q, k, v and of gate, up apart again."""
    shapes, tensors = expected_shapes(model.config), {}
    for name, parameter in model.named_parameters():
        parts = parts_of(name)
        rows = parameter.detach().split([shapes[part][0] for part in parts])
        tensors |= dict(zip(parts, rows, strict=True))
    return tensors


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` at `path` in one step: a reader, or a run that was cut short, finds the old file or the new.

    A link stays, and what it points to is replaced. Raises OSError naming the path, with nothing left behind.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")  # nobody else writes under this name
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name on an empty file
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise type(error)(f"{path} cannot be written: {error.strerror or error}") from None
        raise
