"""The measurements of chapter 13, small: that they measure what they say, never how fast it was."""

from dataclasses import replace

import pytest
import torch

from kvlab.evaluation import fetching, offloading, restart
from kvlab.model.transformer import Transformer
from kvlab.model.zoo import LoadedModel
from tests.harness import tiny_config, tiny_model


def test_fetches_bring_back_whole_prefixes(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "SAMPLE", 2**16)
    model = tiny_model("gqa")
    rates, rows = fetching.fetches(model, tmp_path, (16, 48), repeats=1)
    assert all(rate > 0 for rate in (rates.memory, rates.disk, rates.hashing, rates.flops))
    assert [row.prefix_tokens for row in rows] == [16, 48]
    assert [row.bytes for row in rows] == [2 * 2 * 2 * 8 * 8 * n for n in (16, 48)]  # layers, K and V, heads, width
    assert all(row.predicted_disk_s > row.predicted_memory_s > 0 and row.predicted_recompute_s > 0 for row in rows)
    assert all(row.break_even_bytes_per_s == pytest.approx(row.bytes / row.recompute_s) for row in rows)
    with pytest.raises(ValueError, match="whole blocks of 16 tokens, got 20"):
        fetching.fetches(model, tmp_path, (20,))


def test_a_prompt_over_the_budget_is_refused_and_served_with_two_layers_there():
    small, large = offloading.fits(tiny_model("gqa"), (32, 96), budget_tokens=64)
    assert small.refused is None and "room for 64 tokens" in large.refused
    assert small.same_token and large.same_token
    assert large.resident_bytes == 3 * small.resident_bytes == large.budget_bytes * 96 // 64
    assert large.offloaded_bytes > large.resident_bytes  # of two layers, two are all: and their positions


def test_the_layers_that_are_there_at_once_are_neighbours(monkeypatch):
    """Of unequal layers the largest two neighbours count, neither one layer twice nor the largest two of all."""
    model = Transformer(replace(tiny_config(), num_hidden_layers=4, layer_types=("full_attention",) * 4)).eval()
    slots = iter([7, 1, 4, 5])
    monkeypatch.setattr(offloading, "contents", lambda layer: [(torch.zeros(1, 1, 9, 1), next(slots))])
    (row,) = offloading.fits(model, (8,), budget_tokens=8)
    assert row.offloaded_bytes == (4 + 5) * 4


def test_a_restart_finds_the_prefix_and_says_so(tmp_path, monkeypatch):
    model = tiny_model("gqa")
    loaded = LoadedModel(model, None, tiny_config(), "tiny")
    monkeypatch.setattr(restart.zoo, "load", lambda name, dtype: loaded)
    first, second = (restart.serve(tmp_path, "tiny", "fp64", 48, question) for question in (0, 1))
    assert (first["restored_tokens"], second["restored_tokens"]) == (0, 48)
    assert len(second["answer"]) == restart.ANSWER and second["ttft_s"] > 0


def test_restarts_take_turns(monkeypatch):
    calls = []

    def process(directory, model, dtype, prefix, question):
        kept = bool(calls) and directory == calls[0]
        calls.append(directory)
        return {"ttft_s": 0.5 if kept else 2.0, "restored_tokens": 48 if kept else 0, "answer": [question]}

    monkeypatch.setattr(offloading, "in_a_new_process", process)
    row = offloading.restarts("tiny", "fp64", prefix=48, repeats=2)
    assert (row.speedup, row.restored_tokens, row.same_answers) == (4.0, 48, True)
    assert [directory == calls[0] for directory in calls] == [True, False, True, True, False, True, True]


def test_turns_are_counted():
    with pytest.raises(SystemExit):
        offloading.main(["--out", "x.json", "--repeats", "0"])
