"""Which codes: bits, groups and their axis, and what the names of schemes stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.packing import FP8
from kvlab.schemes import GROUPED

KINDS = ("affine", "symmetric", *FP8)
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Codec:
    """How numbers become codes.

    kind         affine: scale and minimum, levels 0 .. 2^bits - 1 · symmetric: a scale; 8 bits as in llama.cpp's q8_0
                 (levels -127 .. 127), fewer bits as in its q4_0 (the largest magnitude gets level -2^(bits-1))
                 · e4m3, e5m2: 8-bit floats behind a scale
    bits         2, 4 or 8 for a code
    group_size   numbers that share a scale; None: all of a row
    along        "channels" or "tokens"
    scale_dtype  of stored scales and minima; None: the numbers' own 16-bit dtype, and bf16 for wider ones. It keeps
                 their range; what rounding it causes is absorbed by the codes, for these use the scale as stored
    """

    kind: str = "affine"
    bits: int = 8
    group_size: int | None = None
    along: str = "channels"
    scale_dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.kind not in KINDS or self.along not in ("channels", "tokens"):
            raise ValueError(f"no {self.kind!r} codec along {self.along!r}: {', '.join(KINDS)}; channels or tokens")
        if type(self.bits) is not int or self.bits not in BITS or (self.kind in FP8 and self.bits != 8):
            allowed = "8" if self.kind in FP8 else "2, 4 or 8"
            raise ValueError(f"{self.kind} codes take {allowed} bits, not {self.bits!r}")
        if self.group_size is None and self.along == "tokens":
            raise ValueError("groups along tokens need a group_size")
        if self.group_size is not None and (type(self.group_size) is not int or self.group_size < 1):
            raise ValueError(f"a group holds at least one number, not {self.group_size!r}")

    @property
    def zero(self) -> int:
        """The code of level 0 where codes are stored shifted to be unsigned."""
        return 2 ** (self.bits - 1) if self.kind == "symmetric" and self.bits < 8 else 0

    @property
    def largest(self) -> float:
        """The largest level that both signs can reach; affine: the largest code."""
        if self.kind in FP8:
            return torch.finfo(FP8[self.kind]).max
        return 2**self.bits - 1 if self.kind == "affine" else 2 ** (self.bits - 1) - 1

    def check_width(self, width: int) -> None:
        """Raise ValueError where rows of `width` numbers cannot be cut into groups or packed into bytes."""
        if width < 1 or width * self.bits % 8:
            raise ValueError(f"a row of {width} numbers does not fill whole bytes with {self.bits}-bit codes")
        if self.along == "channels" and self.group_size is not None and width % self.group_size:
            raise ValueError(f"a row of {width} numbers cannot be cut into groups of {self.group_size}")

    def stored_scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.scale_dtype is not None:
            return self.scale_dtype
        return dtype if dtype.itemsize == 2 else torch.bfloat16

    def grouped(self, x: Tensor) -> tuple[Tensor, int]:
        """View (B, H_kv, S, D) so that one dimension runs through a group; returns the view and that dimension."""
        if self.along == "tokens":
            return x.unflatten(2, (-1, self.group_size)), 3  # (B, H_kv, S/group_size, group_size, D)
        return x.unflatten(3, (-1, self.group_size or x.shape[3])), 4  # (B, H_kv, S, D/group_size, group_size)


@dataclass(frozen=True)
class Recipe:
    """How a cache stores: a codec for keys, one for values, and the newest tokens that stay in full precision."""

    keys: Codec
    values: Codec
    residual: int = 0


RECIPES = {
    "int8": "8-bit codes, a scale and a minimum for each row",
    "int4": "4-bit codes, a scale and a minimum for 32 numbers of a row",
    "fp8": "e4m3 numbers behind a scale for each row",
    "q8_0": "llama.cpp's blocks: 32 8-bit codes and an fp16 scale",
    "q4_0": "llama.cpp's blocks: 32 4-bit codes and an fp16 scale",
    "kivi4": "KIVI: 4-bit keys in groups of 32 tokens per channel, 4-bit values per token, the newest 128 in full",
    "kivi2": "KIVI: 2-bit keys in groups of 32 tokens per channel, 2-bit values per token, the newest 128 in full",
}
GROUP, RESIDUAL = 32, 128  # KIVI's defaults


def recipe(name: str, width: int) -> Recipe | None:
    """The recipe called `name` for rows of `width` numbers; None for a name that is no recipe.

    Besides RECIPES, schemes named with their groups: int4-g64, int8-g32-r128, kivi2-g32, kivi2-g32-r64.
    """
    group = math.gcd(GROUP, width)  # 32 wherever a row can be cut into groups of 32
    match name:
        case "int8" | "fp8":
            return _same(Codec() if name == "int8" else Codec("e4m3"))
        case "q8_0" | "q4_0":
            return _same(Codec("symmetric", int(name[1]), 32, scale_dtype=torch.float16))
        case "int4":
            return _same(Codec("affine", 4, group))
        case "kivi4" | "kivi2":
            bits = int(name[-1])
            return Recipe(Codec("affine", bits, GROUP, "tokens"), Codec("affine", bits, group), RESIDUAL)
    found = GROUPED.fullmatch(name)
    if found is None:
        return None
    kind, bits, group, residual = found[1], int(found[2]), int(found[3]), int(found[4] or 0)
    if kind == "int":
        return _same(Codec("affine", bits, group), residual)
    keys = Codec("affine", bits, group, "tokens")
    return Recipe(keys, Codec("affine", bits, group), residual or -(-RESIDUAL // group) * group)


def _same(codec: Codec, residual: int = 0) -> Recipe:
    return Recipe(codec, codec, residual)


def check_frozen(codec: Codec) -> None:
    """Raise ValueError for a codec whose scales cannot be static."""
    if codec.kind == "affine" or codec.along == "tokens":
        raise ValueError(f"scales of {codec.kind} codes along {codec.along} cannot be frozen: "
                         "use a symmetric or fp8 codec along channels")  # fmt: skip


def check_codec(codec: Codec | None, residual: int, scales: Tensor | None) -> None:
    """Raise ValueError where a codec does not go with a residual (tokens) or with static scales."""
    if type(residual) is not int or residual < 0:
        raise ValueError(f"a residual holds a whole number of tokens, got {residual!r}")
    if codec is not None and codec.along == "tokens" and (residual == 0 or residual % codec.group_size):
        raise ValueError(
            f"groups of {codec.group_size} tokens need a residual that is a multiple of {codec.group_size} tokens, "
            f"got {residual}"
        )
    if scales is not None:
        if codec is None:
            raise ValueError("static scales were given for a tensor that has no codec")
        check_frozen(codec)
        check_reach(scales)


def check_reach(scales: Tensor) -> None:
    """Raise ValueError for static scales that no number can be divided by: 0, negative ones, NaN, infinity."""
    unfit = scales[~((scales > 0) & scales.isfinite())]
    if unfit.numel():
        raise ValueError(f"static scales must be positive and finite, got {float(unfit[0])}: calibrate them again")


def check_static(scales: Tensor | None, expected: tuple[int, ...]) -> None:
    """Raise ValueError where static scales do not fit the heads and groups of what is stored."""
    if scales is not None and tuple(scales.shape) != expected:
        raise ValueError(f"static scales have shape {tuple(scales.shape)}, the cache needs {expected}")
