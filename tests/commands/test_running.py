"""`kvlab generate` and `kvlab peers` as scripts and people meet them, on the real model."""

from __future__ import annotations

import json
from functools import cache

import pytest
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.commands.peers import show_caches
from kvlab.model import zoo
from tests.model.factory import write_checkpoint

PROMPT = ("generate", "smollm2-135m", "--prompt", "The capital of France is", "--max-new-tokens", "6", "--json")


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """The same model is asked for many times: read it once for each set of options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "load", cache(zoo.load))
        yield


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def plain():
    return json.loads(run(*PROMPT).stdout)


def test_generate_answers_in_one_json_object(plain):
    keys = {"text", "token_ids", "ttft_s", "tokens_per_s", "cache_bytes_allocated", "cache_bytes_used"}
    assert keys <= set(plain) and len(plain["token_ids"]) == 6
    assert "Paris" in plain["text"]
    assert plain["cache_bytes_used"] == 2 * 23_040 * (5 + 5)  # fp32; the last token is never stored
    assert plain["cache_bytes_allocated"] > plain["cache_bytes_used"]


@pytest.mark.parametrize("cache", ["none", "static", "sliding"])
def test_every_cache_gives_the_same_text(plain, cache):
    answer = json.loads(run(*PROMPT, "--cache", cache).stdout)
    assert answer["token_ids"] == plain["token_ids"]
    assert (answer["cache_bytes_used"] == 0) == (cache == "none")


def test_people_see_the_text_and_what_it_cost():
    done = run(*PROMPT[:-1])
    assert done.exit_code == 0 and "Paris" in done.stdout
    assert "time to first token" in done.stdout and "bytes" in done.stdout
    assert "dequantised; on" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cache", "magic"), "unknown cache 'magic'; kvlab has none, contiguous, static, sliding"),
        (("--temperature", "-1"), "temperature must be 0 (greedy) or a positive number, got -1.0"),
        (("--top-p", "1.5"), "top_p must be above 0 and at most 1"),
        (("--max-new-tokens", "0"), "at least 1, got 0"),
        (("--max-new-tokens", "9000"), "need 9005 positions, but smollm2-135m was trained on 8192"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "caf\udce9"), "no Unicode"),
        (("--device", "meta"), "device 'meta' cannot be used here"),
        (("--dtype", "int3"), "dtype 'int3' is not one that models run in"),
        (("--device", "abacus"), "device 'abacus' cannot be used here"),
        (("--compile", "--cache", "none"), "compiled decoding needs the static cache, not none"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_two(options, message):
    done = run(*PROMPT, *options)
    assert done.exit_code == 2 and done.stdout == ""
    assert message in done.stderr.strip().splitlines()[-1]


def test_a_model_that_cannot_run_says_why():
    done = run("generate", "gpt-oss-20b", "--prompt", "x")
    assert done.exit_code == 2 and "can size gpt-oss-20b but not run it" in done.stderr


def test_peers_reports_ratios_of_one_run():
    options = ("--contexts", "16", "--repeats", "1", "--steps", "5", "--no-compile", "--no-caches", "--json")
    done = run("peers", *options)
    answer = json.loads(done.stdout)
    assert answer["caches"] is None
    rows = {row["contestant"]: row for row in answer["rows"]}
    assert rows["transformers"]["vs_reference"] == 1.0 and rows["kvlab eager"]["vs_reference"] > 0
    assert answer["weights_bytes"] == 269_030_016 and answer["environment"]["cores"] >= 1
    table = run("peers", *options[:-1])
    assert "kvlab eager" in table.stdout and "read bandwidth" in table.stdout


def test_peers_compares_caches(capsys):
    short = ("--contexts", "16", "--repeats", "1", "--steps", "4", "--no-compile")
    options = (*short, "--cache-contexts", "64,9000", "--batches", "1,2")
    answer = json.loads(run("peers", *options, "--json").stdout)["caches"]
    rows = {(row["batch"], row["cache"]): row for row in answer["rows"]}
    assert set(rows) == {(batch, name) for batch in (1, 2) for name in ("contiguous", "int8", "int4")}
    assert rows[1, "contiguous"]["payload_bytes"] == 64 * 23_040 and rows[1, "int8"]["payload_bytes"] == 32 * 23_040
    assert rows[1, "int8"]["bytes_ratio"] <= 0.56 and rows[2, "contiguous"]["speed"] == 1.0
    assert answer["skipped"][0] == "batch 1 at 9,000 tokens: smollm2-135m has 8,192 positions"
    show_caches(answer, "bf16")
    shown = capsys.readouterr().out
    assert "Gain against batch x context" in shown and "left out: batch 2 at 9,000 tokens" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--contexts", "64,x"), "'x' is not a prompt length"),
        (("--contexts", "0"), "'0' is not a prompt length"),
        (("--contexts", "²"), "'²' is not a prompt length"),
        (("--cache-contexts", "64,-1"), "'-1' is not a cache's length"),
        (("--cache-contexts", "20"), "a cache of 20 tokens is too short: 5 turns need at least 23"),
        (("--batches", "1,many"), "'many' is not a batch"),
        (("--repeats", "0"), "at least 1 repeat and 4 steps are needed, got 0 and 24"),
    ],
)
def test_bad_races_are_refused_before_loading(options, message):
    done = run("peers", *options)
    assert done.exit_code == 2 and message in done.stderr


def test_a_token_beyond_the_tokenizers_vocabulary_has_no_text(tmp_path):
    write_checkpoint(tmp_path, "llama")  # a vocabulary of 300, of which the tokenizer has 258
    sampling = ("--temperature", "1000", "--max-new-tokens", "40", "--json")
    done = run("generate", str(tmp_path), "--prompt", "hi", *sampling)
    assert done.exit_code == 0 and max(json.loads(done.stdout)["token_ids"]) >= 258
