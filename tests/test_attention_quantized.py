"""Scoring codes is scoring what they stand for, whatever the axis, the chunks and the blocks of columns."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import attention_quantized
from kvlab.attention import EMPTY, DensePart, Step, attend
from kvlab.attention_quantized import OnlineSoftmax, QuantizedPart
from kvlab.codecs import Codec
from kvlab.quantization import quantize

CODECS = {
    "int8": Codec("affine", 8),
    "int4 in groups": Codec("affine", 4, 8),
    "int2 along tokens": Codec("affine", 2, 4, "tokens"),
    "q8_0": Codec("symmetric", 8, 8),
    "q4_0": Codec("symmetric", 4),
    "q4 along tokens": Codec("symmetric", 4, 4, "tokens"),
    "e4m3": Codec("e4m3"),
    "e5m2 along tokens": Codec("e5m2", 8, 4, "tokens"),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
few_examples = settings(max_examples=60, deadline=None)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def positions(S, start=0, rows=1):
    return torch.arange(start, start + S, dtype=torch.int32).expand(rows, 1, S)


def dense_twin(part: QuantizedPart, dtype) -> DensePart:
    def numbers(blocks):
        return torch.cat([b if isinstance(b, torch.Tensor) else b.dequantize(dtype) for b in blocks], 3).to(dtype)

    values = None if part.values is None else numbers(part.values)
    return DensePart(numbers(part.keys), values, part.positions, value_width=part.value_width)


def assert_twins(part, queries, step, **options):
    """Equal to attention over the dequantised slots, 1e-5 of the largest value (fp64: 1e-12)."""
    twin, dtype = dense_twin(part, queries.dtype), queries.dtype
    stored = twin.keys if twin.values is None else twin.values
    bound = (1e-12 if dtype == torch.float64 else 1e-5) * float(stored.abs().max())
    out, lse = part.attend_with_lse(queries, step, **options)
    expected, expected_lse = twin.attend_with_lse(queries, step, **options)
    assert float((out - expected).abs().max()) <= bound
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert float((part.attend(queries, step, **options) - twin.attend(queries, step, **options)).abs().max()) <= bound


@pytest.fixture(params=[4, 10, 2048], ids=lambda n: f"{n} slots at a time")
def chunk(request, monkeypatch):
    monkeypatch.setattr(attention_quantized, "CHUNK", request.param)
    monkeypatch.setattr(attention_quantized, "TILE", 3)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    ("T", "window", "sinks"), [(1, None, 0), (7, None, 0), (7, 5, 2), (1, 3, 1), (20, None, 0), (20, 5, 2)]
)
def test_codes_are_scored_as_what_they_stand_for(codec, dtype, T, window, sinks, chunk):
    keys, values = randn(2, 2, 32, 16, seed=1, dtype=dtype), randn(2, 2, 32, 16, seed=2, dtype=dtype)
    queries = randn(2, 6, T, 16, seed=3, dtype=dtype)
    at = torch.arange(32 - T, 32, dtype=torch.int32).expand(2, T)
    for start, step in [(0, Step.plan(at)), (None, Step(at))]:
        part = QuantizedPart((quantize(keys, codec),), (quantize(values, codec),), positions(32, rows=2), start)
        assert_twins(part, queries, step, scale=0.3, window=window, sinks=sinks)


@every_codec
def test_keys_may_be_codes_while_values_are_not_and_the_other_way_round(codec, chunk):
    keys, values, queries = randn(1, 2, 16, 16), randn(1, 2, 16, 16, seed=1), randn(1, 2, 5, 16, seed=2)
    step = Step.plan(torch.arange(11, 16, dtype=torch.int32)[None])
    for blocks in [((quantize(keys, codec),), (values,)), ((keys,), (quantize(values, codec),))]:
        assert_twins(QuantizedPart(*blocks, positions(16), 0), queries, step, scale=0.3, window=None, sinks=0)


@every_codec
@pytest.mark.parametrize("value_width", [None, 16])
def test_one_latent_and_its_rope_are_keys_and_values(codec, value_width, chunk):
    latent, rope, queries = randn(1, 1, 16, 16), randn(1, 1, 16, 8, seed=1), randn(1, 4, 2, 24, seed=2)
    step = Step.plan(torch.tensor([[14, 15]], dtype=torch.int32))
    for kept in (rope, quantize(rope, Codec())):
        part = QuantizedPart((quantize(latent, codec), kept), None, positions(16), 0, value_width)
        assert part.attend(queries, step, scale=0.2).shape == (1, 4, 2, value_width or 24)
        assert_twins(part, queries, step, scale=0.2, window=None, sinks=0)


@few_examples
@given(data=st.data())
def test_merging_codes_with_a_residual_is_one_softmax(data):
    """Cut a cache as KIVI does, keys and values at different slots: three parts give what one softmax gives."""
    S = 32
    coded_keys, coded_values = 4 * data.draw(st.integers(0, 8)), data.draw(st.integers(0, 32))
    keys, values = randn(1, 2, S, 8, seed=1, dtype=torch.float64), randn(1, 2, S, 8, seed=2, dtype=torch.float64)
    k, v = quantize(keys, Codec("affine", 2, 4, "tokens")), quantize(values, Codec("affine", 4))
    cuts, parts = sorted({0, coded_keys, coded_values // 4 * 4, S}), []
    whole_keys = torch.cat([k.dequantize(torch.float64)[:, :, :coded_keys], keys[:, :, coded_keys:]], 2)
    limit = coded_values // 4 * 4
    whole_values = torch.cat([v.dequantize(torch.float64)[:, :, :limit], values[:, :, limit:]], 2)
    for a, b in pairwise(cuts):
        key_block = k.slots(a, b) if b <= coded_keys else keys[:, :, a:b]
        value_block = v.slots(a, b) if b <= limit else values[:, :, a:b]
        parts.append(QuantizedPart((key_block,), (value_block,), positions(b - a, a), a))
    queries, step = randn(1, 4, 3, 8, seed=3, dtype=torch.float64), Step.plan(torch.tensor([[29, 30, 31]]))
    whole = DensePart(whole_keys, whole_values, positions(S), 0)
    out = attend(queries, tuple(parts), step, scale=0.35)
    torch.testing.assert_close(out, attend(queries, (whole,), step, scale=0.35))


@every_codec
def test_empty_slots_and_padding_queries(codec, chunk):
    keys, values = randn(2, 2, 16, 16), randn(2, 2, 16, 16, seed=1)
    at = positions(16, rows=2).clone()
    at[0, 0, :5], at[1, 0, 9:] = EMPTY, EMPTY
    part = QuantizedPart((quantize(keys, codec),), (quantize(values, codec),), at)
    step = Step(torch.tensor([[EMPTY, 15], [4, EMPTY]], dtype=torch.int32))
    queries = randn(2, 4, 2, 16, seed=2)
    out = part.attend(queries, step, scale=0.3)
    assert bool((out[0, :, 0] == 0).all() and (out[1, :, 1] == 0).all() and out.isfinite().all())
    assert_twins(part, queries, step, scale=0.3, window=None, sinks=0)


@pytest.mark.parametrize("planned", [True, False])
def test_a_part_that_no_query_sees_weighs_nothing(planned):
    keys = randn(1, 2, 8, 16)
    part = QuantizedPart((quantize(keys, Codec()),), (quantize(keys, Codec()),), positions(8, 100), 100)
    at = torch.tensor([[5]], dtype=torch.int32)
    out, lse = part.attend_with_lse(randn(1, 2, 1, 16), Step.plan(at) if planned else Step(at), scale=0.3)
    assert bool((out == 0).all() and torch.isneginf(lse).all()) and out.shape == (1, 2, 1, 16)


def test_scores_of_any_size_stay_finite():
    softmax = OnlineSoftmax()
    values = (torch.ones(1, 1, 2, 3),)
    for scores in ([-1e30, -torch.inf], [3e4, 3e4], [-torch.inf, -torch.inf]):
        softmax.add(torch.tensor(scores).view(1, 1, 1, 2), values)
    out, lse = softmax.answer()
    assert torch.equal(out, torch.ones(1, 1, 1, 3)) and float(lse) == pytest.approx(3e4 + math.log(2))


@pytest.mark.parametrize("codec", [Codec(), Codec("affine", 2, 32, "tokens")], ids=["int8", "int2 along tokens"])
def test_no_buffer_grows_with_the_cache(codec):
    """The largest tensor made while one query reads 16K slots is as large as while it reads 4K."""
    largest = {}
    for S in (4096, 16384):
        part = QuantizedPart(
            (quantize(randn(1, 1, S, 8), codec),), (quantize(randn(1, 1, S, 8), codec),), positions(S), 0
        )
        queries, step = randn(1, 1, 1, 8), Step.plan(torch.tensor([[S - 1]], dtype=torch.int32))
        with torch.profiler.profile(profile_memory=True) as profile:
            part.attend(queries, step, scale=0.3)
        largest[S] = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest[16384] == largest[4096] <= attention_quantized.CHUNK * 8 * 4


def test_a_prompt_reads_numbers_and_a_token_reads_codes(monkeypatch):
    """Numbers for all slots are made only where the step itself is that long."""
    keys = quantize(randn(1, 2, 16, 16), Codec())
    part, made = QuantizedPart((keys,), (keys,), positions(16), 0), []
    whole = QuantizedPart.dequantized
    monkeypatch.setattr(QuantizedPart, "dequantized", lambda *args: made.append(1) or whole(*args))
    for T, expected in [(1, 0), (7, 0), (8, 1), (16, 2)]:
        step = Step.plan(torch.arange(16 - T, 16, dtype=torch.int32)[None])
        part.attend(randn(1, 2, T, 16), step, scale=0.3)
        assert len(made) == expected
