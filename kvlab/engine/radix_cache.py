"""Prefix caching with a radix tree: the tree keeps blocks alive until somebody needs their room."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.engine.block_pool import GONE, BlockPool
from kvlab.engine.prefix_cache import PrefixCache
from kvlab.engine.radix_tree import Node, RadixTree


class RadixCache(PrefixCache):
    """The tree holds one reference to each of its blocks, beside those of the sequences that read them.

    A value of the tree is a list with one block per layer group, GONE where the group's window had moved on.
    A sequence that computed what the tree already has lets its own block go and reads the tree's.
    """

    def __init__(self, pools: Sequence[BlockPool], windows: Sequence[int | None] = (None,), sinks: int = 0):
        super().__init__(pools, windows, sinks)
        self.tree = RadixTree(self.block_size)

    def match(self, tokens, identity):
        tokens = tokens[: max(0, len(tokens) - 1)]
        path, values = self.tree.match(tokens, identity)
        found = [[value[group] for value in values] for group in range(len(self.pools))]
        count = self.agree(found)
        if count < len(values):
            path, _ = self.tree.match(tokens[: count * self.block_size], identity)
        return self._hit(count, found, path)

    def insert(self, path, tokens, start, tables):
        stop = len(tokens) // self.block_size
        values = [[table[block] for table in tables] for block in range(start, stop)]
        new_path, known = self.tree.insert(path, tokens[start * self.block_size : stop * self.block_size], values)
        for block, value in enumerate(known, start):
            self._merge(value, block, tables)
        for value in values[len(known) :]:
            for group, block in enumerate(value):
                self._keep(group, block)
        self.tree.lock(new_path)
        self.tree.unlock(path)
        return new_path

    def lock(self, path: Node) -> None:
        self.tree.lock(path)

    def unlock(self, path: Node) -> None:
        self.tree.unlock(path)

    def cached_count(self, group):
        if self.windows[group] is None:
            return self.tree.evictable  # whoever reads a block has locked its path
        return sum(self._unread(group, value) for node in self.tree.nodes() for value in node.values)

    def can_allocate(self, group, count):
        available = self.pools[group].available
        return count <= available or count <= available + self.cached_count(group)

    def allocate(self, group, count):
        pool = self.pools[group]
        if count > pool.available and self.can_allocate(group, count):  # otherwise nothing is given up for it
            if self.windows[group] is None:
                self._give_up_leaves(count - pool.available)
            else:
                self._give_up_behind_windows(group, count)
        return pool.allocate(count)

    def _give_up_leaves(self, count: int) -> None:
        for value in self.tree.evict(count):
            for pool, block in zip(self.pools, value, strict=True):
                if block != GONE:
                    pool.free([block])

    def _give_up_behind_windows(self, group: int, count: int) -> None:
        """Free blocks of one layer group that nobody reads, wherever they are: their texts stay in the tree."""
        pool = self.pools[group]
        for node in sorted(self.tree.nodes(), key=lambda node: node.last_used):
            for value in node.values:
                if pool.available >= count:
                    return
                if self._unread(group, value):
                    pool.free([value[group]])
                    value[group] = GONE

    def _merge(self, value: list[int], block: int, tables: Sequence[list[int]]) -> None:
        for group, table in enumerate(tables):
            ours, theirs = value[group], table[block]
            if ours == GONE:
                value[group] = theirs
                self._keep(group, theirs)
            elif theirs not in (GONE, ours):
                self.pools[group].share([ours])
                self.pools[group].free([theirs])
                table[block] = ours

    def _keep(self, group: int, block: int) -> None:
        if block != GONE:
            self.pools[group].share([block])

    def _unread(self, group: int, value: list[int]) -> bool:
        return value[group] != GONE and self.pools[group].references(value[group]) == 1
