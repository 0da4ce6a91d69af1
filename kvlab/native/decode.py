"""Attention of one query token in C++: over plain tensors and over codes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvlab.native.build import FEWEST_SLOTS, library
from kvlab.native.rows import NUMBERS, readable, rows_of
from kvlab.quantization import Stored


def can_decode(queries: Tensor, keys: Stored, values: Stored, fewest: int = FEWEST_SLOTS) -> bool:
    """Whether the kernel answers for these: one query token that sees every slot, `fewest` slots or more.

    The first yes starts the compiler, for one to two seconds, once a process. Where there is none, the answer stays
    no, PyTorch's kernels are used, and `build.library()` says why.
    """
    return (
        queries.shape[2] == 1
        and keys.shape[2] >= fewest
        and queries.dtype in NUMBERS
        and queries.shape[1] % keys.shape[1] == 0
        and queries.shape[3] == keys.shape[3]
        and keys.shape == values.shape
        and not torch.compiler.is_compiling()
        and not _wants_gradient(queries, keys, values)
        and readable(keys)
        and readable(values)
        and isinstance(library(), ctypes.CDLL)
    )


def decode(queries: Tensor, keys: Stored, values: Stored, scale: float) -> tuple[Tensor, Tensor]:
    """(B, H, 1, D) queries over all slots of (B, H_kv, S, D): the output and its log-sum-exp (B, H, 1), in fp32."""
    B, H, _, D = queries.shape
    kv_heads, S = keys.shape[1], keys.shape[2]
    queries = queries.to(torch.float32).contiguous()
    out, lse = torch.empty(B, H, 1, D), torch.empty(B, H, 1)
    library().decode(
        queries.data_ptr(), ctypes.byref(rows_of(keys)), ctypes.byref(rows_of(values)), out.data_ptr(), lse.data_ptr(),
        B, kv_heads, H // kv_heads, S, scale, torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


def _wants_gradient(*tensors: Stored) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
