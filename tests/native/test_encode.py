"""One token written by the kernel is, bit for bit, what quantization.encode writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import Step
from kvlab.cache import tensor_store
from kvlab.cache.quantized import QuantizedCache
from kvlab.codecs import Codec
from kvlab.native import build
from kvlab.native.encode import can_encode, encode
from kvlab.quantization import QuantizedTensor
from kvlab.quantization import encode as encode_in_pytorch

needs_kernel = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))
CODECS = {
    "int8": Codec(),
    "int4": Codec("affine", 4, 32),
    "int2": Codec("affine", 2, 16),
    "int4 in full rows": Codec("affine", 4),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SLOT = build.FEWEST_SLOTS


def room(codec, B=1, heads=2, D=64):
    """Codes for SLOT + 3 slots, full of other numbers."""
    coded = encode_in_pytorch(torch.randn(B, heads, SLOT + 3, D, dtype=torch.bfloat16), codec)
    return QuantizedTensor(coded.codes.contiguous(), coded.scales.contiguous(), coded.minima.contiguous(), codec)


def tensors(coded):
    return coded.codes, coded.scales, coded.minima


def assert_same(x, codec):
    into = room(codec, *x.shape[:2], x.shape[3])
    before = [part.clone() for part in tensors(into)]
    assert can_encode(x, into, SLOT)
    encode(x, into, SLOT)
    for mine, theirs, old in zip(tensors(into), tensors(encode_in_pytorch(x, codec)), before, strict=True):
        assert torch.equal(mine[:, :, SLOT : SLOT + 1], theirs)
        assert torch.equal(mine[:, :, :SLOT], old[:, :, :SLOT]) and torch.equal(
            mine[:, :, SLOT + 1 :], old[:, :, SLOT + 1 :]
        )


@needs_kernel
@every_codec
@every_dtype
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_numbers_of_any_size(codec, dtype, data):
    """Random rows around a random centre: scales from the smallest float to the largest, signs mixed and not."""
    B, heads, D = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from([64, 128]))
    exponent, centre = data.draw(st.integers(-140, 126)), data.draw(st.sampled_from([0.0, 1.0, -3.0, 1000.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    x = (torch.randn(B, heads, 1, D, generator=generator, dtype=torch.float64) + centre) * 2.0**exponent
    most = torch.finfo(dtype).max
    assert_same(x.clamp(-most, most).to(dtype), codec)


@needs_kernel
@every_codec
@every_dtype
@pytest.mark.parametrize(
    "case", ["zeros", "constant", "lowest", "all of the range", "one float apart", "halfway", "a tie", "subnormal"]
)
def test_rows_at_the_edge(codec, dtype, case):
    info, x = torch.finfo(dtype), torch.zeros(1, 2, 1, 64, dtype=dtype)
    match case:
        case "constant":
            x += -1.37
        case "lowest":  # in fp32 below every bf16 minimum
            x += -info.max
        case "all of the range":
            x[..., ::2], x[..., 1::2] = info.max, -info.max
        case "one float apart":
            x += 1.37
            x[..., ::3] *= 1 + info.eps
        case "halfway":  # levels that lie between two codes go to the even one
            x += torch.arange(64, dtype=dtype) % 32 / 2
        case "a tie":  # in fp32, a minimum halfway between two bf16 numbers, the even one above it or below
            x += torch.arange(64, dtype=dtype)
            x -= 1 + torch.tensor([1, 3], dtype=dtype).view(1, 2, 1, 1) * 2.0**-8
        case "subnormal":
            x += torch.arange(64, dtype=dtype) * info.tiny / 64
    assert_same(x, codec)


@needs_kernel
@every_dtype
def test_heads_of_a_larger_tensor(dtype):
    """Keys as a model makes them: one slice of the heads that one product gave."""
    heads = torch.randn(2, 1, 9, 64).to(dtype).transpose(1, 2)  # (B, heads, T, D)
    for x in heads.split([3, 3, 3], 1):
        assert_same(x, CODECS["int8"])


@needs_kernel
@every_codec
@every_dtype
def test_a_cache_filled_by_it_is_the_cache_filled_without(codec, dtype, monkeypatch):
    """Across a doubling of the buffers, from the slot on where it begins."""
    count = 2 * SLOT + 5
    keys, values = torch.randn(2, 1, 2, count, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    caches, calls = [], []
    for in_kernel in (True, False):
        cache = QuantizedCache(codec, codec)
        if in_kernel:
            monkeypatch.setattr(tensor_store.native, "encode", lambda *args: calls.append(1) or encode(*args))
        else:
            monkeypatch.setattr(tensor_store.native, "can_encode", lambda *args: False)
        for first, last in [(0, 2 * SLOT - 5), *((i, i + 1) for i in range(2 * SLOT - 5, count))]:
            step = Step.plan(torch.arange(first, last, dtype=torch.int32)[None])
            cache.update(keys[:, :, first:last], values[:, :, first:last], step)
        caches.append(cache)
    assert len(calls) == 2 * 10
    mine, theirs = (
        [b.data[:, :, : b.used] for store in cache._stores() for b in store._buffers() if b.used] for cache in caches
    )
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert caches[0].bytes() == caches[1].bytes()


@needs_kernel
@pytest.mark.parametrize("which", ["keys", "values"])
def test_numbers_that_are_not_finite_are_refused_and_nothing_is_stored(which):
    keys, values = torch.randn(2, 1, 2, SLOT + 1, 64)
    cache = QuantizedCache(Codec(), Codec())
    cache.update(keys[:, :, :SLOT], values[:, :, :SLOT], Step.plan(torch.arange(SLOT)[None]))
    before = [b.data.clone() for store in cache._stores() for b in store._buffers() if b.used]
    (keys if which == "keys" else values)[0, 1, SLOT, 7] = torch.inf
    with pytest.raises(ValueError, match=f"{which} contain NaN or infinity"):
        cache.update(keys[:, :, SLOT:], values[:, :, SLOT:], Step.plan(torch.tensor([[SLOT]])))
    after = [b.data for store in cache._stores() for b in store._buffers() if b.used]
    assert cache.length == SLOT and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "change", ["two tokens", "fp64", "fp16", "few slots", "symmetric", "along tokens", "fp32 scales"]
)
def test_it_takes_only_what_it_can_write(change):
    x, codec, slot = torch.zeros(1, 2, 1, 64), Codec(), SLOT
    match change:
        case "two tokens":
            x = torch.zeros(1, 2, 2, 64)
        case "fp64" | "fp16":
            x = x.to(torch.float64 if change == "fp64" else torch.float16)
        case "few slots":
            slot = SLOT - 1
        case "symmetric":
            codec = Codec("symmetric")
        case "along tokens":
            codec = Codec("affine", 8, 5, "tokens")
        case "fp32 scales":
            codec = Codec(scale_dtype=torch.float32)
    assert not can_encode(x, encode_in_pytorch(torch.zeros(1, 2, SLOT + 3, 64), codec), slot)


def test_nothing_is_written_behind_the_last_slot():
    with pytest.raises(IndexError, match=f"slot {SLOT + 3} lies behind the {SLOT + 3} slots"):
        encode(torch.zeros(1, 2, 1, 64), room(CODECS["int8"]), SLOT + 3)
