"""The measurement of long streams, with a clock that counts: no test here depends on a machine's speed."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvlab.cache.build import build_cache
from kvlab.evaluation.streaming import BASELINE, BLOCK, one_layer, overheads, stream_through
from tests.harness import tiny_config

MODEL = one_layer(tiny_config(), torch.float32)


def ticking():
    """A clock that ticks once for every question."""
    count = itertools.count()
    return lambda: float(next(count))


def test_a_random_layer_has_the_shape_of_the_model():
    assert len(MODEL.model.layers) == 1 and MODEL.config.head_dim == tiny_config().head_dim
    again = one_layer(tiny_config(), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(MODEL.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", ["window-8", "sinks2-6", "sinks2-6-rerotated", "h2o-8", "snapkv-8+int8", "tova-8"])
def test_memory_is_flat_for_every_budgeted_cache(name):
    parts = stream_through(MODEL, build_cache(MODEL.config, name), tokens=120, stretch=20, clock=ticking())
    assert [part.end for part in parts] == [20, 40, 60, 80, 100, 120]
    assert len({part.bytes_total for part in parts[1:]}) == 1
    assert {(part.median_s, part.mean_s, part.slowest_s) for part in parts} == {(1.0, 1.0, 1.0)}


def test_memory_grows_where_nothing_is_left_out():
    seen = []
    cache = build_cache(MODEL.config)
    parts = stream_through(MODEL, cache, tokens=90, stretch=40, clock=ticking(), tick=seen.append)
    assert [part.bytes_payload for part in parts] == [n * 2 * 2 * 8 * 4 for n in (40, 80, 90)]
    assert seen == parts


def test_overheads_are_ratios_to_a_contiguous_cache_of_the_same_length():
    found = overheads(MODEL, ["window-16", "h2o-16"], held=16, blocks=2, clock=ticking())
    assert [row.name for row in found] == [BASELINE, "window-16", "h2o-16"]
    assert all((row.ratio_median, row.ratio_mean) == (1.0, 1.0) for row in found)


def test_decisions_count_in_the_mean(monkeypatch):
    """A step that takes ten times as long once in a block moves the mean and not the median."""
    from kvlab.evaluation import streaming

    steps = {"n": 0}

    def slow_once(model, cache, position, clock):
        steps["n"] += 1
        return 10.0 if cache is not None and position % BLOCK == 0 and cache.layers[0].stride else 1.0

    monkeypatch.setattr(streaming, "_step", slow_once)
    row = overheads(MODEL, ["h2o-16"], held=16, blocks=3)[1]
    assert row.ratio_median == 1.0 and row.ratio_mean == (BLOCK - 1 + 10) / BLOCK
    assert steps["n"] == 2 * 3 * BLOCK


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_streams_of_nothing(sizes):
    with pytest.raises(ValueError, match=f"got {sizes[0]} and {sizes[1]}"):
        stream_through(MODEL, build_cache(MODEL.config), *sizes)
    with pytest.raises(ValueError, match=f"got {sizes[0]} and {sizes[1]}"):
        overheads(MODEL, [], *sizes)
