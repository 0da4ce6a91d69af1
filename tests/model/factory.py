"""Small random checkpoints, written by transformers itself, one per family that kvlab runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

TINY = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MLA = {
    "num_key_value_heads": 6, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "first_k_dense_replace": 3,  # every layer is dense: kvlab has no experts
    "head_dim": 8,
}  # fmt: skip
MLA_YARN = {**YARN, "factor": 8.0, "mscale": 0.707, "mscale_all_dim": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 6}),
    "llama-mqa": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama-llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-linear": (LlamaConfig, {"rope_parameters": LINEAR}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama-head-dim": (LlamaConfig, {"head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "qwen2-sliding": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "deepseek-v2": (DeepseekV2Config, {**MLA, "q_lora_rank": None}),
    "deepseek-v3": (DeepseekV3Config, {**MLA, "q_lora_rank": 16}),
    "deepseek-v2-yarn": (DeepseekV2Config, {**MLA, "q_lora_rank": 16, "rope_parameters": MLA_YARN}),
    "deepseek-v3-yarn": (DeepseekV3Config, {**MLA, "q_lora_rank": 16, "rope_parameters": MLA_YARN}),
}


def write_checkpoint(
    path: Path,
    family: str,
    *,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides,
) -> PreTrainedModel:
    """Write a random model of `family` (a key of FAMILIES) to `path` and return it, for comparing.

    `overrides` are fields of the Hugging Face config. Norm weights and biases are random too: ones and zeros,
    which transformers starts from, would hide a tensor that is read into the wrong place.
    """
    config_class, fields = FAMILIES[family]
    config = config_class(**{**TINY, **fields, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.normal_(centre, 0.3 if parameter.ndim == 1 else 0.2)
    model = model.to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)
    return model


def write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer.json without merges: 256 bytes, then <s> (256) and </s> (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(Path(path) / "tokenizer.json"))
    config = '{"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    (Path(path) / "tokenizer_config.json").write_text(config)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(path: Path, model: PreTrainedModel, kind: str = "F32", *, leave_out: str = "", **metadata) -> None:
    """Write a model as llama.cpp's converter does: matrices in `kind`, Llama's queries and keys interleaved.

    `metadata` adds keys with "__" for "." ("llama__rope__scaling__type"), None removes one; `leave_out` names
    a tensor that is not written.
    """
    config, architecture = model.config, model.config.model_type.replace("mistral", "llama")
    writer = GGUFWriter(path, architecture)
    keys = {
        "context_length": config.max_position_embeddings, "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.key_length": head_dim_of(model),
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }  # fmt: skip
    values = {f"{architecture}.{key}": value for key, value in keys.items()}
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in values.items():
        if value is not None:
            kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32,
                     str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}  # fmt: skip
            writer.add_key_value(key, value, kinds[type(value)])
    for name, tensor in model.state_dict().items():
        if name not in (leave_out, "lm_head.weight" if config.tie_word_embeddings else None):
            _add_tensor(writer, model, name, tensor.float().numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def head_dim_of(model: PreTrainedModel) -> int:
    heads = model.config.num_attention_heads
    return model.get_parameter("model.layers.0.self_attn.q_proj.weight").shape[0] // heads


def _add_tensor(writer: GGUFWriter, model: PreTrainedModel, name: str, values: np.ndarray, kind: str) -> None:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    stem, suffix = (layer[2] if layer else name).rsplit(".", 1)
    if stem.endswith(("q_proj", "k_proj")) and model.config.model_type in ("llama", "mistral"):
        halves = values.reshape(-1, 2, head_dim_of(model) // 2, *values.shape[1:])  # (H, 2, D/2, hidden)
        values = halves.swapaxes(1, 2).reshape(values.shape)
    kind = GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
    data = values if kind.name == "F32" else quantize(np.ascontiguousarray(values), kind)
    prefix = f"blk.{layer[1]}." if layer else ""
    writer.add_tensor(f"{prefix}{GGUF_NAMES[stem]}.{suffix}", data, raw_dtype=kind)
