"""How a stored tensor is described to the C++ kernels: the mirror of rows.h."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvlab.quantization import QuantizedTensor, Stored

NUMBERS = (torch.float32, torch.bfloat16)
KINDS = (*NUMBERS, "unsigned", "signed", "e4m3", "e5m2")  # the same order as in rows.h
HEAD_DIMS = (64, 128)  # the loops over a row are unrolled
LANES = 16  # numbers that are read at once


class Rows(ctypes.Structure):
    """rows.h says what the fields are."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scales", "minima")),
        *((name, ctypes.c_int64) for name in ("data_b", "data_h", "scale_b", "scale_h", "scale_slot", "kind", "bits",
                                              "width", "channels", "tokens", "scales_are_fp16")),
        ("zero", ctypes.c_float),
    )  # fmt: skip


def readable(x: Stored) -> bool:
    """Whether the kernels can read this (B, H_kv, S, D) tensor: on the CPU, with the slots of a head in one piece."""
    width = x.shape[3]
    if isinstance(x, Tensor):
        return x.device.type == "cpu" and x.dtype in NUMBERS and width in HEAD_DIMS and x.stride()[2:] == (width, 1)
    codes, scales, minima, codec = x.codes, x.scales, x.minima, x.codec
    group = codec.group_size or width
    return (
        codes.device.type == "cpu"
        and width in HEAD_DIMS
        and codes.stride()[2:] == (codes.shape[3], 1)
        and scales.dtype in (torch.bfloat16, torch.float16)
        and scales.stride(3) == 1
        and (minima is None or (minima.dtype == scales.dtype and minima.stride() == scales.stride()))
        and (codec.along == "tokens" or group % LANES == 0)
    )


def rows_of(x: Stored) -> Rows:
    """Where a readable tensor lies. It must outlive the answer."""
    if isinstance(x, Tensor):
        size = x.element_size()
        return Rows(
            data=x.data_ptr(), data_b=x.stride(0) * size, data_h=x.stride(1) * size, kind=KINDS.index(x.dtype),
            width=x.shape[3],
        )  # fmt: skip
    codes, scales, codec = x.codes, x.scales, x.codec
    per_channel, group = codec.along == "tokens", codec.group_size or x.shape[3]
    return Rows(
        codes.data_ptr(), scales.data_ptr(), None if x.minima is None else x.minima.data_ptr(),
        codes.stride(0), codes.stride(1), *scales.stride()[:3], _kind(x), codec.bits, x.shape[3],
        1 if per_channel else group, group if per_channel else 1, scales.dtype == torch.float16, codec.zero,
    )  # fmt: skip


def _kind(x: QuantizedTensor) -> int:
    if x.codec.kind in KINDS:
        return KINDS.index(x.codec.kind)
    return KINDS.index("signed" if x.codec.kind == "symmetric" and x.codec.bits == 8 else "unsigned")
