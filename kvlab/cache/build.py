"""From a name to a cache for a whole model."""

from __future__ import annotations

import math

from kvlab.cache.base import KVCache, LayerCache, NoCache
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.quantized import QuantizedCache
from kvlab.cache.sliding import SlidingCache
from kvlab.cache.static import StaticCache
from kvlab.codecs import RECIPES, recipe
from kvlab.config import ModelConfig

CACHES = {
    "none": "store nothing and recompute everything (naive decoding)",
    "contiguous": "one growing buffer for each layer",
    "static": "one buffer of fixed capacity for each layer",
    "sliding": "rings for the layers with a window, growing buffers for the others",
    **RECIPES,
}


def build_cache(config: ModelConfig, name: str = "contiguous", capacity: int | None = None) -> KVCache:
    """A KVCache for `config`. `capacity` (tokens) sizes static caches and is needed for them.

    Names are those of CACHES, and quantising schemes that name their groups (int4-g64, kivi2-g32-r128, ...).
    Raises ValueError for an unknown name, a static cache without a capacity, or groups that do not fit a row.
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
            check_name(name)
            return _quantized_cache(config, name)


def _quantized_cache(config: ModelConfig, name: str) -> QuantizedCache:
    """Layers with a window keep all their tokens too. MLA's rotated columns have scales of their own."""
    width = math.gcd(config.kv_lora_rank, config.qk_rope_head_dim) if config.is_mla else config.head_dim
    how = recipe(name, width)
    how.keys.check_width(width)
    how.values.check_width(width)
    if not config.is_mla:
        return QuantizedCache(how.keys, how.values, how.residual)
    rope_width = config.qk_rope_head_dim
    how.keys.check_width(rope_width)
    return QuantizedCache(how.keys, how.values, how.residual, rope_width=rope_width, rope_codec=how.keys)


def check_name(name: str) -> None:
    """Raise ValueError for a cache that does not exist."""
    if name not in CACHES and recipe(name, 1) is None:
        raise ValueError(f"unknown cache {name!r}; kvlab has {', '.join(CACHES)}, int4-g64, kivi2-g32-r128, ...")
