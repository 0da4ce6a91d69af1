"""What one token stores: its keys and values as they came, or as codes with scales of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.attention import Part
from kvlab.attention_quantized import QuantizedPart
from kvlab.cache.kept import KeptPart
from kvlab.codecs import Codec
from kvlab.quantization import QuantizedTensor, check_finite, encode, wide


class PlainRows:
    """Keys and values as they came."""

    def pack(self, keys: Tensor, values: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """What to store for (B, H_kv, T, D) keys and values: payload, and metadata such as scales."""
        return ([keys] if values is None else [keys, values]), []

    def part(self, stored: list[Tensor], positions: Tensor, start: int | None, bounds: tuple[int, int] | None) -> Part:
        """What queries read of stored tensors; positions (B, H_kv, S)."""
        values = stored[1] if len(stored) > 1 else None
        return KeptPart(stored[0], values, positions, start, bounds=bounds)

    def keys(self, stored: list[Tensor]) -> Tensor:
        """The keys as numbers, (B, H_kv, S, D_k)."""
        return stored[0]


@dataclass(frozen=True)
class CodedRows:
    """Keys and values as codes with scales of their own for every token, so that slots can be dropped one by one.

    rope_width  the last columns of the keys, coded apart by the keys' codec (MLA's rotated part)

    Raises ValueError for groups along tokens: tokens that share a scale cannot leave one by one.
    """

    key_codec: Codec
    value_codec: Codec
    rope_width: int = 0

    def __post_init__(self):
        if "tokens" in (self.key_codec.along, self.value_codec.along):
            raise ValueError(
                "eviction drops tokens one by one, and groups along tokens (KIVI) share scales between them: "
                "use codes with scales for each row, such as int8, fp8 or int4-g64"
            )

    def pack(self, keys, values):
        coded = [encode(block, codec) for block, codec in self._blocks(keys, values)]
        scales = [x for one in coded for x in (one.scales, one.minima) if x is not None]
        return [one.codes for one in coded], scales

    def _blocks(self, keys: Tensor, values: Tensor | None) -> list[tuple[Tensor, Codec]]:
        check_finite(keys, "keys")
        widths = [keys.shape[3] - self.rope_width, self.rope_width] if self.rope_width else [keys.shape[3]]
        blocks = [(block, self.key_codec) for block in keys.split(widths, 3)]
        if values is not None:
            check_finite(values, "values")
            blocks.append((values, self.value_codec))
        for block, codec in blocks:
            codec.check_width(block.shape[3])
        return blocks

    def _split(self, stored: list[Tensor]) -> tuple[list[QuantizedTensor], list[QuantizedTensor]]:
        """Stored tensors as blocks of keys and of values."""
        key_blocks = 2 if self.rope_width else 1
        with_values = len(stored) > key_blocks * (3 if self.key_codec.kind == "affine" else 2)  # codes, scales, minima
        codecs = [self.key_codec] * key_blocks + [self.value_codec] * with_values
        codes, rest = stored[: len(codecs)], iter(stored[len(codecs) :])
        blocks = [
            QuantizedTensor(code, next(rest), next(rest) if codec.kind == "affine" else None, codec)
            for code, codec in zip(codes, codecs, strict=True)
        ]
        return blocks[:key_blocks], blocks[key_blocks:]

    def part(self, stored, positions, start, bounds):
        keys, values = self._split(stored)
        return QuantizedPart(tuple(keys), tuple(values) or None, positions, start)

    def keys(self, stored):
        blocks = [block.dequantize(wide(block.scales.dtype)) for block in self._split(stored)[0]]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 3)
