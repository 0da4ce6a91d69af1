"""A ring for layers that only look back `window` tokens: memory stops growing once the window is full."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import EMPTY, Step, View
from kvlab.cache.base import CannotRewind
from kvlab.cache.dense import DenseCache
from kvlab.cache.kept import KeptPart

SPARE = 8  # slots that a ring may hold beyond its need: drafts come and go, and each new ring is a copy


class SlidingCache(DenseCache):
    """The newest tokens in a ring, the first `sinks` tokens for good. Exact for a model that declares this window.

    `imposed`: the model declares none, and the cache narrows what its queries see. That is lossy. Oracle: attention
    with the mask "s > p - window or s < sinks". Sinks: Xiao et al. 2024 (StreamingLLM), arXiv:2309.17453.

    The window counts the query's own token. The ring holds window - 1 tokens and a step's own, because
    the first query of a step still reads the window - 1 tokens before it, and because a step that is rejected
    must not have overwritten what the next one reads.
    """

    def __init__(self, window: int, sinks: int = 0, imposed: bool = False):
        super().__init__()
        if type(window) is not int or window < 1:
            raise ValueError(f"a window is a whole number and holds at least the query's own token, got {window!r}")
        if type(sinks) is not int or sinks < 0 or (sinks and not imposed):
            raise ValueError(f"sinks are counted from 0, and kept by an imposed window only, got {sinks!r}")
        if window + sinks > 2**31 - 1:
            raise ValueError(f"{sinks} sinks and a window of {window} are more than the 2^31 - 1 positions there are")
        self.window, self.sinks, self.imposed = window, sinks, imposed
        self.before = max(window - 1, 1)  # tokens kept before a step: at least the one that tells a row's length
        self.exact = not imposed
        self.length = 0  # tokens seen while all rows agree and start at position 0
        self.uniform = True

    @property
    def ring(self) -> int:
        # one spare slot takes what padding would write, and stays EMPTY
        return max(self.capacity - self.sinks - 1, 0)

    def update(self, keys, values, step):
        self._check_like(keys, values, step)
        T = keys.shape[2]
        self._fit(keys, values, self.before + _span(step))
        self.uniform = self.uniform and step.start == self.length
        one = self.uniform and T == 1  # decoding: a slice costs less than an index for every row
        if one:
            slot = self.length if self.length < self.sinks else self._ring_slot(self.length)
            where = (slice(None), slice(None), slice(slot, slot + 1))
        else:
            rows = torch.arange(keys.shape[0], device=keys.device)[:, None]  # (B, 1)
            where = (rows, slice(None), self._slots(step.positions))  # (B, T)
        fresh = (keys, values, step.positions[:, None].to(torch.int32))
        for stored, new in zip((self.keys, self.values, self.positions), fresh, strict=True):
            if stored is not None:
                stored[where] = new if one else new.transpose(1, 2)  # (B, T, H_kv, D)
        self.length += T
        if not self.uniform:  # columns are not positions there: padding counts too much, a gap too little
            self.length = max(self.length, int(step.positions.max()) + 1)
        return self._view(T)

    def _ring_slot(self, position):
        return self.sinks + (position - self.sinks) % self.ring

    def _slots(self, positions: Tensor) -> Tensor:
        ring = torch.where(positions < self.sinks, positions, self._ring_slot(positions))
        return torch.where(positions >= 0, ring, self.sinks + self.ring).long()

    def _view(self, T: int) -> View:
        return (self._part(0, T),)

    def _part(self, first: int, T: int) -> KeptPart:
        """Slots first, first + 1, ... as a step of T tokens sees them."""
        full = self.sinks + self.ring
        in_order = self.uniform and self.length <= full  # not wrapped yet: slot i holds position i
        used = slice(first, self.length if in_order else full)
        values = None if self.values is None else self.values[:, :, used]
        facts = (self.keys[:, :, used], values, self.positions[:, :, used], first if in_order else None)
        rule = {"window": self.window, "sinks": self.sinks} if self.imposed else {}
        exactly = self.uniform and not in_order and T == 1 and self.ring == self.window
        bounds = (self.length - self.window, self.length - 1) if exactly else None
        return KeptPart(*facts, bounds=bounds, **rule)

    def _fit(self, keys, values, needed):
        """Grow the ring to what a step needs, or give back what a long one left."""
        if needed <= self.ring <= needed + SPARE:
            return
        old, positions = self._tensors(), self.positions
        self._allocate(keys, values, self.sinks + needed + 1)
        if positions is None:
            return
        beyond = positions <= positions.amax(2, keepdim=True) - self.ring  # no query to come reads them
        positions = positions.masked_fill(beyond & (positions >= self.sinks), EMPTY)
        slots = self._slots(positions)  # (B, 1, C)
        self.positions.scatter_(2, slots, positions)
        for new, before in zip(self._tensors(), old, strict=True):
            new.scatter_(2, slots[..., None].expand_as(before), before)
            new[:, :, -1] = 0.0  # what old EMPTY slots wrote there

    def check_rewind(self, lengths):
        super().check_rewind(lengths)
        if self.positions is None:
            return
        wanted = torch.tensor(lengths, device=self.positions.device)[:, None, None]
        within = (self.positions >= wanted - self.before) | (self.positions < self.sinks)
        held = ((self.positions >= 0) & (self.positions < wanted) & within).sum((1, 2)).tolist()
        for row, (length, found) in enumerate(zip(lengths, held, strict=True)):
            missing = min(length, self.before + min(self.sinks, max(0, length - self.before))) - found
            if missing > 0 and length < int(self._row_lengths()[row]):
                raise CannotRewind(
                    f"cannot rewind row {row} to {length} tokens: of the {self.before} before it that a window of "
                    f"{self.window} keeps, {missing} are overwritten; recompute the row instead"
                )

    def rewind(self, lengths):
        self.check_rewind(lengths)
        self._forget(lengths)
        if self.positions is not None:
            self.uniform = self.uniform and len(set(lengths)) == 1
            self.length = int(self._row_lengths().max())

    def exchange(self, move):
        self._exchange(move, self.capacity)

    def reset(self):
        super().reset()
        self.length, self.uniform = 0, True

    def _live(self):
        newest = self.positions.amax(2, keepdim=True)  # (B, 1, 1)
        return (self.positions >= 0) & ((self.positions > newest - self.window) | (self.positions < self.sinks))


def _span(step: Step) -> int:
    """Positions from a row's first token to its last: with gaps they are more than its tokens."""
    at = step.positions
    T = at.shape[1]
    if step.start is not None or T == 1:
        return T
    first = at.masked_fill(at < 0, 2**31 - 1).amin(1)  # (B,)
    return max(T, int((at.amax(1) - first).max()) + 1)
