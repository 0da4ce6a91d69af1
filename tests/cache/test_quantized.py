"""Codes in a cache: KIVI's split, appending without touching old codes, and forgetting without a trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import sizing
from kvlab.attention import EMPTY, DensePart, Step, attend, attend_part, merge
from kvlab.cache.base import CannotRewind, KVCache
from kvlab.cache.build import build_cache
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.quantized import QuantizedCache
from kvlab.codecs import RECIPES, Codec
from kvlab.config import ModelConfig
from kvlab.quantization import calibrate, kivi_split, quantize, wide

WIDTH = 32
INT8, INT4 = Codec("affine", 8), Codec("affine", 4, 16)
MIXES = {  # keys, values, residual: every pair of axes, codes beside full precision, and one residual for both
    "int8": (INT8, INT8, 0),
    "int4": (INT4, INT4, 0),
    "fp8": (Codec("e4m3"), Codec("e5m2"), 0),
    "16 bits and int4": (None, INT4, 0),
    "int4 and 16 bits": (INT4, None, 0),
    "int8 behind a residual": (INT8, INT8, 8),
    "kivi": (Codec("affine", 2, 4, "tokens"), Codec("affine", 2, 16), 8),
    "rows of keys, channels of values": (INT4, Codec("affine", 4, 8, "tokens"), 8),
    "channels of both": (Codec("affine", 4, 4, "tokens"), Codec("affine", 4, 8, "tokens"), 8),
    "kivi keys, 16-bit values": (Codec("affine", 2, 4, "tokens"), None, 8),
}
every_mix = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
few_examples = settings(max_examples=15, deadline=None)


def tokens(count, rows=1, heads=2, width=WIDTH, seed=0, dtype=torch.float32):
    """Keys and values (rows, heads, count, width) that differ in every element; token i is the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn((count, 2, rows, heads, width), generator=generator).to(dtype)  # token by token
    return both[:, 0].permute(1, 2, 0, 3), both[:, 1].permute(1, 2, 0, 3)


def feed(cache, keys, values, first, last):
    rows = keys.shape[0]
    step = Step.plan(torch.arange(first, last, dtype=torch.int32).expand(rows, last - first))
    return cache.update(keys[:, :, first:last], None if values is None else values[:, :, first:last], step), step


def fill(cache, keys, values, chunks, first=0):
    for count in chunks:
        view, step = feed(cache, keys, values, first, first + count)
        first += count
    return view, step


def stored(cache):
    """Every live tensor of a cache, in full."""
    return [b.live.clone() for s in cache._stores() for b in s._buffers() if b.used] + [cache.positions.clone()]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@st.composite
def cuts(draw, total):
    sizes = []
    while sum(sizes) < total:
        sizes.append(draw(st.integers(1, total - sum(sizes))))
    return sizes


def counts(mix, length):
    """How many keys and values are codes once an update has settled `length` earlier tokens."""
    keys, values, residual = mix
    split = kivi_split(length, residual) if residual else (length, length)
    return [0 if c is None else split[0 if c.along == "tokens" else 1] for c in (keys, values)]


def oracle(x, count, codec, dtype):
    coded = quantize(x[:, :, :count], codec).dequantize(dtype) if count else x[:, :, :0].to(dtype)
    return torch.cat([coded, x[:, :, count:].to(dtype)], 2)


