"""Run by test_triton_decode.py with TRITON_INTERPRET=1: what the kernels compute, program by program, on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import EMPTY, Step, merge
from kvlab.attention_quantized import QuantizedPart
from kvlab.cache.quantized import QuantizedCache
from kvlab.codecs import RECIPES, Codec, recipe
from kvlab.evaluation import gpu_paths
from kvlab.native import triton_decode
from kvlab.quantization import QuantizedTensor, calibrate, quantize

CODECS = [
    Codec("affine", 8), Codec("affine", 8, 32), Codec("symmetric", 8), Codec("symmetric", 8, 16), Codec("e4m3"),
    Codec("e4m3", 8, 32), Codec("e5m2"), Codec("affine", 4), Codec("affine", 4, 16), Codec("symmetric", 4, 32),
    Codec("affine", 2, 16), Codec("symmetric", 2),
]  # fmt: skip
# of an output, whose numbers are around 1. fp16 weights and values are rounded, to 11 bits; the interpreter computes
# what a GPU does in bf16 in fp32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 2e-3}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def consecutive(S, rows=1):
    return torch.arange(S, dtype=torch.int32).expand(rows, 1, S)


def coded(x, codec, scales=None):
    """Codes of (B, H_kv, S, D) as a cache holds them: the front of larger buffers."""
    whole = quantize(torch.cat([x, x[:, :, :1].expand(-1, -1, 7, -1)], 2), codec, scales)
    return whole.slots(0, x.shape[2])


def poisoned(block: QuantizedTensor, where) -> QuantizedTensor:
    """The largest codes and scales in the slots `where` (B, S); both are finite, as they are in a cache."""
    slots, most = where[:, None, :, None], torch.finfo(block.scales.dtype).max
    minima = None if block.minima is None else block.minima.masked_fill(slots, most)
    codes = block.codes.masked_fill(slots, 0x7B)  # the largest finite number of e5m2
    return replace(block, codes=codes, scales=block.scales.masked_fill(slots, most), minima=minima)


def assert_is_attention(queries, part, positions, dtype, **options):
    """Equal to attention over dequantised slots in fp64, and to PyTorch's path over the same codes."""
    out, lse = triton_decode.decode(queries, part, positions, **options)
    assert out.dtype == lse.dtype == torch.float32
    options.pop("length", None)
    dense = part.dequantized(torch.float64).attend_with_lse(queries.double(), Step(positions), **options)
    for expected, expected_lse in (dense, part.attend_with_lse(queries, Step(positions), **options)):
        assert (out.shape, lse.shape) == (expected.shape, expected_lse.shape)
        bound = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        assert float((out - expected).abs().max()) <= bound
        torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_it_is_attention(data):
    def draw(strategy):
        return data.draw(strategy)

    dtype = draw(st.sampled_from(list(TOLERANCE)))
    B, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 17]))
    S = draw(st.sampled_from([1, 63, 65, 150]))
    D_k, D_v = draw(st.sampled_from([64, 128])), draw(st.sampled_from([64, 128]))
    keys = coded(randn(B, kv_heads, S, D_k, seed=1, dtype=dtype), draw(st.sampled_from(CODECS)))
    values = coded(randn(B, kv_heads, S, D_v, seed=2, dtype=dtype), draw(st.sampled_from(CODECS)))
    # a row may begin late, end early and have holes, as left padding, eviction and unused slots make them
    slots = torch.arange(S, dtype=torch.int32)
    starts = torch.tensor([draw(st.integers(0, S - 1)) for _ in range(B)])[:, None]
    used = (slots >= starts) & (torch.rand(B, S, generator=torch.Generator().manual_seed(S)) > 0.2)
    at = torch.where(used, slots - starts, EMPTY).to(torch.int32)
    part = QuantizedPart((poisoned(keys, ~used),), (poisoned(values, ~used),), at[:, None])
    positions = torch.tensor([[draw(st.integers(0, S))] for _ in range(B)], dtype=torch.int32)
    window, sinks = draw(st.sampled_from([(None, 0), (1, 0), (40, 0), (40, 4)]))
    queries = randn(B, kv_heads * group, 1, D_k, seed=3, dtype=dtype)
    assert triton_decode.can_decode(queries, part)
    clean = QuantizedPart((keys,), (values,), at[:, None])
    out, lse = triton_decode.decode(queries, part, positions, scale=0.2, window=window, sinks=sinks)
    plain = triton_decode.decode(queries, clean, positions, scale=0.2, window=window, sinks=sinks)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    assert_is_attention(queries, clean, positions, dtype, scale=0.2, window=window, sinks=sinks)


