"""Sinks and a window with positions inside the cache, as StreamingLLM has them."""

from __future__ import annotations

from torch import Tensor

from kvlab.attention import View
from kvlab.cache.kept import KeptPart, SinkPart, turn
from kvlab.cache.sliding import SlidingCache


class RerotatedCache(SlidingCache):
    """A ring whose sinks are read as if they stood just before the window. Lossy.

    Keys are stored rotated by their own positions. A window that has moved away leaves a gap behind the sinks, and a
    long stream makes it longer than any distance the model was trained on. Here it is closed: of a query's
    sinks + window tokens the positions are 0, 1, 2, ... without a gap, and its own is the last (Xiao et al. 2024,
    arXiv:2309.17453, §3.2). Only differences of positions count, so it is the sinks that are turned.

    Oracle: the kept tokens' keys, rotated by their places inside the cache.
    frequencies  (D_r/2,) radians per token, see rope.inverse_frequencies
    """

    def __init__(self, window: int, sinks: int, frequencies: Tensor):
        super().__init__(window, sinks, imposed=True)
        if sinks < 1:
            raise ValueError("without sinks there is nothing to re-rotate: a window's own distances never change")
        self.frequencies, self.room = frequencies, sinks + window
        self.original: Tensor | None = None  # the sinks' keys while their slots hold turned ones

    def update(self, keys, values, step):
        self._turn_back()
        return super().update(keys, values, step)

    def _view(self, T: int) -> View:
        if self.length <= self.room:  # nobody has left yet: places are positions
            return super()._view(T)
        here = slice(0, self.sinks)
        if self.uniform and T == 1:  # one query: the keys are turned in place, always from the original ones
            self.original = self.keys[:, :, here].clone()
            self.keys[:, :, here] = turn(self.original, self.length - self.room, self.frequencies)
            return super()._view(T)
        values = None if self.values is None else self.values[:, :, here]
        sinks = KeptPart(self.keys[:, :, here], values, self.positions[:, :, here])
        return SinkPart(sinks, self.room, self.frequencies), self._part(self.sinks, T)

    def _turn_back(self) -> None:
        if self.original is not None:
            self.keys[:, :, : self.sinks] = self.original
            self.original = None

    def rewind(self, lengths):
        self.check_rewind(lengths)
        self._turn_back()
        super().rewind(lengths)

    def reorder(self, rows):
        self.check_reorder(rows)
        self._turn_back()
        super().reorder(rows)

    def reset(self):
        self.original = None
        super().reset()
