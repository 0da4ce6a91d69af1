"""Reads a Hugging Face config.json (as transformers 4.x and 5.x write it) into the fields of `ModelConfig`.

What the file does not say is taken from the class it names (`families`); a layout whose cache sizing does not
know is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.configs import families
from kvlab.configs.hf_layout import ConfigError, count, layer_types, refuse_unknown_layouts, short, unknown

ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length"),
    "head_dim": ("kv_channels",),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
}
DTYPES = {
    "float32": "fp32", "fp32": "fp32", "float": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16",
    "fp16": "fp16", "half": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
NESTED = ("text_config", "language_config", "llm_config")
SHARED_WITH_NESTED = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id",
                      "is_encoder_decoder", "quantization_config")  # fmt: skip
FLAGS = ("use_sliding_window", "tie_word_embeddings", "attention_bias", "mlp_bias", "multi_query",
         "new_decoder_architecture", "multi_query_attention", "is_encoder_decoder", "rope_interleave")  # fmt: skip


def read(raw: Mapping, name: str) -> dict:
    """The keyword arguments of `ModelConfig` that `raw` describes (without name and source).

    Raises ConfigError naming the field, the value and the way out.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name}: the config must be a JSON object, not {type(raw).__name__}")
    text = with_plain_names(decoder_section(raw, name), name)
    for flag in FLAGS:
        if text.get(flag) not in (None, True, False):  # "false" is true in Python
            raise ConfigError(f"{name}: {flag} must be true or false, not {short(repr(text[flag]))}: mend the config")
    refuse_unknown_layouts(text, name)
    if says_nothing_of_kv_heads(text) and any(isinstance(raw.get(k), Mapping) for k in NESTED):
        raise ConfigError(f"{name}: the nested config lacks num_key_value_heads, whose default in a "
                          f"{short(text['model_type'])!r} model is not known here: write it there")  # fmt: skip
    types = layer_types(text, name)
    fields = shape(text, name) | positions(text, name)
    fields["layer_types"] = types
    fields["sliding_window"] = text.get("sliding_window") if "sliding_attention" in types else None
    fields["attention_chunk_size"] = text.get("attention_chunk_size") if "chunked_attention" in types else None
    return fields | tokens_and_dtype(text, name) | experts(text)


def decoder_section(raw: Mapping, name: str) -> dict:
    """The part of a config that describes the text decoder, with what it shares with the whole."""
    if isinstance(raw.get("thinker_config"), Mapping):
        raw = raw["thinker_config"]
    key = next((k for k in NESTED if isinstance(raw.get(k), Mapping)), None)
    if key is None:
        return {"model_type": "", **raw}
    if isinstance(raw[key].get("model_type", ""), str) and raw[key].get("model_type"):
        model_type = raw[key]["model_type"]
    else:
        model_type = "llama" if raw.get("model_type") == "llava" else raw.get("model_type", "")
    shared = {k: raw[k] for k in SHARED_WITH_NESTED if k in raw}
    stated = with_plain_names(raw[key] | {"model_type": model_type}, name)
    return shared | families.NESTED_DEFAULTS.get(model_type, {}) | stated


def says_nothing_of_kv_heads(text: Mapping) -> bool:
    """Whether neither the file nor the class it names tells how many heads keys and values have."""
    told = text.get("num_key_value_heads") is not None or text.get("kv_lora_rank") is not None
    own = {**families.KEY_VALUE_HEADS, **families.AS_MANY_AS_QUERY_HEADS, **families.REFUSED_TYPES}
    return not (told or text.get("multi_query") or text["model_type"] in own)


def with_plain_names(text: Mapping, name: str) -> dict:
    """The same config under the names that Llama's config uses (GPT-2 says n_layer, MPT d_model, ...)."""
    plain = dict(text)
    if not isinstance(plain.get("model_type", ""), str):
        raise ConfigError(f"{name}: model_type must be a string, not {plain['model_type']!r}")
    for field, others in ALIASES.items():
        if plain.get(field) is None:
            found = next((plain[o] for o in others if plain.get(o) is not None), None)
            if found is not None:
                plain[field] = found
    attention = plain.get("attn_config")
    if isinstance(attention, Mapping) and attention.get("kv_n_heads"):  # MPT, DBRX
        plain["num_key_value_heads"] = attention["kv_n_heads"]
    elif isinstance(attention, Mapping) and attention.get("attn_type") == "multiquery_attention":  # MPT
        plain["num_key_value_heads"] = 1
    return plain