@pytest.mark.parametrize("width", [16, 32, 256])
def test_other_widths(width):
    block = coded(randn(1, 2, 70, width), Codec())
    part = QuantizedPart((block,), (block,), consecutive(70))
    assert_is_attention(randn(1, 2, 1, width), part, torch.tensor([[69]]), torch.float32, scale=0.3)


def test_every_code_is_read_as_what_it_stands_for():
    """All finite bytes of every kind, by a query that picks one column and weights that pick one slot."""
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    for codec in (Codec(), Codec("symmetric"), Codec("e4m3"), Codec("e5m2")):
        scales = torch.ones(1, 1, 16, 1)
        block = QuantizedTensor(every, scales, torch.zeros_like(scales) if codec.kind == "affine" else None, codec)
        block = replace(block, codes=every.masked_fill(~block.levels(torch.float32).isfinite(), 0))
        numbers = block.dequantize(torch.float32)
        for slot in range(16):
            part = QuantizedPart((block,), (block,), torch.where(torch.arange(16) == slot, 0, EMPTY)[None, None])
            queries = torch.eye(16)[None, :, None]  # (1, 16, 1, 16)
            out, lse = triton_decode.decode(queries, part, torch.zeros(1, 1, dtype=torch.int32), scale=1.0)
            assert torch.equal(out[0, 0, 0], numbers[0, 0, slot]) and torch.equal(lse[0, :, 0], numbers[0, 0, slot])


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("kivi")])
def test_what_caches_hold_can_be_read(name):
    how = recipe(name, 64)
    cache = QuantizedCache(how.keys, how.values)
    for first, T in ((0, 90), (90, 1)):
        at = torch.arange(first, first + T, dtype=torch.int32).expand(2, T)
        fresh = [randn(2, 2, T, 64, seed=seed, dtype=torch.bfloat16) for seed in (first, first + 1)]
        (part,) = cache.update(*fresh, Step.plan(at))
    queries = randn(2, 6, 1, 64, dtype=torch.bfloat16)
    assert triton_decode.can_decode(queries, part)
    assert_is_attention(queries, part, at, torch.bfloat16, scale=0.125)


def test_static_scales_are_one_for_all_slots():
    x, codec = randn(2, 2, 100, 64), Codec("e4m3", 8, 32)
    block = coded(x, codec, calibrate(x, codec))
    assert block.scales.stride(2) == 0
    part = QuantizedPart((block,), (block,), consecutive(100, 2))
    assert_is_attention(randn(2, 2, 1, 64), part, torch.full((2, 1), 99), torch.float32, scale=0.2)


