"""Scales measured once, on sample prompts, against scales measured on every token; and what lies out of range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from kvlab.cache.base import KVCache
from kvlab.cache.build import build_cache
from kvlab.cache.quantized import QuantizedCache
from kvlab.codecs import Codec
from kvlab.evaluation.quality import compare_distributions, held_out_text
from kvlab.evaluation.tasks import generate_samples
from kvlab.generate import prefill
from kvlab.model.zoo import LoadedModel
from kvlab.quantization import calibrate

CODECS = {"int8": Codec("symmetric", 8), "fp8": Codec("e4m3"), "int4, groups of 32": Codec("symmetric", 4, 32)}
SAMPLE_TOKENS = (16, 512)  # of plain sentences, to take scales from
NARROWED = (0.5, 0.25)  # ranges that reach so far only, as if samples had been that much smaller
TEXT = {"window": 512, "stride": 128}  # a cache without a residual gives the same at any stride

Scales = list[tuple[Tensor, Tensor]]  # of keys and values, for each layer


def static_rows(
    loaded: LoadedModel,
    codecs: dict[str, Codec] = CODECS,
    *,
    text: str | None = None,
    tick: Callable[[dict], None] = lambda row: None,
) -> Iterator[dict]:
    """For each codec: dynamic scales, static ones from few and from many sample tokens, and ranges too narrow.

    `text` is what is predicted (None: the held-out text that comes with kvlab).
    `clamped` is the share of stored keys and values that lay out of range.
    """
    ids = loaded.tokenizer.encode(held_out_text() if text is None else text)
    samples = {count: sample_tensors(loaded, count) for count in SAMPLE_TOKENS}
    for name, codec in codecs.items():
        found = {count: [(calibrate(k, codec), calibrate(v, codec)) for k, v in layers]
                 for count, layers in samples.items()}  # fmt: skip
        yield {"codec": name, "scales": "dynamic", **measure(loaded, ids, codec, None, tick)}
        for count, scales in found.items():
            yield {"codec": name, "scales": f"static, {count} tokens", **measure(loaded, ids, codec, scales, tick)}
        for factor in NARROWED:
            narrow = [(k * factor, v * factor) for k, v in found[max(found)]]
            yield {"codec": name, "scales": f"static, ranges x {factor}", **measure(loaded, ids, codec, narrow, tick)}


def sample_tensors(loaded: LoadedModel, count: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (1, H_kv, count, D) of every layer for `count` tokens of plain sentences."""
    (sample,) = generate_samples("passkey", loaded.tokenizer, 1, tokens=max(count, 128) + 8)
    cache = build_cache(loaded.config)
    prefill(loaded.model, loaded.tokenizer.encode(sample.prompt)[:count], cache)
    return [(layer.keys[:, :, :count], layer.values[:, :, :count]) for layer in cache.layers]


@torch.no_grad()
def measure(
    loaded: LoadedModel, ids: Sequence[int], codec: Codec, scales: Scales | None, tick: Callable[[dict], None]
) -> dict:
    """Distance from the exact cache over a text, and the share of numbers that were clamped."""
    layers, made = loaded.config.num_hidden_layers, []

    def make_cache(capacity: int) -> KVCache:
        chosen = scales or [(None, None)] * layers
        made.append(KVCache([QuantizedCache(codec, codec, key_scales=k, value_scales=v) for k, v in chosen]))
        return made[-1]

    distance = compare_distributions(loaded.model, ids, make_cache, **TEXT, tick=tick)
    stored = (len(ids) - 1) * layers * 2 * loaded.config.num_key_value_heads * loaded.config.head_dim
    clamped = sum(layer.clamped for cache in made for layer in cache.layers)
    facts = {key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(distance).items()}
    return {"clamped": round(clamped / stored, 6), **facts}
