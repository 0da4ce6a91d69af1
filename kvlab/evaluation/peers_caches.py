"""What a decode step costs over each cache: time, bytes stored, and bytes allocated in passing.

All caches hold the same tokens and take turns, a few steps each; what is reported are medians and ratios to the exact
cache. The caches are filled with random numbers, not by a prefill: reading them takes as long, and filling takes
seconds instead of minutes. A step that doubles a buffer is one of many, which a median leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from kvlab.attention import Step
from kvlab.cache.base import Bytes, KVCache
from kvlab.cache.build import build_cache
from kvlab.evaluation.transients import Transient, transient
from kvlab.model.transformer import Transformer
from kvlab.native.build import FEWEST_SLOTS, library
from kvlab.native.decode import can_decode
from kvlab.native.rows import HEAD_DIMS
from kvlab.sizing import rows

REFERENCE = "contiguous"
CACHES = (REFERENCE, "int8", "int4")
TURN = 4  # decode steps of a cache before the next one's turn
WARM = 2  # decode steps before the first turn; the last of them is the one whose allocations are counted
FILL_AT_ONCE = 1024  # tokens
MOST_BYTES = 6_000_000_000  # of all caches of one batch and context together


@dataclass(frozen=True)
class CacheRow:
    """One cache at one batch and context.

    step_s       median seconds of a decode step; speed: the reference's median / this one
    bytes_ratio  bytes in use (payload and metadata) / the reference's
    share        of the bytes that a step reads, weights and cache, what is cache
    bound        the speed that bytes read would give: the reference's bytes of a step / this one's
    """

    cache: str
    batch: int
    context: int
    step_s: float
    fastest_s: float
    slowest_s: float
    speed: float
    payload_bytes: int
    metadata_bytes: int
    slack_bytes: int
    total_bytes: int
    bytes_ratio: float
    share: float
    bound: float
    transient_peak_bytes: int
    transient_largest_bytes: int


@dataclass(frozen=True)
class Caches:
    """The second answer of `kvlab peers`: what was measured, what was skipped and why, and what reads long caches."""

    rows: tuple[CacheRow, ...]
    skipped: tuple[str, ...]
    reader: str


@dataclass(frozen=True)
class _Measured:
    """What was seen of one cache."""

    seconds: list[float]
    stored: Bytes
    transient: Transient

    @property
    def used(self) -> int:
        return self.stored.payload + self.stored.metadata


def compare(
    model: Transformer,
    contexts: Sequence[int] = (1024, 2048, 8192),
    batches: Sequence[int] = (1, 4, 16),
    *,
    repeats: int = 5,
    names: Sequence[str] = CACHES,
    tick: Callable[[str], None] = lambda words: None,
) -> Caches:
    """Decode over every cache at every batch and context; a context is what the last step sees.

    Raises ValueError for a context too short for the steps. What fits neither the model's positions nor MOST_BYTES is
    skipped and named. `tick` gets one call for each cache.
    """
    check_contexts(contexts, repeats)
    token_bytes = sum(filled(model, name, 1, FILL_AT_ONCE).bytes().total for name in names) // FILL_AT_ONCE
    found, skipped = [], []
    for batch in batches:
        for context in contexts:
            why = _too_large(model, batch, context, token_bytes)
            if why:
                skipped.append(f"batch {batch} at {context:,} tokens: {why}")
                continue
            found += _rows(model, batch, context, _measure(model, batch, context, repeats, names, tick))
    return Caches(tuple(found), tuple(skipped), _reader(model))


def check_contexts(contexts: Sequence[int], repeats: int) -> None:
    """Raise ValueError for a context that the steps alone would fill."""
    shortest = WARM + repeats * TURN + 1
    if min(contexts) < shortest:
        raise ValueError(f"a cache of {min(contexts)} tokens is too short: {repeats} turns need at least {shortest}")


def _reader(model: Transformer) -> str:
    """What reads a long cache here, in words."""
    row, weight = rows(model.config), model.model.embed_tokens.weight
    keys = weight.new_zeros(1, row.heads, FEWEST_SLOTS, row.key_width)
    if can_decode(keys[:, :, :1], keys, keys):
        return f"the C++ kernels, from {FEWEST_SLOTS} slots on"
    found = library()
    if isinstance(found, str):
        return f"PyTorch's kernels: {found}"
    return f"PyTorch's kernels: the C++ ones are for CPUs, fp32 and bf16, and heads of {HEAD_DIMS} numbers"


def _too_large(model: Transformer, batch: int, context: int, token_bytes: int) -> str | None:
    limit, needed = model.config.max_position_embeddings, token_bytes * batch * context
    if limit is not None and context > limit:
        return f"{model.config.name} has {limit:,} positions"
    return f"the caches need {needed:,} bytes, more than {MOST_BYTES:,}" if needed > MOST_BYTES else None


def filled(model: Transformer, name: str, batch: int, length: int) -> KVCache:
    """A cache that holds `length` tokens in `batch` rows: random numbers, alike in all layers, each with its own."""
    cache = build_cache(model.config, name)
    layer, row, weight = cache.layers[0], rows(model.config), model.model.embed_tokens.weight
    widths, generator = (row.key_width, row.value_width or 0), torch.Generator().manual_seed(0)
    numbers = torch.randn(batch, row.heads, min(length, FILL_AT_ONCE), sum(widths), generator=generator)
    for first in range(0, length, FILL_AT_ONCE):
        count = min(FILL_AT_ONCE, length - first)
        keys, values = numbers[:, :, :count].to(weight.device, weight.dtype).split(widths, 3)
        positions = torch.arange(first, first + count, dtype=torch.int32, device=weight.device).expand(batch, -1)
        layer.update(keys, values if row.value_width else None, Step.plan(positions))
    return KVCache([layer, *(deepcopy(layer) for _ in cache.layers[1:])])


def _measure(
    model: Transformer, batch: int, context: int, repeats: int, names: Sequence[str], tick: Callable[[str], None]
) -> dict[str, _Measured]:
    """Fill, warm up, count allocations, and take turns."""
    first = context - WARM - repeats * TURN
    caches = {name: filled(model, name, batch, first) for name in names}
    seen = {}
    for name, cache in caches.items():
        tick(f"{name}, batch {batch} at {context}")
        for position in range(first, first + WARM - 1):
            _step(model, cache, batch, position)
        seen[name] = transient(lambda cache=cache: _step(model, cache, batch, first + WARM - 1))
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        for name, cache in caches.items():
            for i in range(TURN):
                times[name].append(_step(model, cache, batch, first + WARM + turn * TURN + i))
    return {name: _Measured(times[name], cache.bytes(), seen[name]) for name, cache in caches.items()}


@torch.no_grad()
def _step(model: Transformer, cache: KVCache, batch: int, position: int) -> float:
    """Seconds of one decode step of `batch` rows."""
    device = model.model.embed_tokens.weight.device
    before = perf_counter()
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    step = cache.begin(torch.full((batch, 1), position, dtype=torch.int32, device=device))
    int(model(ids, step, cache).argmax())  # a GPU has answered only when something is read from it
    return perf_counter() - before


def _rows(model: Transformer, batch: int, context: int, measured: dict[str, _Measured]) -> list[CacheRow]:
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    base = next(iter(measured.values()))
    return [
        CacheRow(
            name, batch, context, median(m.seconds), min(m.seconds), max(m.seconds),
            speed=median(base.seconds) / median(m.seconds),
            payload_bytes=m.stored.payload, metadata_bytes=m.stored.metadata, slack_bytes=m.stored.slack,
            total_bytes=m.stored.total, bytes_ratio=m.used / base.used, share=m.used / (weights + m.used),
            bound=(weights + base.used) / (weights + m.used),
            transient_peak_bytes=m.transient.peak_bytes, transient_largest_bytes=m.transient.largest_bytes,
        )
        for name, m in measured.items()
    ]  # fmt: skip