@pytest.mark.parametrize("live", [1, 63, 64, 150])
def test_a_length_on_the_device_cuts_the_slots(live):
    block = coded(randn(1, 2, 200, 64), Codec())
    whole = QuantizedPart((block,), (block,), consecutive(200))
    cut = QuantizedPart((block.slots(0, live),), (block.slots(0, live),), consecutive(live))
    queries, at, options = randn(1, 6, 1, 64, seed=1), torch.tensor([[199]]), {"scale": 0.2}
    answer = triton_decode.decode(queries, whole, at, length=torch.tensor(live), **options)
    for one, other in zip(answer, cut.attend_with_lse(queries, Step(at), window=None, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_nothing_weighs_nothing():
    block = coded(randn(2, 2, 130, 64), Codec("e4m3"))
    part = QuantizedPart((block,), (block,), consecutive(130, 2))
    queries, at = randn(2, 4, 1, 64, seed=1), torch.tensor([[EMPTY], [129]])
    out, lse = triton_decode.decode(queries, part, at, scale=0.2)
    assert not out[0].any() and bool((lse[0] == -torch.inf).all())
    assert torch.equal(merge([(out, lse), (out, lse)])[0], out[0])


def test_large_scores_do_not_overflow():
    block = coded(randn(1, 2, 130, 64), Codec())
    part = QuantizedPart((block,), (block,), consecutive(130))
    queries, at = randn(1, 2, 1, 64, seed=1) * 1e4, torch.tensor([[129]])
    out, lse = triton_decode.decode(queries, part, at, scale=1.0)
    expected, expected_lse = part.attend_with_lse(queries, Step(at), scale=1.0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, expected_lse)


def test_the_largest_fp16_numbers_stay_finite():
    x = randn(1, 1, 70, 64).sign().to(torch.float16) * 65504
    block = coded(x, Codec("affine", 8, 32))
    part = QuantizedPart((block,), (block,), consecutive(70))
    out, _ = triton_decode.decode(randn(1, 1, 1, 64, dtype=torch.float16), part, torch.tensor([[69]]), scale=1e-6)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("change", ["two queries", "fp64", "width of 48", "small groups", "along tokens", "plain keys",
                                    "two blocks", "no values", "strided codes", "strided minima"])  # fmt: skip
def test_it_takes_only_what_it_can_read(change):
    queries, x = randn(1, 2, 1, 64), randn(1, 2, 32, 64)
    block = quantize(x, Codec())
    keys, values = (block,), (block,)
    assert triton_decode.can_decode(queries, QuantizedPart(keys, values, consecutive(32)))
    match change:
        case "two queries":
            queries = randn(1, 2, 2, 64)
        case "fp64":
            queries = queries.double()
        case "width of 48":
            queries, keys = randn(1, 2, 1, 48), (quantize(x[..., :48], Codec()),)
        case "small groups":
            values = (quantize(x, Codec("affine", 8, 8)),)
        case "along tokens":
            keys = (quantize(x, Codec("affine", 8, 32, "tokens")),)
        case "plain keys":
            keys = (x,)
        case "two blocks":
            keys = (quantize(x[..., :32], Codec()), quantize(x[..., 32:], Codec()))
        case "no values":
            values = None
        case "strided codes":
            keys = (replace(block, codes=block.codes.mT.contiguous().mT),)
        case "strided minima":
            keys = (replace(block, minima=block.minima.expand(1, 2, 32, 1)[:, :1].expand(1, 2, 32, 1)),)
    assert not triton_decode.can_decode(queries, QuantizedPart(keys, values, consecutive(32)))


@pytest.mark.parametrize(("share", "ok"), [(0.0, True), (0.05, False)])
def test_the_gpu_check_knows_right_from_wrong(share, ok, monkeypatch):
    def call_once(contestants, device):
        return {name: float(len(run())) for name, run in contestants.items()}

    def off(*args, **options):
        out, lse = decode(*args, **options)
        return out * (1 + share), lse

    decode = triton_decode.decode
    monkeypatch.setattr(gpu_paths.triton_decode, "decode", off)
    monkeypatch.setattr(gpu_paths, "median_seconds", call_once)
    monkeypatch.setattr(gpu_paths, "HEADS", 4)
    monkeypatch.setattr(gpu_paths, "KV_HEADS", 2)
    rows = list(gpu_paths.triton_rows(torch.device("cpu"), torch.float32, contexts=(70,), tokens=70))
    assert [(row["cache"], row["batch"], row["ok"]) for row in rows] == [("int8", 1, ok), ("fp8", 1, ok)]