# What is read
@every_mix
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@few_examples
@given(data=st.data())
def test_a_view_is_attention_over_dequantised_slots(mix, dtype, data):
    keys, values = tokens(30, rows=2, dtype=dtype)
    chunks = data.draw(cuts(30))
    view, step = fill(QuantizedCache(*mix), keys, values, chunks)
    settled = 30 if mix[2] == 0 else 30 - chunks[-1]  # a residual settles what earlier updates stored
    numbers = [
        oracle(x, n, codec, wide(dtype)) for x, n, codec in zip((keys, values), counts(mix, settled), mix, strict=False)
    ]
    queries = torch.randn(2, 4, chunks[-1], WIDTH, dtype=wide(dtype))
    expected = DensePart(*numbers, torch.arange(30).expand(2, 1, 30)).attend_with_lse(queries, step, scale=0.2)[0]
    out = merge([attend_part(queries, part, step, scale=0.2) for part in view])
    assert float((out - expected).abs().max()) <= (1e-12 if dtype == torch.float64 else 1e-5) * float(
        values.abs().max()
    )
    if step.positions.shape[1] > 1 or len(view) > 1:  # and by the door that the model uses
        direct = attend(queries.to(dtype), view, step, scale=0.2).to(wide(dtype))
        assert float((direct - expected).abs().max()) <= 64 * torch.finfo(dtype).eps * float(values.abs().max())


@pytest.mark.parametrize("residual", [32, 64])
def test_a_prompt_within_the_residual_is_bitwise_the_exact_cache(residual):
    keys, values = tokens(32, dtype=torch.bfloat16)
    queries = torch.randn(1, 4, 32, WIDTH, dtype=torch.bfloat16)
    quantised, plain = QuantizedCache.kivi(2, 32, residual), ContiguousCache()
    for first, last in [(0, 20), (20, 31), (31, 32)]:
        (mine, step), (theirs, _) = (feed(c, keys, values, first, last) for c in (quantised, plain))
        asked = queries[:, :, first:last]
        assert torch.equal(attend(asked, mine, step, scale=0.2), attend(asked, theirs, step, scale=0.2))
    assert quantised.bytes().payload == plain.bytes().payload


def test_full_precision_on_both_sides_is_exact():
    assert QuantizedCache(None, None, 8).exact and QuantizedCache(None, None, 8).chunk_invariant
    assert not QuantizedCache(None, INT8).exact and not QuantizedCache.kivi(8).exact


# KIVI's split
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 100])
def test_what_is_quantised_at_each_length(length):
    keys, values = tokens(length)
    by_hand = {31: (0, 0), 32: (32, 0), 33: (32, 1), 63: (32, 31), 64: (64, 32), 100: (96, 68), 1: (0, 0)}[length]
    for chunks in ([length], [1] * length):
        cache = QuantizedCache.kivi(2, 32, 32)
        fill(cache, keys, values, chunks)
        cache.settle()
        assert cache.quantized == by_hand == kivi_split(length, 32)
        dense = [store.tail.used for store in cache._stores()]
        assert dense == [length - by_hand[0], length - by_hand[1]]


def test_an_update_settles_only_what_earlier_ones_stored():
    keys, values = tokens(101)
    cache = QuantizedCache.kivi(2, 32, 32)
    seen = []
    for first, last in [(0, 100), (100, 101)]:
        feed(cache, keys, values, first, last)
        seen.append(cache.quantized)
    assert seen == [(0, 0), (96, 68)]


@every_mix
@few_examples
@given(data=st.data())
def test_codes_are_bitwise_those_of_one_shot(mix, data):
    keys, values = tokens(40)
    one, many = QuantizedCache(*mix), QuantizedCache(*mix)
    fill(one, keys, values, [40])
    fill(many, keys, values, data.draw(cuts(40)))
    one.settle(), many.settle()
    assert same(stored(one), stored(many))


@every_mix
def test_appending_never_touches_old_codes(mix):
    keys, values = tokens(64)
    cache = QuantizedCache(*mix)
    fill(cache, keys, values, [40])
    cache.settle()
    before = [(s.codes.live.clone(), s.scales.live.clone()) for s in cache._stores() if s.quantized]
    fill(cache, keys, values, [1] * 24, first=40)
    after = [(s.codes.live, s.scales.live) for s in cache._stores() if s.quantized]
    assert before and all(len(b[0]) and b[0].shape[2] < a[0].shape[2] for a, b in zip(after, before, strict=True))
    for (codes, scales), (old_codes, old_scales) in zip(after, before, strict=True):
        assert torch.equal(codes[:, :, : old_codes.shape[2]], old_codes)
        assert torch.equal(scales[:, :, : old_scales.shape[2]], old_scales)


