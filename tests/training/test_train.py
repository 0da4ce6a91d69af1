"""Training is the same run every time, interrupted or not, and leaves nothing that must be unpickled."""

from __future__ import annotations

import math
import zipfile
from dataclasses import replace

import pytest
import torch

from kvlab.model import saving
from kvlab.model.tiny import ATTENTIONS
from kvlab.training.recipe import Recipe, batch_of, bits_of, bits_per_byte, initial_model, optimiser
from kvlab.training.state import StateError
from tests.training.conftest import RECIPE, small


def weights_of(run) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in run.model.parameters()]


def rows_of(run) -> list[dict]:
    rows: list[dict] = []
    run.finish(rows.append)
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_one_seed_gives_the_same_losses_twice_and_another_does_not(attention, start):
    runs = [start(str(i), attention, seed) for i, seed in enumerate((0, 0, 1))]
    losses = [[run.advance() for _ in range(5)] for run in runs]
    assert losses[0] == losses[1] and losses[0] != losses[2]
    assert all(torch.equal(a, b) for a, b in zip(weights_of(runs[0]), weights_of(runs[1]), strict=True))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_loss_falls_on_a_toy_text(attention, start):
    recipe = Recipe(steps=60, batch=8, context=32, warmup=5, rate=1e-2, evaluations=1)
    run = start(attention=attention, recipe=recipe)
    first = run.advance()
    row = rows_of(run)[-1]
    assert first > 6.5 and row["train_bits_per_byte"] < 5 and row["held_out_bits_per_byte"] < 3.6


def test_a_resumed_run_equals_one_without_interruption(start):
    whole, cut = start("whole"), start("cut")
    expected = rows_of(whole)
    assert [row["step"] for row in expected] == [3, 6]
    seen: list[dict] = []

    def stop_at_the_fifth(bits: float) -> None:
        if cut.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut.finish(seen.append, stop_at_the_fifth)
    resumed = start("cut", resume=True)
    assert resumed.step == 3  # the state of the evaluation
    assert rows_of(resumed) == expected[1:] and len(seen) == 1
    assert all(torch.equal(a, b) for a, b in zip(weights_of(whole), weights_of(resumed), strict=True))
    assert rows_of(start("cut", resume=True)) == []  # finished: nothing is left to do


def test_states_are_kept_between_evaluations_too(start, monkeypatch):
    """And what was summed up for the next row is in them."""
    monkeypatch.setattr("kvlab.training.train.KEEP_EVERY", 2)
    expected = rows_of(start("whole"))
    cut = start("cut")

    def stop(bits: float) -> None:
        if cut.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut.finish(lambda row: None, stop)
    resumed = start("cut", resume=True)
    assert resumed.step == 4 and rows_of(resumed) == expected[1:]


def test_an_interrupted_write_leaves_the_older_state(start, monkeypatch):
    run = start()
    replaced = saving.os.replace
    calls = []

    def fail_the_second_time(*paths):
        calls.append(paths)
        if len(calls) > 1:
            raise OSError("the disk is full")
        replaced(*paths)

    monkeypatch.setattr(saving.os, "replace", fail_the_second_time)
    with pytest.raises(OSError, match="the disk is full"):
        run.finish(lambda row: None)
    monkeypatch.undo()
    resumed = start(resume=True)
    assert resumed.step == 3
    assert rows_of(resumed)[-1] == rows_of(start("whole"))[-1]


def test_nothing_is_pickled(start):
    run = start()
    run.finish(lambda row: None)
    files = list(run.state_file.parent.iterdir())
    assert [file.name for file in files] == ["state.safetensors"]
    content = run.state_file.read_bytes()
    assert not zipfile.is_zipfile(run.state_file) and content[8:9] == b"{"  # torch.save would write a zip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "its seed is 0, this one's 1"),
        ({"attention": "mqa"}, "its model is small-gqa, this one's small-mqa"),
        ({"recipe": replace(RECIPE, steps=7)}, "its recipe is "),
    ],
)
def test_another_runs_state_is_refused(changes, message, start):
    start().finish(lambda row: None)
    with pytest.raises(StateError, match=message):
        start(**changes, resume=True)


