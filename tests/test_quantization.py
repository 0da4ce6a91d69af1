"""Codes: what comes back, what it costs in stored bytes, and the ranges that break simpler formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.codecs import RECIPES, Codec, recipe
from kvlab.packing import FP8, fp8_numbers, pack, unpack
from kvlab.quantization import QuantizedTensor, calibrate, count_clamped, kivi_split, quantize
from kvlab.rope import rotate
from kvlab.schemes import parse

AFFINE = [Codec("affine", bits, 8, along) for bits in (2, 4, 8) for along in ("channels", "tokens")]
SYMMETRIC = [Codec("symmetric", bits, 8, along) for bits in (2, 4, 8) for along in ("channels", "tokens")]
FLOATS = [Codec(kind, 8, 8, along) for kind in FP8 for along in ("channels", "tokens")]
EVERY = AFFINE + SYMMETRIC + FLOATS
every_codec = pytest.mark.parametrize("codec", EVERY, ids=lambda c: f"{c.kind}-{c.bits}-{c.along}")
sixteen_bits = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
few_examples = settings(max_examples=40, deadline=None)


def numbers(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error_bound(quantized: QuantizedTensor, x: torch.Tensor) -> torch.Tensor:
    """Half a step, or a whole one where llama.cpp's 4-bit rule clips; fp8: half of the last bit of each number."""
    codec, wide = quantized.codec, x.double()
    scales = quantized.scales.double().abs()
    along = scales.repeat_interleave(8, 2 if codec.along == "tokens" else 3)
    if codec.kind in FP8:
        info = torch.finfo(FP8[codec.kind])
        return (wide.abs() / along).clamp(min=info.smallest_normal) * info.eps / 2 * along
    return along * (1.0 if codec.zero else 0.5)


@every_codec
@few_examples
@given(seed=st.integers(0, 10**6), size=st.integers(-30, 30), offset=st.floats(-100, 100), data=st.data())
def test_the_error_is_at_most_half_a_step(codec, seed, size, offset, data):
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    x = ((numbers(2, 2, 16, 16, seed=seed, dtype=torch.float64) + offset) * 2.0**size).clamp(-6e4, 6e4).to(dtype)
    quantized = quantize(x, codec)
    error = (quantized.dequantize(torch.float64) - x.double()).abs()
    rounding = x.double().abs() * 1e-6 + 1e-12  # of the fp32 arithmetic
    assert bool((error <= error_bound(quantized, x) + rounding).all())


@every_codec
def test_stored_dtype_and_bytes_shrink(codec):
    """A test of quality that never quantised anything would pass: look at what is stored."""
    x = numbers(1, 2, 32, 16, dtype=torch.bfloat16)
    quantized = quantize(x, codec)
    assert quantized.codes.dtype == torch.uint8 and quantized.codes.nbytes == x.numel() * codec.bits // 8
    assert quantized.scales.dtype == torch.bfloat16 and quantized.nbytes < x.nbytes * 0.8
    assert bool((quantized.dequantize(torch.bfloat16) != x).any())
    scales = 2 if codec.kind == "affine" else 1
    assert quantized.bits_per_number == codec.bits + 16 * scales / 8


@pytest.mark.parametrize(
    "name", ["int8-g64", "int4-g64", "int4-g32", "kivi2-g32", "kivi4-g32", "kivi4-g64", "q8_0", "q4_0"]
)
def test_stored_bits_are_those_that_sizing_counts(name):
    how = recipe(name, 64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):  # scales take 16 bits in all of them
        for codec in (how.keys, how.values):
            stored = quantize(numbers(1, 3, 64, 64, dtype=dtype), codec)
            assert stored.bits_per_number == float(parse(name).bits_per_number(64))
    assert float(parse("kivi2-g32").bits_per_number(64)) == 3.0


# Trap: a group without a range divides by zero.
@every_codec
@sixteen_bits
@pytest.mark.parametrize("constant", [0.0, 100.0, -3.5])
def test_constant_groups_come_back_exactly(codec, dtype, constant):
    quantized = quantize(torch.full((1, 1, 8, 8), constant, dtype=dtype), codec)
    back = quantized.dequantize(dtype)
    assert bool(quantized.scales.isfinite().all()) and bool((quantized.scales != 0).all())
    if codec.kind == "affine" or constant == 0:
        assert torch.equal(back, torch.full_like(back, constant))
    torch.testing.assert_close(back, torch.full_like(back, constant), rtol=2e-2, atol=0)