def test_two_bits_are_billed_for_groups_of_32_tokens_only():
    """Flushed token by token each group would have one element: no error at all, at 34 bits a number."""
    keys, values = tokens(200, dtype=torch.bfloat16)
    for chunks in ([32] + [1] * 168, [32] * 6 + [8], [200]):
        cache = QuantizedCache.kivi(2, 32, 32)
        fill(cache, keys, values, chunks)
        cache.settle()
        key_store, value_store = cache._stores()
        assert (key_store.quantized, value_store.quantized) == (192, 168)
        for store, x in ((key_store, keys), (value_store, values)):
            coded = store.slots(0, store.quantized)
            assert coded.bits_per_number == 3.0
            assert float((coded.dequantize() - x[:, :, : store.quantized].float()).abs().mean()) > 0.1
        dense = 2 * WIDTH * 2 * (8 + 32)  # heads, width, bytes, tokens in the residuals
        assert cache.bytes().payload == 2 * WIDTH * (192 + 168) * 2 // 8 + dense


def test_keys_and_values_are_stored_apart_whether_or_not_one_codec_serves_both():
    keys, values = tokens(20)
    together, alone = (
        QuantizedCache(INT4, INT4),
        QuantizedCache(INT4, Codec("affine", 4, 16, scale_dtype=torch.bfloat16)),
    )
    for cache in (together, alone):  # equal but for the codec's spelling: the second stores one tensor after the other
        fill(cache, keys, values, [3, 1, 16])
    assert same(stored(together), stored(alone))


# Forgetting
@every_mix
@few_examples
@given(data=st.data())
def test_a_rejected_draft_leaves_no_trace(mix, data):
    keys, values = tokens(60)
    prompt, draft = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    keep = data.draw(st.integers(0, draft))
    drafted, plain = QuantizedCache(*mix), QuantizedCache(*mix)
    other_keys, other_values = tokens(60, seed=1)
    mixed = [torch.cat([a[:, :, : prompt + keep], b[:, :, prompt + keep :]], 2)
             for a, b in ((keys, other_keys), (values, other_values))]  # fmt: skip
    fill(drafted, *mixed, [prompt, draft])
    drafted.rewind([prompt + keep])
    fill(plain, keys, values, [prompt] + [keep] * (keep > 0))
    for cache in (drafted, plain):
        fill(cache, keys, values, [2, 3], first=prompt + keep)
    assert same(stored(drafted), stored(plain))


