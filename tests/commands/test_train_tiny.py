"""`kvlab train-tiny` as scripts and people meet it, on models shrunk to a fraction of a second."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.model import tiny, zoo
from kvlab.training import recipe
from kvlab.training.table import read_rows

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "first_k_dense_replace": 1}


@pytest.fixture(autouse=True)
def shrunken(monkeypatch):
    full = tiny.hugging_face_config
    monkeypatch.setattr(tiny, "hugging_face_config", lambda attention: full(attention) | SMALL)
    monkeypatch.setattr("kvlab.training.train.bits_per_byte", lambda model, data, context: 2.0)
    monkeypatch.setattr(recipe.Recipe.__init__, "__defaults__", (3, 2, 16, *recipe.Recipe.__init__.__defaults__[3:]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other on a busy machine
    yield
    torch.set_num_threads(threads)


def run(*arguments: str):
    return CliRunner().invoke(app, ["train-tiny", *map(str, arguments)])


def test_all_four_are_trained_and_can_be_loaded(tmp_path):
    rows = tmp_path / "results.jsonl"
    done = run("--out", tmp_path, "--rows", rows, "--seed", 5, "--steps", 2)
    assert done.exit_code == 0, done.stderr
    assert [(row["model"], row["seed"], row["step"]) for row in read_rows(rows)] == [
        (name, 5, step) for name in tiny.NAMES for step in (1, 2)
    ]
    for name in tiny.NAMES:
        loaded = zoo.load(tmp_path / f"{name}-seed5", device="cpu")
        assert loaded.tokenizer.decode(loaded.tokenizer.encode("ok")) == "ok"
    assert "tiny-mqa" in done.stdout and "too few seeds to tell" in done.stdout
    assert "tiny-mla, seed 5, step 2: held out 2.000 bits per byte" in done.stderr
    assert not list(tmp_path.rglob("*.p*t"))


def test_json_alone_on_stdout_and_the_table_again(tmp_path):
    answer = json.loads(run("--attention", "gqa", "--out", tmp_path, "--json").stdout)
    assert [(a["model"], a["bits"], a["mean"], a["compared_with_first"]) for a in answer] == [
        ("tiny-gqa", [2.0], 2.0, None)
    ]
    assert json.loads(run("--table", "--out", tmp_path, "--json").stdout) == answer


def test_a_second_run_is_refused_unless_resumed(tmp_path):
    options = ("--attention", "mha", "--out", tmp_path)
    assert run(*options).exit_code == 0
    again = run(*options)
    assert again.exit_code == 2 and "is there already: --resume to go on with it" in again.stderr
    assert "Traceback" not in again.stderr
    resumed = run(*options, "--resume")
    assert resumed.exit_code == 0 and len(read_rows(tmp_path / "rows.jsonl")) == 3  # no row twice


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "mqq"), "unknown attention 'mqq': one of mha, gqa, mqa, mla"),
        (("--seed", "-1"), "a seed is a whole number from 0 to 2^40, not -1"),
        (("--seed", str(2**70)), "a seed is a whole number from 0 to 2^40, not 1180591620717411303424"),
        (("--steps", "0"), "steps must be at least 1, got 0"),
        (("--table",), "no such file: train first"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_two(options, message, tmp_path):
    done = run(*options, "--out", tmp_path)
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "{tmp}/file"), "for --out: {tmp}/file cannot be made a directory (File exists)"),
        (("--out", "{tmp}/file/x"), "for --out: {tmp}/file/x cannot be made a directory (Not a directory)"),
        (("--rows", "{tmp}/file/x"), "for --rows: {tmp}/file cannot be made a directory (File exists)"),
        (("--rows", "{tmp}"), "for --rows: {tmp} is a directory: give the name of a file"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_training(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.training.text.python_topics", None)  # the first thing that takes time
    (tmp_path / "file").write_text("mine")
    done = run("--out", tmp_path / "models", *(option.format(tmp=tmp_path) for option in options))
    assert done.exit_code == 2 and message.format(tmp=tmp_path) in done.stderr and done.stdout == ""
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("line", ["5", '{"model": "x"}', '{"id": 1, "task": "passkey"}'])
def test_rows_of_something_else_are_named(tmp_path, line):
    (tmp_path / "other.jsonl").write_text(line + "\n")
    done = run("--table", "--rows", tmp_path / "other.jsonl")
    assert done.exit_code == 2 and "other.jsonl, line 1 is no row of a training run, it has no" in done.stderr
