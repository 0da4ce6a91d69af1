"""Blocks that lie outside the pools, as the scheduler sees them: names, never contents."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvlab.engine.block_pool import GONE
from kvlab.engine.prefix_cache import HashChain, Key
from kvlab.engine.request import Sequence

Name = Key | int  # of a block of some prefix, or the CPU block of a swapped sequence
THERE = 0  # stands for a block in the store where a pool's block would have its number


class Shelf(ABC):
    """What a scheduler asks about blocks of a layer group that others keep, and may have lost.

    keeps_prefixes  whether full blocks are wanted, to be found again by later engines
    """

    keeps_prefixes = False

    def has(self, group: int, key: Key) -> bool:
        """Whether a block of a prefix seems to be there."""
        return False

    @abstractmethod
    def load(self, group: int, name: Name) -> bool:
        """Bring a block within reach until the plan is done, whole and checked; False if that cannot be."""


class CpuBlocks(Shelf):
    """Swapped blocks only, and none is ever lost."""

    def load(self, group, name):
        return True


def loaded_prefix(cache: HashChain, shelf: Shelf, sequence: Sequence) -> tuple[int, list[Key]]:
    """Go on where the blocks of a sequence end, with those that a shelf has of the tokens that follow.

    Returns how many blocks there are now, all layer groups agreeing and everything loaded, and the keys of the new
    ones. A block that fails to load was never there: what is promised is what is loaded.
    """
    have = sequence.stored // cache.block_size
    found, keys = [list(table) for table in sequence.tables], []
    for block in range(have, (len(sequence.tokens) - 1) // cache.block_size):
        keys.append(cache.key_of(keys[-1] if keys else sequence.path, sequence.tokens, block))
        for group, row in enumerate(found):
            row.append(THERE if shelf.has(group, keys[-1]) else GONE)
        if any(row[-1] == GONE and window is None for row, window in zip(found, cache.windows, strict=True)):
            break  # a layer that sees everything cannot do without this block
    while (count := cache.agree(found)) > have:
        needed = [
            (group, block)
            for group, first in enumerate(cache.first_needed(count))
            for block in range(max(first, have), count)
        ]
        lost = next(((g, block) for g, block in needed if not shelf.load(g, keys[block - have])), None)
        if lost is None:
            break
        found[lost[0]][lost[1]] = GONE
    return max(count, have), keys
