"""The plain KV cache: one buffer for each layer, written in place, doubled when it is full."""

from __future__ import annotations

from kvlab.attention import DensePart
from kvlab.cache.dense import DenseCache

FIRST_CAPACITY = 64  # slots, so that short texts do not start with a chain of doublings


class ContiguousCache(DenseCache):
    """Every token, in order of arrival. Exact.

    Doubling copies the cache only log2(length) times, so a token is copied twice at most on average,
    where concatenating would copy all of them at every step. The price is up to half the buffer as slack.
    """

    appends = True

    def __init__(self):
        super().__init__()
        self.length = 0  # slots in use, the same in every row
        self.start: int | None = None  # slot i holds position start + i in every row; None when that is not so

    def update(self, keys, values, step):
        self._check_like(keys, values, step)
        T = keys.shape[2]
        self._grow(keys, values, self.length + T)
        self.start = continued(self.start, self.length, step.start)
        new = slice(self.length, self.length + T)
        self.keys[:, :, new] = keys
        if values is not None:
            self.values[:, :, new] = values
        self.positions[:, :, new] = step.positions[:, None]
        self.length += T
        return (self._part(),)

    def _part(self) -> DensePart:
        used = slice(0, self.length)
        values = None if self.values is None else self.values[:, :, used]
        return DensePart(self.keys[:, :, used], values, self.positions[:, :, used], self.start)

    def _grow(self, keys, values, needed):
        if needed <= self.capacity:
            return
        old, used = self._tensors(), self.length
        positions = self.positions
        self._allocate(keys, values, max(needed, 2 * self.capacity, FIRST_CAPACITY))
        if positions is not None:
            self.positions[:, :, :used] = positions[:, :, :used]
        for new, before in zip(self._tensors(), old, strict=False):
            new[:, :, :used] = before[:, :, :used]

    def rewind(self, lengths):
        self.check_rewind(lengths)
        self._forget(lengths)
        if self.positions is not None:
            in_use = self._live().any(0).flatten().nonzero()  # columns that some row still needs
            self.length = int(in_use[-1]) + 1 if len(in_use) else 0
            if len(set(lengths)) > 1:
                self.start = None

    def exchange(self, move):
        self._exchange(move, self.length)

    def reset(self):
        super().reset()
        self.length, self.start = 0, None


def continued(start: int | None, length: int, step_start: int | None) -> int | None:
    """Where slot 0 stands once a step is appended, if all slots still hold consecutive positions."""
    if length == 0:
        return step_start
    return start if start is not None and step_start == start + length else None
