"""Parts of caches that keep less than everything: what such a cache knows of its slots, and what it lets be seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.attention import DensePart, Step
from kvlab.rope import rotate_by


@dataclass(frozen=True)
class KeptPart(DensePart):
    """Dense slots in any order, without a mask wherever none is needed.

    bounds         every slot is in use, sinks aside at a position from bounds[0] to bounds[1]; None: not known
    window, sinks  what the cache lets queries see, in place of the model's own window; None: the model's rule stands
    """

    bounds: tuple[int, int] | None = None
    window: int | None = None
    sinks: int = 0

    def attend(self, queries, step, *, scale, window=None, sinks=0):
        window, sinks = self._rule(window, sinks)
        return super().attend(queries, step, scale=scale, window=window, sinks=sinks)

    def attend_with_lse(self, queries, step, *, scale, window=None, sinks=0):
        window, sinks = self._rule(window, sinks)
        return super().attend_with_lse(queries, step, scale=scale, window=window, sinks=sinks)

    def _rule(self, window: int | None, sinks: int) -> tuple[int | None, int]:
        return (window, sinks) if self.window is None else (self.window, self.sinks)

    def _all_visible(self, step: Step, window: int | None) -> bool:
        if self.bounds is None or step.start is None:
            return super()._all_visible(step, window)
        newest_query = step.start + step.positions.shape[1] - 1
        return self.bounds[1] <= step.start and (window is None or self.bounds[0] > newest_query - window)


@dataclass(frozen=True)
class SinkPart:
    """Sinks that stand just before the window, wherever it has moved (StreamingLLM's positions inside the cache).

    A key turned forward by d tokens meets a query as the key meets the query turned back by d. Each query of a chunk
    has a d of its own, so it is the queries that are turned.

    sinks        (B, H_kv, sinks, D_k), stored at their own positions
    room         sinks + window: a query at position p stands at min(p, room - 1) inside the cache
    frequencies  (D_r/2,) of the rotary columns, which are the last D_r of a key
    """

    sinks: DensePart
    room: int
    frequencies: Tensor

    def attend(self, queries, step, *, scale, window=None, sinks=0):
        return self.sinks.attend(self._turned(queries, step), step, scale=scale)

    def attend_with_lse(self, queries, step, *, scale, window=None, sinks=0):
        return self.sinks.attend_with_lse(self._turned(queries, step), step, scale=scale)

    def _turned(self, queries: Tensor, step: Step) -> Tensor:
        moved = (step.positions - (self.room - 1)).clamp(min=0)  # (B, T) tokens
        return turn(queries, -moved, self.frequencies)


def turn(x: Tensor, delta: Tensor | int, frequencies: Tensor) -> Tensor:
    """Queries or keys (B, H, T, D_k) turned by `delta` tokens; only the last columns are rotary (MLA), or all."""
    plain, rotary = x.split([x.shape[3] - 2 * len(frequencies), 2 * len(frequencies)], 3)
    turned = rotate_by(rotary, delta, frequencies)
    return torch.cat([plain, turned], 3) if plain.shape[3] else turned