@pytest.mark.parametrize("codec", AFFINE, ids=lambda c: f"{c.bits}-{c.along}")
@sixteen_bits
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 100.0, 6.1e-5, 2.0**-14, 60000.0])
def test_ranges_of_one_ulp_come_back_exactly(codec, dtype, value):
    low = torch.full((1, 1, 8, 8), value, dtype=dtype)
    high = (low.view(torch.int16) + 1).view(dtype)
    x = torch.where(torch.arange(64).view(1, 1, 8, 8) % 3 == 0, low, high)
    assert bool((low != high).all()) and torch.equal(quantize(x, codec).dequantize(dtype), x)


@every_codec
@pytest.mark.parametrize("scale_dtype", [None, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e5, 3e38, 1e-40])
@pytest.mark.parametrize("shift", [0, -2])  # all negative: the minimum itself may lie beyond the scales' dtype
def test_extreme_ranges_stay_finite(codec, scale_dtype, size, shift):
    x = ((numbers(1, 1, 8, 8).clamp(-1, 1) + shift) / (1 - shift) * size).to(torch.bfloat16)
    quantized = quantize(x, replace(codec, scale_dtype=scale_dtype))
    assert all(bool(terms is None or terms.isfinite().all()) for terms in (quantized.scales, quantized.minima))
    assert all(bool(terms is None or terms.isfinite().all()) for terms in quantized.terms(torch.float32))
    assert bool(quantized.dequantize(torch.bfloat16).isfinite().all())
    assert bool(quantized.dequantize(torch.float32).isfinite().all())


