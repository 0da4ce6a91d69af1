"""The engine's race counts what was asked for, in turns, and its contestants answer alike. No test asserts a speed."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from kvlab import cli
from kvlab.engine.stats import Stats
from kvlab.evaluation import engine_latency, peers_engine, serving
from kvlab.evaluation.engine_latency import decoding, prefix_hits
from kvlab.evaluation.peers_engine import race
from kvlab.evaluation.serving import ENGINE, ONE_BY_ONE, Job, Settings, draw_jobs, enough, enter, mean_waste
from kvlab.model import zoo
from tests.harness import tiny_config, tiny_model

JOBS = [Job((1, 2, 3), 5), Job((4, 5, 6, 7, 8, 9), 2), Job((1, 2), 9)]


@pytest.fixture
def turns(monkeypatch):
    """Contestants with known times, turn by turn, and the order in which they were called."""
    order = []

    def contestant(name, *seconds):
        left = iter(seconds)

        def serve(jobs):
            order.append(name)
            return ([[0] * job.new_tokens for job in jobs], next(left), 100), Stats(steps=len(order))

        return serve

    entered = {"slow": contestant("slow", 8.0, 16.0, 4.0), ENGINE: contestant(ENGINE, 4.0, 1.0, 2.0)}
    monkeypatch.setattr(peers_engine, "enter", lambda *_: (entered, {"third": "not installed"}))
    return order


def test_contestants_take_turns_and_medians_are_compared(turns):
    result = race(tiny_model(), JOBS, repeats=3, say=lambda words: None)
    assert turns == ["slow", ENGINE] * 3 and result.absent == {"third": "not installed"}
    slow, engine = result.rows
    assert (slow.tokens_per_s, slow.slowest_per_s, slow.fastest_per_s) == (16 / 8, 16 / 16, 16 / 4)
    assert (slow.engine_ratio, engine.engine_ratio) == (4.0, 1.0)
    assert result.service.steps == 6  # the turn that took 2 s was the sixth call
    assert (result.requests, result.prompt_tokens, result.useful_tokens) == (3, 11, 16)


def test_tokens_that_nobody_asked_for_are_no_answer(turns, monkeypatch):
    padded = lambda jobs: (([[0] * 9 for _ in jobs], 1.0, 100), None)  # noqa: E731
    monkeypatch.setattr(peers_engine, "enter", lambda *_: ({"padded": padded}, {}))
    with pytest.raises(ValueError, match=r"padded was asked for \[5, 2, 9\] tokens and gave \[9, 9, 9\]"):
        race(tiny_model(), JOBS, repeats=1, say=lambda words: None)


def test_jobs_beyond_the_models_positions_are_refused_before_anyone_is_set_up(turns):
    with pytest.raises(ValueError, match="positions"):
        race(tiny_model(), [Job((1,) * 250, 20)], repeats=1)
    assert turns == []


def test_real_contestants_agree_on_the_tokens():
    pytest.importorskip("transformers")
    model, jobs = tiny_model(dtype=torch.float32), draw_jobs(5, 61, prompt_tokens=(3, 20), new_tokens=(2, 12))
    contestants, absent = enter(model, jobs, enough(jobs), lambda words: None)
    assert absent == {} and len(contestants) == 4
    answers = {name: serve(jobs)[0] for name, serve in contestants.items()}
    for name, (tokens, seconds, cache_bytes) in answers.items():
        assert tokens == answers[ONE_BY_ONE][0], name
        assert seconds > 0 and cache_bytes > 0
    token_bytes = 2 * 2 * 2 * 8 * 4  # keys and values x layers x KV heads x head_dim x fp32
    assert answers[ENGINE][2] == enough(jobs).num_blocks * 16 * token_bytes
    longest = max(len(job.prompt_ids) for job in jobs) + max(job.new_tokens for job in jobs) - 1
    assert answers["transformers static"][2] == len(jobs) * longest * token_bytes


def test_who_cannot_run_is_named_with_the_reason(monkeypatch):
    def missing(model, settings):
        raise ImportError("transformers is not installed\nand more")

    monkeypatch.setattr(serving, "_static", missing)
    monkeypatch.setattr(serving, "_continuous", missing)
    said = []
    contestants, absent = enter(tiny_model(), JOBS, enough(JOBS), said.append)
    assert list(contestants) == [ONE_BY_ONE, ENGINE]
    assert set(absent.values()) == {"transformers is not installed"}
    assert said[0] == "transformers static does not take part: transformers is not installed"


def test_kvlab_itself_may_not_be_absent():
    with pytest.raises(ValueError, match="can never fit into 1"):
        enter(tiny_model(), JOBS, Settings(num_blocks=1, block_size=2), lambda words: None)


def test_jobs_are_drawn_between_their_bounds_and_again_alike():
    jobs = draw_jobs(200, 61, prompt_tokens=(3, 5), new_tokens=(1, 2), seed=7)
    assert jobs == draw_jobs(200, 61, prompt_tokens=(3, 5), new_tokens=(1, 2), seed=7)
    assert {len(job.prompt_ids) for job in jobs} == {3, 4, 5} and {job.new_tokens for job in jobs} == {1, 2}
    assert {token for job in jobs for token in job.prompt_ids} == set(range(61))


def test_waste_by_hand():
    # after the steps 3, 4 and 5 tokens are stored: 3 of 4 slots, 4 of 4, and nothing once the last token is drawn
    assert mean_waste(tiny_model(), [Job((1, 2, 3), 3)], Settings(num_blocks=2, block_size=4)) == 1 / 8


def test_longer_jobs_waste_less():
    waste = {}
    for name, (prompt_tokens, new_tokens) in peers_engine.MIXES.items():
        jobs = draw_jobs(32, 61, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        waste[name] = mean_waste(tiny_model(), jobs, enough(jobs))
        assert name == "short" or sum(job.tokens for job in jobs) / len(jobs) >= 250
    assert waste["mixed"] < 0.04 < waste["short"]


def test_enough_is_exactly_enough():
    model, jobs = tiny_model(), [Job((1, 2, 3), 9), Job((4, 5, 6), 9)]
    settings = enough(jobs, block_size=4)
    assert settings.num_blocks == 3 + 3
    (tokens, _, _), stats = serving._engine(model, settings)(jobs)
    assert stats.preemptions == 0
    (again, _, _), stats = serving._engine(model, Settings(num_blocks=4, block_size=4))(jobs)
    assert stats.preemptions > 0 and again == tokens


def test_prefix_hits_are_those_that_were_meant():
    found = prefix_hits(tiny_model(), hits=(0, 32, 96), prompt_tokens=100, repeats=2)
    assert [(hit.hit_tokens, hit.prompt_tokens) for hit in found] == [(0, 100), (32, 100), (96, 100)]
    assert all(hit.ratio == hit.ttft_s / hit.missing_s for hit in found)


@pytest.mark.parametrize("hit", [8, 112, -16])
def test_hits_that_cannot_be_are_refused(hit):
    with pytest.raises(ValueError, match=f"got {hit}"):
        prefix_hits(tiny_model(), hits=(0, hit), prompt_tokens=100)


def test_the_missing_tokens_are_computed_behind_the_ones_that_are_there(monkeypatch):
    """What the engine is compared with draws the token that a whole prefill draws."""
    model, prompt, drawn = tiny_model(), list(range(40)), []
    real = engine_latency.prefill
    monkeypatch.setattr(
        engine_latency, "prefill", lambda *args, **more: drawn.append(real(*args, **more)) or drawn[-1]
    )  # fmt: skip
    cache = engine_latency.build_cache(model.config)
    engine_latency.prefill(model, prompt, cache)
    engine_latency._missing(model, cache, 32, prompt[32:])
    assert torch.allclose(drawn[0], drawn[1])


def test_decoding_takes_turns_and_compares_with_the_contiguous_cache():
    rows = decoding(tiny_model(), context=40, steps=3)
    assert [row.contestant for row in rows] == ["contiguous cache", "paged cache", "engine"]
    assert rows[0].vs_contiguous == 1.0 and rows[2].vs_contiguous == rows[0].token_s / rows[2].token_s


@pytest.fixture
def small(turns, monkeypatch):
    """A whole measurement of a tiny model."""
    loaded = SimpleNamespace(model=tiny_model(), config=tiny_config(), words="a tiny model")
    monkeypatch.setattr(zoo, "load", lambda name, **options: loaded)
    monkeypatch.setattr(peers_engine, "MIXES", {"mixed": ((8, 20), (2, 6)), "short": ((2, 9), (1, 3))})
    monkeypatch.setattr(peers_engine, "prefix_hits", partial(prefix_hits, hits=(0, 16), prompt_tokens=20))
    monkeypatch.setattr(peers_engine, "decoding", partial(decoding, context=20, steps=2))


def test_the_command_measures_races_hits_and_decoding(small):
    done = CliRunner().invoke(cli.app, ["peers", "--engine", "--requests", "2", "--repeats", "1", "--json"])
    answer = json.loads(done.stdout)
    assert list(answer["mixes"]) == ["mixed", "short"] and len(answer["decoding"]) == 3
    assert answer["mixes"]["short"]["absent"] == {"third": "not installed"}
    assert [hit["hit_tokens"] for hit in answer["prefix_hits"]] == [0, 16]


def test_the_command_prints_tables(small):
    shown = CliRunner().invoke(cli.app, ["peers", "--engine", "--requests", "2", "--repeats", "1"]).stdout
    assert "mixed: 2 requests" in shown and "third took no part: not installed" in shown and "held no token" in shown
    assert "Prefix hits" in shown and "One request behind 20 tokens" in shown


def test_a_race_of_nobody_is_refused_before_loading(monkeypatch):
    monkeypatch.setattr(zoo, "load", None)
    done = CliRunner().invoke(cli.app, ["peers", "--engine", "--requests", "0"])
    assert done.exit_code == 2 and "got 0 and 5" in done.stderr
