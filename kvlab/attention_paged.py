"""Attention over pools of blocks: keys and values are read where a row's block table says.

Shapes are those of attention.py, and rows are those of rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvlab.attention import DensePart, Part, Step
from kvlab.attention_quantized import QuantizedPart
from kvlab.native import paged as native
from kvlab.native import triton_paged as triton
from kvlab.quantization import QuantizedTensor, Stored
from kvlab.rows import Rows

__all__ = ["PagedPart", "Rows"]


@dataclass(frozen=True)
class PagedPart:
    """The blocks of one layer. Rows with one token are answered together, every other row by itself.

    keys         (blocks, H_kv, block_size, D_i), numbers or codes, columns beside columns: the D_i add up to D_k
    values       the same for D_v, or None where keys are values too (MLA)
    group        the layer group: which of the step's tables is meant
    value_width  columns of the output to keep; None keeps all
    window, sinks  what the cache lets queries see, in place of the model's own window; None: the model's rule stands
    """

    keys: tuple[Stored, ...]
    values: tuple[Stored, ...] | None
    group: int = 0
    value_width: int | None = None
    window: int | None = None
    sinks: int = 0

    def attend(self, queries, step, *, scale, window=None, sinks=0):
        window, sinks = self._rule(window, sinks)
        answers = []
        for rows, in_place in self._cut(queries, step.rows):
            if in_place:
                out = self._decode(queries, rows, scale, window, sinks)[0].to(queries.dtype)
            else:
                part, q, planned = self._gathered(queries, rows, window, sinks)
                out = _flat(part.attend(q, planned, scale=scale, window=window, sinks=sinks))
            answers.append((rows, out))
        return _assembled(answers, step, 0.0)[..., : self.value_width]

    def attend_with_lse(self, queries, step, *, scale, window=None, sinks=0):
        window, sinks = self._rule(window, sinks)
        outs, lses = [], []
        for rows, in_place in self._cut(queries, step.rows):
            if in_place:
                out, lse = self._decode(queries, rows, scale, window, sinks)
            else:
                part, q, planned = self._gathered(queries, rows, window, sinks)
                out, lse = map(_flat, part.attend_with_lse(q, planned, scale=scale, window=window, sinks=sinks))
            outs.append((rows, out))
            lses.append((rows, lse))
        return _assembled(outs, step, 0.0)[..., : self.value_width], _assembled(lses, step, -torch.inf)

    def _rule(self, window: int | None, sinks: int) -> tuple[int | None, int]:
        return (window, sinks) if self.window is None else (self.window, self.sinks)

    def _cut(self, queries: Tensor, rows: Rows) -> list[tuple[Rows, bool]]:
        """Rows that are answered together, and whether a kernel answers them, reading blocks where they lie.

        The kernel takes rows of any lengths; what is gathered is padded to the longest.
        """
        together = []
        for singles in rows.singles:
            in_place = self._can_decode(queries)
            together += [(some, in_place) for some in ([singles] if in_place else singles.alike)]
        return together + [(chunk, False) for chunk in rows.chunks]

    @cached_property
    def _pools(self) -> native.Pools | triton.Pools | None:
        """What a kernel can read in place, on a CPU or a GPU."""
        values = self.keys if self.values is None else self.values
        if len(self.keys) > 1 or len(values) > 1:
            return None
        return native.Pools.of(self.keys[0], values[0]) or triton.Pools.of(self.keys[0], values[0])

    def _can_decode(self, queries: Tensor) -> bool:
        return self._pools is not None and self._pools.take(queries)

    def _decode(self, queries, rows, scale, window, sinks) -> tuple[Tensor, Tensor]:
        where = rows.tables[self.group], rows.lengths_tensor
        return self._pools.decode(rows.flatten(queries), *where, scale=scale, window=window, sinks=sinks)

    def _gathered(self, queries, rows, window, sinks) -> tuple[Part, Tensor, Step]:
        """What rows of T tokens each may see, row by row: a part, the queries (R, H, T, D_k), and their step."""
        positions = rows.positions.view(len(rows.lengths), -1)  # (R, T)
        reach = rows.reach(self.group, window, sinks)
        count = reach.positions.shape[2]
        keys = tuple(_gather(pool, reach.blocks, count) for pool in self.keys)
        values = None if self.values is None else tuple(_gather(pool, reach.blocks, count) for pool in self.values)
        q = rows.flatten(queries).unflatten(0, positions.shape).transpose(1, 2)
        start = rows.lengths[0] - rows.counts[0] if len(rows.lengths) == 1 else None
        if isinstance(keys[0], QuantizedTensor):
            part = QuantizedPart(keys, values, reach.positions, reach.start)
        else:
            dense = [None if blocks is None else blocks[0].to(q.dtype) for blocks in (keys, values)]
            part = DensePart(*dense, reach.positions, reach.start)
        return part, q, Step(positions, start)


def _gather(pool: Stored, blocks: Tensor, count: int) -> Stored:
    """The first `count` slots of some blocks, (R, n) -> (R, H_kv, count, D)."""
    if isinstance(pool, QuantizedTensor):
        codes, scales = (_gather(x, blocks, count) for x in (pool.codes, pool.scales))
        return QuantizedTensor(
            codes, scales, None if pool.minima is None else _gather(pool.minima, blocks, count), pool.codec
        )
    heads = pool.shape[1]
    places = blocks[:, None] * heads + torch.arange(heads, device=blocks.device)[:, None]  # (R, H_kv, n)
    # an index into contiguous memory: selecting from a transposed pool is many times slower
    found = pool.flatten(0, 1).index_select(0, places.flatten())  # (R H_kv n, block_size, D)
    return found.unflatten(0, places.shape).flatten(2, 3)[:, :, :count]


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)  # (R, H, T, ...) -> (R T, H, ...)


def _assembled(answers: list[tuple[Rows, Tensor]], step: Step, padding: float) -> Tensor:
    """The answers (N, H, ...) for some rows each, as (B, H, T, ...); `padding` where no row has a token."""
    rows, whole = answers[0]
    if rows.tokens is not None:
        whole = whole.new_full((step.positions.numel(), *whole.shape[1:]), padding)
        for rows, answer in answers:
            whole[rows.tokens] = answer
    return whole.unflatten(0, step.positions.shape).transpose(1, 2)
