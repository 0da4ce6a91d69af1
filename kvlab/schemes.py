"""Storage schemes of cached numbers: how many bytes a row of keys or values takes, exactly.

A *row* is what one token stores in one head of one layer: `head_dim` numbers (MLA: the latent and its rope).
Bare names count the codes alone; names with their groups count scales and minima too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

BARE = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "int2": 2}  # bits of one code
BLOCKS = {"q8_0": 34, "q5_0": 22, "q5_1": 24, "q4_0": 18, "q4_1": 20}  # bytes of 32 numbers, llama.cpp (ggml)
SPELLINGS = {
    "float32": "fp32", "f32": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "half": "fp16",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8",
}  # fmt: skip
GROUP_BYTES = 4  # an fp16 scale and an fp16 minimum
GROUPED = re.compile(r"(int|kivi)([248])-g([1-9]\d*)(?:-r([1-9]\d*))?")


class SchemeError(ValueError):
    """A dtype or scheme that sizing does not know."""


@dataclass(frozen=True)
class Scheme:
    """How numbers are stored: `bits` a code, and `group_bytes` more for every `group_size` numbers."""

    name: str
    bits: int
    group_size: int | None = None
    group_bytes: int = 0
    keys_along_tokens: bool = False  # KIVI: the keys' groups lie along the tokens, one per channel
    residual: int = 0  # the newest tokens, in 16 bits; KIVI's keys leave it together: so many at most

    @property
    def words(self) -> str:
        """What is counted, said in one line."""
        if self.name in BLOCKS:
            size = BLOCKS[self.name]
            return f"{self.name}: blocks of 32 numbers along a row, {size} bytes each, scales counted"
        if self.group_size is None:
            return f"{self.name}: {self.bits} bits a number" + ("" if self.bits >= 16 else ", scales not counted")
        where = "keys grouped along tokens, values along a row" if self.keys_along_tokens else "groups along a row"
        rest = f"the last {self.residual} tokens in 16 bits" if self.residual else "every token counted as quantised"
        tail = f", {rest}" if self.keys_along_tokens or self.residual else ""
        scales = f"an fp16 scale and minimum per {self.group_size} counted"
        return f"{self.name}: {self.bits}-bit codes, {where}, {scales}{tail}"

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of `width` numbers; a last group that is not full is stored in full."""
        if self.name in BLOCKS:
            return -(-width // 32) * BLOCKS[self.name]
        groups = -(-width // self.group_size) if self.group_size else 0
        return -(-width * self.bits // 8) + groups * self.group_bytes

    def key_row_bytes(self, width: int) -> Fraction:
        """Bytes of one row of keys; exact, a fraction where groups along tokens share their scale."""
        if not self.keys_along_tokens:
            return Fraction(self.row_bytes(width))
        return -(-width * self.bits // 8) + Fraction(width * self.group_bytes, self.group_size)

    def bits_per_number(self, width: int) -> Fraction:
        """Bits of one stored value in a row of `width` numbers, scales and padding included."""
        return Fraction(8 * self.row_bytes(width), width)


def parse(name: str) -> Scheme:
    """The scheme called `name`: bf16, fp8, int4, q8_0, int4-g64, kivi2-g32, kivi2-g32-r128, ...

    Raises SchemeError listing what there is.
    """
    key = str(name).strip().lower()
    key = SPELLINGS.get(key, key)
    if key in BARE:
        return Scheme(key, BARE[key])
    if key in BLOCKS:
        return Scheme(key, int(key[1]), 32, BLOCKS[key] - 4 * int(key[1]))
    match = GROUPED.fullmatch(key)
    if match is None:
        known = ", ".join([*BARE, *BLOCKS, "int{2,4,8}-gN", "kivi{2,4,8}-gN (N numbers share a scale)"])
        raise SchemeError(f"unknown dtype {name!r}: one of {known}")
    kind, bits, group, residual = match.groups()
    return Scheme(key, int(bits), int(group), GROUP_BYTES, kind == "kivi", int(residual or 0))
