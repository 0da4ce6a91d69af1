"""The measurement of long streams, with a clock that counts: no test here depends on a machine's speed."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from kvlab.cache.build import build_cache
from kvlab.evaluation.streaming import BASELINE, BLOCK, both_ends, measured, one_layer, overheads, stream_through
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


def test_both_ends_are_timed_in_turns(monkeypatch):
    from kvlab.evaluation import streaming

    order, real = [], streaming._step

    def slower_far_away(model, cache, position, clock):
        order.append(position)
        real(model, cache, position, clock)
        return 3.0 if position >= 100 else 2.0

    monkeypatch.setattr(streaming, "_step", slower_far_away)
    found = both_ends(MODEL, "h2o-8", early=20, late=100, blocks=2)
    assert order == [*range(20, 52), *range(100, 132), *range(52, 84), *range(132, 164)]
    assert (found.early_s, found.late_s, found.ratio) == (2.0, 3.0, 1.5)
    assert found.early_bytes == found.late_bytes
    grown = both_ends(MODEL, BASELINE, early=20, late=100, blocks=1)
    assert grown.late_bytes > grown.early_bytes
    with pytest.raises(ValueError, match=r"1 <= early <= late.* 9, 5, 1"):
        both_ends(MODEL, BASELINE, 9, 5, 1)


def test_rows_of_everything_and_a_run_that_goes_on(tmp_path, monkeypatch):
    from kvlab.evaluation import streaming

    monkeypatch.setattr(streaming, "overheads", lambda model, names: overheads(model, names, 16, 1))
    monkeypatch.setattr(
        streaming, "both_ends", lambda model, name, late: both_ends(model, name, early=20, late=late, blocks=1)
    )
    facts = {"names": ["window-8", "h2o-8"], "tokens": 60, "work": tmp_path / "rows.jsonl"}
    rows = list(measured(MODEL, **facts))
    assert [(row["measure"], row["name"]) for row in rows] == [
        *(("overhead", name) for name in (BASELINE, "window-8", "h2o-8")),
        *((measure, name) for name in (BASELINE, "window-8", "h2o-8") for measure in ("ends", "stretch")),
    ]
    assert list(measured(MODEL, **facts)) == rows  # read, not run again
    with pytest.raises(ValueError, match="give another file"):
        next(measured(one_layer(tiny_config(), torch.bfloat16), **facts))
    with pytest.raises(ValueError, match="give another file"):  # overheads are those of other contestants
        next(measured(MODEL, **{**facts, "names": ("window-8",)}))
    monkeypatch.setattr(streaming, "measured", lambda model, **facts: iter([{"measure": model.config.name}]))
    streaming.main(["--shape", "tiny-mha", "--work", str(tmp_path / "w" / "x"), "--out", str(tmp_path / "o" / "y")])
    answer = json.loads((tmp_path / "o" / "y").read_text())
    assert answer["rows"] == [{"measure": "tiny-mha"}] and answer["command"] == streaming.COMMAND


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_streams_of_nothing(sizes):
    with pytest.raises(ValueError, match=f"got {sizes[0]} and {sizes[1]}"):
        stream_through(MODEL, build_cache(MODEL.config), *sizes)
    with pytest.raises(ValueError, match=f"got {sizes[0]} and {sizes[1]}"):
        overheads(MODEL, [], *sizes)
