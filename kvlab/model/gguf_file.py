"""The GGUF file format: metadata, a table of tensors, and their data, quantised or not.

Layout (little-endian): "GGUF", version, counts; key-value pairs; one entry per tensor; padding; data. Every
length is checked against the file's size, so that a truncated file is refused before anything is used.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kvlab.model.weights import CheckpointError, Shape

SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
Value = int | float | bool | str | list


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: shape in torch's order, its storage type, first byte and length in the file."""

    shape: Shape
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata`, `tensors` (name -> TensorEntry) and `read(name)`.

    Raises CheckpointError where the file is missing, not GGUF, truncated or corrupt.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            self._bytes = np.memmap(self.path, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as error:  # ValueError: numpy cannot map an empty file
            raise CheckpointError(
                f"{self.path} cannot be read ({error}): check the path, or download it again"
            ) from None
        cursor = _Cursor(memoryview(self._bytes), self.path)
        num_tensors, num_values = _read_counts(cursor)
        self.metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("<I"))
        self.tensors = self._read_table(cursor, num_tensors)

    def _read_table(self, cursor: _Cursor, count: int) -> dict[str, TensorEntry]:
        entries = {}
        for _ in range(count):
            name = cursor.string()
            num_dims = cursor.number("<I")
            if num_dims > 4 or name in entries:
                raise cursor.corrupt(f"the entry of tensor {name!r} makes no sense")
            dims = [cursor.number("<Q") for _ in range(num_dims)]
            entries[name] = (tuple(reversed(dims)), cursor.number("<I"), cursor.number("<Q"))  # fastest first
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise cursor.corrupt(f"general.alignment is {alignment!r}")
        base = -(-cursor.place // alignment) * alignment
        return {name: self._entry(name, shape, kind, base + offset) for name, (shape, kind, offset) in entries.items()}

    def _entry(self, name: str, shape: Shape, kind: int, start: int) -> TensorEntry:
        if kind not in set(GGMLQuantizationType):
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as ggml type {kind}, which is unknown: "
                "the file is corrupt, or newer than the installed gguf package"
            )
        kind = GGMLQuantizationType(kind)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block_values:
            raise CheckpointError(
                f"{self.path}: tensor {name} of shape {shape} cannot be {kind.name}, which stores "
                f"{block_values} values a block: the file is corrupt; download it again"
            )
        num_bytes = math.prod(shape) // block_values * block_bytes
        if start + num_bytes > len(self._bytes):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} ends at byte {start + num_bytes}, the "
                f"file has {len(self._bytes)}; download it again"
            )
        return TensorEntry(shape, kind, start, num_bytes)

    def read(self, name: str) -> Tensor:
        """Return one tensor in fp32, dequantised."""
        entry = self.tensors[name]
        raw = self._bytes[entry.start : entry.start + entry.num_bytes].view(np.ndarray)
        try:
            values = dequantize(raw.reshape(*entry.shape[:-1], -1), entry.kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {entry.kind.name}, which the gguf package "
                "cannot dequantise: use a file in Q8_0, Q4_K, F16 or BF16"
            ) from None
        # fp32 is not dequantised but viewed: copied, because the file is mapped read-only
        return torch.from_numpy(values if values.flags.writeable else values.copy()).view(entry.shape)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{cursor.path} is not a GGUF file: it does not begin with 'GGUF'; download it again")
    version = cursor.number("<I")
    if version not in (2, 3):
        why = "is big-endian" if version & 0xFFFF == 0 else f"has version {version}"
        raise CheckpointError(
            f"{cursor.path} {why}: kvlab reads little-endian GGUF 2 and 3; convert it again with a current llama.cpp"
        )
    return cursor.number("<Q"), cursor.number("<Q")


class _Cursor:
    """A place in the file that moves forward as values are read, and never past the end."""

    def __init__(self, data: memoryview, path: Path):
        self.data, self.path, self.place = data, path, 0

    def corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is corrupt near byte {self.place}: {what}; download it again")

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.place:
            raise CheckpointError(
                f"{self.path} is truncated or corrupt: at byte {self.place} it announces {count} "
                f"bytes, the file has {len(self.data)}; download it again"
            )
        self.place += count
        return bytes(self.data[self.place - count : self.place])

    def number(self, code: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.corrupt("a text is not UTF-8") from None

    def value(self, kind: int) -> Value:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(self.number("<I"), self.number("<Q"))
        raise self.corrupt(f"a metadata value has type {kind}")

    def _array(self, kind: int, count: int) -> list:
        if kind == STRING:
            return [self.string() for _ in range(min(count, len(self.data)))]  # a wild count ends at the file's end
        if kind not in SCALARS:
            raise self.corrupt(f"a metadata array holds type {kind}")
        code = SCALARS[kind]
        raw = self.take(count * struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code[1]}", raw))
