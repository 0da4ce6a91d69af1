"""Presets: the shapes and parameter counts that were published."""

import pytest

from kvlab.config import preset_names, resolve
from kvlab.configs import families


@pytest.mark.parametrize(
    "name, layers, heads, kv_heads, head_dim, parameters",
    [
        ("llama-2-7b", 32, 32, 32, 128, 6_738_415_616),
        ("llama-2-13b", 40, 40, 40, 128, 13_015_864_320),
        ("llama-3-8b", 32, 32, 8, 128, 8_030_261_248),
        ("llama-3-70b", 80, 64, 8, 128, 70_553_706_496),
        ("llama-3.1-405b", 126, 128, 8, 128, 405_853_388_800),
        ("mistral-7b", 32, 32, 8, 128, 7_241_732_096),
        ("qwen2.5-0.5b", 24, 14, 2, 64, 494_032_768),
        ("qwen2.5-7b", 28, 28, 4, 128, 7_615_616_512),
        ("qwen3-0.6b", 28, 16, 8, 128, 596_049_920),
        ("qwen3-32b", 64, 64, 8, 128, 32_762_123_264),
        ("smollm2-135m", 30, 9, 3, 64, 134_515_008),
        ("smollm2-360m", 32, 15, 5, 64, 361_821_120),
        ("gemma-3-12b", 48, 16, 8, 256, 11_766_034_176),
        ("gpt-oss-20b", 24, 64, 8, 64, 20_914_757_184),
        ("gpt-oss-120b", 36, 64, 8, 64, 116_829_156_672),
        ("deepseek-67b", 95, 64, 8, 128, 67_425_001_472),
        ("opt-13b", 40, 40, 40, 128, 12_853_473_280),
        ("falcon-7b", 32, 71, 1, 64, 6_921_720_704),
    ],
)
def test_presets_are_the_published_shapes(name, layers, heads, kv_heads, head_dim, parameters):
    c = resolve(name)
    assert (c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (
        layers, heads, kv_heads, head_dim,
    )  # fmt: skip
    assert c.num_parameters == parameters
    assert c.hub_id in c.source


def test_every_preset_has_a_source_a_size_and_says_whether_it_runs():
    for name in preset_names():
        c = resolve(name)
        assert c.source.startswith("https://huggingface.co/") and c.num_parameters and not c.notes
        assert (c.cannot_run is None) == (c.model_type in families.RUNNABLE and not c.num_experts), name
        assert resolve(name.upper()) == c


def test_the_course_model_is_smollm2_135m_instruct():
    c = resolve("smollm2-135m")
    assert (c.hidden_size, c.intermediate_size, c.vocab_size) == (576, 1536, 49_152)
    assert (c.rope_theta, c.max_position_embeddings, c.rms_norm_eps) == (100_000.0, 8192, 1e-5)
    assert c.tie_word_embeddings and c.dtype == "bf16" and c.bos_token_id == 1 and c.eos_token_ids == (2,)


def test_mixtures_of_experts_count_all_and_active_parameters():
    """Counted from the shapes: experts, router, attention, norms, embeddings."""

    def moe(layers, vocab, hidden, heads, kv, dim, inner, experts, used, qk=False):
        attention = hidden * dim * 2 * (heads + kv) + 2 * hidden + hidden * experts + 2 * dim * qk
        rest, expert = 2 * vocab * hidden + hidden, 3 * hidden * inner
        return tuple(layers * (attention + n * expert) + rest for n in (experts, used))

    def mla(layers, vocab, hidden, inner, moe_inner, experts, used, shared, dense, bias):
        attention = hidden * 1536 + 1536 + 1536 * 128 * 192 + hidden * 576 + 512 + 512 * 128 * 256
        attention += 128 * 128 * hidden + 2 * hidden
        rest = 2 * vocab * hidden + hidden + dense * 3 * hidden * inner + layers * attention
        gate, expert = experts * hidden + bias, 3 * hidden * moe_inner
        return tuple(rest + (layers - dense) * ((n + shared) * expert + gate) for n in (experts, used))

    def both(name):
        c = resolve(name)
        return c.num_parameters, c.num_active_parameters

    assert both("mixtral-8x7b") == moe(32, 32_000, 4096, 32, 8, 128, 14_336, 8, 2)
    assert both("qwen3-30b-a3b") == moe(48, 151_936, 2048, 32, 4, 128, 768, 128, 8, qk=True)
    assert both("deepseek-v2") == mla(60, 102_400, 5120, 12_288, 1536, 160, 6, 2, 1, 0)
    assert both("deepseek-v3") == mla(61, 129_280, 7168, 18_432, 2048, 256, 8, 1, 3, 256)


def test_gpt_oss_checkpoints_store_experts_in_17_bytes_per_32_weights():
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        c = resolve(name)
        in_fp4 = c.num_hidden_layers * c.num_experts * 3 * 2880 * 2880
        assert c.weights_bytes == 2 * (c.num_parameters - in_fp4) + in_fp4 * 17 // 32
