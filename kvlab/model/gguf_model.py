"""A GGUF file's model in Hugging Face's words: config fields, tensor names, order of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvlab.model.gguf_file import GGUFFile
from kvlab.model.weights import CheckpointError
from kvlab.rope import inverse_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
# Llama 3.1 and 3.2: a GGUF holds only the frequencies' divisors, so the parameters are found by trying both.
_LLAMA3 = [
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
]


def hugging_face_name(name: str) -> str:
    """Translate a tensor's name; one that is not known comes back as it is."""
    block = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if block is None or block[2] not in _NAMES:
        return name
    prefix = f"model.layers.{block[1]}." if block[1] is not None else ""
    return f"{prefix}{_NAMES[block[2]]}.{block[3]}"


def hugging_face_config(file: GGUFFile) -> dict:
    """Return the fields of a config.json, read from the metadata.

    Raises CheckpointError for an architecture that kvlab does not run, or missing or contradicting values.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} cannot be run: kvlab reads "
            f"{', '.join(ARCHITECTURES)}; other models may load from safetensors"
        )
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    _check(values, prefix, file)
    config = {field: values[key] for key, field in _FIELDS.items()} | {
        "model_type": architecture,
        "head_dim": _head_dim(file, values),
        "rope_theta": values.get("rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "vocab_size": _vocab_size(file, values),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": _published_dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if values.get("attention.sliding_window"):
        # llama.cpp calls Mistral "llama" too; only Mistral's config means every layer by a window.
        config |= {"model_type": "mistral", "sliding_window": values["attention.sliding_window"]}
    scaling = _rope_scaling(file, config, values)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _check(values: Mapping, prefix: str, file: GGUFFile) -> None:
    missing = [key for key in _FIELDS if key not in values]
    if missing:
        raise CheckpointError(
            f"{file.path}: metadata {prefix}{missing[0]} is missing: convert the model again with a current llama.cpp"
        )
    blocks = values["block_count"]
    if not isinstance(blocks, int) or not 0 < blocks <= len(file.tensors):
        raise CheckpointError(
            f"{file.path}: metadata says {blocks} blocks, but the file has {len(file.tensors)} tensors: "
            "it is corrupt; download it again"
        )
    if values.get("expert_count"):
        raise CheckpointError(f"{file.path}: a mixture of {values['expert_count']} experts cannot be run by kvlab")


def read_tensor(file: GGUFFile, name: str, config: Mapping) -> Tensor:
    """Return a tensor in fp32 with its rows in Hugging Face's order.

    llama.cpp rotates neighbouring dimensions of a "llama" model where Hugging Face rotates halves, so its
    converter interleaves the two halves of each query and key head; this puts them back. Qwen's never moved.
    """
    tensor = file.read(name)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None or file.metadata["general.architecture"] != "llama":
        return tensor
    pairs = tensor.view(config[heads], -1, 2, *tensor.shape[1:])  # (H, D/2, 2, hidden)
    return pairs.transpose(1, 2).reshape(tensor.shape)  # (H, 2, D/2, hidden) -> (H * D, hidden)


def _head_dim(file: GGUFFile, values: Mapping) -> int:
    """key_length where the file has it (Qwen3), else what RoPE turns, else hidden/heads."""
    rotated, keys = values.get("rope.dimension_count"), values.get("attention.key_length")
    head_dim = keys or rotated or values["embedding_length"] // max(values["attention.head_count"], 1)
    for what, other in (("values", values.get("attention.value_length")), ("RoPE", rotated)):
        if other not in (None, head_dim):
            raise CheckpointError(
                f"{file.path}: keys have {head_dim} dimensions a head but {what} {other}: kvlab "
                "does not run this layout"
            )
    return head_dim


def _vocab_size(file: GGUFFile, values: Mapping) -> int:
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]  # rows may be padded beyond the tokenizer's list
    return values.get("vocab_size") or len(file.metadata.get("tokenizer.ggml.tokens", ()))


def _published_dtype(file: GGUFFile) -> str:
    """The type of the matrices; quantised ones were bf16 before, as nearly all models are published."""
    kind = next((entry.kind.name for entry in file.tensors.values() if len(entry.shape) > 1), "")
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def _rope_scaling(file: GGUFFile, config: Mapping, values: Mapping) -> dict | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    named = {
        "factor": "rope.scaling.factor",
        "attention_factor": "rope.scaling.attn_factor",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
    }
    return {"rope_type": kind} | {field: values[key] for field, key in named.items() if key in values}


def _llama3_scaling(file: GGUFFile, config: Mapping) -> dict:
    divisors = file.read("rope_freqs.weight").flatten()  # (D/2,)
    theta, head_dim = config["rope_theta"], config["head_dim"]
    plain, _ = inverse_frequencies(head_dim, theta, None, None)
    for scaling in _LLAMA3:
        scaled, _ = inverse_frequencies(head_dim, theta, scaling, None)
        if divisors.shape == plain.shape and torch.allclose(plain / scaled, divisors, rtol=1e-4):
            return scaling
    raise CheckpointError(
        f"{file.path}: rope_freqs.weight holds a RoPE scaling that is not Llama 3's, so kvlab "
        "cannot name it: load the model from safetensors"
    )