def test_a_state_is_neither_overwritten_nor_trusted_when_broken(start):
    run = start()
    run.finish(lambda row: None)
    with pytest.raises(StateError, match="is there already: --resume to go on with it"):
        start()
    run.state_file.write_bytes(run.state_file.read_bytes()[:1000])
    with pytest.raises(StateError, match="cannot be read") as caught:
        start(resume=True)
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_no_number_ends_the_run_before_the_weights_change(start):
    run = start()
    with torch.no_grad():
        run.model.model.norm.weight[0] = math.nan
    before = weights_of(run)[0]
    with pytest.raises(ValueError, match="the loss of step 0 is nan: lower the learning rate"):
        run.advance()
    assert torch.equal(weights_of(run)[0], before) and not run.state_file.exists()


def test_a_row_says_what_was_trained_on_what_and_where(start):
    row = rows_of(start())[-1]
    assert (row["model"], row["seed"], row["step"], row["steps"]) == ("small-gqa", 0, 6, 6)
    assert row["text"]["sha256"] == "toy" and row["recipe"]["batch"] == 4
    assert row["environment"]["cpu"] and row["environment"]["torch"] == torch.__version__
    assert row["elements_per_token_and_layer"] == 64 and row["cache_bytes_per_token"] == 2 * 64 * 2


class TestRecipe:
    def test_every_model_gets_the_same_batches_and_each_time_through_others(self, corpus):
        again = batch_of(corpus.train, RECIPE, 0, 3)
        assert all(torch.equal(a, b) for a, b in zip(batch_of(corpus.train, RECIPE, 0, 3), again, strict=True))
        inputs, targets = again
        assert inputs.shape == (4, 32) and torch.equal(inputs[:, 1:], targets[:, :-1])
        assert not torch.equal(inputs, batch_of(corpus.train, RECIPE, 1, 3)[0])

    def test_one_time_through_reads_nothing_twice(self):
        data = torch.arange(32 * 13 + 1)
        batches = [batch_of(data, RECIPE, 0, step)[0] for step in range(3)]  # 12 windows, 4 a batch
        read = torch.cat(batches).flatten()
        assert len(read.unique()) == len(read) == 3 * 4 * 32
        assert not torch.equal(batches[0], batch_of(data, RECIPE, 0, 3)[0])

    def test_a_text_too_short(self):
        with pytest.raises(ValueError, match="the text has 100 bytes, but a batch of this recipe needs 161"):
            batch_of(torch.zeros(100, dtype=torch.long), RECIPE, 0, 0)
        assert batch_of(torch.zeros(161, dtype=torch.long), RECIPE, 0, 0)[0].shape == (4, 32)

    def test_the_rate_rises_then_falls(self):
        recipe = Recipe(steps=100, warmup=10, rate=1.0, last_share=0.1)
        rates = [recipe.rate_at(step) for step in range(100)]
        assert rates[0] == 0.1 and rates[10] == 1.0 and rates[99] == pytest.approx(0.1, abs=1e-3)
        assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)

    def test_evaluations(self):
        recipe = Recipe(steps=1000)
        assert [step for step in range(1, 1001) if recipe.evaluates_after(step)] == [200, 400, 600, 800, 1000]
        assert Recipe(steps=1).evaluates_after(1)

    @pytest.mark.parametrize("field", ["steps", "batch", "context", "evaluations"])
    def test_nothing_to_train(self, field):
        with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
            Recipe(**{field: 0})

    def test_norms_do_not_decay(self):
        groups = optimiser(initial_model(small(), 0), RECIPE).param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert {w.dim() for w in groups[0]["params"]} == {2} and {w.dim() for w in groups[1]["params"]} == {1}

    @pytest.mark.parametrize("attention", ATTENTIONS)
    def test_a_model_starts_near_eight_bits_per_byte(self, attention, corpus):
        assert 7.5 < bits_per_byte(initial_model(small(attention), 0), corpus.held_out, 32) < 9.5

    @pytest.mark.parametrize("length", [97, 100, 20])
    def test_every_byte_but_the_first_is_judged_once(self, length, corpus):
        model, data = initial_model(small(), 0).to(torch.float64), corpus.held_out[:length]
        total = 0.0
        for start in range(0, length - 1, 32):
            window = data[start : start + 33][None]
            total += float(bits_of(model, window[:, :-1], window[:, 1:]).detach()) * (window.shape[1] - 1)
        assert bits_per_byte(model, data, 32) == pytest.approx(total / (length - 1), rel=1e-6)
