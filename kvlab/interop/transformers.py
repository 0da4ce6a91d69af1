"""The same weights in Hugging Face transformers, for comparing tokens and speed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from time import perf_counter

import torch

from kvlab.config import ModelConfig
from kvlab.model.transformer import Transformer
from kvlab.model.weights import parts_of


def usable() -> str | None:
    """The installed version of transformers; None where it is missing or too old for `twin` (before 5)."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return None
    return found if int(found.split(".")[0]) >= 5 else None


def twin(model: Transformer):
    """A transformers model with this model's weights, dtype and device.

    Raises ImportError where transformers is not installed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model.config.model_type, **config_fields(model.config))
    other = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    weight = model.model.embed_tokens.weight
    other = other.to(device=weight.device, dtype=weight.dtype).eval().requires_grad_(False)
    other.load_state_dict(unfused(model), strict=not model.config.tie_word_embeddings)
    other.tie_weights()
    return other


def config_fields(config: ModelConfig) -> dict:
    """A kvlab config in the words of a transformers config."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        "sliding_window", "attention_bias", "bos_token_id",
    )  # fmt: skip
    fields = {name: getattr(config, name) for name in names}
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    fields["rope_parameters"] = {"rope_theta": config.rope_theta, **scaling}
    fields["layer_types"] = list(config.layer_types)
    fields["eos_token_id"] = list(config.eos_token_ids) or None
    fields["pad_token_id"] = None
    return fields


def unfused(model: Transformer) -> dict[str, torch.Tensor]:
    """The weights under their Hugging Face names: fused projections are cut into their parts, as views."""
    config, tensors = model.config, {}
    kv_rows = config.num_key_value_heads * config.head_dim
    for name, weight in model.state_dict().items():
        parts = parts_of(name)
        rows = [weight.shape[0]]
        if len(parts) == 3:
            rows = [config.num_attention_heads * config.head_dim, kv_rows, kv_rows]
        elif len(parts) == 2:
            rows = [config.intermediate_size] * 2
        tensors.update(zip(parts, weight.split(rows), strict=True))
    return tensors


def greedy(other, token_ids: list[int], count: int, *, use_cache: bool = True) -> tuple[list[int], int]:
    """Greedy token ids by transformers' own `generate`, and the bytes of its cache (0 without one)."""
    ids = torch.tensor([token_ids], device=other.device)
    out = other.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        use_cache=use_cache, return_dict_in_generate=True,
    )  # fmt: skip
    name = "cache" if "cache" in list(out.keys()) else "past_key_values"  # its name before 5.24
    layers = out[name].layers if use_cache else []
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return out.sequences[0, len(token_ids) :].tolist(), kept


def timed_tokens(other, token_ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy token ids by transformers' own `generate`, and the seconds that each took, the first with its prefill."""
    ids = torch.tensor([token_ids], device=other.device)
    clock = _Clock()
    out = other.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        streamer=clock, use_cache=True,
    )  # fmt: skip
    return out[0, len(token_ids) :].tolist(), clock.seconds


class _Clock:
    """A streamer, as transformers calls it: the prompt first, then each token."""

    def __init__(self):
        self.seconds: list[float] = []
        self._before: float | None = None

    def put(self, value):
        now = perf_counter()
        if self._before is not None:
            self.seconds.append(now - self._before)
        self._before = now

    def end(self):
        pass
