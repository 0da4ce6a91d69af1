"""The block tables of sequences: growing by demand, sharing, copying on write, giving back, swapping."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.engine.block_pool import GONE, BlockPool, blocks_for, first_needed
from kvlab.engine.plan import Pairs, Restores
from kvlab.engine.prefix_cache import PrefixCache
from kvlab.engine.request import Sequence
from kvlab.engine.shelf import CpuBlocks, Shelf, loaded_prefix


class BlockTables:
    """Moves sequences in and out of the blocks that a prefix cache manages, all layer groups together.

    `swap_blocks` is the size of the CPU pool of each layer group, in blocks. `longest_step` is the most tokens that
    one step can store of a sequence: a layer with a window then needs the window's blocks and the step's.
    `shelf` knows what became of blocks outside the pools; one that keeps prefixes needs a HashChain.
    """

    def __init__(self, cache: PrefixCache, longest_step: int, swap_blocks: int = 0, shelf: Shelf | None = None):
        self.cache, self.pools, self.windows, self.block_size = cache, cache.pools, cache.windows, cache.block_size
        self.swap_pools = [BlockPool(swap_blocks, self.block_size) for _ in self.pools]
        self.longest_step, self.shelf = longest_step, shelf or CpuBlocks()
        self._filled: Restores = [[] for _ in self.pools]

    def most_blocks(self, tokens: int) -> list[int]:
        """Per layer group, the most blocks that a sequence holds at once until `tokens` tokens are stored."""
        whole = blocks_for(tokens, self.block_size)
        sinks = self.cache.sink_blocks
        return [whole if window is None else min(whole, sinks + self._reach(window)) for window in self.windows]

    def attach_prefix(self, sequence: Sequence) -> None:
        """Let a sequence without blocks begin with those that hold a prefix of its tokens."""
        hit = self.cache.match(sequence.tokens, sequence.request.identity)
        for pool, table in zip(self.pools, hit.tables, strict=True):
            pool.share(held(table))
        self._start(sequence, hit.tables, hit.path, hit.num_blocks)
        sequence.stored = hit.num_blocks * self.block_size

    def restore_prefix(self, sequence: Sequence) -> Restores:
        """Lengthen a prefix by what the shelf has. Returns the blocks to read before the step.

        They become findable once the step is done, as if it had computed them.
        """
        moves: Restores = [[] for _ in self.pools]
        have = sequence.stored // self.block_size
        count, keys = loaded_prefix(self.cache, self.shelf, sequence)
        if count == have:
            return moves
        for group, first in enumerate(self.cache.first_needed(count)):
            table = sequence.tables[group]
            self.pools[group].free(held(table[:first]))
            table[:first] = [GONE] * first
            fresh = self.cache.allocate(group, count - len(table))
            moves[group] = list(zip(keys[len(table) - have : count - have], fresh, strict=True))
            table += fresh
        sequence.stored = count * self.block_size
        return moves

    def fits_whole(self, sequence: Sequence) -> bool:
        """Whether all known tokens of a sequence could be stored, after those that are."""
        need = self._beyond(sequence.tables, len(sequence.tokens))
        return all(self.cache.can_allocate(group, count) for group, count in enumerate(need))

    def fits_step(self, sequence: Sequence, count: int) -> bool:
        """Whether the next `count` tokens could be stored now, counting the copy of a shared last block."""
        grown = blocks_for(sequence.stored + count, self.block_size)
        return all(
            self.cache.can_allocate(group, grown - len(table) + self._must_copy(group, sequence))
            for group, table in enumerate(sequence.tables)
        )

    def extend(self, sequence: Sequence, count: int) -> Pairs:
        """Make room for the next `count` tokens, which must fit. Returns the blocks to copy before they are written.

        A block that others read too is not written: the sequence gets a copy of its own. Blocks that it has room in
        already, behind drafts that were rejected, are written again.
        """
        copies: Pairs = [[] for _ in self.pools]
        for group, table in enumerate(sequence.tables):
            if self._must_copy(group, sequence):
                last = sequence.stored // self.block_size
                shared, (own,) = table[last], self.cache.allocate(group, 1)
                self.pools[group].free([shared])
                copies[group].append((shared, own))
                table[last] = own
            missing = blocks_for(sequence.stored + count, self.block_size) - len(table)
            table += self.cache.allocate(group, max(0, missing))
        return copies

    def give_back(self, sequence: Sequence) -> None:
        """Free the blocks that the next token no longer sees, in layer groups with a window. Those of sinks stay."""
        for pool, window, table in zip(self.pools, self.windows, sequence.tables, strict=True):
            last = first = first_needed(sequence.stored, window, self.block_size)
            while first > self.cache.sink_blocks and table[first - 1] != GONE:
                first -= 1
            pool.free(table[first:last])
            table[first:last] = [GONE] * (last - first)

    def register(self, sequence: Sequence) -> None:
        """Make the blocks findable that were filled up by computed tokens."""
        full = sequence.stored // self.block_size
        if full > sequence.registered:
            tokens = sequence.tokens[: full * self.block_size]
            sequence.path = self.cache.insert(sequence.path, tokens, sequence.registered, sequence.tables)
            if self.shelf.keeps_prefixes:
                self._note_filled(sequence, full)
            sequence.registered = full

    def _note_filled(self, sequence: Sequence, full: int) -> None:
        key = sequence.path
        for block in range(full - 1, sequence.registered - 1, -1):
            for filled, table in zip(self._filled, sequence.tables, strict=True):
                if table[block] != GONE:
                    filled.append((key, table[block]))
            key = key.parent

    def take_filled(self) -> Restores:
        """What was registered since the last call. Nothing is written to these blocks before the next plan."""
        filled, self._filled = self._filled, [[] for _ in self.pools]
        return filled

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give a child all blocks of its parent to read."""
        tables = [table[: blocks_for(parent.stored, self.block_size)] for table in parent.tables]
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(held(table))
        self._start(child, tables, parent.path, parent.registered)
        child.stored = child.peak = parent.stored

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence, swapped ones included."""
        if sequence.tables:
            self.cache.unlock(sequence.path)
        for group, table in enumerate(sequence.tables):
            self.pools[group].free(held(table))
        for group, table in enumerate(sequence.swapped):
            self.swap_pools[group].free(held(table))
        sequence.tables, sequence.swapped, sequence.path = [], [], None
        sequence.stored = sequence.registered = 0

    def can_swap_out(self, sequence: Sequence) -> bool:
        return sequence.stored > 0 and all(
            len(held(table)) <= pool.available for pool, table in zip(self.swap_pools, sequence.tables, strict=True)
        )

    def swap_out(self, sequence: Sequence) -> Pairs:
        """Give a sequence CPU blocks for its own. Returns (block, CPU block) pairs to copy before anything is written.

        Blocks that others read too are copied as well, and come back as blocks of its own.
        """
        stored, used = sequence.stored, blocks_for(sequence.stored, self.block_size)
        tables = [table[:used] for table in sequence.tables]
        self.release(sequence)
        pairs, sequence.swapped = _move(tables, lambda group, count: self.swap_pools[group].allocate(count))
        sequence.stored = stored
        return pairs

    def fits_swapped(self, sequence: Sequence) -> bool:
        """Whether a swapped sequence could come back and have all its known tokens stored."""
        need = self._beyond(sequence.swapped, len(sequence.tokens))
        return all(
            self.cache.can_allocate(group, len(held(table)) + count)
            for group, (table, count) in enumerate(zip(sequence.swapped, need, strict=True))
        )

    def swap_in(self, sequence: Sequence) -> Pairs:
        """Give a sequence blocks for its CPU blocks. Returns (CPU block, block) pairs to copy before the step.

        The CPU blocks stay taken until `swapped_in` is told that they were copied.
        """
        pairs, tables = _move(sequence.swapped, self.cache.allocate)
        path = self.cache.match((), sequence.request.identity).path
        self._start(sequence, tables, path, registered=0)
        sequence.swapped = []
        return pairs

    def can_swap_in(self, sequence: Sequence) -> bool:
        """Whether all CPU blocks of a sequence are still what they were."""
        return all(
            self.shelf.load(group, place) for group, table in enumerate(sequence.swapped) for place in held(table)
        )

    def swapped_in(self, pairs: Pairs) -> None:
        """Free CPU blocks whose content was copied back."""
        for pool, moves in zip(self.swap_pools, pairs, strict=True):
            pool.free([slot for slot, _ in moves])

    def _start(self, sequence: Sequence, tables: list[list[int]], path: object, registered: int) -> None:
        self.cache.lock(path)
        sequence.tables, sequence.path, sequence.registered = tables, path, registered

    def _must_copy(self, group: int, sequence: Sequence) -> bool:
        if sequence.stored % self.block_size == 0:
            return False  # the next token begins a new block
        last = sequence.tables[group][sequence.stored // self.block_size]
        return self.pools[group].references(last) > 1

    def _beyond(self, tables: list[list[int]], tokens: int) -> list[int]:
        """Per layer group, blocks that these tables still need until `tokens` tokens are stored."""
        whole = blocks_for(tokens, self.block_size)
        return [
            min(whole - len(table), most - len(held(table)))
            for table, most in zip(tables, self.most_blocks(tokens), strict=True)
        ]

    def _reach(self, window: int) -> int:
        """Blocks that the window of a step's first token and its other tokens can touch, however they lie."""
        return (window + self.longest_step - 3 + self.block_size) // self.block_size + 1


def held(table: list[int]) -> list[int]:
    """The blocks of a table that are still there."""
    return [block for block in table if block != GONE]


def _move(tables: list[list[int]], allocate: Callable[[int, int], list[int]]) -> tuple[Pairs, list[list[int]]]:
    """Allocate a new block for each held one. Returns the (old, new) pairs and the tables that name the new ones."""
    pairs: Pairs = []
    moved: list[list[int]] = []
    for group, table in enumerate(tables):
        old = held(table)
        new_of = dict(zip(old, allocate(group, len(old)), strict=True))
        pairs.append(list(new_of.items()))
        moved.append([new_of.get(block, GONE) for block in table])
    return pairs, moved
