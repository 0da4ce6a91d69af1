"""From a name to a cache for a whole model."""

from __future__ import annotations

from kvlab.cache.base import KVCache, LayerCache, NoCache
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.sliding import SlidingCache
from kvlab.cache.static import StaticCache
from kvlab.config import ModelConfig

CACHES = {
    "none": "store nothing and recompute everything (naive decoding)",
    "contiguous": "one growing buffer for each layer",
    "static": "one buffer of fixed capacity for each layer",
    "sliding": "rings for the layers with a window, growing buffers for the others",
}


def build_cache(config: ModelConfig, name: str = "contiguous", capacity: int | None = None) -> KVCache:
    """A KVCache for `config`. `capacity` (tokens) sizes static caches and is needed for them.

    Raises ValueError for an unknown name, or a static cache without a capacity.
    """
    return KVCache([_layer_cache(config, index, name, capacity) for index in range(config.num_hidden_layers)])


def _layer_cache(config: ModelConfig, index: int, name: str, capacity: int | None) -> LayerCache:
    window = config.window(index)
    match name:
        case "none":
            return NoCache()
        case "contiguous":
            return ContiguousCache()
        case "static" if capacity is not None:
            return StaticCache(capacity)
        case "static":
            raise ValueError("a static cache needs a capacity in tokens: prompt length + new tokens")
        case "sliding":
            return ContiguousCache() if window is None else SlidingCache(window)
        case _:
            return check_name(name)


def check_name(name: str) -> None:
    """Raise ValueError for a cache that does not exist."""
    if name not in CACHES:
        raise ValueError(f"unknown cache {name!r}; kvlab has {', '.join(CACHES)}")
