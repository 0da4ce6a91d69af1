"""What the scheduler tells the model runner: one step."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.engine.prefix_cache import Key
from kvlab.engine.request import Sequence

Restores = list[list[tuple[Key, int]]]  # per layer group: (key of a block in the store, block id)
Pairs = list[list[tuple[int, int]]]  # per layer group: (from, to) block ids


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence's part of a step: run `count` >= 1 of its tokens, of which `start` are stored already.

    tables  its block ids, one table per layer group, long enough to store the tokens of this step
    draws   tokens to draw from the last token's logits: 0 where more of the prompt follows in later steps
    """

    sequence: Sequence
    start: int
    count: int
    tables: tuple[tuple[int, ...], ...]
    draws: int

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.count]


@dataclass(frozen=True, eq=False)
class Plan:
    """One step, to be done in this order: swap_out, swap_in, restore, copies, then the rows.

    swap_out   (block, CPU block) pairs per layer group
    swap_in    (CPU block, block) pairs per layer group
    restore    (key, block) pairs per layer group: blocks of a prefix to read from the store
    copies     (shared block, own block) pairs per layer group: copy-on-write
    rows       what runs, oldest first
    preempted  what gave up its blocks for it
    """

    swap_out: Pairs
    swap_in: Pairs
    restore: Restores
    copies: Pairs
    rows: list[Row]
    preempted: list[Sequence]

    @classmethod
    def empty(cls, groups: int) -> Plan:
        return cls(*([[] for _ in range(groups)] for _ in range(4)), rows=[], preempted=[])

    @property
    def samples(self) -> list[Row]:
        """The rows whose last known token is in this step: tokens are drawn for them."""
        return [row for row in self.rows if row.draws]

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


def add_pairs(pairs: Pairs | Restores, more: Pairs | Restores) -> None:
    """Append, layer group by layer group."""
    for ours, theirs in zip(pairs, more, strict=True):
        ours += theirs
