"""One token's keys or values into a cache of codes, in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvlab.native.build import FEWEST_SLOTS, library
from kvlab.native.rows import NUMBERS, readable, rows_of
from kvlab.quantization import QuantizedTensor


def can_encode(x: Tensor, into: QuantizedTensor, slot: int) -> bool:
    """Whether the kernel can write the (B, H_kv, 1, D) numbers of one token into slot `slot` of affine codes."""
    return (
        x.shape[2] == 1
        and slot >= FEWEST_SLOTS
        and x.device.type == "cpu"
        and x.dtype in NUMBERS
        and x.stride(3) == 1
        and into.codec.kind == "affine"
        and into.codec.along == "channels"
        and into.scales.dtype == torch.bfloat16
        and readable(into)
        and isinstance(library(), ctypes.CDLL)
    )


def encode(x: Tensor, into: QuantizedTensor, slot: int) -> None:
    """Write (B, H_kv, 1, D) finite numbers into slot `slot` of (B, H_kv, C, D), as quantization.encode would."""
    if slot >= into.codes.shape[2]:
        raise IndexError(f"slot {slot} lies behind the {into.codes.shape[2]} slots that there are")
    library().encode(ctypes.byref(rows_of(x)), ctypes.byref(rows_of(into)), x.shape[0], x.shape[1], slot)
