"""Configs that are refused, and models that can be sized but not run: each says why in one line."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import LLAMA, read
from kvlab.config import ConfigError


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"layer_types": ["linear_attention"] * 31 + ["full_attention"]}, "linear_attention"),
        ({"layer_types": ["mamba"] * 31 + ["attention"]}, "mamba"),
        ({"layer_types": ["novel_attention"] * 32}, "novel_attention"),
        ({"model_type": "mamba2"}, "mamba2"),
        ({"model_type": "rwkv"}, "rwkv"),
        ({"model_type": "qwen3_next"}, "qwen3_next"),
        ({"index_topk": 2048, "index_head_dim": 128}, "index_topk"),
        ({"model_type": "deepseek_v32"}, "deepseek_v32"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "t5"}, "t5"),
        ({"cross_attention_layers": [3, 8]}, "cross_attention_layers"),
        ({"attn_type_list": [0, 0, 1]}, "attn_type_list"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"num_key_value_heads": [8, 4]}, "num_key_value_heads"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads"),
        ({"model_type": "novel", "sliding_window": 64}, "sliding_window 64"),
        ({"model_type": "rwkv7"}, "rwkv7"),
        ({"model_type": "gated_deltanet"}, "gated_deltanet"),
        ({"model_type": "novel_linear"}, "novel_linear"),
        ({"mixer_types": ["lightning", "full"]}, "mixer_types"),
        ({"interleaved_sliding_window": [512, None]}, "interleaved_sliding_window"),
        ({"model_type": "novel", "window_size": 512}, "window_size 512"),
        ({"model_type": "nomic_bert"}, "nomic_bert"),
        ({"model_type": "novel", "architectures": ["NovelForMaskedLM"]}, "NovelForMaskedLM"),
        ({"model_type": "novel", "patch_size": 14, "image_size": 224}, "patch_size 14"),
        ({"model_type": "gemma4_text"}, "gemma4_text"),
    ],
)
def test_unknown_layouts_are_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match="does not know this layout") as error:
        read(**changes)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_fields_that_say_no_are_not_refused():
    read(num_kv_shared_layers=0, is_encoder_decoder=False, index_topk=None)
    read(model_type="novel")  # plain fields: an unknown model of a known layout can be sized
    assert read(model_type="novel").cannot_run
    read(model_type="minimax_m2", attn_type_list=[1] * 32)  # every layer is softmax attention


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_attention_heads": "absent"}, "lacks num_attention_heads"),
        ({"num_hidden_layers": 10**10}, "num_hidden_layers 10000000000 is more than"),
        ({"head_dim": 10**400}, "head_dim must be a positive whole number, not 1000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": "no"}, "use_sliding_window must be true"),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": "4"},
            "max_window_layers must be a whole number, not '4'",
        ),
        ({"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layers": 5}, "no_rope_layers must list 32"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layer_interval": "4"}, "interval"),
        ({"model_type": "deepseek_v3"}, "lacks kv_lora_rank"),
        ({"model_type": "gpt_oss"}, "lacks sliding_window"),
        (
            {
                "text_config": {
                    "model_type": "novel",
                    "hidden_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                }
            },
            "the nested config lacks num_key_value_heads",
        ),
        ({"num_hidden_layers": "absent"}, "lacks num_hidden_layers"),
        ({"hidden_size": "absent", "head_dim": 128}, "lacks hidden_size"),
        ({"num_key_value_heads": 7}, "32 is not a multiple of num_key_value_heads 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, not 0"),
        ({"num_key_value_heads": -8}, "num_key_value_heads must be a positive whole number, not -8"),
        ({"head_dim": 12.5}, "head_dim must be a positive whole number, not 12.5"),
        ({"hidden_size": "4096"}, "hidden_size must be a positive whole number, not '4096'"),
        ({"vocab_size": 0}, "vocab_size must be a positive whole number, not 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        (
            {"hidden_size": 100, "num_attention_heads": 3, "num_key_value_heads": 3},
            "100 is not a multiple of",
        ),
        ({"layer_types": ["full_attention"] * 31}, "lists 31 layers, num_hidden_layers says 32"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is None but 32 layers"),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window must be a positive whole number, not 0",
        ),
        ({"rope_theta": 0}, "rope_theta must be a positive number, not 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object or null"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"eos_token_id": "<eos>"}, "eos_token_id"),
        ({"model_type": 3}, "model_type must be a string"),
    ],
)
def test_configs_that_lack_or_contradict_are_refused(changes, words):
    with pytest.raises(ConfigError) as error:
        read(**changes)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_config_built_by_hand_is_checked_too():
    c = read()
    with pytest.raises(ConfigError, match="num_key_value_heads 5"):
        replace(c, num_key_value_heads=5)
    with pytest.raises(ConfigError, match="dtype 'bf17'"):
        replace(c, dtype="bf17")
    with pytest.raises(ConfigError, match="belong together"):
        replace(c, kv_lora_rank=16)
    with pytest.raises(ConfigError, match="lists 3 layers, num_hidden_layers says 32"):
        replace(c, layer_types=("full_attention",) * 3)
    with pytest.raises(ConfigError, match="'linear_attention' is not known"):
        replace(c, layer_types=("linear_attention",) * 32)
    assert replace(c, layer_types=(), sliding_window=8).layer_types == ("sliding_attention",) * 32


@given(
    field=st.sampled_from(sorted(LLAMA)),
    value=st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()),
)
def test_any_value_in_any_field_is_read_or_refused_in_one_line(field, value):
    try:
        read(**{field: value})
    except ConfigError as error:
        assert "\n" not in str(error).replace(str(value), "")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, "experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "rotated"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"attention_bias": True}, "bias"),
        ({"mlp_bias": True}, "MLP"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        (
            {
                "model_type": "deepseek_v3",
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "rope_interleave": False,
            },
            "halves",
        ),
        ({"vocab_size": "absent"}, "vocab_size"),
        ({"model_type": "phi3"}, "fused"),
    ],
)
def test_what_can_be_sized_but_not_run_says_why(changes, words):
    assert read().cannot_run is None
    assert words in read(**changes).cannot_run


def test_whatever_a_file_holds_the_refusal_is_one_printable_line_with_an_end():
    for bad in ("\n evil \x1b[31m" * 9, "x" * 5000, "\ud800"):
        for field in ("num_hidden_layers", "model_type", "mamba_d_state", "layer_types", "dtype", "index_topk"):
            try:
                read(**{field: bad}, sliding_window=8)
            except ConfigError as error:
                assert str(error).isprintable() and len(str(error)) <= 600


def test_what_the_file_does_not_say_is_said_aloud():
    assert any("num_key_value_heads" in note for note in read(model_type="novel", num_key_value_heads="absent").notes)
    assert not read(num_key_value_heads="absent").notes  # a Llama's class says: as many as query heads
