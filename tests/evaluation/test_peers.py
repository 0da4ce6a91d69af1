"""The race measures what it says, in turns, and says who is missing. No test here asserts a speed."""

from __future__ import annotations

import pytest
import torch

from kvlab.evaluation import peers
from kvlab.evaluation.peers import Peers, Row, race
from tests.harness import tiny_config, tiny_model


@pytest.fixture
def turns(monkeypatch):
    """Contestants with known times, and the order in which they were called."""
    order = []

    def contestant(name, prefill_s, step_s):
        def run(prompt, count):
            order.append((name, len(prompt), count))
            return [0] * count, [prefill_s] + [9.0] * peers.WARM_STEPS + [step_s] * (count - 1 - peers.WARM_STEPS)

        return run

    entered = {"kvlab eager": contestant("kvlab eager", 1.0, 0.5), "transformers": contestant("transformers", 2.0, 1.0)}
    monkeypatch.setattr(peers, "enter", lambda *_: (entered, {"llama.cpp": "not installed"}, None))
    monkeypatch.setattr(peers, "read_bandwidth", lambda device: 1e6)
    return order


def test_contestants_take_turns(turns):
    race(tiny_model(), [4, 8], repeats=2, steps=6)
    once = [(name, n, 6) for n in (4, 8) for name in ("kvlab eager", "transformers")]
    assert turns == once * 2


def test_ratios_leave_out_the_prefill_and_the_first_steps(turns):
    rows = {(row.contestant, row.context): row for row in race(tiny_model(), [4, 8], repeats=3, steps=6).rows}
    row = rows["kvlab eager", 8]
    assert (row.tokens_per_s, row.prefill_s) == (2.0, 1.0)
    assert (row.vs_reference, row.prefill_vs_reference) == (2.0, 2.0)
    assert rows["transformers", 8].vs_reference == 1.0


def test_the_bound_counts_weights_and_cache(turns):
    model = tiny_model()
    result = race(model, [8], repeats=1, steps=6)
    weights = sum(p.numel() for p in model.parameters()) * 8
    cache = 2 * 2 * 2 * 8 * (8 + 3) * 8  # 2 x layers x KV heads x head_dim x (context + half the steps) x fp64
    assert result.weights_bytes == weights and result.bandwidth_bytes_per_s == 1e6
    assert result.rows[0].of_bound == pytest.approx(2.0 * (weights + cache) / 1e6)


def test_without_the_reference_there_are_no_ratios(turns, monkeypatch):
    alone = {"kvlab eager": peers.enter()[0]["kvlab eager"]}
    monkeypatch.setattr(peers, "enter", lambda *_: (alone, {"transformers": "not installed"}, None))
    assert race(tiny_model(), [4], repeats=1, steps=6).rows[0].vs_reference is None


def test_real_contestants_agree_on_the_tokens():
    """Eager kvlab and transformers on the same weights, for real."""
    pytest.importorskip("transformers")
    model = tiny_model(dtype=torch.float32)
    said = []
    contestants, absent, _ = peers.enter(model, 32, False, said.append)
    prompt = [1, 2, 3, 4, 5]
    answers = {name: run(prompt, 8) for name, run in contestants.items()}
    assert {tuple(ids) for ids, _ in answers.values()} == {tuple(answers["kvlab eager"][0])}
    assert all(len(seconds) == 8 for _, seconds in answers.values())
    assert "llama.cpp" in absent and "llama.cpp does not take part" in said[-1]


def test_read_bandwidth_is_bytes_over_seconds(monkeypatch):
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(1000))
    clock = iter([0.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(peers, "perf_counter", lambda: next(clock))
    assert peers.read_bandwidth(torch.device("cpu"), turns=2) == 4000 / 1.0


def test_results_are_plain_records():
    row = Row("kvlab eager", 8, 1.0, 2.0, 1.5, 2.5, 0.5)
    assert Peers((row,), {}, 1e9, 10, None).rows[0].vs_reference is None
    assert tiny_config().num_hidden_layers == 2


def test_contexts_beyond_the_models_positions_are_refused_before_anyone_is_set_up(turns):
    model = tiny_model()
    with pytest.raises(ValueError, match="positions"):
        race(model, [4, model.config.max_position_embeddings], repeats=1, steps=6)
    assert turns == []
