"""The C++ kernel against attention in float64, over numbers and over codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import attention_quantized
from kvlab.attention import DensePart, Step, attend, attend_part
from kvlab.attention_quantized import QuantizedPart
from kvlab.codecs import Codec
from kvlab.native import build
from kvlab.native.decode import can_decode, decode
from kvlab.native.rows import HEAD_DIMS
from kvlab.quantization import QuantizedTensor, quantize

needs_kernel = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))
FEWEST = build.FEWEST_SLOTS
FP16 = torch.float16
CODECS = {
    "plain": None,
    "int8": Codec(),
    "int8 in groups": Codec("affine", 8, 16),
    "int4": Codec("affine", 4, 32),
    "int2": Codec("affine", 2, 64),
    "q8_0": Codec("symmetric", 8, 32, scale_dtype=FP16),
    "q4_0": Codec("symmetric", 4, 32, scale_dtype=FP16),
    "symmetric int2": Codec("symmetric", 2),
    "e4m3": Codec("e4m3"),
    "e5m2": Codec("e5m2", scale_dtype=FP16),
    "int2 along tokens": Codec("affine", 2, 32, "tokens"),
    "q4 along tokens": Codec("symmetric", 4, 8, "tokens", FP16),
    "e4m3 along tokens": Codec("e4m3", 8, 16, "tokens"),
}
few_examples = settings(max_examples=25, deadline=None)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(x, codec, beyond=9):
    """(B, H_kv, S, D) as the live slots of a larger buffer, and the numbers that it stands for in fp64."""
    S = x.shape[2]
    if codec is None:
        buffer = torch.full((*x.shape[:2], S + beyond, x.shape[3]), 1e30).to(x.dtype)  # must not be read
        buffer[:, :, :S] = x
        return buffer[:, :, :S], x.double()
    per = codec.group_size if codec.along == "tokens" else 1
    coded = quantize(x, codec)
    buffers = [
        None if part is None else torch.cat([part, torch.full_like(part[:, :, :1], fill).expand(-1, -1, beyond, -1)], 2)
        for part, fill in ((coded.codes, 126), (coded.scales, 3e4), (coded.minima, 3e4))
    ]
    codes, scales, minima = (
        None if b is None else b[:, :, :n] for b, n in zip(buffers, (S, S // per, S // per), strict=True)
    )
    return QuantizedTensor(codes, scales, minima, codec), coded.dequantize(torch.float64)


def reference(queries, keys, values, scale):
    """Output and log-sum-exp in float64."""
    step = Step(torch.full((queries.shape[0], 1), keys.shape[2], dtype=torch.int32))
    at = torch.arange(keys.shape[2]).expand(keys.shape[0], 1, -1)
    return attend_part(queries.double(), DensePart(keys, values, at), step, scale=scale)


def assert_equal(queries, keys, values, scale=0.2):
    """keys, values: pairs of what is stored and what it stands for."""
    assert can_decode(queries, keys[0], values[0], fewest=1)
    out, lse = decode(queries, keys[0], values[0], scale)
    expected, expected_lse = reference(queries, keys[1], values[1], scale)
    assert out.dtype == lse.dtype == torch.float32
    assert float((out - expected).abs().max()) <= 4e-6 * float(values[1].abs().max())
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=4e-6)


@needs_kernel
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@few_examples
@given(data=st.data())
def test_it_equals_attention_in_float64(codec, data):
    """Any shape, runs of slots that end anywhere, and nothing read from behind them."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    B, kv_heads, group = (data.draw(st.integers(1, n)) for n in (2, 3, 8))
    S, D = data.draw(st.integers(2, 700)), data.draw(st.sampled_from(HEAD_DIMS))
    if codec is not None and codec.along == "tokens":
        S = -(-S // codec.group_size) * codec.group_size
    keys, values = (stored(randn(B, kv_heads, S, D, seed=seed, dtype=dtype), codec) for seed in (1, 2))
    assert_equal(randn(B, kv_heads * group, 1, D, seed=S, dtype=dtype), keys, values)


@needs_kernel
@few_examples
@given(codecs=st.tuples(*[st.sampled_from(list(CODECS))] * 2))
def test_keys_and_values_may_be_stored_differently(codecs):
    keys, values = (stored(randn(2, 2, 96, 64, seed=i), CODECS[name]) for i, name in enumerate(codecs))
    assert_equal(randn(2, 6, 1, 64, seed=3), keys, values)


@needs_kernel
def test_static_scales_are_read_though_they_lie_in_memory_once():
    scales = torch.tensor([0.02, 0.03], dtype=torch.bfloat16).view(1, 2, 1, 1)
    coded = quantize(randn(1, 2, 100, 64), Codec("symmetric"), scales)
    coded = QuantizedTensor(coded.codes, scales.expand(1, 2, 100, -1), None, coded.codec)
    assert_equal(randn(1, 4, 1, 64), (coded, coded.dequantize(torch.float64)), (coded, coded.dequantize(torch.float64)))


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_matter(threads):
    keys, values = (stored(randn(1, 1, 1000, 64, seed=i), CODECS["int8"]) for i in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equal(randn(1, 3, 1, 64), keys, values)
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("size", [1e4, 1e-30])
def test_scores_of_any_size(size):
    """Weights from 1 to far below what fp32 can hold, and scores that are all alike."""
    keys, values = (stored(randn(1, 2, 300, 64, seed=i), None) for i in range(2))
    queries = randn(1, 2, 1, 64, seed=3) * size
    out, lse = decode(queries, keys[0], values[0], 1.0)
    expected, expected_lse = reference(queries, keys[1], values[1], 1.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2 if size > 1 else 1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_nan_in_a_visible_slot_is_not_hidden():
    keys, values = randn(1, 1, 64, 64), randn(1, 1, 64, 64, seed=1)
    keys[0, 0, 40, 3] = torch.nan
    assert bool(decode(randn(1, 1, 1, 64), keys, values, 0.1)[0].isnan().all())


# Who asks
def part_of(S, codec, dtype=torch.bfloat16, start=0):
    keys, values = (stored(randn(2, 2, S, 64, seed=i, dtype=dtype), codec)[0] for i in range(2))
    positions = torch.arange(start, start + S, dtype=torch.int32).expand(2, 1, S)
    if codec is None:
        return DensePart(keys, values, positions, start)
    return QuantizedPart((keys,), (values,), positions, start)


@pytest.fixture
def asked(monkeypatch):
    """How often each part asks the kernel."""
    calls = []
    real = attention_quantized.native.decode
    monkeypatch.setattr(attention_quantized.native, "decode", lambda *args: calls.append(1) or real(*args))
    return calls


@needs_kernel
@pytest.mark.parametrize("codec", [None, CODECS["int8"], CODECS["int4"]], ids=["plain", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_over_many_slots_uses_it_and_agrees_with_pytorch(codec, dtype, asked, monkeypatch):
    part, queries = part_of(FEWEST, codec, dtype), randn(2, 6, 1, 64, seed=5, dtype=dtype)
    step = Step.plan(torch.full((2, 1), FEWEST - 1, dtype=torch.int32))
    mine = attend(queries, (part,), step, scale=0.2)
    assert len(asked) == 1 and mine.dtype == dtype
    monkeypatch.setattr(attention_quantized.native, "can_decode", lambda *args: False)
    theirs = attend(queries, (part,), step, scale=0.2)
    assert len(asked) == 1
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@needs_kernel
@pytest.mark.parametrize("codec", [None, CODECS["int8"]], ids=["plain", "int8"])
@pytest.mark.parametrize("case", ["few slots", "a window", "unknown positions", "a future slot", "two tokens"])
def test_pytorch_answers_where_not_every_slot_is_seen_or_few_are(codec, case, asked):
    S, T, window, at = FEWEST, 1, None, FEWEST - 1
    match case:
        case "few slots":
            S = FEWEST - 1
        case "a window":
            window = 100
        case "a future slot":
            at = FEWEST - 2
        case "two tokens":
            T, at = 2, FEWEST
    part, planned = part_of(S, codec), torch.arange(at, at + T, dtype=torch.int32).expand(2, T)
    step = Step(planned) if case == "unknown positions" else Step.plan(planned)
    out = attend(randn(2, 4, T, 64, dtype=torch.bfloat16), (part,), step, scale=0.2, window=window)
    assert asked == [] and out.shape == (2, 4, T, 64)


@needs_kernel
def test_merging_is_one_softmax():
    """Its log-sum-exp is what makes codes and a residual one softmax."""
    whole = part_of(700, CODECS["int8"], torch.float32)
    first, last = (
        QuantizedPart(
            (whole.keys[0].slots(*cut),), (whole.values[0].slots(*cut),), whole.positions[:, :, slice(*cut)], cut[0]
        )
        for cut in ((0, 600), (600, 700))
    )
    step, queries = Step.plan(torch.full((2, 1), 699, dtype=torch.int32)), randn(2, 4, 1, 64)
    expected = reference(queries, *(block[0].dequantize(torch.float64) for block in (whole.keys, whole.values)), 0.2)[0]
    torch.testing.assert_close(attend(queries, (first, last), step, scale=0.2).double(), expected, rtol=0, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("codec", ["plain", "int8"])
def test_no_buffer_of_pytorchs_grows_with_the_slots(codec):
    most = {}
    for S in (1024, 8192):
        part, queries = part_of(S, CODECS[codec]), randn(2, 4, 1, 64, dtype=torch.bfloat16)
        step = Step.plan(torch.full((2, 1), S - 1, dtype=torch.int32))
        with torch.profiler.profile(profile_memory=True) as profile:
            part.attend(queries, step, scale=0.3)
        most[S] = max(event.self_cpu_memory_usage for event in profile.events())
    assert most[1024] == most[8192] == queries.numel() * 4


@pytest.mark.parametrize(
    "change",
    [
        "two queries", "head of 32", "float64", "strided", "fewer values", "uneven heads", "gradient", "compiling",
        "another device",
    ],
)  # fmt: skip
def test_it_takes_only_what_it_can_read(change, monkeypatch):
    queries, keys, values = (torch.zeros(1, 2, n, 64) for n in (1, 8, 8))
    match change:
        case "two queries":
            queries = torch.zeros(1, 2, 2, 64)
        case "head of 32":
            queries, keys, values = queries[..., :32], keys[..., :32], values[..., :32]
        case "float64":
            queries, keys, values = queries.double(), keys.double(), values.double()
        case "strided":
            keys, values = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (keys, values))
        case "fewer values":
            values = values[:, :, :7]
        case "uneven heads":
            queries = torch.zeros(1, 3, 1, 64)
        case "gradient":
            keys.requires_grad_()
        case "compiling":
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        case "another device":
            queries, keys, values = queries.to("meta"), keys.to("meta"), values.to("meta")
    assert not can_decode(queries, keys, values, fewest=1)


@pytest.mark.parametrize(
    "codec", [Codec("affine", 8, 8), Codec(scale_dtype=torch.float32)], ids=["groups of 8", "fp32 scales"]
)
def test_it_takes_only_codes_that_it_can_read(codec):
    coded = quantize(randn(1, 2, 8, 64), codec)
    assert not can_decode(torch.zeros(1, 2, 1, 64), coded, coded, fewest=1)