def shape(text: Mapping, name: str) -> dict:
    """Layers, heads and widths; the head's width is read where the config has it, else hidden/heads."""
    missing = [f for f in ("num_hidden_layers", "num_attention_heads", "hidden_size") if text.get(f) is None]
    if missing:
        raise ConfigError(f"{name}: the config lacks {', '.join(missing)}: give a decoder's full config.json")
    heads, hidden = count(text, "num_attention_heads", name), count(text, "hidden_size", name)
    fields = {f: text.get(f) for f in ("vocab_size", "intermediate_size", "max_position_embeddings")}
    fields |= {
        "model_type": text["model_type"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": count(text, "num_hidden_layers", name),
        "num_key_value_heads": _key_value_heads(text, heads, name),
    }
    ranks = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    if text.get("kv_lora_rank") is not None:
        fields |= {rank: text.get(rank) for rank in ranks}
        if text["model_type"] == "minicpm3" and text.get("v_head_dim") is None:
            fields["v_head_dim"] = hidden // heads  # its class derives it
    elif "kv_lora_rank" not in text and text["model_type"] in families.LATENT:
        raise ConfigError(f"{name}: a {text['model_type']!r} config lacks kv_lora_rank: give the full config.json")
    return fields | {"head_dim": _head_dim(text, hidden, heads, name)}


def _head_dim(text: Mapping, hidden: int, heads: int, name: str) -> int:
    if text.get("kv_lora_rank") is not None:  # MLA: an expanded query or key is [nope | rope]
        return count(text, "qk_nope_head_dim", name) + count(text, "qk_rope_head_dim", name)
    if text.get("head_dim") is not None:
        return count(text, "head_dim", name)
    if text["model_type"] in families.HEAD_DIM:
        return families.HEAD_DIM[text["model_type"]]
    if hidden % heads:
        raise ConfigError(
            f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no "
            "head_dim: mend one of them"
        )
    return hidden // heads


def _key_value_heads(text: Mapping, heads: int, name: str) -> int:
    model_type, stated = text["model_type"], text.get("num_key_value_heads")
    if isinstance(stated, (list, tuple)):
        raise unknown(name, f"num_key_value_heads {short(stated)}", "heads differ from layer to layer")
    if model_type == "falcon" and not text.get("new_decoder_architecture"):
        return 1 if text.get("multi_query", True) else heads
    if stated is None and (text.get("multi_query") or text.get("attention_head_type") == "multiquery"):
        return 1
    if model_type == "gpt_bigcode" and stated is None:
        return 1 if text.get("multi_query", True) else heads
    if model_type == "chatglm" and not text.get("multi_query_attention"):
        return heads
    if stated is not None:
        return count(text, "num_key_value_heads", name)
    if "num_key_value_heads" not in text and model_type in families.KEY_VALUE_HEADS and model_type != "falcon":
        return families.KEY_VALUE_HEADS[model_type]
    return heads


def positions(text: Mapping, name: str) -> dict:
    """RoPE as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters, also per layer type)."""
    for field in ("rope_parameters", "rope_scaling"):
        if text.get(field) is not None and not isinstance(text[field], Mapping):
            raise ConfigError(f"{name}: {field} must be an object or null, not {short(text[field])!r}")
    rope = text.get("rope_parameters")
    per_type = isinstance(rope, Mapping) and isinstance(rope.get("full_attention"), Mapping)
    if per_type:
        rope = rope["full_attention"]
    scaling = dict(rope or text.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) if rope else None
    if theta is not None and text.get("rope_theta") not in (None, theta):
        raise ConfigError(f"{name}: rope_theta is {text['rope_theta']} and in rope_parameters {theta}: keep one")
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    partial = scaling.pop("partial_rotary_factor", text.get("partial_rotary_factor") or text.get("rotary_pct"))
    return {
        "rope_theta": next((t for t in (theta, text.get("rope_theta")) if t is not None), 10_000.0),
        "rope_scaling": None
        if kind == "default" and not scaling.get("mrope_section")
        else {"rope_type": kind} | scaling,
        "partial_rotary_factor": 1.0 if partial is None else partial,
        "rms_norm_eps": 1e-6 if text.get("rms_norm_eps") is None else text["rms_norm_eps"],
    }


def tokens_and_dtype(text: Mapping, name: str) -> dict:
    """Token ids, biases, activation and the dtype of the weights."""
    model_type, eos = text["model_type"], text.get("eos_token_id")
    stated = text.get("dtype") if text.get("dtype") is not None else text.get("torch_dtype")
    dtype = DTYPES.get(str(stated).removeprefix("torch."), "bf16")
    if stated is not None and str(stated).removeprefix("torch.") not in (*DTYPES, "auto"):
        raise ConfigError(f"{name}: dtype {stated!r} is not known here: one of {', '.join(DTYPES)}")
    note = () if stated not in (None, "auto") else ("the config names no dtype: bf16 (2 bytes) is taken",)
    if says_nothing_of_kv_heads(text):
        note += ("the config names no num_key_value_heads: as many as query heads are taken",)
    tied = text.get("tie_word_embeddings")
    return {
        "bos_token_id": text.get("bos_token_id") if type(text.get("bos_token_id")) is int else None,
        "eos_token_ids": tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        "dtype": dtype,
        "tie_word_embeddings": model_type in families.TIED_BY_DEFAULT if tied is None else bool(tied),
        "attention_bias": model_type == "qwen2" or bool(text.get("attention_bias")),
        "qk_norm": model_type.startswith("qwen3"),
        "hidden_act": text.get("hidden_activation")
        or text.get("hidden_act")
        or text.get("activation_function")
        or "silu",
        "notes": note,
    }


def experts(text: Mapping) -> dict:
    """Number of routed experts and how many a token uses; both None in a dense model."""
    dense = text.get("first_k_dense_replace")
    if type(dense) is int and dense >= text["num_hidden_layers"]:
        return {}  # DeepSeek: this many layers are dense, here all of them
    total = next((text[f] for f in ("num_local_experts", "n_routed_experts", "num_experts") if text.get(f)), None)
    used = text.get("num_experts_per_tok") or text.get("experts_per_token")
    return {"num_experts": total, "num_experts_per_tok": used} if total and used else {}
