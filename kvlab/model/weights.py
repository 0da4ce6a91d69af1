"""Which tensors a model must have, by their Hugging Face names, and whether a checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.config import ModelConfig
from kvlab.configs.hf_layout import one_line

Shape = tuple[int, ...]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class CheckpointError(ValueError):
    """A checkpoint cannot be read; the message is one line: file, what is wrong, the way out."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


def parts_of(parameter: str) -> tuple[str, ...]:
    """Return the checkpoint's tensors, in order of rows, that make one parameter of the transformer."""
    for fused, parts in FUSED.items():
        if f".{fused}." in parameter:
            return tuple(parameter.replace(fused, part) for part in parts)
    return (parameter,)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return name -> shape of every tensor that a model of this config needs."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = _latent_shapes(config) if config.is_mla else _attention_shapes(config)
    return {f"self_attn.{name}": shape for name, shape in attention.items()} | {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _latent_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query_rows = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    shapes: dict[str, Shape] = {"q_proj.weight": (query_rows, hidden)}
    if config.q_lora_rank is not None:
        shapes = {
            "q_a_proj.weight": (config.q_lora_rank, hidden),
            "q_a_layernorm.weight": (config.q_lora_rank,),
            "q_b_proj.weight": (query_rows, config.q_lora_rank),
        }
    return shapes | {
        "kv_a_proj_with_mqa.weight": (rank + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
    }


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    query_rows = config.num_attention_heads * config.head_dim
    key_rows = config.num_key_value_heads * config.head_dim
    rows = {"q_proj": query_rows, "k_proj": key_rows, "v_proj": key_rows}
    shapes: dict[str, Shape] = {f"{name}.weight": (n, hidden) for name, n in rows.items()}
    if config.attention_bias:
        shapes |= {f"{name}.bias": (n,) for name, n in rows.items()}
    if config.qk_norm:
        shapes |= {f"{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes | {"o_proj.weight": (hidden, query_rows)}


def check_shapes(found: Mapping[str, Shape], config: ModelConfig, where: str) -> None:
    """Compare a checkpoint's tensors with what its config asks for.

    Raises CheckpointError naming the first tensor that is missing, of another shape, or unknown.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing == ["lm_head.weight"]:
        raise CheckpointError(
            f"{where}: lm_head.weight is missing, but the config says tie_word_embeddings is "
            "false: set it to true, or get the complete checkpoint"
        )
    if missing:
        raise CheckpointError(
            f"{where}: tensor {missing[0]} is missing{_and_more(missing)}: the checkpoint is "
            f"incomplete, or is not of type {config.model_type}; download it again"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {tuple(found[name])}, but the config asks for "
                f"{shape}: config and weights belong to different models"
            )
    unknown = [name for name in found if name not in expected and not _is_ignored(name, config)]
    if unknown:
        raise CheckpointError(
            f"{where}: unexpected tensor {unknown[0]}{_and_more(unknown)}: a model of type "
            f"{config.model_type} with {config.num_hidden_layers} layers, as its config says, has "
            "none, so kvlab would compute something else"
        )


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store RoPE's frequencies, and tied ones the output matrix once more."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
