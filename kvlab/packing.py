"""Codes in bytes: 2-, 4- and 8-bit integers, and 8-bit floats read by moving their bits."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def pack(codes: Tensor, bits: int) -> Tensor:
    """(..., D) codes -> (..., D x bits / 8) bytes; byte i holds i, i + D x bits / 8, ..., the first in its lowest bits.

    Whole planes share a byte instead of neighbours, so that unpacking writes contiguous memory.
    """
    if bits == 8:
        return codes
    planes = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed = planes[0]
    for i, plane in enumerate(planes[1:], 1):
        packed = packed | (plane << (bits * i))
    return packed


def unpack(packed: Tensor, bits: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Undo pack, into `dtype`: (..., P) bytes -> (..., P x 8 / bits)."""
    if bits == 8:
        return packed.to(dtype)
    per_byte, width, mask = 8 // bits, packed.shape[-1], 2**bits - 1
    codes = torch.empty(*packed.shape[:-1], per_byte * width, dtype=dtype, device=packed.device)
    for i in range(per_byte):
        plane = packed >> (bits * i) if i else packed
        codes[..., i * width : (i + 1) * width] = plane if i == per_byte - 1 else plane & mask
    return codes


def fp8_numbers(codes: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """What finite e4m3 or e5m2 codes stand for. PyTorch's own cast takes ten times as long on a CPU."""
    if kind == "e5m2":  # the upper half of an fp16 number
        return codes.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).to(dtype)
    # sign extension and a shift put e4m3's exponent where fp16 has its own, whose bias is larger: 15 instead of 7
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(dtype).mul_(2**8)
