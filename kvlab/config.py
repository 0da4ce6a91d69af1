"""The shape of a decoder: from a preset, a Hugging Face config.json, a directory or the hub; checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvlab.configs.hf_layout import ConfigError, short

__all__ = ["ConfigError", "ModelConfig", "preset_names", "resolve"]
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
DTYPES = ("fp32", "bf16", "fp16", "fp8")
LARGEST = 10**15  # of any count: beyond it a file is wrong, and numbers leave the range of floats


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, in the names of Hugging Face configs; raises ConfigError on a contradiction."""

    name: str
    model_type: str
    vocab_size: int | None  # None only where cannot_run says so
    hidden_size: int
    intermediate_size: int | None  # None only where cannot_run says so
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # with MLA the width of an expanded query or key: qk_nope_head_dim + qk_rope_head_dim
    max_position_embeddings: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping | None = None  # as the config wrote it, its type under "rope_type"; None = plain RoPE
    sliding_window: int | None = None  # tokens, the current one included; None unless at least one layer uses it
    layer_types: tuple[str, ...] = ()  # "full_attention", "sliding_attention" or "chunked_attention" for each layer
    kv_lora_rank: int | None = None  # MLA: all five are None elsewhere
    q_lora_rank: int | None = None  # None in an MLA model whose queries are not compressed
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # biases on the q, k and v projections
    qk_norm: bool = False  # RMSNorm on each query and key head before RoPE (Qwen3)
    hidden_act: str = "silu"
    dtype: str = "bf16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_parameters: int | None = None  # published or computed
    weights_bytes: int | None = None  # only where the published checkpoint is not num_parameters x dtype
    source: str = ""
    cannot_run: str | None = None  # why kvlab can size this model but not run it; None = it runs
    attention_chunk_size: int | None = None  # tokens; None unless at least one layer is chunked (Llama 4)
    num_experts: int | None = None  # routed experts of a layer; None in a dense model
    num_experts_per_tok: int | None = None
    num_active_parameters: int | None = None  # used per token in a mixture of experts; None in a dense model
    partial_rotary_factor: float = 1.0
    hub_id: str | None = None  # where the weights are published, or the directory they lie in
    notes: tuple[str, ...] = ()  # what was taken for granted, to be said aloud

    def __post_init__(self):
        if not self.layer_types:  # short for: all layers alike
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            object.__setattr__(self, "layer_types", (kind,) * max(0, _whole(self.num_hidden_layers)))
        for check in (_check_counts, _check_heads, _check_layers, _check_mla, _check_rest):
            check(self)

    @property
    def is_mla(self) -> bool:
        """Whether keys and values are one latent per token and layer (multi-head latent attention)."""
        return self.kv_lora_rank is not None

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, its own included; None where it sees all of them."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @classmethod
    def from_dict(cls, raw: Mapping, name: str | None = None, source: str = "") -> ModelConfig:
        """Read a Hugging Face config; raises ConfigError naming what is missing, contradictory or unknown."""
        from kvlab.configs.hf_config import read
        from kvlab.configs.runnable import count_parameters, why_not

        label = name or (isinstance(raw, Mapping) and raw.get("_name_or_path")) or "config"
        config = cls(name=str(label), source=source, **read(raw, str(label)))
        config = replace(config, cannot_run=why_not(config, raw))
        return replace(config, num_parameters=count_parameters(config))

    @classmethod
    def from_file(cls, path: str | Path, name: str | None = None) -> ModelConfig:
        """Read a config.json, or the one in a directory; raises ConfigError when missing or broken."""
        path = Path(os.path.expanduser(path))  # ~nobody stays as it is
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{file}: no such file: give a directory with a config.json, or a path to one")
        if file.suffix == ".gguf":
            raise ConfigError(
                f"{file}: sizing reads a config.json, not a GGUF file: give the original model's config.json"
            )
        try:
            raw = json.loads(file.read_text(encoding="utf-8-sig"))  # some editors put a mark in front
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits
            raise ConfigError(f"{file}: not valid JSON ({str(error).splitlines()[0]}): is it a config.json?") from None
        label = name or str(path if path.is_dir() else file)
        config = cls.from_dict(raw, name=label, source=str(file))
        return replace(config, hub_id=str(file.parent), weights_bytes=checkpoint_bytes(file.parent))


def _whole(value: object) -> int:
    return value if type(value) is int else 0


