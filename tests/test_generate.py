"""The decoding loop: the same tokens with and without a cache, and the work that each counts."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache.build import CACHES, build_cache
from kvlab.codecs import RECIPES
from kvlab.generate import check_request, generate, prefill, stream
from kvlab.model.compiled import CompiledStep
from kvlab.sampling import Sampler
from tests.harness import naive, tiny_model, tokens

PROMPT = tokens(1, 7)[0].tolist()


@contextmanager
def counted_rows(model):
    """Count the token rows that really pass through the K/V projection of layer 0."""
    seen = []
    hook = model.model.layers[0].self_attn.qkv_proj.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape[0] * inputs[0].shape[1])
    )
    yield seen
    hook.remove()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", [name for name in CACHES if name != "none" and name not in RECIPES])
def test_every_exact_cache_generates_the_naive_tokens(name, window):
    model = tiny_model(window=window)
    expected = generate(model, PROMPT, None, max_new_tokens=20)
    got = generate(model, PROMPT, name, max_new_tokens=20)
    assert got.token_ids == expected.token_ids and len(got.token_ids) == 20


@settings(max_examples=20, deadline=None)
@given(prompt=st.lists(st.integers(0, 60), min_size=1, max_size=20), seed=st.integers(0, 5), chunk=st.integers(1, 8))
def test_sampling_and_chunked_prefill_change_nothing(prompt, seed, chunk):
    model, sampler = tiny_model(), Sampler(temperature=0.8, top_p=0.9, seed=seed)
    expected = [t.id for t in stream(model, prompt, None, max_new_tokens=6, sampler=sampler)]
    assert generate(model, prompt, "contiguous", max_new_tokens=6, sampler=sampler).token_ids == expected
    cache = build_cache(model.config, "contiguous")
    logits = prefill(model, prompt, cache, chunk)
    torch.testing.assert_close(logits, naive(model, torch.tensor([prompt]))[:, -1])


def test_naive_rows_grow_with_the_square_and_cached_rows_with_the_length():
    model, growth = tiny_model(), {}
    for cache in (None, "contiguous"):
        rows = []
        for length in (25, 50, 100):
            with counted_rows(model) as seen:
                result = generate(model, [1], cache, max_new_tokens=length)
            assert result.kv_rows == sum(seen)
            rows.append(sum(seen))
        growth[cache] = math.log2(rows[2] / rows[1])
    assert growth[None] == pytest.approx(2, abs=0.02)
    assert growth["contiguous"] == pytest.approx(1, abs=0.02)


def test_a_cached_step_computes_one_row():
    with counted_rows(tiny_model()) as seen:
        generate(tiny_model(), PROMPT, "contiguous", max_new_tokens=4)
    assert seen == [7, 1, 1, 1]


def test_generation_ends_with_a_stop_token_and_says_so():
    full = generate(tiny_model(), PROMPT, max_new_tokens=12)
    stop = full.token_ids[5]
    cut = generate(tiny_model(), PROMPT, max_new_tokens=12, stop_ids=[stop])
    assert full.finished == "length" and cut.finished == "stop"
    assert cut.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]


def test_tokens_stream_while_they_are_made():
    model, events = tiny_model(), []
    for token in stream(model, PROMPT, build_cache(model.config), max_new_tokens=3):
        events.append((token.kv_rows, token.id == int(token.logits.argmax())))
    assert events == [(7, True), (1, True), (1, True)]
    seen = []
    result = generate(model, PROMPT, max_new_tokens=3, on_token=lambda token: seen.append(token.id))
    assert seen == result.token_ids and result.ttft_s == result.seconds[0]


def test_a_seed_decides_what_is_sampled():
    def draw(seed):
        return generate(tiny_model(), PROMPT, max_new_tokens=30, sampler=Sampler(1.0, seed=seed)).token_ids

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 5, "the prompt is empty"),
        ([1], 0, "max_new_tokens must be at least 1, got 0"),
        ([1], 2.5, "max_new_tokens must be at least 1, got 2.5"),
        ([1], True, "got True"),
        ([1, 2.5], 5, "whole numbers, not 2.5"),
        ([True], 5, "whole numbers, not True"),
        ("a text", 5, "whole numbers, not 'a': encode text first"),
        (torch.tensor([1, 2]), 5, r"whole numbers, not tensor\(1\)"),
        ([1], -2, "got -2"),
        ([1, 61], 5, "token id 61 is outside tiny-gqa's vocabulary of 61"),
        ([1, -1], 5, "token id -1 is outside"),
        ([1] * 250, 7, "250 prompt tokens and 7 new ones need 257 positions, but tiny-gqa was trained on 256"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_before_any_work(prompt, new, message):
    with counted_rows(tiny_model()) as seen, pytest.raises(ValueError, match=message):
        generate(tiny_model(), prompt, max_new_tokens=new)
    assert seen == []
    check_request(tiny_model(), [1] * 250, 6)


def test_a_cache_that_stores_nothing_is_naive_decoding():
    model = tiny_model()
    expected = generate(model, PROMPT, None, max_new_tokens=6)
    for cache in ("none", build_cache(model.config, "none")):
        got = generate(model, PROMPT, cache, max_new_tokens=6)
        assert got.token_ids == expected.token_ids and got.kv_rows == expected.kv_rows
    nothing = build_cache(model.config, "none")
    torch.testing.assert_close(prefill(model, PROMPT, nothing), naive(model, torch.tensor([PROMPT]))[:, -1])
    with pytest.raises(ValueError, match="takes a prompt whole, not 3 tokens from 0 on"):
        prefill(model, PROMPT, nothing, chunk=3)
    with pytest.raises(ValueError, match="from 7 on"):
        prefill(model, PROMPT, nothing, start=7)


@pytest.mark.parametrize("chunk", [0, 2.5, True])
def test_a_chunk_is_a_number_of_tokens(chunk):
    with pytest.raises(ValueError, match=f"at least one token, got {chunk}"):
        prefill(tiny_model(), PROMPT, build_cache(tiny_model().config), chunk)


def test_an_unknown_cache_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown cache 'magic'; kvlab has none, contiguous"):
        generate(tiny_model(), PROMPT, "magic", max_new_tokens=2)


class TestCompiled:
    """One graph for all lengths, on the two-layer model."""

    def test_fp32_tokens_equal_eager_ones_and_nothing_is_compiled_twice(self):
        model = tiny_model(dtype=torch.float32)
        cache = build_cache(model.config, "static", 64)
        step = CompiledStep(model, cache)
        assert step.warm_up() > 0 and cache.bytes().payload == 0
        with torch._dynamo.config.patch(error_on_recompile=True):
            for prompt in (PROMPT, PROMPT[:2], PROMPT * 4):
                cache.reset()
                compiled = list(stream(model, prompt, cache, max_new_tokens=30, decode=step))
                eager = list(stream(model, prompt, build_cache(model.config), max_new_tokens=30))
                assert [t.id for t in compiled] == [t.id for t in eager]
                for a, b in zip(compiled, eager, strict=True):
                    torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-4)

    def test_bf16_logits_stay_within_the_stated_bound(self):
        model = tiny_model(dtype=torch.bfloat16)
        compiled = generate(model, PROMPT, max_new_tokens=1, compile=True)
        assert compiled.warmup_s > 0
        cache = build_cache(model.config, "static", 32)
        step = CompiledStep(model, cache)
        prefill(model, PROMPT, cache)
        after = naive(model, torch.tensor([[*PROMPT, 5]]))[:, -1]
        bound = 0.05 * float(after.abs().max())  # fused kernels round at other places than eager ones
        torch.testing.assert_close(step(5, len(PROMPT)), after, rtol=0, atol=bound)

    def test_a_full_cache_is_refused_before_the_graph_runs(self):
        model = tiny_model(dtype=torch.float32)
        cache = build_cache(model.config, "static", 8)
        step = CompiledStep(model, cache)
        step.warm_up()
        prefill(model, PROMPT, cache)
        step(1, 7)
        with pytest.raises(ValueError, match="room for 8 tokens and holds 8"):
            step(1, 8)

    @pytest.mark.parametrize("name", ["contiguous", "sliding"])
    def test_a_cache_that_grows_cannot_be_compiled(self, name):
        model = tiny_model(window=6)
        with pytest.raises(ValueError, match=r"needs a static cache, got (Contiguous|Sliding)Cache"):
            CompiledStep(model, build_cache(model.config, name))
        with pytest.raises(ValueError, match="got no cache"):
            generate(model, PROMPT, None, compile=True)
        with pytest.raises(ValueError, match="needs a static cache, got NoCache"):
            generate(model, PROMPT, build_cache(model.config, "none"), compile=True)
