"""From a name to a cache for a whole model."""

from __future__ import annotations

import math

from kvlab.cache.base import KVCache, LayerCache, NoCache
from kvlab.cache.block_store import pool_format
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.offloaded import OffloadedKVCache
from kvlab.cache.paged import layer_groups, paged_layers
from kvlab.cache.paged_rows import PagedKVCache
from kvlab.cache.plans import FAMILIES, ScoredPlan, parse
from kvlab.cache.quantized import QuantizedCache
from kvlab.cache.sliding import SlidingCache
from kvlab.cache.static import StaticCache
from kvlab.codecs import RECIPES, recipe
from kvlab.config import ModelConfig
from kvlab.engine.block_pool import blocks_for

BLOCK_SIZE = 16  # tokens
CACHES = {
    "none": "store nothing and recompute everything (naive decoding)",
    "contiguous": "one growing buffer for each layer",
    "static": "one buffer of fixed capacity for each layer",
    "sliding": "rings for the layers with a window, growing buffers for the others",
    "paged": f"blocks of {BLOCK_SIZE} tokens from a pool of fixed capacity; paged-fp8, paged-int8: as 8-bit codes",
    "offloaded": "layers kept in CPU memory, fetched one ahead; offloaded-int4, ...: other caches in this way",
    **RECIPES,
}
STAY = ("none", "static", "paged", "offloaded")  # whose tensors cannot travel


def build_cache(config: ModelConfig, name: str = "contiguous", capacity: int | None = None) -> KVCache:
    """A KVCache for `config`. `capacity` (tokens) sizes static and paged caches and is needed for them.

    Names are those of CACHES, quantising schemes that name their groups (int4-g64, kivi2-g32-r128, ...), budgets
    (window-256, sinks4-252, h2o-25%, snapkv-256-prompt; see cache/plans.py), and paged with what the pool holds
    (paged-fp8). A paged cache's capacity is that of all rows together, in whole blocks.
    Raises ValueError for an unknown name, a missing capacity, or groups that do not fit a row.
    """
    if name.split("-")[0] == "offloaded":
        check_name(name)
        return OffloadedKVCache(build_cache(config, _inner(name), capacity))
    if name.split("-")[0] == "paged":
        return paged_cache(config, capacity, kv_dtype=name.partition("-")[2] or None)
    plan = parse(name)
    if plan is not None:
        return KVCache(plan.layers(config))
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


def paged_cache(
    config: ModelConfig, capacity: int | None, block_size: int = BLOCK_SIZE, kv_dtype: str | None = None
) -> PagedKVCache:
    """A PagedKVCache whose pools hold `capacity` tokens in each layer, rounded up to whole blocks."""
    if capacity is None:
        raise ValueError("a paged cache needs a capacity in tokens: prompt length + new tokens, of all rows together")
    if {type(capacity), type(block_size)} != {int} or capacity < 1 or block_size < 1:
        raise ValueError(
            f"a paged cache holds at least one token, in blocks of at least one: got {capacity!r} and {block_size!r}"
        )
    windows, _ = layer_groups(config)
    return PagedKVCache(paged_layers(config, blocks_for(capacity, block_size), block_size, kv_dtype), windows)


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
    """Raise ValueError for a cache that does not exist, or whose layers could not be offloaded as the name says."""
    if name.split("-")[0] == "offloaded":
        return _check_can_travel(_inner(name))
    if name.startswith("paged-"):
        pool_format(name.removeprefix("paged-"))
        return
    if name not in CACHES and recipe(name, 1) is None and parse(name) is None:
        raise ValueError(
            f"unknown cache {name!r}; kvlab has {', '.join(CACHES)}, int4-g64, kivi2-g32-r128, ..., "
            f"{', '.join(FAMILIES)}"
        )


def _check_can_travel(inner: str) -> None:
    check_name(inner)
    if inner.split("-")[0] in STAY or isinstance(parse(inner), ScoredPlan):
        raise ValueError(
            f"a cache {inner!r} cannot be offloaded: its tensors must stay where they are; name contiguous, sliding, "
            "a window, or one of codes such as int8"
        )


def _inner(name: str) -> str:
    return name.partition("-")[2] or "contiguous"
