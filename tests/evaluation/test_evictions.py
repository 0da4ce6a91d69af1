"""Right answers through caches that evict: one prefill for many caches, and one pass that judges their answers."""

from __future__ import annotations

import json

import pytest
import torch

from kvlab.cache.base import KVCache
from kvlab.cache.build import build_cache
from kvlab.cache.contiguous import ContiguousCache
from kvlab.evaluation import evictions
from kvlab.evaluation.evictions import (
    ASKED,
    EXACT,
    WAYS,
    Conversation,
    budget_rows,
    cache_name,
    conversation,
    likeliest,
    verdicts,
)
from kvlab.evaluation.forks import ForkedLayer, branches, forked
from kvlab.evaluation.tasks import generate_samples
from kvlab.generate import generate, prefill
from kvlab.model import zoo
from tests.harness import in_chunks, tiny_model, tokens

MODEL = tiny_model("gqa", torch.float32)
NAMES = [cache_name(EXACT, 0), *(cache_name(way, 12) for way in WAYS)]


@pytest.fixture(scope="module")
def tiny() -> zoo.LoadedModel:
    return zoo.load("tiny-mha", dtype="fp32", device="cpu")


def after_a_prompt(cache: KVCache, prompt: list[int], more: torch.Tensor) -> torch.Tensor:
    prefill(MODEL, prompt, cache, chunk=10)
    goes_on = torch.tensor([False])
    at = torch.arange(len(prompt), len(prompt) + more.shape[1], dtype=torch.int32)[None]
    return MODEL(more, cache.begin(at, goes_on), cache)


def test_a_fork_fills_caches_as_they_would_have_been_alone():
    prompt, more = tokens(1, 40)[0].tolist(), tokens(1, 5, seed=1)
    together = forked(MODEL.config, NAMES)
    prefill(MODEL, prompt, together, chunk=10)
    goes_on, at = torch.tensor([False]), torch.arange(40, 45, dtype=torch.int32)[None]
    outs = []
    for name, cache in zip(NAMES, branches(together), strict=True):
        outs.append(MODEL(more, cache.begin(at, goes_on), cache))
        alone = build_cache(MODEL.config, name)
        assert torch.equal(outs[-1], after_a_prompt(alone, prompt, more))
        assert cache.bytes() == alone.bytes()
    assert len({float(out.sum()) for out in outs}) > len(NAMES) // 2  # they differ once the prompt has ended


def test_a_fork_is_a_cache():
    cache = KVCache([ForkedLayer([ContiguousCache(), ContiguousCache()]) for _ in range(2)])
    plain, ids = KVCache([ContiguousCache() for _ in range(2)]), tokens(2, 9)
    assert torch.equal(in_chunks(MODEL, ids, cache, [5, 4]), in_chunks(MODEL, ids, plain, [5, 4]))
    for one in (cache, plain):
        one.rewind([6, 6])
        one.reorder(torch.tensor([1, 1]))
    new = tokens(2, 2, seed=3)
    assert torch.equal(in_chunks(MODEL, new, cache, [2], start=6), in_chunks(MODEL, new, plain, [2], start=6))
    assert cache.bytes().total == 2 * plain.bytes().total
    for branch in branches(cache):
        assert branch.bytes() == plain.bytes()
    cache.reset()
    assert cache.bytes().total == 0
    with pytest.raises(ValueError, match=r"cut at the same positions, got strides .*16.*8"):
        forked(MODEL.config, ["h2o-64-stride16", "h2o-64-stride8"])


def test_a_text_is_what_greedy_decoding_writes_exactly_where_each_token_is_the_likeliest():
    prompt = tokens(1, 30)[0].tolist()
    written = generate(MODEL, prompt, max_new_tokens=8).token_ids
    for ids, same in ((written, 8), ([*written[:3], written[3] ^ 1, *written[4:]], 3)):
        cache = build_cache(MODEL.config, cache_name(EXACT, 0))
        logits = prefill(MODEL, prompt, cache)
        chosen = likeliest(MODEL, cache, logits, ids, 30)
        assert chosen[:same] == ids[:same] and (same == 8 or chosen[3] == written[3] != ids[3])


