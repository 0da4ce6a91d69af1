"""Blocks of equal size, their owners, and in which order they are used again (Kwon et al. 2023, PagedAttention)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence

GONE = -1  # stands in a block table where a block was given back, because no later token can see it


class OutOfBlocks(ValueError):
    """Fewer blocks are available than asked for; nothing was changed."""


class BlockPool:
    """The bookkeeping of `num_blocks` blocks of `block_size` tokens; the keys and values lie elsewhere.

    A block is in one of three states, and free_count + cached_count + used_count == num_blocks always:

    used    somebody holds a reference
    cached  nobody does, but a key still finds its content: it waits in the queue to be shared or overwritten
    free    nobody does, and nothing is known of its content

    Cached and free blocks wait in one queue. The block that was let go first is overwritten first, and only then
    does it lose its key.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if {type(num_blocks), type(block_size)} != {int} or num_blocks < 0 or block_size < 1:
            got = f"got {num_blocks!r} and {block_size!r}"
            raise ValueError(f"a pool needs whole numbers, num_blocks >= 0 and block_size >= 1, {got}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._references = [0] * num_blocks
        self._queue = OrderedDict.fromkeys(range(num_blocks))  # an ordered set: a shared block leaves from the middle
        self._keys: dict[int, Hashable] = {}  # block -> key
        self._findable: dict[Hashable, OrderedDict[int, None]] = {}  # key -> its blocks: equal contents stay apart
        self._cached = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out: free and cached ones."""
        return len(self._queue)

    @property
    def free_count(self) -> int:
        return len(self._queue) - self._cached

    @property
    def cached_count(self) -> int:
        return self._cached

    @property
    def used_count(self) -> int:
        return self.num_blocks - len(self._queue)

    def references(self, block: int) -> int:
        """How many owners a block has."""
        self._check_ids([block])
        return self._references[block]

    def waiting(self) -> list[int]:
        """Return the free and cached blocks in the order in which they will be handed out."""
        return list(self._queue)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each, least recently freed first; their keys are forgotten.

        Raises OutOfBlocks.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks: the count must be >= 0")
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} of {self.num_blocks} available")
        blocks = [self._queue.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            if block in self._keys:
                self._cached -= 1
                self._forget_key(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; cached ones leave the queue.

        Raises ValueError for a free block, whose content nobody knows.
        """
        self._check_ids(blocks)
        for block in blocks:
            if not self._references[block] and block not in self._keys:
                raise ValueError(f"block {block} is free and holds nothing to share: allocate one instead")
        for block in blocks:
            if not self._references[block]:
                del self._queue[block]
                self._cached -= 1
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block. Blocks without an owner join the queue in REVERSE order.

        A table's last block is the one that the fewest other requests could share, so it is overwritten first.
        Raises ValueError when a block is named more often than it has references; nothing is freed then.
        """
        self._check_ids(blocks)
        for block, times in Counter(blocks).items():
            if times > self._references[block]:
                raise ValueError(f"block {block} freed {times} times with {self._references[block]} references")
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._queue[block] = None
                self._cached += block in self._keys

    def register(self, block: int, key: Hashable) -> None:
        """Make the content of a block in use findable under `key`: call this once it is full and computed.

        Two blocks may have equal keys (both were computed before either could be found). Raises ValueError for a
        block that is not in use or has another key.
        """
        self._check_ids([block])
        if not self._references[block]:
            raise ValueError(f"block {block} is not in use: only its owner can register what it holds")
        if self._keys.setdefault(block, key) != key:
            raise ValueError(f"block {block} is registered under another key: free it before it holds something else")
        self._findable.setdefault(key, OrderedDict())[block] = None

    def find(self, key: Hashable) -> int | None:
        """Return the block that was registered first under `key`, used or cached; None when there is none."""
        blocks = self._findable.get(key)
        return next(iter(blocks)) if blocks else None

    def key_of(self, block: int) -> Hashable | None:
        """Return the key under which a block is findable, None when it is not."""
        self._check_ids([block])
        return self._keys.get(block)

    def check(self) -> None:
        """Assert that the books agree; for tests."""
        assert all(count >= 0 for count in self._references)
        assert set(self._queue) == {block for block, count in enumerate(self._references) if not count}
        assert self._cached == sum(block in self._keys for block in self._queue)
        assert self.free_count + self.cached_count + self.used_count == self.num_blocks
        findable = [(block, key) for key, blocks in self._findable.items() for block in blocks]
        assert len(findable) == len(self._keys) and all(self._keys[block] == key for block, key in findable)

    def _forget_key(self, block: int) -> None:
        key = self._keys.pop(block)
        del self._findable[key][block]
        if not self._findable[key]:
            del self._findable[key]

    def _check_ids(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"there is no block {block}: the pool has blocks 0 to {self.num_blocks - 1}")


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold `tokens` tokens."""
    return -(-tokens // block_size)


def first_needed(position: int, window: int | None, block_size: int) -> int:
    """Index of the first block that a query at `position` or later can see: s > position − window, or everything."""
    return 0 if window is None else max(0, position - window + 1) // block_size
