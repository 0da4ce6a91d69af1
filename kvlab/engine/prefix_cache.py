"""Computing a shared prompt once: what every prefix cache promises, and the one that chains hashes of blocks."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvlab.engine.block_pool import GONE, BlockPool, blocks_for, first_needed
from kvlab.engine.request import Identity


@dataclass(frozen=True)
class Hit:
    """The longest known prefix of a prompt.

    num_blocks  how many full blocks are known
    tables      their ids, one table per layer group; GONE where the group's window does not reach back to
    path        where the prefix ends: what `lock` and `insert` continue from
    """

    num_blocks: int
    tables: list[list[int]]
    path: object


class PrefixCache(ABC):
    """Finds blocks by the tokens they hold. Each layer group has a pool of its own and a window (None: sees all).

    Only full blocks are known, and only once their keys and values were computed. All groups agree on a hit.
    Groups with a window also see the first `sinks` tokens, whose blocks they keep.
    """

    def __init__(self, pools: Sequence[BlockPool], windows: Sequence[int | None] = (None,), sinks: int = 0):
        if not pools or len(pools) != len(windows) or len({pool.block_size for pool in pools}) != 1:
            sizes = [pool.block_size for pool in pools]
            raise ValueError(f"one pool per layer group, of one block size: got sizes {sizes} for windows {windows}")
        self.pools, self.windows, self.block_size = tuple(pools), tuple(windows), pools[0].block_size
        self.sink_blocks = blocks_for(sinks, self.block_size)

    @abstractmethod
    def match(self, tokens: Sequence[int], identity: Identity) -> Hit:
        """Return the longest known prefix, at most len(tokens) − 1 tokens: the last one is computed for its logits."""

    @abstractmethod
    def insert(self, path: object, tokens: Sequence[int], start: int, tables: Sequence[list[int]]) -> object:
        """Make the full blocks of `tokens` findable from block `start`, where `path` ends, on.

        Their content must be computed, and `path` locked. Returns the longer path, locked in place of the old one.
        """

    def lock(self, path: object) -> None:
        """Keep a path from being evicted, once more: one sequence reads it."""

    def unlock(self, path: object) -> None:
        """Take back one `lock`."""

    def cached_count(self, group: int) -> int:
        """Blocks of a layer group that only this cache still knows, and would give up when they are needed."""
        return self.pools[group].cached_count

    def can_allocate(self, group: int, count: int) -> bool:
        """Whether a layer group could get `count` blocks."""
        return count <= self.pools[group].available

    def allocate(self, group: int, count: int) -> list[int]:
        """Hand out blocks of a layer group, giving up cached ones if need be. Raises OutOfBlocks."""
        return self.pools[group].allocate(count)

    def agree(self, found: Sequence[Sequence[int]]) -> int:
        """Return for how many leading blocks every group has what the next token would see.

        `found` is one row of block ids per group, GONE where a block is not there. A group with a window needs
        only the sinks' blocks and those that the window reaches, whatever became of the others.
        """
        leading = [next((i for i, block in enumerate(row) if block == GONE), len(row)) for row in found]
        longest, runs = 0, [0] * len(found)  # runs: how many blocks in a row are there, up to this one
        for count, blocks in enumerate(zip(*found, strict=True), start=1):
            runs = [0 if block == GONE else run + 1 for run, block in zip(runs, blocks, strict=True)]
            firsts = self.first_needed(count)
            if all(
                run >= count - first and lead >= min(first, self.sink_blocks)
                for run, first, lead in zip(runs, firsts, leading, strict=True)
            ):
                longest = count
        return longest

    def _hit(self, count: int, found: Sequence[Sequence[int]], path: object) -> Hit:
        """Return a hit of `count` blocks: of each group those that are still to be read."""
        tables = []
        for row, first in zip(found, self.first_needed(count), strict=True):
            sinks = row[: min(first, self.sink_blocks)]
            tables.append([*sinks, *[GONE] * (first - len(sinks)), *row[first:count]])
        return Hit(count, tables, path)

    def first_needed(self, count: int) -> list[int]:
        """For each layer group the first of `count` blocks that the next token still sees, sinks aside."""
        return [first_needed(count * self.block_size, window, self.block_size) for window in self.windows]


class NoPrefixCache(PrefixCache):
    """Remembers nothing."""

    def match(self, tokens, identity):
        return Hit(0, [[] for _ in self.pools], None)

    def insert(self, path, tokens, start, tables):
        return None


@dataclass(frozen=True, eq=False)
class Key:
    """The name of a block's content: a hash of the key before it and of its own token ids.

    A hash may collide, so keys are equal only where all tokens are, back to the identity that every chain starts
    from. Keys that share their beginning share its objects, and the comparison ends at the first shared one.
    """

    digest: bytes
    parent: Key | None = field(repr=False)
    content: tuple[int, ...] | Identity

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        ours, theirs = self, other
        while ours is not theirs:
            if not (isinstance(ours, Key) and isinstance(theirs, Key)) or ours.content != theirs.content:
                return False
            ours, theirs = ours.parent, theirs.parent
        return True

    def spelt(self) -> tuple[Identity, list[int]]:
        """Whose chain this is, and all its tokens."""
        key, parts = self, []
        while key.parent is not None:
            parts.append(key.content)
            key = key.parent
        return key.content, [token for part in reversed(parts) for token in part]


Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def root_key(identity: Identity, digest: Digest = sha256) -> Key:
    """Return the parent of every first block: it keeps identities apart all along their chains."""
    return Key(digest(identity.encoded()), None, identity)


def next_key(parent: Key, tokens: Sequence[int], digest: Digest = sha256) -> Key:
    """Return the key of the block that holds `tokens` after the blocks that `parent` names."""
    content = tuple(tokens)
    data = parent.digest + struct.pack(f"<{len(content)}q", *content)  # eight bytes each: 65 is not 321
    return Key(digest(data), parent, content)


class HashChain(PrefixCache):
    """Each full block is registered in its pool under key = SHA-256(key of the block before, token ids).

    The first block's parent is made of the identity, so no other adapter or tenant finds any block of the chain.
    Evicting is left to the pools. Two sequences that compute the same block at the same time keep one each.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None] = (None,),
        sinks: int = 0,
        digest: Digest = sha256,
    ):
        super().__init__(pools, windows, sinks)
        self.digest = digest

    def match(self, tokens, identity):
        path = [root_key(identity, self.digest)]
        found: list[list[int]] = [[] for _ in self.pools]
        for block in range((len(tokens) - 1) // self.block_size):
            path.append(self.key_of(path[-1], tokens, block))
            for row, pool in zip(found, self.pools, strict=True):
                row.append(pool.find(path[-1]))
            if any(row[-1] is None and window is None for row, window in zip(found, self.windows, strict=True)):
                break  # a layer that sees everything cannot do without this block
        found = [[GONE if block is None else block for block in row] for row in found]
        count = self.agree(found)
        return self._hit(count, found, path[count])

    def insert(self, path, tokens, start, tables):
        for block in range(start, len(tokens) // self.block_size):
            path = self.key_of(path, tokens, block)
            for pool, table in zip(self.pools, tables, strict=True):
                if table[block] != GONE:
                    pool.register(table[block], path)
        return path

    def key_of(self, parent: Key, tokens: Sequence[int], block: int) -> Key:
        """Return the key of a block, the very object under which a pool knows it if one does."""
        key = next_key(parent, tokens[block * self.block_size : (block + 1) * self.block_size], self.digest)
        known = ((pool, pool.find(key)) for pool in self.pools)
        return next((pool.key_of(found) for pool, found in known if found is not None), key)
