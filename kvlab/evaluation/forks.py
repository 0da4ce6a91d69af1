"""One prefill for many caches that read the same until a prompt ends, and are compressed there in different ways."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.cache.base import Bytes, KVCache, LayerCache
from kvlab.cache.build import build_cache
from kvlab.config import ModelConfig


class ForkedLayer(LayerCache):
    """One layer of several caches: all store what comes, and the first says what is read.

    Right only while the others would say the same: until a prompt that they keep whole has ended. Then take each
    cache apart with `branches`.
    """

    exact = False

    def __init__(self, layers: Sequence[LayerCache]):
        strides = {layer.stride for layer in layers}
        if len(strides) != 1:
            raise ValueError(
                f"forked caches must be cut at the same positions, got strides {sorted(map(str, strides))}"
            )
        self.layers, self.stride = list(layers), strides.pop()

    def update(self, keys, values, step):
        views = [layer.update(keys, values, step) for layer in self.layers]
        return views[0]

    def observe(self, queries, view, step, *, scale, window):
        for layer in self.layers:
            layer.observe(queries, view, step, scale=scale, window=window)

    def check(self, step):
        for layer in self.layers:
            layer.check(step)

    def check_positions(self, step):
        self.layers[0].check_positions(step)

    def check_rewind(self, lengths):
        for layer in self.layers:
            layer.check_rewind(lengths)

    def rewind(self, lengths):
        self.check_rewind(lengths)
        for layer in self.layers:
            layer.rewind(lengths)

    def check_reorder(self, rows):
        self.layers[0].check_reorder(rows)

    def reorder(self, rows):
        for layer in self.layers:
            layer.reorder(rows)

    def reset(self):
        for layer in self.layers:
            layer.reset()

    def bytes(self):
        return sum((layer.bytes() for layer in self.layers), Bytes())


def forked(config: ModelConfig, names: Sequence[str]) -> KVCache:
    """A KVCache that fills a cache of each name. Raises ValueError for caches that are cut at different positions."""
    caches = [build_cache(config, name) for name in names]
    return KVCache([ForkedLayer(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)])


def branches(cache: KVCache) -> list[KVCache]:
    """The caches that a forked one filled, in the order of their names; each goes on alone."""
    return [KVCache(layers) for layers in zip(*(layer.layers for layer in cache.layers), strict=True)]
