"""Caches beside each other: turns, ratios, bytes, and what is left out. No test here asserts a speed."""

from __future__ import annotations

import pytest
import torch

from kvlab import sizing
from kvlab.cache.contiguous import ContiguousCache
from kvlab.evaluation import peers_caches
from kvlab.evaluation.peers_caches import TURN, WARM, Caches, compare, filled
from kvlab.native import build
from tests.harness import LAYERS, tiny_config, tiny_model

NAMES = ("contiguous", "int8")


@pytest.fixture
def steps(monkeypatch):
    """Decode steps of known length: (cache, batch, position) of each, in order."""
    order = []

    def step(model, cache, batch, position):
        exact = isinstance(cache.layers[0], ContiguousCache)
        order.append(("contiguous" if exact else "int8", batch, position))
        return 1.0 if exact else 0.5

    monkeypatch.setattr(peers_caches, "_step", step)
    return order


def test_caches_take_turns_and_end_at_the_context(steps):
    compare(tiny_model(), [40], [2], repeats=2, names=NAMES)
    first = 40 - WARM - 2 * TURN
    warm = [(name, 2, first + i) for name in NAMES for i in range(WARM)]
    turns = [(name, 2, first + WARM + turn * TURN + i) for turn in (0, 1) for name in NAMES for i in range(TURN)]
    assert steps == warm + turns and steps[-1][2] == 39


def test_ratios_are_of_medians_and_of_bytes(steps):
    model = tiny_model()
    exact, int8 = compare(model, [40], [2], repeats=1, names=NAMES).rows
    weights = sum(p.numel() for p in model.parameters()) * 8
    assert (exact.speed, int8.speed, exact.bound) == (1.0, 2.0, 1.0)
    assert (int8.step_s, int8.fastest_s, int8.slowest_s) == (0.5, 0.5, 0.5)
    used = [row.payload_bytes + row.metadata_bytes for row in (exact, int8)]
    assert int8.bytes_ratio == used[1] / used[0] and exact.bytes_ratio == 1.0
    assert exact.share == used[0] / (weights + used[0])
    assert int8.bound == (weights + used[0]) / (weights + used[1]) > 1


def test_bytes_are_those_of_the_caches(steps):
    """The steps are stand-ins, so the caches hold what they were filled with."""
    held = 40 - WARM - TURN
    for row in compare(tiny_model(), [40], [3], repeats=1, names=("contiguous", "int8", "int4")).rows:
        cache = filled(tiny_model(), row.cache, 3, held)
        assert (row.payload_bytes, row.metadata_bytes, row.slack_bytes) == tuple(vars(cache.bytes()).values())
        assert row.total_bytes == cache.bytes().total
    exact = filled(tiny_model(), "contiguous", 3, held).bytes().payload
    assert exact == sizing.bytes_ideal(tiny_config(), held, 3, "bf16") // 2 * 8


@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("length", [5, peers_caches.FILL_AT_ONCE + 3])
def test_a_filled_cache_holds_its_tokens_in_every_layer(attention, length):
    cache = filled(tiny_model(attention), "contiguous", 2, length)
    assert len(cache.layers) == LAYERS
    first, second = (layer.keys for layer in cache.layers)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    assert all(layer.length == length and layer.start == 0 for layer in cache.layers)
    assert (cache.layers[0].values is None) == (attention == "mla")


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_a_real_step_over_every_cache(attention):
    seen = []
    model = tiny_model(attention, torch.bfloat16)
    found = compare(model, [40], [1, 2], repeats=1, tick=seen.append)
    assert [(row.batch, row.cache) for row in found.rows] == [(b, n) for b in (1, 2) for n in peers_caches.CACHES]
    assert seen[0] == "contiguous, batch 1 at 40" and len(seen) == 6
    for row in found.rows:
        assert 0 < row.fastest_s <= row.step_s <= row.slowest_s and row.bytes_ratio <= 1.0
        assert 0 < row.transient_largest_bytes < row.transient_peak_bytes
    assert found.skipped == () and "heads of (64, 128)" in found.reader


def test_what_does_not_fit_is_left_out_and_named(steps, monkeypatch):
    model = tiny_model()
    token = sum(filled(model, name, 1, 1024).bytes().total for name in NAMES) // 1024
    monkeypatch.setattr(peers_caches, "MOST_BYTES", token * 100)
    found = compare(model, [40, 300], [1, 3], repeats=1, names=NAMES)
    assert {(row.batch, row.context) for row in found.rows} == {(1, 40)}
    assert found.skipped == (
        "batch 1 at 300 tokens: tiny-gqa has 256 positions",
        f"batch 3 at 40 tokens: the caches need {token * 120:,} bytes, more than {token * 100:,}",
        "batch 3 at 300 tokens: tiny-gqa has 256 positions",
    )


def test_a_context_that_the_steps_would_fill_is_refused(steps):
    with pytest.raises(
        ValueError, match=f"a cache of 22 tokens is too short: 5 turns need at least {WARM + 5 * TURN + 1}"
    ):
        compare(tiny_model(), [22, 64], [1], repeats=5)
    assert steps == []


def test_why_the_kernel_does_not_read_is_said(monkeypatch):
    monkeypatch.setattr(peers_caches, "library", lambda: "no C++ compiler was found")
    assert peers_caches._reader(tiny_model()) == "PyTorch's kernels: no C++ compiler was found"
    assert Caches((), (), "").rows == () and build.FEWEST_SLOTS == 512