def test_rewinding_through_groups_of_keys():
    keys, values = tokens(100)
    cache = QuantizedCache.kivi(2, 32, 32)
    fill(cache, keys, values, [99, 1])
    assert cache.quantized == (96, 67)
    before = stored(cache)
    for length in (70, 95, 1):
        with pytest.raises(CannotRewind, match=f"to {length} tokens: 96 are quantised in groups of 32"):
            cache.rewind([length])
    assert same(stored(cache), before) and cache.length == 100
    cache.rewind([97])
    assert cache.quantized == (96, 67) and cache.length == 97
    cache.rewind([64])
    assert cache.quantized == (64, 64)
    for store in cache._stores():  # and nothing of what was there is left
        assert not store.codes.data[:, :, 64:].any() and not store.tail.data.any()
        assert (
            not store.scales.data[:, :, 64 // store.per :].any()
            and not store.minima.data[:, :, 64 // store.per :].any()
        )
    once = QuantizedCache.kivi(2, 32, 32)
    fill(once, keys, values, [96])
    once.settle()
    assert torch.equal(cache._stores()[0].codes.live, once._stores()[0].codes.live[:, :, :64])
    fill(cache, keys, values, [20, 16], first=64)
    cache.settle()
    assert cache.quantized == (96, 68)
    cache.rewind([0])
    assert cache.length == 0 and cache.bytes().total == 0


@pytest.mark.parametrize(
    "mix", [mix for mix in MIXES.values() if not mix[2]], ids=[n for n in MIXES if not MIXES[n][2]]
)
def test_a_ragged_rewind_leaves_no_trace_in_any_row(mix):
    keys, values = tokens(12, rows=2)
    cache, alone = QuantizedCache(*mix), QuantizedCache(*mix)
    fill(cache, keys, values, [12])
    cache.rewind([9, 7])
    assert cache.length == 9 and cache.start is None
    assert [row.tolist() for row in cache.positions[:, 0]] == [[*range(9)], [*range(7), EMPTY, EMPTY]]
    for store in cache._stores():
        for buffer in store._buffers():
            assert buffer.data is None or not (buffer.data[1, :, 7:].any() or buffer.data[0, :, 9:].any())
    fill(alone, keys[1:], values[1:], [7])
    assert cache.bytes().payload == (9 + 7) * alone.bytes().payload // 7
    at = torch.tensor([[9], [7]], dtype=torch.int32)
    view = cache.update(keys[:, :, 9:10], values[:, :, 9:10], Step.plan(at))
    twin = alone.update(keys[1:, :, 9:10], values[1:, :, 9:10], Step.plan(at[1:]))
    query = torch.randn(2, 4, 1, WIDTH)
    out = attend(query, view, Step.plan(at), scale=0.2)[1:]
    torch.testing.assert_close(out, attend(query[1:], twin, Step.plan(at[1:]), scale=0.2))


def test_rows_behind_a_residual_stay_equally_long():
    keys, values = tokens(20, rows=2)
    cache = QuantizedCache.kivi(2, 4, 8)
    fill(cache, keys, values, [20])
    with pytest.raises(CannotRewind, match=r"equally long, and cannot rewind to \[20, 19\]"):
        cache.rewind([20, 19])
    with pytest.raises(ValueError, match=r"residual \(of 8 tokens\).*go on at position 20, got .* \[19, 19\]"):
        feed(cache, keys, values, 19, 20)
    assert cache.length == 20


@every_mix
def test_reordering_moves_codes_scales_residual_and_positions(mix):
    keys, values = tokens(32, rows=2)
    cache = QuantizedCache(*mix)
    fill(cache, keys, values, [32])
    cache.settle()  # KIVI's keys leave an empty residual
    before = stored(cache)
    for rows in ([1, 0], [1, 1]):
        cache.reorder(torch.tensor(rows))
    assert all(torch.equal(now, old[[0, 0]]) for now, old in zip(stored(cache), before, strict=True))
    swapped = QuantizedCache(*mix)
    fill(swapped, keys[[0, 0]], values[[0, 0]], [32])
    swapped.settle()
    assert same(stored(cache), stored(swapped))
    with pytest.raises(ValueError, match="rows 0 to 1"):
        cache.reorder(torch.tensor([2]))


# Padding
@pytest.mark.parametrize("codec", [INT8, INT4, Codec("symmetric", 8, 16), Codec("e4m3")], ids=lambda c: c.kind)
def test_padding_spoils_no_scale(codec):
    keys, values = tokens(8, rows=2)
    at = torch.tensor([[EMPTY] * 5 + [0, 1, 2], list(range(8))], dtype=torch.int32)
    keys[0, :, :5], values[0, :, :5] = float("nan"), float("inf")  # what stands in padding is nobody's business
    cache, alone = QuantizedCache(codec, codec), QuantizedCache(codec, codec)
    cache.update(keys, values, Step.plan(at))
    alone.update(keys[:1, :, 5:], values[:1, :, 5:], Step.plan(at[:1, 5:]))
    for mine, theirs in zip(stored(cache), stored(alone), strict=True):
        assert torch.equal(mine[:1, :, 5:], theirs)
    assert cache.bytes().payload == (3 + 8) * 2 * 2 * WIDTH * codec.bits // 8


# Static scales
def test_static_scales_clamp_count_and_cost_nothing_per_token():
    keys, values = tokens(16)
    codec = Codec("e4m3")
    scales = [calibrate(x.clamp(-1, 1), codec) for x in (keys, values)]
    cache = QuantizedCache(codec, codec, key_scales=scales[0], value_scales=scales[1])
    fill(cache, keys.clamp(-1, 1), values.clamp(-1, 1), [8])
    assert cache.clamped == 0
    fill(cache, keys * 10, values, [8], first=8)
    reach = [float(s.max()) * 448 for s in scales]
    assert cache.clamped > 400
    back = cache._stores()[0].slots(8, 16).dequantize()
    assert bool(back.isfinite().all()) and float(back.abs().max()) <= reach[0] * 1.01
    error = (back - keys[:, :, 8:16] * 10).abs()
    assert bool((error <= (keys[:, :, 8:16].abs() * 10 - 1).clamp(min=1 / 16)).all())
    assert cache.bytes().metadata == cache._positions.nbytes + scales[0].nbytes + scales[1].nbytes


def test_scales_calibrated_on_zeros_are_no_zeros():
    keys, values = tokens(4)
    scales = calibrate(torch.zeros_like(keys), Codec("e4m3"))
    cache = QuantizedCache(Codec("e4m3"), Codec("e4m3"), key_scales=scales, value_scales=scales)
    view, step = fill(cache, keys, values, [4])
    assert bool(attend(torch.randn(1, 2, 4, WIDTH), view, step, scale=0.2).isfinite().all())


# MLA
def test_a_latent_in_fp8_and_its_rope_as_it_came_take_656_bytes():
    """FlashMLA's layout: 512 e4m3 codes, four fp32 scales, 64 rotated numbers in bf16; 1,152 bytes in bf16."""
    latents, _ = tokens(10, heads=1, width=576, dtype=torch.bfloat16)
    cache = QuantizedCache(Codec("e4m3", 8, 128, scale_dtype=torch.float32), None, rope_width=64)
    view, step = fill(cache, latents, None, [9, 1])
    taken = cache.bytes()
    assert taken.payload + taken.metadata - cache._positions.nbytes == 10 * 656
    out = attend(torch.randn(1, 4, 1, 576, dtype=torch.bfloat16), view, step, scale=0.05)
    assert out.shape == (1, 4, 1, 576)
    part = view[0]
    assert torch.equal(part.keys[1], latents[..., 512:]) and part.values is None


@pytest.mark.parametrize("rope_codec", [None, INT8, Codec("affine", 4, 8, "tokens")], ids=["16 bits", "int8", "int4"])
def test_the_rope_of_a_latent_has_scales_of_its_own(rope_codec):
    """Rotated columns 100 times larger than the latent spoil its scales, unless they are kept apart."""
    latents, _ = tokens(40, heads=1)
    latents[..., 24:] *= 100
    residual = 8 if rope_codec is not None and rope_codec.along == "tokens" else 0
    apart = QuantizedCache(INT8, None, residual, rope_width=8, rope_codec=rope_codec)
    together = QuantizedCache(INT8, None)
    fill(apart, latents, None, [31, 9]), fill(together, latents, None, [40])
    errors = [float((c.key_stores[0].slots(0, 20).dequantize()[..., :24] - latents[:, :, :20, :24]).abs().mean())
              for c in (apart, together)]  # fmt: skip
    assert errors[1] > 20 * errors[0]
    query = torch.randn(1, 4, 1, WIDTH)
    step = Step.plan(torch.tensor([[40]], dtype=torch.int32))
    view = apart.update(latents[:, :, :1], None, step)
    blocks = [torch.cat([x if isinstance(x, torch.Tensor) else x.dequantize() for x in part.keys], 3) for part in view
              if not isinstance(part, DensePart)]  # fmt: skip
    blocks += [part.keys for part in view if isinstance(part, DensePart)]
    twin = DensePart(torch.cat(blocks, 2), None, torch.arange(41)[None, None])
    error = attend(query, view, step, scale=0.01) - attend(query, (twin,), step, scale=0.01)
    assert float(error.abs().max()) <= 1e-6 * float(latents.abs().max())


# Refusals leave the cache as it was
@every_mix
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_and_infinity_are_refused_and_nothing_changes(mix, bad, where):
    keys, values = tokens(21)
    cache = QuantizedCache(*mix)
    fill(cache, keys, values, [20])
    before = stored(cache)
    spoilt = {"keys": keys, "values": values}[where]
    spoilt[0, 1, 20, 3] = bad
    with pytest.raises(ValueError, match=f"{where} contain NaN or infinity"):
        feed(cache, keys, values, 20, 21)
    assert same(stored(cache), before) and cache.length == 20


@pytest.mark.parametrize(
    ("shapes", "dtype", "words"),
    [
        (((1, 3, 1, 32), (1, 3, 1, 32)), torch.float32, r"\(1, 2, 32\).* \(1, 3, 32\)"),
        (((1, 2, 1, 16), (1, 2, 1, 32)), torch.float32, r"\(1, 2, 32\).* \(1, 2, 16\)"),
        (((1, 2, 1, 32), (1, 2, 1, 32)), torch.bfloat16, "holds torch.float32 .* torch.bfloat16"),
        (((1, 2, 1, 32), None), torch.float32, "no values"),
        (((1, 2, 2, 32), (1, 2, 2, 32)), torch.float32, r"positions \(1, 1\) need keys"),
        (((1, 2, 1, 32), (1, 2, 3, 32)), torch.float32, "do not fit keys"),
    ],
)
def test_keys_that_do_not_fit_are_refused(shapes, dtype, words):
    cache = QuantizedCache.kivi(2, 4, 8)
    fill(cache, *tokens(20), [20])
    before = stored(cache)
    keys, values = (None if shape is None else torch.zeros(shape, dtype=dtype) for shape in shapes)
    with pytest.raises(ValueError, match=words):
        cache.update(keys, values, Step.plan(torch.tensor([[20]])))
    assert same(stored(cache), before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QuantizedCache.kivi(2, 32, 100), "groups of 32 tokens .* got 100"),
        (lambda: QuantizedCache.kivi(2, 32, 0), "groups of 32 tokens .* got 0"),
        (lambda: QuantizedCache.kivi(3), "2, 4 or 8 bits, not 3"),
        (lambda: QuantizedCache(INT8, INT8, -1), "got -1"),
        (lambda: QuantizedCache(INT8, INT8, 2.5), "got 2.5"),
        (lambda: QuantizedCache(INT8, INT8, True), "got True"),
        (lambda: Codec("affine", 4.0), "not 4.0"),
        (lambda: Codec("affine", 4, 2.5), "not 2.5"),
        (lambda: QuantizedCache(Codec("e4m3"), None, key_scales=torch.zeros(1, 2, 1, 1)), "positive and finite"),
        (lambda: QuantizedCache(INT8, None, rope_width=-1), "got -1"),
        (lambda: QuantizedCache(INT8, INT8, key_scales=torch.ones(1)), "cannot be frozen"),
        (lambda: QuantizedCache(None, INT8, key_scales=torch.ones(1)), "no codec"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("cache", "width", "words"),
    [
        (QuantizedCache(Codec("affine", 8, 48), None), 32, "row of 32 numbers cannot be cut into groups of 48"),
        (QuantizedCache(Codec("affine", 4), None), 7, "row of 7 numbers does not fill whole bytes with 4-bit"),
        (QuantizedCache.kivi(2, 4, 8), 6, "row of 6 numbers does not fill whole bytes with 2-bit"),
        (QuantizedCache(INT8, None, rope_width=8), 8, "rope_width 8 leaves nothing of keys of width 8"),
        (QuantizedCache(Codec("e4m3"), None, key_scales=torch.ones(1, 3, 1, 1)), 8, r"\(1, 3, 1, 1\).*\(1, 2, 1, 1\)"),
    ],
)
def test_widths_that_do_not_fit_are_refused_before_anything_is_stored(cache, width, words):
    with pytest.raises(ValueError, match=words):
        fill(cache, *tokens(4, width=width), [4])
    assert cache.bytes().total == 0 and cache.length == 0


# Memory
def test_no_step_copies_the_codes_but_log_many():
    keys, values = tokens(1000)
    cache, moves, where = QuantizedCache(INT8, INT8), 0, None
    for position in range(1000):
        feed(cache, keys, values, position, position + 1)
        data = cache._stores()[0].codes.data
        moves, where = moves + (data.data_ptr() != where), data.data_ptr()
    assert moves == 1 + 4  # 64, 128, 256, 512, 1024


def test_a_long_prompt_leaves_no_large_residual_behind():
    keys, values = tokens(2000, dtype=torch.bfloat16)
    cache = QuantizedCache.kivi(4, 32, 128)
    fill(cache, keys, values, [2000])
    in_full = cache.bytes().total
    cache.settle()
    assert [store.tail.data.shape[2] for store in cache._stores()] == [160, 256]
    assert cache.bytes().total < 0.45 * in_full


# By name
def config(head_dim=64, **more) -> ModelConfig:
    return ModelConfig(
        name="small", model_type="llama", vocab_size=61, hidden_size=128, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=256, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("int8", "int8-g64"), ("int4", "int4-g32"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("int2-g16", "int2-g16")],
)
def test_named_caches_store_what_sizing_counts(name, scheme):
    cache = build_cache(config(), name)
    for layer in cache.layers:
        fill(layer, *tokens(50, width=64), [50])
    taken, positions = cache.bytes(), sum(layer._positions.nbytes for layer in cache.layers)
    assert taken.payload + taken.metadata - positions == sizing.bytes_ideal(config(), 50, dtype=scheme)
    assert not cache.exact and cache.chunk_invariant


@pytest.mark.parametrize("name", [*RECIPES, "int4-g32-r16", "kivi2-g16-r32"])
def test_every_name_makes_a_cache_that_shrinks_and_decodes(name):
    cache, plain = build_cache(config(), name), build_cache(config())
    assert isinstance(cache, KVCache)
    keys, values = tokens(400, width=64, dtype=torch.bfloat16)
    for layer, twin in zip(cache.layers, plain.layers, strict=True):
        view, step = fill(layer, keys, values, [399, 1])
        theirs, _ = fill(twin, keys, values, [399, 1])
        query = torch.randn(1, 4, 1, 64, dtype=torch.bfloat16)
        error = (attend(query, view, step, scale=0.125) - attend(query, theirs, step, scale=0.125)).abs().mean()
        assert 0 < float(error) < 0.1
    assert cache.bytes().payload < 0.6 * plain.bytes().payload


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("q8_0", "row of 8 numbers cannot be cut into groups of 32"),
        ("int4-g16", "row of 8 numbers cannot be cut into groups of 16"),
        ("int5", "unknown cache 'int5'"),
        ("kivi2-g32-r100", "groups of 32 tokens .* got 100"),
    ],
)
def test_names_that_do_not_fit_a_model_are_refused_at_once(name, words):
    with pytest.raises(ValueError, match=words):
        build_cache(config(head_dim=64 if "kivi" in name else 8), name)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "kivi2-g4-r8"])
def test_a_latent_is_cut_so_that_its_rope_has_groups_of_its_own(name):
    mla = dict(kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
    layer = build_cache(config(**mla), name).layers[0]
    latents, _ = tokens(40, heads=1)
    view, step = fill(layer, latents, None, [39, 1])
    assert [store.slots(0, 8).shape[3] for store in layer.key_stores] == [24, 8] and view[0].values is None
    assert attend(torch.randn(1, 4, 1, WIDTH), view, step, scale=0.2).shape == (1, 4, 1, WIDTH)
