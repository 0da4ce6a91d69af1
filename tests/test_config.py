"""Configs as transformers 4 and 5 write them, and files and names that lead to one."""

import json

import pytest

from configs import GEMMA_3, LLAMA, read
from kvlab.config import ConfigError, ModelConfig, resolve
from kvlab.configs import families, hub


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
    one = {**mpt, "attn_config": {"attn_type": "multiquery_attention"}}
    assert ModelConfig.from_dict(one).num_key_value_heads == 1


def test_one_kv_head_where_the_config_says_multi_query():
    for other in ({"model_type": "RefinedWebModel", "multi_query": True}, {"attention_head_type": "multiquery"}):
        assert read(num_key_value_heads="absent", **other).num_key_value_heads == 1
    assert read(multi_query=True).num_key_value_heads == 8  # Falcon 40B says both


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
    minicpm3 = read(model_type="minicpm3", kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32)
    assert minicpm3.v_head_dim == 128  # its class derives it: hidden / heads
    assert not read(model_type="deepseek_v2", kv_lora_rank=None).is_mla  # DeepSeek-VL2's small ones
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


@pytest.mark.parametrize("kind", sorted(families.KEY_VALUE_HEADS))
def test_class_defaults_are_those_of_transformers(kind):
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"{kind} is a nested type, without a name of its own")
    theirs = CONFIG_MAPPING[kind]()
    assert families.KEY_VALUE_HEADS[kind] == theirs.num_key_value_heads
    assert families.HEAD_DIM.get(kind) in (None, getattr(theirs, "head_dim", None))


def test_directories_and_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 123)
    c = resolve(str(tmp_path))
    assert c == resolve(str(tmp_path / "config.json")) or c.num_parameters
    assert c.hub_id == str(tmp_path) and c.weights_bytes == 123
    index = {"metadata": {"total_size": 456}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve(str(tmp_path)).weights_bytes == 456


def test_a_byte_order_mark_is_no_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert resolve(str(tmp_path)).num_hidden_layers == 32


@pytest.mark.parametrize("total", [float("inf"), "x", None])
def test_an_index_with_a_broken_total_is_passed_over(tmp_path, total):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 123)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}}))
    assert resolve(str(tmp_path)).weights_bytes == 123


@pytest.mark.parametrize(
    "content", ["{", "[1, 2]", "", '"text"', "\xff\xfe", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
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
