"""Bytes of a cache: published check values, the traps that public calculators fell into, and laws."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import tiny
from kvlab.config import LARGEST, ModelConfig, resolve
from kvlab.schemes import BLOCKS
from kvlab.sizing import (
    GIB,
    SizingError,
    bytes_allocated,
    bytes_ideal,
    bytes_per_token,
    bytes_per_token_by_layer,
    layout,
    max_batch,
    max_context,
    terms,
    tokens_held,
    weights_bytes,
)

SCHEMES = ["fp32", "bf16", "fp8", "int4", "int2", *BLOCKS, "int4-g64", "int8-g128", "int2-g32", "kivi2-g32",
           "kivi4-g64", "kivi2-g32-r128"]  # fmt: skip


# --- check values and traps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, expected, traps",
    [
        ("llama-2-7b", 524_288, ()),
        ("llama-3-8b", 131_072, (524_288,)),  # counted with query heads
        ("llama-3.1-70b", 327_680, (2_621_440,)),
        ("qwen3-32b", 262_144, (163_840,)),  # head_dim taken as hidden / heads
        ("qwen3-0.6b", 114_688, (57_344,)),
        ("qwen2.5-7b", 57_344, (1_605_632, 200_704)),  # bits for bytes, hidden for KV width
        ("deepseek-v3", 70_272, (4_997_120, 124_928, 62_464)),  # as MHA, 2 x 512, without the RoPE part
        ("deepseek-v2", 69_120, (3_932_160,)),
        ("smollm2-135m", 23_040, (69_120,)),
        ("qwen2.5-0.5b", 12_288, ()),
        ("opt-13b", 819_200, ()),
        ("deepseek-67b", 389_120, ()),
        ("falcon-7b", 8_192, (581_632,)),
        ("gemma-3-12b", 393_216, (368_640,)),
        ("gpt-oss-20b", 49_152, (34_560,)),
    ],
)
def test_bytes_per_token(name, expected, traps):
    config = resolve(name)
    assert bytes_per_token(config) == expected == sum(bytes_per_token_by_layer(config))
    assert expected not in traps


def test_examples_of_the_course():
    assert bytes_ideal(resolve("llama-3-70b"), 131_072) == 42_949_672_960 == 40 * GIB
    assert bytes_ideal(resolve("llama-2-7b"), 4096) == 2 * GIB
    assert bytes_ideal(resolve("llama-3-8b"), 8192) == GIB
    assert bytes_ideal(resolve("opt-13b"), 2048) == 1_677_721_600  # 1.678 GB in the PagedAttention paper
    assert bytes_ideal(resolve("llama-2-7b"), 10_000) == 5_242_880_000  # 5.243 GB, 4.88 GiB


def test_gb_and_gib_are_not_mixed():
    size = bytes_ideal(resolve("llama-3.1-70b"), 1_000_000)
    assert size == 327_680_000_000 and round(size / GIB, 2) == 305.18  # not "328 GiB", not "305 GB"
    assert 8 * GIB == 8_589_934_592


def test_mla_against_what_it_replaces():
    v2, v3, dense = resolve("deepseek-v2"), resolve("deepseek-v3"), resolve("deepseek-67b")
    assert Fraction(2 * 128 * 128, 512 + 64) == Fraction(32_768, 576)  # 56.9 x
    assert bytes_per_token(v3, mla_layout="expanded") == 4_997_120 == 61 * 128 * (192 + 128) * 2
    assert layout(v3) == "mla" and layout(v3, "expanded") == "mla, expanded"
    saved = 1 - Fraction(bytes_per_token(v2), bytes_per_token(dense))
    assert round(float(saved), 4) == 0.8224  # MLA alone; the 93.3% published also counts 6-bit storage
    assert round(1 - 576 * 60 * 6 / (2048 * 95 * 16), 4) == 0.9334
    with pytest.raises(SizingError, match="latent, expanded"):
        bytes_per_token(v3, mla_layout="doubled")


def test_bits_are_not_bytes():
    config = resolve("qwen2.5-7b")
    assert bytes_per_token(config, "int8") == bytes_per_token(config, "fp8") == 28_672
    assert bytes_per_token(config, "int4") == 14_336 and bytes_per_token(config, "fp32") == 114_688


def test_capacity_is_a_function_of_the_length_in_a_hybrid_model():
    """Of half-sliding models tokens-that-fit grows with the length of a request: no single pool size is right."""
    config = tiny("fsfs", window=128)
    budget = bytes_ideal(config, 512, batch=1000)
    capacity = [n * max_batch(config, budget, n) for n in (128, 512, 2048, 8192)]
    assert capacity == sorted(capacity) and capacity[-1] > 1.5 * capacity[0]
    full = replace(config, layer_types=("full_attention",) * 4, sliding_window=None)
    assert {n * max_batch(full, budget, n) for n in (128, 500, 1000)} == {128 * max_batch(full, budget, 128)}


# --- windows and blocks ------------------------------------------------------------------------------------------


def test_sliding_layers_hold_their_window():
    gemma = resolve("gemma-3-12b")
    by_hand = 2 * 8 * 256 * 2 * (8 * 131_072 + 40 * 1024)
    assert bytes_ideal(gemma, 131_072) == by_hand == 8_925_478_912
    assert bytes_allocated(gemma, 131_072) == 2 * 48 * 8 * 256 * 2 * 131_072 == 48 * GIB
    mistral = resolve("mistral-7b")
    assert bytes_ideal(mistral, 100_000) == bytes_ideal(mistral, 4096) == 4096 * 131_072
    assert bytes_ideal(mistral, 4095) == 4095 * 131_072
    oss = resolve("gpt-oss-20b")
    assert bytes_ideal(oss, 8192) == 2 * 8 * 64 * 2 * 12 * (8192 + 128)
    chunked = ModelConfig.from_dict(
        {"model_type": "llama4_text", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "attention_chunk_size": 10, "dtype": "bfloat16"}
    )  # fmt: skip
    assert tokens_held(chunked, "chunked_attention", 25) == 10
    assert bytes_ideal(chunked, 25) == 2 * 2 * 16 * 2 * (3 * 10 + 25)


def test_blocks_are_paid_in_full():
    config = resolve("llama-3-8b")
    assert bytes_allocated(config, 17, block_size=16) == 32 * 131_072
    assert bytes_allocated(config, 16, block_size=16) == bytes_ideal(config, 16)
    assert bytes_allocated(config, 1, batch=3, block_size=256) == 3 * 256 * 131_072


def test_layout_names():
    names = {name: layout(resolve(name)) for name in ("llama-2-7b", "llama-3-8b", "falcon-7b", "mistral-7b")}
    assert names == {"llama-2-7b": "mha", "llama-3-8b": "gqa", "falcon-7b": "mqa",
                     "mistral-7b": "gqa, sliding window 4096"}  # fmt: skip
    assert layout(resolve("gemma-3-12b")) == "gqa, sliding window 1024 in 40 of 48 layers"


# --- laws --------------------------------------------------------------------------------------------------------

models = st.builds(
    lambda kinds, window, kv, group, dim: tiny(
        kinds, window if "s" in kinds else None, num_key_value_heads=kv, num_attention_heads=kv * group, head_dim=dim
    ),
    st.text("fs", min_size=1, max_size=5),
    st.integers(1, 300),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([16, 20, 64, 80, 128]),
) | st.sampled_from([resolve("deepseek-v2"), resolve("gemma-3-12b"), resolve("llama-3-8b")])
schemes, contexts, batches = st.sampled_from(SCHEMES), st.integers(1, 5000), st.integers(1, 64)


@given(models, contexts, batches, schemes)
def test_linear_in_the_batch(config, context, batch, dtype):
    assert bytes_ideal(config, context, batch, dtype) == batch * bytes_ideal(config, context, 1, dtype)


@given(models, contexts, st.integers(1, 500), schemes)
def test_a_longer_context_never_needs_less(config, context, more, dtype):
    assert bytes_ideal(config, context, 1, dtype) <= bytes_ideal(config, context + more, 1, dtype)


@given(models, contexts, batches, schemes, st.integers(1, 300))
def test_allocated_is_at_least_ideal_and_a_block_more_at_most(config, context, batch, dtype, block_size):
    allocated = bytes_allocated(config, context, batch, dtype, block_size)
    assert allocated >= bytes_ideal(config, context, batch, dtype)
    assert allocated == bytes_allocated(config, -(-context // block_size) * block_size, batch, dtype)
    full = replace(config, layer_types=("full_attention",) * config.num_hidden_layers, sliding_window=None)
    assert allocated == bytes_allocated(full, context, batch, dtype, block_size)


@given(models, batches, schemes, st.integers(0, 10**9))
def test_max_context_is_the_longest_that_fits(config, batch, dtype, budget):
    longest = max_context(config, budget, batch, dtype)
    if longest is None:
        assert bytes_ideal(config, 10**9, batch, dtype) <= budget
    else:
        assert longest == 0 or bytes_ideal(config, longest, batch, dtype) <= budget
        assert bytes_ideal(config, longest + 1, batch, dtype) > budget


@given(contexts, batches, schemes)
def test_a_budget_that_is_just_enough_is_enough(context, batch, dtype):
    config = resolve("llama-3-8b")
    budget = bytes_ideal(config, context, batch, dtype)
    assert max_context(config, budget, batch, dtype) == context and max_batch(config, budget, context, dtype) == batch
    assert max_context(config, budget - 1, batch, dtype) == context - 1


@given(models, contexts, schemes, st.integers(-5, 10**9))
def test_max_batch_is_the_largest_that_fits(config, context, dtype, budget):
    most = max_batch(config, budget, context, dtype)
    assert most == 0 or bytes_ideal(config, context, most, dtype) <= budget
    assert bytes_ideal(config, context, most + 1, dtype) > budget


@given(models, contexts, batches, schemes)
def test_terms_add_up_and_their_factors_multiply(config, context, batch, dtype):
    summands = terms(config, context, batch, dtype)
    assert sum(term["bytes"] for term in summands) == bytes_ideal(config, context, batch, dtype)
    for term in summands:
        product = 1.0
        for factor in term["factors"].values():
            product *= factor
        assert product == pytest.approx(term["bytes"], rel=1e-9)


@given(models, contexts)
def test_fewer_bits_need_fewer_bytes(config, context):
    sizes = [
        bytes_ideal(config, context, 1, dtype) for dtype in ("fp32", "bf16", "q8_0", "fp8", "int4-g128", "int4", "int2")
    ]
    if config.head_dim >= 64:  # a narrow row pays for a whole group
        assert sizes == sorted(sizes, reverse=True)


def test_seven_factors():
    (term,) = terms(resolve("llama-3-70b"), 131_072)
    assert list(term["factors"].values()) == [2, 80, 8, 128, 2, 131_072, 1]
    (term,) = terms(resolve("deepseek-v3"), 1)
    assert list(term["factors"].values()) == [61, 576, 2, 1, 1]  # no factor 2: keys and values are one vector


@pytest.mark.parametrize("wrong", [{"context": 0}, {"context": -1}, {"batch": 0}, {"context": 1.5}, {"context": True}])
def test_counts_must_be_positive_whole_numbers(wrong):
    arguments = {"context": 8, "batch": 1} | wrong
    with pytest.raises(SizingError, match="at least 1"):
        bytes_ideal(resolve("llama-3-8b"), **arguments)
    with pytest.raises(SizingError, match="block_size"):
        bytes_allocated(resolve("llama-3-8b"), 8, block_size=0)


@pytest.mark.parametrize("budget", [1.5e9 + 0.5, float("nan"), float("inf"), True, "1"])
def test_a_budget_is_a_whole_number_of_bytes(budget):
    for most in (lambda c: max_batch(c, budget, 8), lambda c: max_context(c, budget)):
        with pytest.raises(SizingError, match="budget_bytes must be a whole number of bytes"):
            most(resolve("llama-3-8b"))


def test_a_whole_number_may_be_written_as_a_float():
    config = resolve("llama-3-8b")
    assert max_batch(config, 80e9, 4096) == max_batch(config, 80 * 10**9, 4096) == 149
    assert type(max_batch(config, 80e9, 4096)) is int
    assert max_context(config, 80e9) == max_context(config, 80 * 10**9)


def test_a_budget_beyond_all_counting_is_still_answered():
    config = resolve("llama-3-8b")
    assert max_context(config, 10**30) == LARGEST
    assert max_context(config, LARGEST * 131_072) == LARGEST
    assert max_context(config, LARGEST * 131_072 - 1) == LARGEST - 1


def test_weights():
    assert weights_bytes(resolve("llama-3-70b")) == 141_107_412_992
    assert weights_bytes(resolve("gpt-oss-20b")) == 13_761_264_768  # mixed: not parameters x 2
    with pytest.raises(SizingError, match="parameters is not known"):
        weights_bytes(tiny())
