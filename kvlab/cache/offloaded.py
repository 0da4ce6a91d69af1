"""Layers that are kept in CPU memory, and come to where they are computed on just in time (as in FlexGen, 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from kvlab.cache.base import KVCache, LayerCache, Step
from kvlab.cache.link import Link, link_to


class OffloadedCache(LayerCache):
    """Another layer cache, whose tensors are with the GPU only while its layer is computed. As exact as that one.

    An update waits for its own tensors and asks for those of the layer that `follows`, so that they travel during
    this layer's attention and MLP. After attention only what the update wrote goes home, where the cache appends.
    Until it is there, the tensors that came stay: a step that fails loses nothing, and may be rewound.
    """

    def __init__(self, inner: LayerCache, link: Link):
        """Raises ValueError for a cache that cannot be offloaded."""
        inner.exchange(lambda x, used: x)
        self.inner, self.link = inner, link
        self.follows: OffloadedCache | None = None
        self._homes: list[tuple[Tensor, int]] = []  # what was fetched from, and how many slots were in use
        self._arriving: Callable[[], list[Tensor]] | None = None
        self._here = False  # whether the inner cache's tensors are where it is computed on

    @property
    def exact(self) -> bool:
        return self.inner.exact

    @property
    def chunk_invariant(self) -> bool:
        return self.inner.chunk_invariant

    def fetch(self) -> None:
        """Begin to bring the tensors; does nothing where they are there or on their way."""
        if self._here or self._arriving is not None:
            return
        self._homes = contents(self.inner)
        self._arriving = self.link.fetch([(x, self._slots(0, used)) for x, used in self._homes])

    def update(self, keys, values, step):
        self._arrive()
        if self.follows is not None:
            self.follows.fetch()
        return self.inner.update(keys, values, step)

    def observe(self, queries, view, step, *, scale, window):
        self.inner.observe(queries, view, step, scale=scale, window=window)
        self._leave()

    def _arrive(self) -> None:
        if self._here:
            return
        self.fetch()
        arriving, self._arriving = self._arriving, None  # if it fails, the next attempt begins anew
        replace(self.inner, arriving())
        self._here = True

    def _leave(self) -> None:
        moved = []
        for (x, used), (home, before) in zip_longest(contents(self.inner), self._homes, fillvalue=(None, 0)):
            if x is not None:
                outgrown = home is None or home.shape != x.shape
                moved.append(self.link.store(x, None if outgrown else home, self._slots(before, used)))
        replace(self.inner, moved)
        self._homes, self._here = [], False

    def _slots(self, start: int, used: int) -> slice:
        """The slots that are copied: all of them where an update may have written anywhere."""
        return slice(start, used) if self.inner.appends else slice(None)

    def _at_home(self) -> LayerCache:
        """The inner cache, all of it in CPU memory."""
        if self._here:
            self._leave()
        self.link.settle()
        self._arriving = None  # a copy of what the caller is about to change
        return self.inner

    def check(self, step):
        self._at_home().check(_at_home(step))

    def check_positions(self, step):
        self._at_home().check_positions(_at_home(step))

    def check_rewind(self, lengths):
        self._at_home().check_rewind(lengths)

    def check_reorder(self, rows):
        self._at_home().check_reorder(rows)

    def rewind(self, lengths):
        self._at_home().rewind(lengths)

    def reorder(self, rows):
        self._at_home().reorder(rows)

    def reset(self):
        self._at_home().reset()

    def bytes(self):
        """The inner cache's; while a step runs, two layers of it are in the other memory as well."""
        return self._at_home().bytes()


class OffloadedKVCache(KVCache):
    """A cache whose layers are kept in CPU memory: beside a model there is room for two of them, not for all.

    device  where the model computes; `link` says how to get there, by default a stream of its own on CUDA and a
            thread on a CPU
    """

    def __init__(self, cache: KVCache, device: torch.device | str = "cpu", link: Link | None = None):
        link = link or link_to(device)
        super().__init__([OffloadedCache(layer, link) for layer in cache.layers])
        for layer, following in pairwise(self.layers):
            layer.follows = following

    def begin(self, positions, rows=None):
        """Plan a step, and let the first layer set out."""
        step = super().begin(positions, rows)
        self.layers[0].fetch()
        return step


def _at_home(step: Step) -> Step:
    return dataclasses.replace(step, positions=step.positions.cpu())


def contents(cache: LayerCache) -> list[tuple[Tensor, int]]:
    """The stored tensors of a cache, each with how many of its slots are in use."""
    found = []

    def look(x: Tensor, used: int) -> Tensor:
        found.append((x, used))
        return x

    cache.exchange(look)
    return found


def replace(cache: LayerCache, tensors: Sequence[Tensor]) -> None:
    """Give a cache these tensors, in the order of `contents`."""
    fresh = iter(tensors)
    cache.exchange(lambda x, used: next(fresh))
