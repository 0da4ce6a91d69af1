"""`kvlab dataset` as scripts and people meet it; it needs a tokenizer and no weights."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.evaluation import results
from kvlab.evaluation.tasks import TASKS
from kvlab.model import zoo

KEYS = {"id", "task", "prompt", "answer", "depth", "num_tokens"}


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    monkeypatch.setattr(zoo, "load", None)


def run(out, *options: str):
    return CliRunner().invoke(app, ["dataset", "--out", str(out), *options])


def rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_all_tasks_with_their_keys(tmp_path):
    done = run(tmp_path / "d.jsonl", "--samples", "3", "--json")
    answer, written = json.loads(done.stdout), rows(tmp_path / "d.jsonl")
    assert done.exit_code == 0 and answer["samples"] == len(written) == 3 * len(TASKS)
    assert all(set(row) >= KEYS for row in written) and {row["task"] for row in written} == set(TASKS)
    (line,) = done.stderr.splitlines()  # the other tasks are gates at their own lengths
    assert "warning: tracking at 256 tokens is no gate" in line


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    options = ("--task", "needles", "--task", "recall", "--samples", "4", "--tokens", "120")
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        assert run(tmp_path / name, *options, "--seed", seed).exit_code == 0
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c and b"\r" not in a and a.endswith(b"\n")
    assert [row["task"] for row in rows(tmp_path / "a")] == ["needles"] * 4 + ["recall"] * 4


def test_people_are_told_and_warned(tmp_path):
    done = run(tmp_path / "d.jsonl", "--task", "recency", "--samples", "1", "--tokens", "2000")
    assert done.exit_code == 0 and "1 samples of recency (written)" in done.stdout
    assert "warning: recency at 2000 tokens is no gate" in done.stderr


def test_another_file_is_not_replaced_without_force(tmp_path):
    file = tmp_path / "d.jsonl"
    options = ("--task", "passkey", "--samples", "1", "--tokens", "64")
    run(file, *options)
    assert "(unchanged)" in run(file, *options).stdout
    before = file.read_bytes()
    done = run(file, *options, "--seed", "1")
    assert done.exit_code == 2 and "exists and holds something else: --force replaces it" in done.stderr
    assert file.read_bytes() == before
    assert run(file, *options, "--seed", "1", "--force").exit_code == 0 and file.read_bytes() != before


def test_nothing_is_left_of_a_run_that_fails(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(results.os, "replace", full)
    done = run(tmp_path / "d.jsonl", "--task", "passkey", "--samples", "1", "--tokens", "64")
    assert done.exit_code == 2 and "no space left" in done.stderr and list(tmp_path.iterdir()) == []


def test_the_tokenizer_of_a_file_or_a_directory_counts(tmp_path):
    options = ("--task", "passkey", "--samples", "1", "--tokens", "64")
    model = zoo.offline_gguf()
    for name, place in (("a", model), ("b", model.parent)):
        assert run(tmp_path / name, *options, "--model", str(place)).exit_code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_pipe_is_refused_before_any_work(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # to look into it would wait for ever
    for options in ((), ("--force",)):
        done = run(tmp_path / "pipe", "--task", "passkey", "--samples", "1", "--tokens", "64", *options)
        assert done.exit_code == 2 and "pipe is a pipe or a device: give the name of a file" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "sudoku"), "unknown task 'sudoku'; kvlab has passkey, needles, recall, variables, tracking"),
        (("--task", "passkey", "--task", "sudoku", "--model", "no-such-model"), "unknown task 'sudoku'"),
        (("--samples", "0"), "at least one sample is needed, got 0"),
        (("--task", "passkey", "--tokens", "10"), "passkey needs at least 36 tokens"),
        (("--depth", "2"), "a depth lies between 0 (start of the text) and 1 (its end), got 2.0"),
        (("--model", "no-such-model"), "no-such-model"),
        (("--model", ""), "unknown model ''"),
        (("--out", "{tmp}/nowhere/d.jsonl"), "there is no directory"),
        (("--out", "{tmp}"), "is a directory"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_two(options, message, tmp_path):
    done = run(tmp_path / "d.jsonl", *(option.format(tmp=tmp_path) for option in options))
    assert done.exit_code == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert message in line and not (tmp_path / "d.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    done = run(tmp_path / "d.jsonl", "--task", "passkey", "--samples", "1")
    assert done.exit_code == 2 and "cannot be written" in done.stderr