def test_a_range_over_65504_keeps_its_half_step_in_bf16_and_fp32():
    x = torch.tensor([-1e5, 1e5, 3.0, 0.0]).view(1, 1, 1, 4)
    for dtype in (torch.float32, torch.bfloat16):
        back = quantize(x.to(dtype), Codec("affine", 8)).dequantize()
        assert float((back - x.to(dtype)).abs().max()) <= 2e5 / 255
    fp16 = torch.tensor([-60000.0, 60000.0, 65504.0, 0.0], dtype=torch.float16).view(1, 1, 1, 4)  # its range is 125504
    assert bool(quantize(fp16, Codec("affine", 8)).dequantize(torch.float16).isfinite().all())


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(codec, bad):
    x = numbers(1, 1, 8, 8, dtype=torch.float16)
    x[0, 0, 3, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(x, codec)


# Axes
def test_large_channels_spoil_rows_and_not_channels():
    """Two channels 50 times larger than the others, as keys have them: groups along tokens keep them apart."""
    x = numbers(1, 1, 64, 64)
    x[..., [3, 40]] *= 50

    def rest(codec):
        error = (quantize(x, codec).dequantize() - x).abs()
        return float(error[..., [c for c in range(64) if c not in (3, 40)]].mean())

    assert rest(Codec("affine", 4, None)) > 5 * rest(Codec("affine", 4, 32, "tokens"))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_groups_along_tokens_are_groups_along_channels_of_the_transposed_tensor(bits):
    x = numbers(1, 2, 16, 16)
    along_tokens = quantize(x, Codec("affine", bits, 8, "tokens")).dequantize()
    assert torch.equal(along_tokens, quantize(x.mT.contiguous(), Codec("affine", bits, 8)).dequantize().mT)


def test_every_slot_is_quantised_by_itself():
    """Appending may quantise a slot, or a group of slots, without looking at the others."""
    x = numbers(2, 2, 16, 16)
    for codec in EVERY:
        whole = quantize(x, codec)
        for first in (0, 8):
            piece, cut = quantize(x[:, :, first : first + 8], codec), whole.slots(first, first + 8)
            assert torch.equal(piece.codes, cut.codes) and torch.equal(piece.scales, cut.scales)
            assert torch.equal(cut.dequantize(), whole.dequantize()[:, :, first : first + 8])


def test_slots_cannot_be_cut_within_a_group():
    with pytest.raises(ValueError, match="slots 0 to 12 cut through groups of 8 tokens"):
        quantize(numbers(1, 1, 16, 8), Codec("affine", 4, 8, "tokens")).slots(0, 12)


# llama.cpp's blocks
def test_q8_0_by_hand():
    x = torch.zeros(1, 1, 1, 32)
    x[..., 0], x[..., 1], x[..., 2] = -127.0, 63.5, 12.0
    quantized = quantize(x, recipe("q8_0", 32).keys)
    assert quantized.codes.view(torch.int8)[0, 0, 0, :4].tolist() == [-127, 64, 12, 0]
    assert quantized.nbytes == 34 and quantized.scales.dtype == torch.float16 and float(quantized.scales) == 1.0


@pytest.mark.parametrize("sign", [1, -1])
def test_q4_0_gives_the_largest_magnitude_the_level_minus_eight(sign):
    x = torch.zeros(1, 1, 1, 32)
    x[..., 0], x[..., 1] = sign * 8.0, -sign * 8.0
    quantized = quantize(x, recipe("q4_0", 32).keys)
    back = quantized.dequantize()
    assert quantized.nbytes == 18 and abs(float(quantized.scales)) == 1.0
    # both magnitudes are the largest: the negative number is taken, and the positive one is clipped to 7 steps
    assert sorted(back[0, 0, 0, :2].tolist()) == [-8.0, 7.0]
    lone = torch.zeros(1, 1, 1, 32)
    lone[..., 5] = sign * 8.0
    assert torch.equal(quantize(lone, recipe("q4_0", 32).keys).dequantize(), lone)


# fp8
@pytest.mark.parametrize("kind", FP8)
def test_every_finite_fp8_code_is_read_as_pytorch_reads_it(kind):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    theirs = codes.view(FP8[kind]).float()
    finite = theirs.isfinite()
    assert int(finite.sum()) == {"e4m3": 254, "e5m2": 248}[kind]
    assert torch.equal(fp8_numbers(codes, kind, torch.float32)[finite], theirs[finite])


def test_fp8_clamps_before_it_casts():
    ones = torch.ones(1, 1, 1, 1)
    x = torch.tensor([448.0, 464.0, 1000.0, -1e30]).view(1, 1, 1, 4)
    assert quantize(x, Codec("e4m3"), ones).dequantize().flatten().tolist() == [448, 448, 448, -448]
    assert int(count_clamped(x, Codec("e4m3"), ones)) == 3


@pytest.mark.parametrize("codec", [Codec("e4m3"), Codec("e5m2"), Codec("symmetric"), Codec("symmetric", 4)])
def test_static_scales_clamp_what_calibration_did_not_see(codec):
    sample, later = numbers(1, 2, 16, 8).clamp(-1, 1), numbers(1, 2, 16, 8, seed=1) * 10
    sample[..., 0] = 1.0
    scales = calibrate(sample, codec)
    assert scales.shape == (1, 2, 1, 1)
    error = (quantize(later, codec, scales).dequantize() - later).abs()
    reach = 1.0 + 1 / 64  # bf16 rounds the scale up
    assert bool((error <= (later.abs() - 1.0).clamp(min=reach / 4 if codec.bits == 4 else reach / 8)).all())
    assert int(count_clamped(later, codec, scales)) >= int((later.abs() > reach).sum()) > 100
    assert int(count_clamped(sample, codec, scales)) == 0


def test_calibration_on_zeros_gives_a_scale_that_works():
    scales = calibrate(torch.zeros(1, 2, 16, 8), Codec("e4m3"))
    assert scales.tolist() == [[[[1.0]], [[1.0]]]]
    assert bool(quantize(numbers(1, 2, 4, 8), Codec("e4m3"), scales).dequantize().isfinite().all())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_static_scales_that_no_number_can_be_divided_by(value):
    with pytest.raises(ValueError, match=f"positive and finite, got {value}"):
        quantize(numbers(1, 1, 8, 8), Codec("e4m3"), torch.full((1, 1, 1, 1), value))


@pytest.mark.parametrize("shape", [(2,), (1, 3, 1, 1), (1, 2, 1, 2), (1, 2, 5, 1)])
def test_static_scales_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"do not fit \(1, 2, 4, 1\)"):
        quantize(numbers(1, 2, 4, 8), Codec("e4m3"), torch.ones(shape))


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (torch.full((1, 1, 4, 8), float("nan")), "NaN"),
        (torch.full((1, 1, 4, 8), float("-inf")), "infinity"),
        (torch.zeros(1, 1, 0, 8), "no numbers"),
        (torch.zeros(4, 8), r"not torch.float32 \(4, 8\)"),
    ],
)
def test_samples_that_give_no_scales(samples, words):
    with pytest.raises(ValueError, match=words):
        calibrate(samples, Codec("e4m3"))


@pytest.mark.parametrize("x", [torch.zeros(1, 4, 8), torch.zeros(1, 1, 4, 8, dtype=torch.int32)])
def test_what_is_no_tensor_of_numbers_is_refused(x):
    with pytest.raises(ValueError, match="floating-point"):
        quantize(x, Codec())


