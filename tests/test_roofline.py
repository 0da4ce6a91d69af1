"""The roofline's counts, by hand and against brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import resolve
from kvlab.hardware import lookup
from kvlab.roofline import attention_flops, linear_flops, pairs, phases, weights_read
from kvlab.sizing import SizingError, bytes_ideal, bytes_per_token, weights_bytes

H100 = lookup("h100")


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([None, 1, 3, 7, 100]), st.booleans())
def test_pairs_by_brute_force(context, new, most, chunked):
    new = min(new, context)
    seen = {
        (q, k)
        for q in range(context - new, context)
        for k in range(q + 1)
        if most is None or (k // most == q // most if chunked else k > q - most)
    }
    kind = "chunked_attention" if chunked and most else "full_attention"
    assert pairs(context, new, kind, most) == len(seen)


def test_llama_3_8b_by_hand():
    config = resolve("llama-3-8b")
    head, total = 128_256 * 4096, 8_030_261_248
    assert linear_flops(config, 1, 1) == 2 * (total - head)  # the untied input embedding is looked up
    assert linear_flops(config, 100, 1) == 2 * (total - 2 * head) * 100 + 2 * head
    assert attention_flops(config, 2048, 2048) == 2 * 32 * 256 * 32 * 2048 * 2049 // 2
    p = phases(config, H100, 2048)["decode"]
    assert p.weights_bytes == 2 * (total - head)
    assert p.cache_bytes == bytes_ideal(config, 2048) + bytes_per_token(config)
    assert p.bytes == p.weights_bytes + p.cache_bytes and p.intensity == p.flops / p.bytes
    assert p.memory_s == p.bytes / 3.35e12 and p.compute_s == p.flops / 989.4e12 and p.time_s == p.memory_s


def test_smollm2_reads_269_mb():
    assert weights_read(resolve("smollm2-135m"), 1) == 2 * 134_515_008  # tied: the embedding is the output head


def test_what_bounds_each_phase():
    config = resolve("llama-3-8b")
    p = phases(config, H100, 2048)
    assert p["prefill"].bound == "compute" and p["decode"].bound == "memory"
    slow = phases(config, H100, 2048, overhead_s=0.01)
    assert slow["decode"].bound == "overhead" and slow["decode"].time_s == 0.01
    assert slow["prefill"].bound == "compute" and slow["prefill"].time_s == p["prefill"].time_s


def test_a_batch_shares_the_weights():
    config = resolve("llama-3-8b")
    one, many = (phases(config, H100, 512, batch)["decode"] for batch in (1, 64))
    assert many.weights_bytes == one.weights_bytes and many.cache_bytes == 64 * one.cache_bytes
    assert many.flops == 64 * one.flops and many.time_s < 1.5 * one.time_s


def test_a_cache_in_fewer_bits_is_read_faster():
    config = resolve("llama-3-8b")
    wide, narrow = (phases(config, H100, 100_000, 8, dtype)["decode"] for dtype in ("bf16", "int4"))
    assert wide.cache_bytes == 4 * narrow.cache_bytes and wide.flops == narrow.flops


def test_windows_bound_the_attention():
    config = resolve("mistral-7b")
    near, far = (phases(config, H100, n)["decode"] for n in (4096, 32_768))
    assert near.flops == far.flops and near.bytes == far.bytes


def test_experts_compute_with_the_active_and_read_what_was_chosen():
    config = resolve("gpt-oss-20b")
    head = 201_088 * 2880
    assert linear_flops(config, 1, 1) == 2 * (config.num_active_parameters - head)
    few, many = weights_read(config, 1), weights_read(config, 10_000)
    assert many == weights_bytes(config) - 2 * head  # every expert is chosen
    one_expert = 24 * 3 * 2880 * 2880 * 17 / 32 + 24 * (2 * 2880 + 2880) * 2
    assert few == pytest.approx(many - 28 * one_expert, rel=0.01)  # 4 of 32


def test_mla_decodes_absorbed_and_prefills_expanded():
    config = resolve("deepseek-v3")
    assert attention_flops(config, 1000, 1) == 61 * 2 * 128 * (576 + 512) * 1000
    assert attention_flops(config, 1000, 1, "expanded") == 61 * 2 * 128 * (192 + 128) * 1000
    assert attention_flops(config, 10, 10) == 61 * 2 * 128 * (192 + 128) * 55
    latent, expanded = (phases(config, H100, 1000, mla_layout=m)["decode"] for m in ("latent", "expanded"))
    assert expanded.cache_bytes > 70 * latent.cache_bytes


def test_the_dtype_of_the_arithmetic_is_said():
    assert phases(resolve("llama-3-8b"), lookup("t4"), 8)["decode"].compute_dtype == "fp16"


@pytest.mark.parametrize("wrong", [{"prompt": 0}, {"batch": 0}, {"overhead_s": -1.0}])
def test_bad_input(wrong):
    with pytest.raises(SizingError):
        phases(resolve("llama-3-8b"), H100, **{"prompt": 8} | wrong)


def test_chunks_of_a_very_long_context_are_counted_by_formula():
    assert pairs(3 * 10**12, 3 * 10**12, "chunked_attention", 10**4) == 3 * 10**8 * (10**4 * (10**4 + 1) // 2)
