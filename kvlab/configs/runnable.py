"""Whether kvlab's own transformer can run a config, and how many parameters it then has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvlab.configs.families import CANNOT_RUN, RUNNABLE

if TYPE_CHECKING:  # the config calls these two functions, so it cannot be imported here
    from kvlab.config import ModelConfig

ROPE_TYPES = (None, "default", "linear", "llama3", "yarn")


def why_not(config: ModelConfig, raw: Mapping) -> str | None:
    """Why kvlab can size but not run this model, in a few words; None when it runs."""
    text = next(
        (raw[k] for k in ("text_config", "language_config", "llm_config") if isinstance(raw.get(k), Mapping)),
        raw,
    )
    scaling = (config.rope_scaling or {}).get("rope_type")
    reasons = (
        (config.model_type in CANNOT_RUN, CANNOT_RUN.get(config.model_type)),
        (bool(config.num_experts), "mixture of experts"),
        (
            config.model_type not in RUNNABLE,
            f"model_type {config.model_type!r} is not one of {', '.join(RUNNABLE)}",
        ),
        (text is not raw, "a multimodal model: only its text decoder was read"),
        (
            config.vocab_size is None or config.intermediate_size is None,
            "the config lacks vocab_size or intermediate_size",
        ),
        (config.hidden_act not in ("silu", "swish"), f"activation {config.hidden_act!r}, not silu"),
        (config.partial_rotary_factor != 1, "only part of each head is rotated"),
        (config.is_mla and text.get("rope_interleave") is False, "RoPE over halves, not neighbours, in MLA"),
        (scaling not in ROPE_TYPES, f"RoPE scaling {scaling!r}"),
        (config.head_dim % 2 == 1, f"RoPE needs an even head_dim, not {config.head_dim}"),
        (config.attention_bias and config.model_type != "qwen2", "a bias on the output projection"),
        (bool(text.get("mlp_bias")), "biases in the MLP"),
        (bool(text.get("quantization_config")), "its weights are stored quantised"),
    )
    return next((words for applies, words in reasons if applies), None)


def count_parameters(config: ModelConfig) -> int | None:
    """Parameters of a model that kvlab runs (embeddings counted once when tied); None for any other."""
    c = config
    if c.cannot_run is not None or c.vocab_size is None or c.intermediate_size is None:
        return None
    attention = _mla_parameters(c) if c.is_mla else _gqa_parameters(c)
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return embeddings + c.num_hidden_layers * layer + c.hidden_size


def _gqa_parameters(c: ModelConfig) -> int:
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    biases = queries + 2 * keys if c.attention_bias else 0
    return c.hidden_size * (2 * queries + 2 * keys) + biases + (2 * c.head_dim if c.qk_norm else 0)


def _mla_parameters(c: ModelConfig) -> int:
    rank, query_rows = c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    queries = c.hidden_size * query_rows
    if c.q_lora_rank is not None:
        queries = c.q_lora_rank * (c.hidden_size + 1 + query_rows)
    down = c.hidden_size * (rank + c.qk_rope_head_dim) + rank
    up = rank * c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
    return queries + down + up + c.num_attention_heads * c.v_head_dim * c.hidden_size
