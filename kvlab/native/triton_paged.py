"""A decode step over pools of blocks on a GPU, by Triton; the kernel is in triton_blocks.py.

What triton_decode.py says of Triton, of its absence and of its interpreter holds here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.native import triton_decode as codes
from kvlab.quantization import QuantizedTensor, Stored


@dataclass(frozen=True)
class Pools:
    """Keys and values (blocks, H_kv, block_size, D) that the kernel can read: numbers, or codes by channels."""

    keys: Stored
    values: Stored

    @classmethod
    def of(cls, keys: Stored, values: Stored) -> Pools | None:
        """None where the kernel cannot read them, or cannot be had: `triton_decode.absent()` says why."""
        on_gpu = (keys if isinstance(keys, Tensor) else keys.codes).is_cuda or codes.interpreting()
        return cls(keys, values) if on_gpu and _readable(keys) and _readable(values) and not codes.absent() else None

    def take(self, queries: Tensor) -> bool:
        """Whether queries (..., D_k) can be answered."""
        return queries.dtype in codes.DTYPES

    def decode(
        self,
        queries: Tensor,
        tables: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The last token of each of R requests over what it sees: (R, H, D_k) -> (R, H, D_v), and (R, H), in fp32.

        tables   (R, width) int32 block ids; what a query sees must be there, for nothing checks it on a GPU
        lengths  (R,) int64 tokens stored, the query's own included
        """
        from kvlab.native import triton_blocks, triton_kernels

        R, H, _ = queries.shape
        _, kv_heads, block_size, D_v = self.values.shape
        G, slots = H // kv_heads, codes.slots_at_once(queries)
        most = tables.shape[1] * block_size
        seen = most if window is None or sinks else min(window, most)
        runs = codes.count_runs(R * kv_heads, math.ceil(seen / slots), codes.processors(queries.device))
        outs = queries.new_empty((R, H, runs, D_v), dtype=torch.float32)
        lses = queries.new_empty((R, H, runs), dtype=torch.float32)
        with torch.cuda.device_of(queries):  # Triton launches on the current device
            triton_blocks.decode_blocks[(runs, kv_heads, R)](
                queries.contiguous(), _tensors(self.keys), _strides(self.keys), _tensors(self.values),
                _strides(self.values), tables.contiguous(), lengths, outs, lses, scale, tables.shape[1], window, sinks,
                G, _layout(self.keys), _layout(self.values), _tile(self.keys),
                max(codes.SMALLEST, codes.power_of_two(G)), slots, block_size,
                triton_kernels.DTYPES[codes.dot_dtype(queries)],
            )  # fmt: skip
            if runs > 1:
                of_runs, outs, lses = (outs, lses), outs.new_empty((R, H, 1, D_v)), lses.new_empty((R, H, 1))
                triton_kernels.merge_runs[(R * H,)](*of_runs, outs, lses, runs, codes.power_of_two(runs), D_v)
        return outs[:, :, 0], lses[:, :, 0]


def _readable(pool: Stored) -> bool:
    if isinstance(pool, QuantizedTensor):
        return codes.readable(pool)
    return pool.dtype in codes.DTYPES and pool.shape[3] in codes.WIDTHS and pool.stride(3) == 1


def _layout(pool: Stored) -> tuple[str, int, int, int, int]:
    """What the kernel is compiled for; see triton_decode.codec. Bytes and groups are none of plain numbers'."""
    return codes.codec(pool) if isinstance(pool, QuantizedTensor) else ("numbers", 0, 0, pool.shape[3], 0)


def _tile(pool: Stored) -> int:
    return codes.tile(pool) if isinstance(pool, QuantizedTensor) else pool.shape[3]


def _tensors(pool: Stored) -> tuple:
    return codes.tensors(pool) if isinstance(pool, QuantizedTensor) else (pool,)


def _strides(pool: Stored) -> tuple[int, ...]:
    return codes.strides(pool) if isinstance(pool, QuantizedTensor) else (*pool.stride()[:3], 0, 0, 0)
