"""`kvlab stream` as scripts and people meet it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvlab.cli import app

SHORT = ("--tokens", "60", "--stretch", "30")


def run(*arguments: str):
    return CliRunner().invoke(app, ["stream", *arguments])


def test_both_ends_of_every_stream_in_one_json_object():
    answer = json.loads(run("sinks4-12", "h2o-16", "contiguous", *SHORT, "--json").stdout)
    assert list(answer["caches"]) == ["sinks4-12", "h2o-16", "contiguous"] and answer["tokens"] == 60
    for name, parts in answer["caches"].items():
        assert [part["end"] for part in parts] == [30, 60]
        assert (parts[0]["bytes_payload"] == parts[1]["bytes_payload"]) == (name != "contiguous")
    one = 2 * 3 * 64 * 2  # bytes of a token in one layer of SmolLM2 in bf16
    assert answer["caches"]["sinks4-12"][1]["bytes_payload"] == 16 * one


def test_people_see_both_ends():
    done = run("window-16", *SHORT)
    assert done.exit_code == 0 and "window-16" in done.stdout and "median step" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("h2o",), "cannot read the cache 'h2o'"),
        (("magic",), "unknown cache 'magic'"),
        (("window-8", "--tokens", "0"), "got 0 and 1000"),
        (("none", *SHORT), "none stores nothing"),
        (("h2o-16", "snapkv-16-prompt", *SHORT), "snapkv-16-prompt decides where a prompt ends"),
        (("window-8", "h2o-16+int4-g7", *SHORT), "groups of 7"),
        (("window-8", "--shape", "nothing"), "nothing"),
        (("window-8", "--dtype", "fp8", *SHORT), "fp32, bf16, fp16"),
    ],
)
def test_bad_options_are_one_line(options, words):
    done = run(*options)
    assert done.exit_code == 2 and words in done.stderr and done.stdout == ""