@pytest.mark.parametrize("codec", [Codec(), Codec("e4m3", 8, 8, "tokens")])
def test_scales_that_cannot_be_static(codec):
    with pytest.raises(ValueError, match="cannot be frozen"):
        calibrate(numbers(1, 1, 8, 8), codec)
    with pytest.raises(ValueError, match="cannot be frozen"):
        quantize(numbers(1, 1, 8, 8), codec, torch.ones(1, 1, 1, 1))


# Packing
@few_examples
@given(bits=st.sampled_from([2, 4, 8]), width=st.integers(1, 6), seed=st.integers(0, 999))
def test_packing_loses_nothing(bits, width, seed):
    codes = torch.randint(0, 2**bits, (3, width * 8 // bits), generator=torch.Generator().manual_seed(seed)).byte()
    packed = pack(codes, bits)
    assert packed.shape == (3, width) and torch.equal(unpack(packed, bits), codes)
    assert torch.equal(unpack(packed, bits, torch.float32), codes.float())


def test_a_byte_holds_the_codes_of_planes():
    assert pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist() == [1 + 16 * 3, 2 + 16 * 4]
    assert pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [1 + 4 * 2 + 16 * 3]


# KIVI
def test_kivis_split():
    """Checked by hand from its source: keys leave 32 at a time, values one by one."""
    lengths = (0, 31, 32, 33, 63, 64, 100)
    assert [kivi_split(n, 32)[0] for n in lengths] == [0, 0, 32, 32, 32, 64, 96]
    assert [kivi_split(n, 32)[1] for n in lengths] == [0, 0, 0, 1, 31, 32, 68]


# Rotation
def test_codes_cannot_be_rotated_and_rotating_through_numbers_keeps_distances():
    """Context shift: queries see only distances, so rotating stored keys by -n must be recomputing them, to a step."""
    keys, query = numbers(1, 1, 8, 16), numbers(1, 1, 1, 16, seed=1)
    angles = torch.arange(0, 20).float()[:, None] * (0.5 ** torch.arange(8).float())
    table = [f(torch.cat([angles, angles], -1))[None, None] for f in (torch.cos, torch.sin)]
    at = lambda first: [t[:, :, first : first + 8] for t in table]  # noqa: E731
    codec = Codec("affine", 8)
    stored = quantize(rotate(keys, *at(5)), codec)
    with pytest.raises((AttributeError, TypeError)):
        rotate(stored, *at(5))
    back = [table[0][:, :, 5:6], -table[1][:, :, 5:6]]
    moved = quantize(rotate(stored.dequantize(), *back), codec)
    step = float(stored.scales.max()) + float(moved.scales.max())
    difference = (query @ moved.dequantize().mT - query @ rotate(keys, *at(0)).mT).abs().max()
    assert float(difference) <= step / 2 * float(query.abs().sum())


# Errors name both numbers
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Codec("affine", 3), "2, 4 or 8 bits, not 3"),
        (lambda: Codec("e4m3", 4), "take 8 bits, not 4"),
        (lambda: Codec("affine", 8, 0), "at least one number, not 0"),
        (lambda: Codec("affine", 8, None, "tokens"), "need a group_size"),
        (lambda: Codec("nf4"), "no 'nf4' codec"),
        (lambda: Codec("affine", 8, 8, "heads"), "along 'heads'"),
        (lambda: quantize(numbers(1, 1, 4, 8), Codec("affine", 8, 3)), "row of 8 numbers cannot .* groups of 3"),
        (lambda: quantize(numbers(1, 1, 4, 7), Codec("affine", 4)), "row of 7 numbers does not fill .* 4-bit"),
        (lambda: quantize(numbers(1, 1, 4, 6), Codec("affine", 2)), "row of 6 numbers does not fill .* 2-bit"),
        (lambda: quantize(numbers(1, 1, 12, 8), Codec("affine", 2, 8, "tokens")), "12 tokens cannot be cut .* of 8"),
    ],
)  # fmt: skip
def test_errors_name_both_numbers(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_recipes():
    assert all(recipe(name, 64) is not None for name in RECIPES)
    assert recipe("contiguous", 64) is None and recipe("int3-g8", 64) is None
    assert recipe("int4-g16-r64", 64).residual == 64 and recipe("int4-g16", 64).values.group_size == 16
    assert recipe("kivi2-g32", 64).residual == recipe("kivi2", 64).residual == 128
    assert recipe("kivi2-g48", 96).residual == 144  # the first multiple of the group that holds 128