def _check_counts(c: ModelConfig) -> None:
    """Every count must be a positive whole number where it is given."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    optional = (
        "vocab_size", "intermediate_size", "max_position_embeddings", "sliding_window",
        "attention_chunk_size",
        "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_experts",
        "num_experts_per_tok", "num_parameters", "num_active_parameters", "weights_bytes",
    )  # fmt: skip
    for field in needed + optional:
        value = getattr(c, field)
        if value is None and field in optional:
            continue
        if type(value) is not int or not 1 <= value <= LARGEST:
            wrong = short(repr(value))
            raise ConfigError(f"{c.name}: {field} must be a positive whole number, not {wrong}: mend the config")


def _check_heads(c: ModelConfig) -> None:
    if c.num_attention_heads % c.num_key_value_heads:
        raise ConfigError(
            f"{c.name}: num_attention_heads {c.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{c.num_key_value_heads}: every KV head serves as many query heads"
        )


def _check_layers(c: ModelConfig) -> None:
    if len(c.layer_types) != c.num_hidden_layers:
        raise ConfigError(f"{c.name}: layer_types lists {len(c.layer_types)} layers, num_hidden_layers says "
                          f"{c.num_hidden_layers}: mend the config")  # fmt: skip
    unknown = next((t for t in c.layer_types if t not in LAYER_TYPES), None)
    if unknown is not None:
        raise ConfigError(f"{c.name}: layer type {unknown!r} is not known: one of {', '.join(LAYER_TYPES)}")
    for kind, field in (
        ("sliding_attention", "sliding_window"),
        ("chunked_attention", "attention_chunk_size"),
    ):
        if (kind in c.layer_types) != (getattr(c, field) is not None):
            raise ConfigError(
                f"{c.name}: {field} is {getattr(c, field)} but {c.layer_types.count(kind)} layers are "
                f"{kind}: give both or neither"
            )


def _check_mla(c: ModelConfig) -> None:
    fields = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    missing = [f for f in fields if getattr(c, f) is None]
    if missing and (len(missing) < len(fields) or c.q_lora_rank is not None):
        raise ConfigError(f"{c.name}: the MLA fields belong together, {', '.join(missing)} missing: give all or none")


def _check_rest(c: ModelConfig) -> None:
    if c.dtype not in DTYPES:
        raise ConfigError(f"{c.name}: dtype {c.dtype!r} is not known: one of {', '.join(DTYPES)}")
    for field in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
        value = getattr(c, field)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ConfigError(f"{c.name}: {field} must be a positive number, not {value!r}: mend the config")
    if c.num_experts and c.num_experts_per_tok and c.num_experts_per_tok > c.num_experts:
        raise ConfigError(f"{c.name}: num_experts_per_tok {c.num_experts_per_tok} exceeds num_experts {c.num_experts}")
    if any(type(e) is not int or e < 0 for e in c.eos_token_ids):
        raise ConfigError(f"{c.name}: eos_token_id must be a token id or a list of them, not {c.eos_token_ids!r}")


def checkpoint_bytes(directory: Path) -> int | None:
    """Bytes of the safetensors in a directory, by their index or file sizes; None without any."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError, OverflowError):
            pass  # an index without a total: the files tell
    return sum(f.stat().st_size for f in directory.glob("*.safetensors")) or None


def preset_names() -> tuple[str, ...]:
    """Names of the models whose published shapes come with the package."""
    from kvlab.configs.presets import load

    return tuple(load())


def resolve(model: str) -> ModelConfig:
    """The config of a preset name, a directory, a path to a config.json, or a hub id (`owner/name`).

    Raises ConfigError when there is no such model, suggesting the closest presets.
    """
    from kvlab.configs.presets import load, shipped

    presets = load()
    key = str(model).strip().lower()
    if key in presets:
        raw, published = presets[key]
        config = ModelConfig.from_dict(raw, name=key)
        return replace(config, **published)
    if key in shipped():
        return replace(ModelConfig.from_file(shipped()[key], name=key), source="part of kvlab")
    path = Path(os.path.expanduser(model))
    if key and path.exists():
        return ModelConfig.from_file(path)
    if key.count("/") == 1 and not key.startswith((".", "/", "~")) and not key.endswith((".json", ".gguf")):
        from kvlab.configs.hub import fetch

        file = fetch(str(model).strip(), "config.json")
        return replace(ModelConfig.from_file(file, name=model), hub_id=str(model), source=f"huggingface.co/{model}")
    if "/" in key or key.endswith((".json", ".gguf")):
        raise ConfigError(f"{model}: no such file or directory")
    import difflib

    close = difflib.get_close_matches(key, [*presets, *shipped()], n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(close)}?" if close else "`kvlab models` lists the presets"
    raise ConfigError(
        f"unknown model {model!r}: {advice} (a directory, a config.json or a hub id owner/name works too)"
    )
