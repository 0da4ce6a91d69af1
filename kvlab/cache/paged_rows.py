"""A paged cache that plans its own steps: rows with block tables, as in other caches rows have slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvlab.attention import Step
from kvlab.cache.base import Bytes, CacheFull, CannotRewind, KVCache, row_numbers, whole_lengths
from kvlab.cache.paged import PagedCache
from kvlab.engine.block_pool import GONE, BlockPool, blocks_for, first_needed
from kvlab.rows import Rows

TABLE_ENTRY_BYTES = 4


class LayerGroup:
    """The block tables of the layers that share a window, one for each row."""

    def __init__(self, window: int | None, pool: BlockPool):
        self.window, self.pool = window, pool
        self.tables: list[list[int]] = []

    def shortage(self, stored: Sequence[int], counts: Sequence[int]) -> int:
        """Blocks that are missing for rows to store `counts` more tokens; 0 where they fit."""
        size, writers, freed = self.pool.block_size, Counter(), Counter()
        missing = 0
        for table, before, count in zip(self.tables or [[] for _ in stored], stored, counts, strict=True):
            missing += blocks_for(before + count, size) - len(table)
            freed.update(block for block in table[: first_needed(before, self.window, size)] if block != GONE)
            if count and before % size:
                writers[table[-1]] += 1
        # all who write to a shared block copy it, unless nobody else would be left to read it
        missing += sum(min(count, self.pool.references(block) - 1) for block, count in writers.items())
        missing -= sum(self.pool.references(block) == count for block, count in freed.items())
        return max(0, missing - self.pool.available)

    def extend(self, stored: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """Make room for what fits: give back what no window sees any more, own what is written, and grow.

        Returns (from, to) blocks to copy before the step writes.
        """
        size, copies = self.pool.block_size, []
        self.tables = self.tables or [[] for _ in stored]
        for table, before in zip(self.tables, stored, strict=True):
            behind = first_needed(before, self.window, size)
            self.pool.free([block for block in table[:behind] if block != GONE])
            table[:behind] = [GONE] * behind
        for table, before, count in zip(self.tables, stored, counts, strict=True):
            if count and before % size and self.pool.references(table[-1]) > 1:
                shared, (own,) = table[-1], self.pool.allocate(1)
                self.pool.free([shared])
                copies.append((shared, own))
                table[-1] = own
            table += self.pool.allocate(blocks_for(before + count, size) - len(table))
        return copies

    def missing_before(self, row: int, length: int) -> int:
        """Tokens before `length` that a query there would see, and whose blocks were given back."""
        if self.window is None or not length:
            return 0
        size, first = self.pool.block_size, max(0, length - self.window + 1)
        gone = [i for i, block in enumerate(self.tables[row]) if block == GONE]
        return max(0, min(length, (gone[-1] + 1) * size) - first) if gone else 0

    def cut(self, row: int, before: int, length: int) -> list[int]:
        """Forget a row's tokens from `length` on; the slots where nobody else reads them."""
        size, table = self.pool.block_size, self.tables[row]
        slots = [
            table[p // size] * size + p % size
            for p in range(length, before)
            if table[p // size] != GONE and self.pool.references(table[p // size]) == 1
        ]
        kept = blocks_for(length, size)
        self.pool.free([block for block in table[kept:] if block != GONE])
        del table[kept:]
        return slots

    def reorder(self, rows: Sequence[int]) -> None:
        """Share blocks instead of copying them: only who writes to one gets its own."""
        tables = [list(self.tables[row]) for row in rows]
        for table in tables:
            self.pool.share([block for block in table if block != GONE])
        self.clear()
        self.tables = tables

    def clear(self) -> None:
        for table in self.tables:
            self.pool.free([block for block in table if block != GONE])
        self.tables = []

    def live_slots(self, stored: Sequence[int]) -> int:
        """Slots that the next query of some row sees, shared ones counted once."""
        size, window = self.pool.block_size, self.window
        return len({
            table[p // size] * size + p % size
            for table, length in zip(self.tables, stored, strict=True)
            for p in range(0 if window is None else max(0, length - window), length)
            if table[p // size] != GONE
        })  # fmt: skip


class PagedKVCache(KVCache):
    """A model's cache in blocks. Exact, or lossy as its layers are.

    One block table for each row and layer group; a row takes blocks as it grows and gives back what no window of its
    layers sees any more. `reorder` shares blocks, and a row that writes to a shared one copies it first.
    `begin` reserves: run the step that it plans, or rewind.

    windows     of the layer groups
    num_blocks  in the pool of each group
    """

    def __init__(self, layers: Sequence[PagedCache], windows: Sequence[int | None]):
        super().__init__(layers)
        first = layers[0]
        self.block_size = first.block_size
        self.groups = [LayerGroup(window, BlockPool(first.num_blocks, first.block_size)) for window in windows]
        self.lengths: list[int] | None = None  # tokens stored for each row; None before the first step

    def begin(self, positions, rows=None):
        """Plan a step for (B, T) positions: each row goes on where it ends, padding may stand anywhere.

        Raises CacheFull, with nothing changed, where the blocks do not suffice.
        """
        step = Step.plan(positions, rows)
        stored = [0] * len(positions) if self.lengths is None else self.lengths
        counts = self._counts(step, stored)
        self._check_room(stored, counts)
        self._copy([group.extend(stored, counts) for group in self.groups])
        self.lengths = [before + count for before, count in zip(stored, counts, strict=True)]
        return replace(step, rows=self._rows(step, stored, counts))

    def _counts(self, step: Step, stored: list[int]) -> list[int]:
        """How many tokens each row has in the step; raises ValueError where they do not follow what it stores."""
        if len(stored) != len(step.positions):
            raise ValueError(f"this cache holds {len(stored)} rows, positions of {len(step.positions)} were given")
        B, T = step.positions.shape
        if step.start is not None and stored == [step.start] * B:
            return [T] * B
        live = step.positions >= 0  # (B, T)
        before = torch.tensor(stored, device=live.device)[:, None]
        wrong = live & (step.positions != before + live.cumsum(1) - 1)
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            holds = stored[row] + int(live[row, :column].sum())
            raise ValueError(
                f"row {row} holds tokens up to position {holds - 1}, so position {int(step.positions[row, column])} "
                "cannot follow: block tables have no gaps; rewind or reset first"
            )
        if not live.any():
            raise ValueError("a step needs at least one token that is not padding")
        return live.sum(1).tolist()

    def _check_room(self, stored: list[int], counts: list[int]) -> None:
        for group in self.groups:
            short = group.shortage(stored, counts)
            if short:
                pool = group.pool
                raise CacheFull(
                    f"the paged cache has {pool.available} of {pool.num_blocks} blocks of {pool.block_size} tokens "
                    f"left, {short} too few for {sum(counts)} more tokens: create it with a larger capacity, or "
                    "rewind or reset it"
                )

    def _rows(self, step: Step, stored: list[int], counts: list[int]) -> Rows:
        active = [row for row, count in enumerate(counts) if count]
        padded = sum(counts) < step.positions.numel()
        return Rows.plan(
            [stored[row] for row in active], [counts[row] for row in active],
            [[group.tables[row] for row in active] for group in self.groups], self.block_size,
            (step.positions.flatten() >= 0).nonzero().flatten() if padded else None, step.positions.device,
        )  # fmt: skip

    def _copy(self, pairs: list[list[tuple[int, int]]]) -> None:
        for layer in self.layers:
            layer.copy_blocks(pairs[layer.group])

    def rewind(self, lengths):
        lengths = whole_lengths(lengths)
        stored = [0] * len(lengths) if self.lengths is None else self.lengths
        self._check_rewind(lengths, stored)
        if self.lengths is None:
            return
        for index, group in enumerate(self.groups):
            slots = [
                slot
                for row, (before, length) in enumerate(zip(stored, lengths, strict=True))
                for slot in group.cut(row, before, length)
            ]
            for layer in self.layers:
                if layer.group == index:
                    layer.zero_slots(slots)  # a rejected token leaves no trace
        self.lengths = lengths

    def _check_rewind(self, lengths: list[int], stored: list[int]) -> None:
        if len(lengths) != len(stored):
            raise ValueError(f"{len(lengths)} lengths were given for {len(stored)} rows")
        for row, (length, before) in enumerate(zip(lengths, stored, strict=True)):
            if not 0 <= length <= before:
                raise ValueError(f"cannot rewind row {row} to {length} tokens: it holds {before}")
            for group in self.groups if length < before else ():
                missing = group.missing_before(row, length)
                if missing:
                    raise CannotRewind(
                        f"cannot rewind row {row} to {length} tokens: of the {group.window - 1} before it that the "
                        f"window of {group.window} reads, {missing} were given back; recompute the row instead"
                    )

    def reorder(self, rows):
        rows = row_numbers(rows).tolist()
        if self.lengths is None:
            return
        if not 0 <= min(rows) <= max(rows) < len(self.lengths):
            raise ValueError(f"cannot reorder to rows {rows}: the cache holds rows 0 to {len(self.lengths) - 1}")
        for group in self.groups:
            group.reorder(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def reset(self):
        super().reset()
        self.lengths = None
        for group in self.groups:
            group.clear()

    def bytes(self):
        """The bytes of all layers, and of the tables as a step holds them, (rows, most blocks) for each layer group."""
        stored = self.lengths or []
        live = [group.live_slots(stored) for group in self.groups]
        entries = sum(len(group.tables) * max(map(len, group.tables), default=0) for group in self.groups)
        return sum((layer.bytes_of(live[layer.group]) for layer in self.layers), Bytes(0, TABLE_ENTRY_BYTES * entries))
