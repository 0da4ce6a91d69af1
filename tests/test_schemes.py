"""Storage schemes: bits of a number, scales and minima, groups that are not full."""

from fractions import Fraction

import pytest

from configs import tiny
from kvlab.config import resolve
from kvlab.schemes import SchemeError, parse
from kvlab.sizing import bytes_ideal, bytes_per_token


@pytest.mark.parametrize(
    "scheme, width, bits",
    [("q8_0", 64, Fraction(17, 2)), ("q5_0", 64, Fraction(11, 2)), ("q5_1", 64, 6), ("q4_0", 64, Fraction(9, 2)),
     ("q4_1", 128, 5), ("int4-g64", 64, Fraction(9, 2)), ("int4-g32", 64, 5), ("int2-g32", 64, 3),
     ("int8-g128", 128, Fraction(33, 4)), ("kivi2-g32", 64, 3), ("int2", 64, 2), ("fp8", 576, 8)],
)  # fmt: skip
def test_bits_per_number(scheme, width, bits):
    assert parse(scheme).bits_per_number(width) == bits


def test_groups_count_scales_and_bare_names_say_that_they_do_not():
    config = resolve("llama-3-8b")
    assert bytes_per_token(config, "q8_0") == 2 * 32 * 8 * 4 * 34
    assert bytes_per_token(config, "int4-g64") == 2 * 32 * 8 * (64 + 2 * 4)
    assert "not counted" in parse("int4").words and "not counted" not in parse("bf16").words
    assert "scales counted" in parse("q8_0").words and "minimum per 64 counted" in parse("int4-g64").words
    assert bytes_per_token(resolve("deepseek-v3"), "q8_0") == 61 * 18 * 34  # 576 numbers are 18 blocks


def test_a_group_that_is_not_full_is_stored_in_full():
    assert parse("q8_0").row_bytes(80) == 3 * 34
    assert parse("int8-g128").row_bytes(64) == 64 + 4
    assert parse("int2").row_bytes(3) == 1 and parse("int4").row_bytes(3) == 2


def test_kivi_groups_keys_along_tokens_and_keeps_a_residual():
    config = tiny("f", head_dim=80, num_key_value_heads=1, num_attention_heads=1)
    assert parse("kivi2-g128").key_row_bytes(80) == 20 + Fraction(80 * 4, 128)  # one scale per channel and 128 tokens
    assert bytes_ideal(config, 128, dtype="kivi2-g128") == 128 * 20 + 80 * 4 + 128 * (20 + 4)
    assert bytes_ideal(config, 1, dtype="kivi2-g128") == 47  # 20 + 2.5 and 24: whole bytes, rounded up
    kept = tiny("f", head_dim=64)
    plain, with_residual = (bytes_ideal(kept, 100, dtype=d) for d in ("kivi2-g32", "kivi2-g32-r32"))
    assert with_residual - plain == 32 * 2 * 2 * (128 - 24)  # 32 tokens, keys and values, 2 heads: 128 bytes for 24
    assert bytes_ideal(kept, 20, dtype="kivi2-g32-r32") == bytes_ideal(kept, 20, dtype="bf16")


@pytest.mark.parametrize("name", ["int3", "q6_k", "int4-g0", "int4-g-64", "kivi3-g32", "", "fp8-g3", "int4g64"])
def test_unknown_schemes_list_the_known_ones(name):
    with pytest.raises(SchemeError, match=r"q8_0.*int\{2,4,8\}-gN"):
        parse(name)


def test_spellings():
    assert parse("BF16") == parse("bfloat16") and parse("f16") == parse("float16") and parse("fp8_e4m3") == parse("fp8")
