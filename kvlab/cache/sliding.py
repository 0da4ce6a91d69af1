"""A ring for layers that only look back `window` tokens: memory stops growing once the window is full."""

from __future__ import annotations

import torch

from kvlab.attention import DensePart
from kvlab.cache.base import CannotRewind
from kvlab.cache.dense import DenseCache


class SlidingCache(DenseCache):
    """The token at position p lives in slot p % ring. Exact for a model whose layer declares this window.

    The window counts the query's own token. The ring holds window - 1 tokens and the longest step seen, because
    the first query of a step still reads the window - 1 tokens before it, and because a step that is rejected
    must not have overwritten what the next one reads.
    """

    def __init__(self, window: int):
        super().__init__()
        if window < 1:
            raise ValueError(f"a window must hold at least the query's own token, got {window}")
        self.window = window
        self.length = 0  # tokens seen while all rows agree and start at position 0
        self.uniform = True

    @property
    def ring(self) -> int:
        # one spare slot takes what padding would write, and stays EMPTY
        return max(self.capacity - 1, 0)

    def update(self, keys, values, step):
        self._check_like(keys, values, step)
        T = keys.shape[2]
        self._grow(keys, values, self.window - 1 + T)
        positions = step.positions
        slots = torch.where(positions >= 0, positions % self.ring, self.ring).long()  # (B, T)
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]  # (B, 1)
        self.keys[rows, :, slots] = keys.transpose(1, 2)  # (B, T, H_kv, D_k)
        if values is not None:
            self.values[rows, :, slots] = values.transpose(1, 2)
        self.positions[rows, 0, slots] = positions.to(torch.int32)
        self.uniform = self.uniform and step.start == self.length
        self.length += T
        return (self._part(),)

    def _part(self) -> DensePart:
        in_order = self.uniform and self.length <= self.ring  # not wrapped yet: slot i holds position i
        used = slice(0, self.length if in_order else self.ring)
        values = None if self.values is None else self.values[:, :, used]
        return DensePart(self.keys[:, :, used], values, self.positions[:, :, used], 0 if in_order else None)

    def _grow(self, keys, values, needed):
        if needed <= self.ring:
            return
        old, positions = self._tensors(), self.positions
        self._allocate(keys, values, needed + 1)
        if positions is None:
            return
        slots = torch.where(positions >= 0, positions % self.ring, self.ring).long()  # (B, 1, C)
        self.positions.scatter_(2, slots, positions)
        for new, before in zip(self._tensors(), old, strict=True):
            new.scatter_(2, slots[..., None].expand_as(before), before)
            new[:, :, self.ring] = 0.0  # what old EMPTY slots wrote there

    def check_rewind(self, lengths):
        super().check_rewind(lengths)
        if self.positions is None:
            return
        wanted = torch.tensor(lengths, device=self.positions.device)[:, None, None]
        needed = (self.positions >= 0) & (self.positions < wanted) & (self.positions > wanted - self.window)
        held = needed.sum((1, 2)).tolist()
        for row, (length, found) in enumerate(zip(lengths, held, strict=True)):
            missing = min(length, self.window - 1) - found
            if missing > 0 and length < int(self._row_lengths()[row]):
                raise CannotRewind(
                    f"cannot rewind row {row} to {length} tokens: of the {self.window - 1} before it that the window "
                    f"of {self.window} reads, {missing} are overwritten; recompute the row instead"
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
        return (self.positions >= 0) & (self.positions > newest - self.window)
