"""Numbers as small codes: number ~ level x scale + minimum, one scale for every group of numbers.

Shapes are those of attention.py; D is the width of a row of keys or values. A group is `group_size` numbers of one
row (along channels: one token, what KIVI does to values), or the same channel of `group_size` tokens (along tokens:
what KIVI does to keys, whose large channels would otherwise spoil the scale of every row).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlab.codecs import Codec, check_frozen, check_reach
from kvlab.packing import FP8, fp8_numbers, pack, unpack

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes, as wide as a float


@dataclass(frozen=True)
class QuantizedTensor:
    """A (B, H_kv, S, D) tensor as codes; deliberately not a Tensor, so that nobody rotates or adds codes.

    codes   (B, H_kv, S, D x bits / 8) uint8
    scales  (B, H_kv, S, D/group_size), along tokens (B, H_kv, S/group_size, D)
    minima  like scales; None for symmetric and fp8 codecs
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    codec: Codec

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H_kv, S, width = self.codes.shape
        return B, H_kv, S, width * 8 // self.codec.bits

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)

    @property
    def bits_per_number(self) -> float:
        """Stored bits for each number, scales and minima counted."""
        return 8 * self.nbytes / (self.codes.numel() * 8 // self.codec.bits)

    def slots(self, start: int, stop: int) -> QuantizedTensor:
        """Slots start .. stop as a view; along tokens both must be multiples of group_size."""
        per = self.codec.group_size if self.codec.along == "tokens" else 1
        if start % per or stop % per:
            raise ValueError(f"slots {start} to {stop} cut through groups of {per} tokens")
        groups = slice(start // per, stop // per)
        minima = None if self.minima is None else self.minima[:, :, groups]
        codes, scales = self.codes[:, :, start:stop], self.scales[:, :, groups]
        return replace(self, codes=codes, scales=scales, minima=minima)

    def heads(self, start: int, stop: int) -> QuantizedTensor:
        """Heads start .. stop as a view."""
        minima = None if self.minima is None else self.minima[:, start:stop]
        return replace(self, codes=self.codes[:, start:stop], scales=self.scales[:, start:stop], minima=minima)

    def levels(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for before scale and offsets: (B, H_kv, S, D)."""
        if self.codec.kind in FP8:
            return fp8_numbers(self.codes, self.codec.kind, dtype)
        signed = self.codec.kind == "symmetric" and self.codec.bits == 8
        return unpack(self.codes.view(torch.int8) if signed else self.codes, self.codec.bits, dtype)

    def terms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Levels, scales and what is added to level x scale (shaped like scales; None for nothing), all in `dtype`."""
        scales = self.scales.to(dtype)
        if self.codec.zero:
            return self.levels(dtype), scales, scales * -self.codec.zero
        return self.levels(dtype), scales, None if self.minima is None else self.minima.to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers again, (B, H_kv, S, D); a last rounding beyond dtype's range stays finite."""
        levels, scales, offsets = self.terms(wide(dtype))
        groups, dim = self.codec.grouped(levels)
        x = groups * scales.unsqueeze(dim)
        x = x if offsets is None else x + offsets.unsqueeze(dim)
        most = torch.finfo(dtype).max
        return x.clamp(-most, most).to(dtype).reshape(self.shape)


Stored = Tensor | QuantizedTensor


def quantize(x: Tensor, codec: Codec, scales: Tensor | None = None) -> QuantizedTensor:
    """Quantise (B, H_kv, S, D). `scales` (…, D/group_size) freezes them: larger numbers are clamped.

    Raises ValueError for NaN or infinity, and where D (along tokens: S) is no multiple of the group or a byte.
    KIVI: Liu et al. 2024, arXiv:2402.02750.
    """
    _check_shape(x, codec)
    check_finite(x, "the numbers")
    if codec.along == "tokens" and x.shape[2] % codec.group_size:
        raise ValueError(f"{x.shape[2]} tokens cannot be cut into groups of {codec.group_size} tokens")
    if scales is not None:
        _check_scales(scales, x, codec)
    return encode(x, codec, scales)


def encode(x: Tensor, codec: Codec, scales: Tensor | None = None) -> QuantizedTensor:
    """`quantize` for numbers that were checked before: caches check a step once."""
    groups, dim = codec.grouped(x.to(wide(x.dtype)))
    stored = codec.stored_scale_dtype(x.dtype)
    minima = None
    if scales is not None:
        scales = scales.expand(*x.shape[:3], -1).unsqueeze(dim)
    elif codec.kind == "affine":
        scales, minima = _affine_scales(groups, dim, codec.largest, stored, x.dtype)
        groups = groups - minima.to(groups.dtype)
        minima = minima.squeeze(dim)
    else:
        scales = _symmetric_scales(groups, dim, codec, stored)
    codes = _codes(groups, scales.to(groups.dtype), codec).reshape(x.shape)
    return QuantizedTensor(pack(codes, codec.bits), scales.squeeze(dim), minima, codec)


def calibrate(samples: Tensor, codec: Codec) -> Tensor:
    """Static scales (1, H_kv, 1, D/group_size) from sample keys or values (B, H_kv, S, D): the largest magnitude seen.

    A group that was zero in all samples gets scale 1, never 0. Raises ValueError for NaN, infinity or no samples.
    """
    check_frozen(codec)
    _check_shape(samples, codec)
    check_finite(samples, "the samples")
    if not samples.numel():
        raise ValueError(f"samples of shape {tuple(samples.shape)} hold no numbers to calibrate scales by")
    groups, dim = codec.grouped(samples.to(wide(samples.dtype)))
    most = groups.abs().amax((0, 2, dim), keepdim=True).squeeze(dim)  # (1, H_kv, 1, D/group_size)
    return _rounded_up(most / codec.largest, codec.largest, codec.stored_scale_dtype(samples.dtype))


def count_clamped(x: Tensor, codec: Codec, scales: Tensor) -> Tensor:
    """How many numbers of (B, H_kv, S, D) lie beyond what frozen scales reach with both signs, a () tensor."""
    groups, dim = codec.grouped(x.to(wide(x.dtype)))
    return (groups.abs() > scales.unsqueeze(dim).to(groups.dtype) * codec.largest).sum()


def kivi_split(length: int, residual: int) -> tuple[int, int]:
    """How many of `length` tokens KIVI holds quantised, (keys, values); the rest stays in full precision.

    Keys leave the residual `residual` at a time, values one by one.
    """
    return length // residual * residual, max(0, length - residual)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What arithmetic on numbers of this dtype is done in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_shape(x: Tensor, codec: Codec) -> None:
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"a codec takes floating-point (B, H_kv, S, D), not {x.dtype} {tuple(x.shape)}")
    codec.check_width(x.shape[3])


def _check_scales(scales: Tensor, x: Tensor, codec: Codec) -> None:
    check_frozen(codec)
    check_reach(scales)
    *leading, groups = *x.shape[:3], x.shape[3] // (codec.group_size or x.shape[3])
    fits = scales.dim() == 4 and scales.shape[3] == groups
    if not fits or any(n not in (1, wanted) for n, wanted in zip(scales.shape, leading, strict=False)):
        raise ValueError(f"static scales of shape {tuple(scales.shape)} do not fit {(*leading, groups)}, in which all "
                         "but the last may be 1")  # fmt: skip


def check_finite(x: Tensor, name: str) -> None:
    """Raise ValueError if `x` holds NaN or an infinity: one would take every number of its group along."""
    if bool((x - x).any()):
        raise ValueError(f"{name} contain NaN or infinity, which cannot be quantised")


def _affine_scales(groups: Tensor, dim: int, largest: float, dtype: torch.dtype, came_as: torch.dtype):
    low, high = groups.aminmax(dim=dim, keepdim=True)
    minima = low.to(dtype) if dtype == came_as else _rounded_down(low, dtype)
    # a minimum that ends above `low`, where its dtype ends, leaves no range: what lies below it is clamped
    ranges = (high - minima.to(groups.dtype)).clamp_(min=0)
    return _rounded_up(ranges / largest, largest, dtype), minima


def _symmetric_scales(groups: Tensor, dim: int, codec: Codec, dtype: torch.dtype) -> Tensor:
    low, high = groups.aminmax(dim=dim, keepdim=True)
    largest = codec.zero or codec.largest
    scales = _rounded_up(torch.maximum(high, -low) / largest, largest, dtype)
    # with fewer than 8 bits the largest magnitude gets the one level that has no mirror image
    return torch.where(high > -low, -scales, scales) if codec.zero else scales


def _rounded_up(scales: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """Scales >= 0 as stored: rounded up, so that codes reach both ends; 1 for constant groups, whose codes are 0."""
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max / largest / 4)  # level x scale stays finite
    scales = scales.clamp(max=most)
    stored = scales.to(dtype)
    stored.view(INTEGERS[dtype.itemsize]).add_(stored < scales)  # the next float is the next integer
    return stored.masked_fill_(scales == 0, 1.0)


def _rounded_down(minima: Tensor, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    minima = minima.clamp(-info.max, info.max)
    stored = minima.to(dtype)
    lower = minima - minima.abs() * info.eps - info.smallest_normal * info.eps
    return torch.where(stored > minima, lower.clamp(min=-info.max).to(dtype), stored)


def _codes(groups: Tensor, scales: Tensor, codec: Codec) -> Tensor:
    levels = groups / scales
    if codec.kind in FP8:
        # clamped first: depending on version and device the cast makes NaN of larger numbers
        return levels.clamp(-codec.largest, codec.largest).to(FP8[codec.kind]).view(torch.uint8)
    lowest = 0 if codec.kind == "affine" else -max(codec.zero, codec.largest)
    levels = levels.round_().clamp_(lowest, codec.largest)
    levels = levels.add_(codec.zero) if codec.zero else levels
    return levels.to(torch.int8).view(torch.uint8) if lowest == -127 else levels.to(torch.uint8)