def test_verdicts_of_exact_caches_are_right_for_what_the_model_writes():
    """Two questions; the second stands after the first and its answer."""
    context, first, second = (tokens(1, n, seed=n)[0].tolist() for n in (30, 4, 3))
    one = generate(MODEL, context + first, max_new_tokens=5).token_ids
    two = generate(MODEL, context + first + one + second, max_new_tokens=5).token_ids
    found = verdicts(MODEL, Conversation(context, [(first, one), (second, two)]), NAMES)
    assert set(found) == set(ASKED) and set(found["known"]) == set(NAMES)
    for asked in ASKED:
        assert found[asked][NAMES[0]]["right"] == [True, True]
    wrong = verdicts(MODEL, Conversation(context, [(first, [one[0] ^ 1, *one[1:]]), (second, two)]), NAMES[:1])
    assert wrong["known"][NAMES[0]]["right"][0] is False


def test_budgets_are_equal_bytes():
    """All methods hold the same keys and values; what they remember of queries is counted beside it."""
    context, question, answer = (tokens(1, n, seed=n)[0].tolist() for n in (40, 2, 3))
    found = verdicts(MODEL, Conversation(context, [(question, answer)]), NAMES)
    one_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, width, bytes
    for asked, tokens_held in (("known", 12 + 3), ("unknown", 12 + 2 + 3)):
        exact, *others = (found[asked][name] for name in NAMES)
        assert exact["payload_bytes"] == one_token * 45
        assert {other["payload_bytes"] for other in others} == {one_token * tokens_held}
        snapkv, keynorm = (found[asked][cache_name(method, 12)]["total_bytes"] for method in ("snapkv", "keynorm"))
        assert snapkv > keynorm


def test_a_sample_as_a_conversation(tiny):
    sample = next(iter(generate_samples("needles", tiny.tokenizer, 1, tokens=600)))
    talk = conversation(sample, tiny.tokenizer)
    words = tiny.tokenizer.decode
    assert words(talk.context) == sample.context and len(talk.questions) == 2
    assert words(talk.questions[0][0]) == sample.question and words(talk.questions[0][1]) == f" {sample.answer}"
    asked, key = (words(ids) for ids in talk.questions[1])
    name = asked.removeprefix(".\nThe pass key of ").removesuffix(" is")
    assert f"The pass key of {name} is{key}." in sample.context and name not in sample.question
    assert talk.length == len(tiny.tokenizer.encode(sample.prompt)) + 6 + len(asked) + 6
    (only,) = generate_samples("passkey", tiny.tokenizer, 1, tokens=300)
    assert len(conversation(only, tiny.tokenizer).questions) == 1


def test_rows_of_every_cell_and_a_run_that_goes_on(tiny, tmp_path):
    facts = {"samples": 2, "tasks": {"needles": 400}, "budgets": {"needles": (32,)}, "methods": ("recent", "tova"),
             "work": tmp_path}  # fmt: skip
    ticks: list = []
    rows = list(budget_rows(tiny, tick=ticks.append, **facts))
    assert len(ticks) == 2 and len(rows) == 2 * 2 * 3  # ways to ask, questions, caches
    assert [row["method"] for row in rows[::2]] == [EXACT, "recent", "tova"] * 2
    assert {row["total"] for row in rows} == {2} and all(row["low"] <= row["right"] / 2 <= row["high"] for row in rows)
    assert all(sum(total for _, total in row["by_depth"].values()) == 2 for row in rows)
    kept = (tmp_path / "needles.jsonl").read_bytes()
    assert list(budget_rows(tiny, **facts)) == rows and (tmp_path / "needles.jsonl").read_bytes() == kept
    first = list(budget_rows(tiny, **{**facts, "samples": 1}))  # rows of the file that were not asked for do not count
    assert {row["total"] for row in first} == {1}


def test_the_command_records_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "budget_rows", lambda loaded, **facts: iter([{"method": loaded.config.name}]))
    evictions.main(["--model", "tiny-mha", "--dtype", "fp32", "--work", str(tmp_path / "work"),
                    "--out", str(tmp_path / "new" / "rows.json")])  # fmt: skip
    answer = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert answer["rows"] == [{"method": "tiny-mha"}] and answer["command"] == evictions.COMMAND
    assert set(answer["asked"]) == set(ASKED)
