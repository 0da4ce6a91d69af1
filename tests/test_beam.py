"""Beam search against trying everything, over dense caches and over blocks that beams share."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache as memoize
from itertools import product

import pytest
import torch

from kvlab.attention import Step
from kvlab.beam import Beam, beam_search
from kvlab.cache.base import CacheFull
from kvlab.cache.build import build_cache, paged_cache
from kvlab.engine.block_pool import GONE
from kvlab.generate import generate
from kvlab.model.transformer import Transformer
from tests.harness import tiny_config, tiny_model

PROMPT = [1, 2, 3, 4, 5]
VOCABULARY = 6


@memoize
def small(name: str) -> Transformer:
    """Six tokens, so that all texts of three can be tried."""
    torch.manual_seed(4)
    config = replace(tiny_config("mla" if name == "mla" else "gqa"), vocab_size=VOCABULARY)
    if name == "hybrid":
        config = replace(config, layer_types=("full_attention", "sliding_attention"), sliding_window=4)
    model = Transformer(config).double().eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.4)
    return model


@torch.no_grad()
def log_probability(model: Transformer, continuation: tuple[int, ...]) -> float:
    """Of a text after the prompt, in one pass without any cache."""
    ids = torch.tensor([[*PROMPT, *continuation]])  # (1, T)
    step = Step.plan(torch.arange(ids.shape[1], dtype=torch.int32)[None])
    logs = model.unembed(model.hidden_states(ids, step, None)[0]).log_softmax(-1)  # (T, vocabulary)
    return sum(float(logs[len(PROMPT) - 1 + i, token]) for i, token in enumerate(continuation))


def everything(model: Transformer, length: int, stop_ids=()) -> list[Beam]:
    """All continuations up to a length, each cut after its first stop token, likeliest first."""
    texts = set()
    for tokens in product(range(VOCABULARY), repeat=length):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), length)
        texts.add(tokens[:end])
    return sorted((Beam(text, log_probability(model, text)) for text in texts), key=lambda beam: -beam.log_probability)


def plain_search(model: Transformer, width: int, length: int, stop_ids=()) -> list[Beam]:
    """The same search without a cache: every text is scored anew from its beginning."""
    beams = [Beam((), 0.0)]
    for _ in range(length):
        longer = [
            text
            for beam in beams
            for text in (
                [beam.token_ids] if beam.token_ids and beam.token_ids[-1] in stop_ids
                else [(*beam.token_ids, token) for token in range(VOCABULARY)]
            )
        ]  # fmt: skip
        beams = sorted((Beam(text, log_probability(model, text)) for text in longer), key=lambda b: -b.log_probability)
        beams = beams[:width]
    return beams


def check_equal(found: list[Beam], expected: list[Beam]) -> None:
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert math.isclose(ours.log_probability, theirs.log_probability, rel_tol=1e-10)


def caches(model: Transformer) -> list:
    config = model.config
    return [build_cache(config), *(paged_cache(config, 400, block_size) for block_size in (1, 3, 16))]


MODELS = pytest.mark.parametrize("name", ["gqa", "mla", "hybrid"])


@MODELS
@pytest.mark.parametrize("stop_ids", [(), (2,), (0, 4)])
def test_a_beam_as_wide_as_the_vocabulary_finds_the_best_pairs_of_all(name, stop_ids):
    model = small(name)
    expected = everything(model, 2, stop_ids)[:VOCABULARY]
    for cache in caches(model):
        found = beam_search(model, PROMPT, cache, VOCABULARY, max_new_tokens=2, stop_ids=stop_ids)
        check_equal(found, expected)


@MODELS
@pytest.mark.parametrize(("width", "stop_ids"), [(1, ()), (2, ()), (3, (2,)), (5, (0, 4))])
def test_narrower_and_longer_searches_equal_one_without_a_cache(name, width, stop_ids):
    model = small(name)
    expected = plain_search(model, width, 7, stop_ids)
    for cache in caches(model):
        check_equal(beam_search(model, PROMPT, cache, width, max_new_tokens=7, stop_ids=stop_ids), expected)


def test_one_beam_is_greedy_and_a_wider_one_is_no_less_likely():
    model = small("gqa")
    greedy = generate(model, PROMPT, max_new_tokens=9).token_ids
    (alone,) = beam_search(model, PROMPT, build_cache(model.config), 1, max_new_tokens=9)
    assert list(alone.token_ids) == greedy
    assert beam_search(model, PROMPT, build_cache(model.config), 5, max_new_tokens=9)[0].log_probability >= (
        alone.log_probability
    )


def test_a_search_ends_when_all_beams_have_stopped():
    model = small("gqa")
    cache = build_cache(model.config)
    found = beam_search(model, PROMPT, cache, 2, max_new_tokens=9, stop_ids=range(VOCABULARY))
    assert [len(beam.token_ids) for beam in found] == [1, 1]
    assert cache.layers[0].length == len(PROMPT)  # no step after the prompt


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_beams_share_blocks_and_copy_only_what_they_write(block_size, monkeypatch):
    """Copy on write, counted: every write to a block that others read too copies it once, and nothing else does."""
    model, width, new = small("gqa"), 4, 8
    cache = paged_cache(model.config, 400, block_size)
    (group,) = cache.groups
    copies, expected = [], []
    extend = group.extend

    def counted(stored, counts):
        last = [table[-1] for table in group.tables if stored[0] % block_size]
        expected.append(len(last) - len(set(last)))  # of those who would write to one block, one may keep it
        copies.append(len(pairs := extend(stored, counts)))
        return pairs

    monkeypatch.setattr(group, "extend", counted)
    found = beam_search(model, PROMPT, cache, width, max_new_tokens=new)
    assert copies == expected and (sum(copies) > 0) == (block_size > 1)
    tables = [[block for block in table if block != GONE] for table in group.tables]
    whole = len(PROMPT) // block_size
    assert all(table[:whole] == tables[0][:whole] for table in tables)  # one prompt, stored once
    assert group.pool.used_count == len({block for table in tables for block in table})
    assert all(group.pool.references(block) == sum(table.count(block) for table in tables) for block in tables[0])
    group.pool.check()
    cache.reset()
    assert group.pool.used_count == 0
    check_equal(found, plain_search(model, width, new))


def test_bad_input():
    model = tiny_model("gqa")
    for width in (0, 62, 2.5, True):
        with pytest.raises(ValueError, match=f"a beam is 1 to 61 continuations wide, got {width}"):
            beam_search(model, [1], build_cache(model.config), width)
    with pytest.raises(ValueError, match="the prompt is empty"):
        beam_search(model, [], build_cache(model.config), 2)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        beam_search(model, [1], build_cache(model.config), 2, max_new_tokens=0)
    with pytest.raises(ValueError, match="need 300 positions"):
        beam_search(model, [1] * 290, build_cache(model.config), 2, max_new_tokens=10)
    with pytest.raises(ValueError, match="give a cache that stores"):
        beam_search(model, [1], build_cache(model.config, "none"), 2)
    used = build_cache(model.config)
    beam_search(model, [1], used, 2, max_new_tokens=2)
    with pytest.raises(ValueError, match="this cache holds 2 rows"):
        beam_search(model, [1], used, 2, max_new_tokens=2)


def test_a_pool_that_is_too_small_says_so_and_keeps_its_books():
    model = tiny_model("gqa")
    cache = paged_cache(model.config, 12, 4)
    with pytest.raises(CacheFull, match="blocks of 4 tokens left"):
        beam_search(model, PROMPT, cache, 4, max_new_tokens=20)
    cache.groups[0].pool.check()
    cache.reset()
    assert len(beam_search(model, PROMPT, cache, 1, max_new_tokens=6)) == 1


def test_logits_that_are_not_finite_are_refused(monkeypatch):
    model = tiny_model("gqa")
    monkeypatch.setattr(model, "unembed", lambda hidden: torch.full((len(hidden), 61), float("nan")))
    with pytest.raises(ValueError, match="logits of row 0 are not finite"):
        beam_search(model, [1, 2], build_cache(model.config), 2)


def test_a_cache_that_decides_where_a_prompt_ends_serves_beams():
    """All of it kept: the exact search. Less: a beam of one is greedy decoding with that cache."""
    model, whole, less = small("gqa"), "recent-100%-prompt", "snapkv-6-recent2-prompt"
    found = beam_search(model, PROMPT, build_cache(model.config, whole), 3, max_new_tokens=7)
    check_equal(found, plain_search(model, 3, 7))
    (one,) = beam_search(model, PROMPT * 3, build_cache(model.config, less), 1, max_new_tokens=9)
    assert list(one.token_ids) == generate(model, PROMPT * 3, less, max_new_tokens=9).token_ids
