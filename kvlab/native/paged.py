"""Blocks of keys and values in C++: attention of one query token in each of several requests, and storing codes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.native.build import library
from kvlab.native.rows import NUMBERS, Rows, readable, rows_of
from kvlab.quantization import QuantizedTensor, Stored


@dataclass(frozen=True)
class Pools:
    """Keys and values (blocks, H_kv, block_size, D) that the kernel can read, and how it is told where they lie."""

    keys: Stored
    values: Stored
    described: tuple[Rows, Rows]

    @classmethod
    def of(cls, keys: Stored, values: Stored) -> Pools | None:
        """None where the kernel cannot read them, or there is no kernel: `build.library()` says why.

        The first yes starts the compiler, for some seconds, once a process.
        """
        fit = keys.shape == values.shape and readable(keys) and readable(values)
        return cls(keys, values, (rows_of(keys), rows_of(values))) if fit and _compiled() else None

    def take(self, queries: Tensor) -> bool:
        """Whether queries (..., D) can be answered."""
        return queries.dtype in NUMBERS and queries.shape[-1] == self.keys.shape[3]

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
        """The last token of each of R requests over what it sees: (R, H, D) -> the same, and (R, H), both in fp32.

        tables   (R, width) int32 block ids
        lengths  (R,) int64 tokens stored, the query's own included

        Raises ValueError where a table names no block of the pool although its query looks there.
        """
        R, H, D = queries.shape
        blocks, kv_heads, block_size, _ = self.keys.shape
        queries, tables, lengths = queries.to(torch.float32).contiguous(), tables.contiguous(), lengths.contiguous()
        out, lse = torch.empty(R, H, D), torch.empty(R, H)
        wrong = library().decode_paged(
            queries.data_ptr(), *map(ctypes.byref, self.described), tables.data_ptr(), lengths.data_ptr(),
            out.data_ptr(), lse.data_ptr(), R, kv_heads, H // kv_heads, blocks, block_size, tables.shape[1],
            window or 0, sinks, scale, torch.get_num_threads(),
        )  # fmt: skip
        if wrong >= 0:
            raise ValueError(
                f"request {wrong} stores {int(lengths[wrong])} tokens in blocks of {block_size}, but its table "
                f"{tables[wrong].tolist()} does not name one of the blocks 0 to {blocks - 1} wherever its query looks"
            )
        return out, lse


def can_encode(fresh: Tensor, pool: QuantizedTensor) -> bool:
    """Whether the kernel can store tokens (N, H_kv, D) in a pool of codes."""
    return (
        fresh.device.type == "cpu"
        and fresh.dtype in NUMBERS
        and fresh.stride(2) == 1
        and pool.codec.along == "channels"
        and pool.codec.kind in ("affine", "e4m3")
        and pool.scales.dtype == torch.bfloat16
        and readable(pool)
        and _compiled()
    )


def encode(fresh: Tensor, pool: QuantizedTensor, blocks: Tensor, offsets: Tensor) -> None:
    """Store tokens (N, H_kv, D), each at an offset (N,) in a block (N,), as quantization.encode would code them.

    Raises IndexError, with nothing stored, for a slot that is in no block.
    """
    wrong = library().encode_paged(
        ctypes.byref(rows_of(fresh[:, :, None])), ctypes.byref(rows_of(pool)), blocks.data_ptr(), offsets.data_ptr(),
        *fresh.shape[:2], pool.shape[0], pool.shape[2],
    )  # fmt: skip
    if wrong >= 0:
        raise IndexError(
            f"token {wrong} goes to offset {int(offsets[wrong])} of block {int(blocks[wrong])}, but the pool has "
            f"{pool.shape[0]} blocks of {pool.shape[2]} tokens"
        )


def _compiled() -> bool:
    return isinstance(library(), ctypes.CDLL)
