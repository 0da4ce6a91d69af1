"""Rows of a step: which of its tokens belong together, and in which blocks they are stored.

A *row* is one request's part of a step; a *layer group* is the layers that share a window, and with it their block
tables. The token at position p lies in slot

    table[p // block_size] * block_size + p % block_size

so positions follow from the table, and attention's rule needs none that are stored (PagedAttention, Kwon et al.
2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvlab.attention import Step
from kvlab.engine.block_pool import GONE, blocks_for, first_needed


@dataclass(frozen=True)
class Reach:
    """What some rows may see, one row behind the other.

    blocks     (R, n) int32
    positions  (R, 1, S) of the slots in these blocks; those behind a row's last token belong to no query
    start      of a single row: slot i holds position start + i, and there is none behind the last token
    """

    blocks: Tensor
    positions: Tensor
    start: int | None


@dataclass(frozen=True)
class Rows:
    """How the tokens of a step are cut into rows, and where they are stored: N tokens, row behind row.

    starts      R + 1 offsets: row r has the tokens starts[r] .. starts[r + 1]
    lengths     R, the tokens stored for a row once this step is
    positions   (N,) int32, of each token
    tables      for each layer group (R, most blocks) int32, GONE where a row has no block
    slots       for each layer group (N,) int64, where each token is stored
    block_size  tokens
    tokens      (N,) int64, which of the step's B·T tokens these are; None: all, in their order
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    positions: Tensor
    tables: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    block_size: int
    tokens: Tensor | None = None

    @classmethod
    def plan(
        cls,
        stored: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[Sequence[Sequence[int]]],
        block_size: int,
        tokens: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Rows:
        """Rows that store counts[row] tokens after the stored[row] that they have, in the blocks tables[group][row].

        Raises ValueError for a row without tokens, or with a table that is too short for them.
        """
        lengths = [before + count for before, count in zip(stored, counts, strict=True)]
        _check(counts, lengths, tables, block_size)
        starts = [0, *accumulate(counts)]
        row = torch.repeat_interleave(torch.tensor(counts))  # (N,)
        shift = torch.tensor(stored) - torch.tensor(starts[:-1])  # from a token's offset to its position
        positions = torch.arange(starts[-1]) + shift[row]
        index, offset = positions // block_size, positions % block_size
        rectangles = [_rectangle(table) for table in tables]
        slots = tuple((table[row, index].long() * block_size + offset).to(device) for table in rectangles)
        return cls(
            tuple(starts), tuple(lengths), positions.int().to(device), tuple(x.to(device) for x in rectangles),
            slots, block_size, tokens,
        )  # fmt: skip

    def step(self) -> Step:
        """The flat step (1, N) of these rows."""
        return Step(self.positions[None], rows=self)

    @cached_property
    def counts(self) -> list[int]:
        return [end - start for start, end in pairwise(self.starts)]

    @cached_property
    def places(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each layer group the block, and the offset in it, where each token is stored: (N,) int64 each."""
        return tuple((slots // self.block_size, slots % self.block_size) for slots in self.slots)

    @cached_property
    def lengths_tensor(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.positions.device)  # (R,)

    @cached_property
    def singles(self) -> list[Rows]:
        """The rows with one token, all together; empty where there are none."""
        rows = [row for row, count in enumerate(self.counts) if count == 1]
        return [self.select(rows)] if rows else []

    @cached_property
    def chunks(self) -> list[Rows]:
        """The rows with more tokens, each by itself."""
        return [self.select([row]) for row, count in enumerate(self.counts) if count > 1]

    @cached_property
    def alike(self) -> list[Rows]:
        """These rows by the bit length of their number of blocks: padding to the longest at most doubles them."""
        sizes = [blocks_for(length, self.block_size).bit_length() for length in self.lengths]
        return [self.select([row for row, size in enumerate(sizes) if size == bits]) for bits in sorted(set(sizes))]

    def select(self, rows: list[int]) -> Rows:
        """Some of the rows, in the order given."""
        if rows == list(range(len(self.lengths))):
            return self
        device = self.positions.device
        index = torch.tensor(rows, device=device)
        kept = torch.cat([torch.arange(self.starts[row], self.starts[row + 1]) for row in rows]).to(device)
        return Rows(
            (0, *accumulate(self.counts[row] for row in rows)), tuple(self.lengths[row] for row in rows),
            self.positions[kept], tuple(table[index] for table in self.tables),
            tuple(slots[kept] for slots in self.slots), self.block_size,
            kept if self.tokens is None else self.tokens[kept],
        )  # fmt: skip

    def flatten(self, x: Tensor) -> Tensor:
        """The tokens of these rows out of a step's: (B, H, T, D) -> (N, H, D)."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self.tokens is None else flat[self.tokens]

    def reach(self, group: int, window: int | None, sinks: int) -> Reach:
        """What rows of T tokens each may see of a layer group. Found once: its layers ask for the same."""
        key = group, window, sinks
        if key not in self._reaches:
            self._reaches[key] = self._reach(*key)
        return self._reaches[key]

    @cached_property
    def _reaches(self) -> dict[tuple, Reach]:
        return {}

    def _reach(self, group: int, window: int | None, sinks: int) -> Reach:
        size, table, (T, *_) = self.block_size, self.tables[group], self.counts
        firsts, leading = [first_needed(length - T, window, size) for length in self.lengths], blocks_for(sinks, size)
        if min(firsts) <= leading:  # the sinks' blocks lie within the window's, or behind them, in some row
            firsts, leading = [0 if leading else first for first in firsts], 0
        counts = [blocks_for(length, size) - first for length, first in zip(self.lengths, firsts, strict=True)]
        index = torch.tensor(firsts)[:, None] + torch.arange(max(counts))  # (R, n)
        index = torch.cat([torch.arange(leading).expand(len(firsts), -1), index], 1).to(table.device)
        # slots that no query sees may lie anywhere: behind a row's last token, before its window
        blocks = table.gather(1, index.clamp(max=table.shape[1] - 1)).clamp(min=0)
        positions = (index[..., None] * size + torch.arange(size, device=table.device)).flatten(1)[:, None]  # (R, 1, S)
        if len(self.lengths) > 1:
            return Reach(blocks, positions, None)
        start = firsts[0] * size
        positions = positions[..., : leading * size + self.lengths[0] - start]
        return Reach(blocks, positions, None if leading else start)


def _rectangle(table: Sequence[Sequence[int]]) -> Tensor:
    most = max(len(blocks) for blocks in table)
    return torch.tensor([[*blocks, *[GONE] * (most - len(blocks))] for blocks in table], dtype=torch.int32)


def _check(counts: Sequence[int], lengths: Sequence[int], tables: Sequence, block_size: int) -> None:
    if not counts or min(counts) < 1:
        raise ValueError(f"every row of a step has at least one token, got {list(counts)}")
    for group, table in enumerate(tables):
        for row, (blocks, length) in enumerate(zip(table, lengths, strict=True)):
            if len(blocks) * block_size < length:
                raise ValueError(
                    f"row {row} has {len(blocks)} blocks of {block_size} tokens in layer group {group}, too few for "
                    f"its {length} tokens"
                )
