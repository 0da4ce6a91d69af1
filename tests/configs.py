"""Raw configs, as the hub has them, that several tests change a field of."""

from kvlab.config import ModelConfig

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


def tiny(kinds: str = "ff", window: int | None = None, **changes) -> ModelConfig:
    """A small model whose layers are full (f) or sliding (s)."""
    types = tuple({"f": "full_attention", "s": "sliding_attention"}[k] for k in kinds)
    fields = {"name": "tiny", "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    return ModelConfig(**fields | changes, num_hidden_layers=len(kinds), layer_types=types, sliding_window=window)
