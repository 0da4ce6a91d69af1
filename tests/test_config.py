"""Configs: presets as published, files as transformers writes them, and what is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import families, hub
from kvlab.config import ConfigError, ModelConfig, preset_names, resolve

LLAMA = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "torch_dtype": "bfloat16", "eos_token_id": [1, 2],
}  # fmt: skip
GEMMA_3 = {  # as on the hub: a difference from class defaults, head_dim (256, not 3840/16) among them
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 3840, "intermediate_size": 15_360, "model_type": "gemma3_text", "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # fmt: skip


def read(**changes) -> ModelConfig:
    raw = {**LLAMA, **changes}
    return ModelConfig.from_dict({k: v for k, v in raw.items() if v != "absent"}, name="m")


# --- presets ---------------------------------------------------------------------------------------------------


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
        assert (c.cannot_run is None) == (c.model_type in families.RUNNABLE), name
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


# --- reading a config.json --------------------------------------------------------------------------------------


def test_head_dim_is_read_where_it_is_given_and_derived_where_it_is_not():
    assert read(head_dim=96).head_dim == 96
    assert read(head_dim=None).head_dim == read(head_dim="absent").head_dim == 128
    qwen = read(model_type="qwen3", hidden_size=5120, num_attention_heads=64, head_dim="absent")
    assert qwen.head_dim == 128  # the class default, not 5120 / 64 = 80


def test_key_value_heads_default_to_the_query_heads_or_to_the_class():
    assert read(num_key_value_heads="absent").num_key_value_heads == 32
    assert read(num_key_value_heads=None).num_key_value_heads == 32
    assert read(model_type="mistral", num_key_value_heads="absent").num_key_value_heads == 8
    assert read(model_type="mistral", num_key_value_heads=None).num_key_value_heads == 32


def test_rope_as_transformers_4_and_5_write_it():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = read(rope_scaling={**scaling, "rope_type": "llama3"})
    older = read(rope_scaling={**scaling, "type": "llama3"})
    new = read(rope_theta="absent", rope_parameters={**scaling, "rope_type": "llama3", "rope_theta": 500_000.0})
    assert old.rope_theta == new.rope_theta == 500_000.0
    assert old.rope_scaling == older.rope_scaling == new.rope_scaling == {**scaling, "rope_type": "llama3"}
    plain = read(rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert (plain.rope_theta, plain.rope_scaling) == (7.0, None)
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 9.0},
        "sliding_attention": {"rope_theta": 3.0},
    }
    assert read(rope_theta="absent", rope_parameters=both).rope_theta == 9.0
    with pytest.raises(ConfigError, match=r"500000.0 and in rope_parameters 7.0"):
        read(rope_parameters={"rope_type": "default", "rope_theta": 7.0})


def test_dtype_under_both_names_and_a_note_without_one():
    assert read(torch_dtype="float16").dtype == "fp16"
    assert read(torch_dtype="absent", dtype="float32").dtype == "fp32"
    silent = read(torch_dtype="absent")
    assert silent.dtype == "bf16" and "names no dtype" in silent.notes[0]
    with pytest.raises(ConfigError, match="int7"):
        read(torch_dtype="int7")


def test_biases_norms_and_token_ids():
    assert read(model_type="qwen2").attention_bias and not read().attention_bias
    assert read(model_type="qwen3").qk_norm and not read().qk_norm
    assert read().eos_token_ids == (1, 2) and read(eos_token_id=7).eos_token_ids == (7,)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_nested_text_configs():
    c = ModelConfig.from_dict(GEMMA_3, name="gemma")
    assert (c.head_dim, c.num_key_value_heads, c.vocab_size) == (256, 8, 262_208)
    assert c.layer_types == resolve("gemma-3-12b").layer_types and c.sliding_window == 1024
    assert c.dtype == "bf16" and c.eos_token_ids == (1, 106) and c.cannot_run
    llava = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32_064, "torch_dtype": "float16"},
    }
    c = ModelConfig.from_dict(llava)
    assert (c.num_hidden_layers, c.hidden_size, c.vocab_size, c.dtype) == (32, 4096, 32_064, "fp16")


def test_older_names():
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50_257,
    }
    c = ModelConfig.from_dict(gpt2)
    assert (c.hidden_size, c.num_hidden_layers, c.num_key_value_heads, c.head_dim) == (768, 12, 12, 64)
    falcon = {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
              "num_kv_heads": 8, "new_decoder_architecture": True, "multi_query": True}  # fmt: skip
    assert ModelConfig.from_dict(falcon).num_key_value_heads == 8
    assert ModelConfig.from_dict({**falcon, "new_decoder_architecture": False}).num_key_value_heads == 1
    mha = {**falcon, "new_decoder_architecture": False, "multi_query": False}
    assert ModelConfig.from_dict(mha).num_key_value_heads == 128
    mpt = {
        "model_type": "mpt",
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "attn_config": {"kv_n_heads": 8},
    }
    assert ModelConfig.from_dict(mpt).num_key_value_heads == 8


def sliding(**changes) -> list[int]:
    c = read(**changes)
    return [i for i, kind in enumerate(c.layer_types) if kind == "sliding_attention"]


def test_which_layers_slide():
    six = {"num_hidden_layers": 6, "sliding_window": 512}
    assert sliding(model_type="mistral", **six) == [0, 1, 2, 3, 4, 5]
    assert sliding(model_type="mistral", num_hidden_layers=6, sliding_window=None) == []
    assert sliding(model_type="qwen2", use_sliding_window=False, max_window_layers=4, **six) == []
    assert sliding(model_type="qwen2", use_sliding_window=True, max_window_layers=4, **six) == [4, 5]
    assert sliding(model_type="gemma2", **six) == [0, 2, 4]
    assert sliding(model_type="gpt_oss", **six) == [0, 2, 4]
    assert sliding(model_type="gemma3_text", **six) == [0, 1, 2, 3, 4]
    assert sliding(model_type="gemma3_text", sliding_window_pattern=3, **six) == [0, 1, 3, 4]
    assert sliding(model_type="cohere2", **six) == [0, 1, 2, 4, 5]
    listed = ["full_attention"] * 5 + ["sliding_attention"]
    assert sliding(model_type="anything", layer_types=listed, **six) == [5]
    assert read(model_type="qwen2", use_sliding_window=False, sliding_window=512).sliding_window is None


def test_llama_4_attends_in_chunks():
    c = read(model_type="llama4_text", num_hidden_layers=8, attention_chunk_size=8192)
    chunked = [i for i, kind in enumerate(c.layer_types) if kind == "chunked_attention"]
    assert chunked == [0, 1, 2, 4, 5, 6] and c.attention_chunk_size == 8192 and c.cannot_run


def test_mla_fields():
    c = resolve("deepseek-v2")
    assert (c.kv_lora_rank, c.qk_rope_head_dim, c.head_dim, c.v_head_dim) == (512, 64, 192, 128)
    assert c.is_mla and not resolve("llama-3-8b").is_mla
    with pytest.raises(ConfigError, match="qk_rope_head_dim"):
        read(kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128)


@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss",
     "cohere2", "llama4_text", "phi3", "olmo3", "starcoder2", "gpt2", "falcon", "gpt_bigcode", "deepseek_v3"],
)  # fmt: skip
def test_layers_and_heads_are_those_of_transformers(kind):
    """Both read the same file: as transformers writes it, and without its layer_types, as older versions did."""
    from transformers import AutoConfig
    from transformers.cache_utils import get_layer_types_and_kwargs

    theirs = AutoConfig.for_model(kind)
    raw = json.loads(theirs.to_json_string(use_diff=False))
    types, _ = get_layer_types_and_kwargs(theirs)
    for text in (raw, {k: v for k, v in raw.items() if k != "layer_types"}):
        ours = ModelConfig.from_dict(text, name=kind)
        assert list(ours.layer_types) == types
        assert ours.num_key_value_heads == getattr(theirs, "num_key_value_heads", ours.num_key_value_heads)
        if not ours.is_mla:
            width = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
            assert ours.head_dim == width


# --- refusals ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_attention_heads": "absent"}, "lacks num_attention_heads"),
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


# --- which models run --------------------------------------------------------------------------------------------


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
        ({"vocab_size": "absent"}, "vocab_size"),
        ({"model_type": "phi3"}, "fused"),
    ],
)
def test_what_can_be_sized_but_not_run_says_why(changes, words):
    assert read().cannot_run is None
    assert words in read(**changes).cannot_run


# --- files and names ---------------------------------------------------------------------------------------------


def test_directories_and_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 123)
    c = resolve(str(tmp_path))
    assert c == resolve(str(tmp_path / "config.json")) or c.num_parameters
    assert c.hub_id == str(tmp_path) and c.weights_bytes == 123
    index = {"metadata": {"total_size": 456}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve(str(tmp_path)).weights_bytes == 456


@pytest.mark.parametrize("content", ["{", "[1, 2]", "", '"text"', "\xff\xfe", "[" * 100_000])
def test_broken_files(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError) as error:
        resolve(str(tmp_path))
    assert "\n" not in str(error.value)


def test_unknown_names_suggest_the_closest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean llama-3-8b"):
        resolve("lama-3-8b")
    with pytest.raises(ConfigError, match="kvlab models"):
        resolve("zzzz")
    with pytest.raises(ConfigError, match="no such file"):
        resolve("./nothing/config.json")
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(str(tmp_path))  # a directory without one


def test_a_hub_id_without_network_is_one_clear_line(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "is_reachable", lambda endpoint: False)
    with pytest.raises(ConfigError, match=r"nobody/nothing: not a preset.*connect") as error:
        resolve("nobody/nothing")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="not a hub id"):
        resolve("no..body/nothing")
