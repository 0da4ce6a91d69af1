"""The measurements of chapter 11, on a tiny trained model whose tokens are bytes."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kvlab.cache.build import build_cache
from kvlab.evaluation import windows
from kvlab.evaluation.quality import held_out_text
from kvlab.evaluation.results import recorded
from kvlab.generate import last_logits
from kvlab.model import zoo

NAMES = ("contiguous", "window-32", "sinks4-28")


@pytest.fixture(scope="module")
def tiny() -> zoo.LoadedModel:
    return zoo.load("tiny-mha", dtype="fp32", device="cpu")


def test_a_stream_is_judged_as_if_it_were_read_token_by_token(tiny):
    ids = tiny.tokenizer.encode(held_out_text())[:101]
    for row in windows.stream_rows(tiny, ids, NAMES, stretch=40, chunk=16):
        cache, losses = build_cache(tiny.config, row["cache"]), []
        for position in range(100):
            logits = last_logits(tiny.model, ids[position : position + 1], position, cache)[0]
            losses.append(-float(logits.log_softmax(-1)[ids[position + 1]]))
        wanted = [sum(losses[at : at + 40]) / len(losses[at : at + 40]) for at in (0, 40, 80)]
        assert row["nll"] == pytest.approx(wanted, abs=1e-4)
        assert row["payload_bytes"] == cache.bytes().payload


def test_a_stream_that_broke_off_goes_on_where_it_was(tiny, tmp_path):
    ids, ticks = tiny.tokenizer.encode(held_out_text())[:65], []
    facts = {"stretch": 32, "chunk": 16, "work": tmp_path, "tick": ticks.append}
    first = list(windows.stream_rows(tiny, ids, NAMES[:2], **facts))
    both = list(windows.stream_rows(tiny, ids, NAMES, **facts))
    assert both[:2] == first and sum(ticks) == 3 * 64
    with pytest.raises(ValueError, match="give another file"):
        list(windows.stream_rows(tiny, ids[:60], NAMES, **facts))
    with pytest.raises(ValueError, match="give another file"):  # another text of the same length
        list(windows.stream_rows(tiny, ids[::-1], NAMES, **facts))


def test_answers_are_counted_in_all_and_by_depth(tiny, tmp_path):
    rows = list(windows.task_rows(tiny, samples=5, tasks={"passkey": 300}, names=NAMES[:2], work=tmp_path))
    assert [(row["task"], row["cache"], row["total"]) for row in rows] == [("passkey", name, 5) for name in NAMES[:2]]
    for row in rows:
        assert [total for _, total in row["by_depth"].values()] == [1] * 5
        assert sum(right for right, _ in row["by_depth"].values()) == row["right"]
        assert row["low"] <= row["right"] / 5 <= row["high"]


@pytest.mark.parametrize(("count", "words"), [(0, "got 0"), (-4, "got -4"), (10**6, "at most, got 1,000,000")])
def test_a_stream_that_the_text_does_not_have_is_refused(tiny, count, words):
    with pytest.raises(ValueError, match=words):
        windows.stream_text(tiny, count)


def test_the_text_of_the_stream_is_long_enough_and_named(tiny):
    ids, about = windows.stream_text(tiny, tokens=300)
    assert len(ids) == 301 and about["source"] == "pydoc_data.topics" and len(about["sha256"]) == 64


def test_the_command_records_rows_with_their_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "STREAMED", NAMES)
    out = tmp_path / "rows.json"
    windows.main(["stream", "--model", "tiny-mha", "--tokens", "64", "--out", str(out), "--work", str(tmp_path / "w")])
    answer = json.loads(out.read_text())
    assert [row["cache"] for row in answer["rows"]] == list(NAMES) and answer["tokens"] == 64
    assert answer["command"].endswith("windows stream") and answer["environment"]["torch"] == torch.__version__


def test_the_recorded_rows_are_those_that_the_command_makes_now():
    stream, tasks = recorded("windows-stream.json"), recorded("windows-tasks.json")
    assert [row["cache"] for row in stream["rows"]] == list(windows.STREAMED)
    assert [len(row["nll"]) for row in stream["rows"]] == [windows.TOKENS // windows.STRETCH] * len(windows.STREAMED)
    assert all(math.isfinite(x) for row in stream["rows"] for x in row["nll"])
    first = {row["nll"][0] for row in stream["rows"]}
    assert max(first) - min(first) < 1e-4  # nothing has left yet
    wanted = [(task, name) for task in windows.TASKS for name in windows.ASKED]
    assert [(row["task"], row["cache"]) for row in tasks["rows"]] == wanted
