"""Fewer key/value heads for a trained model, by averaging: the first half of a conversion to GQA or MQA.

Ainslie et al. 2023 (arXiv:2305.13245) average the projections of the KV heads that are to become one and then train
on for 5% of the original steps. Without that second half the averaged heads answer no query well.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvlab.config import ModelConfig
from kvlab.configs.runnable import count_parameters
from kvlab.model.transformer import Transformer


@torch.no_grad()
def pool_kv_heads(model: Transformer, heads: int) -> Transformer:
    """A copy of `model` with `heads` KV heads, each the mean of the neighbours it replaces; `model` is unchanged.

    Query heads keep the group they were in. Raises ValueError for MLA, which has no KV heads to pool, and where
    the model's KV heads cannot be shared out evenly.
    """
    config = pooled_config(model.config, heads)
    weights = model.state_dict()
    with torch.device("meta"):  # shapes only: every parameter is put in below
        pooled = Transformer(config)
    pooled.load_state_dict({name: _pooled(name, w, model.config, heads) for name, w in weights.items()}, assign=True)
    return pooled.train(model.training).requires_grad_(False)


def pooled_config(config: ModelConfig, heads: int) -> ModelConfig:
    """The same shape with `heads` KV heads; raises ValueError where that cannot be."""
    if config.is_mla:
        raise ValueError(f"{config.name} has multi-head latent attention: there are no KV heads to pool")
    if heads < 1 or config.num_key_value_heads % heads:
        raise ValueError(
            f"the {config.num_key_value_heads} KV heads of {config.name} cannot be pooled into {heads}: "
            "give a number that divides them"
        )
    name = f"{config.name}, pooled to {heads} KV head{'s' if heads > 1 else ''}"
    fewer = replace(config, name=name, num_key_value_heads=heads, weights_bytes=None, hub_id=None)
    return replace(fewer, num_parameters=count_parameters(fewer))


def _pooled(name: str, weight: Tensor, config: ModelConfig, heads: int) -> Tensor:
    """One parameter of the pooled model: of qkv_proj (weight or bias) the k and v rows averaged, others copied."""
    if ".qkv_proj." not in name:
        return weight.clone()
    query_rows, kv_rows = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    queries, keys, values = weight.split([query_rows, kv_rows, kv_rows])
    means = [rows.unflatten(0, (heads, -1, config.head_dim)).mean(1).flatten(0, 1) for rows in (keys, values)]
    return torch.cat([queries, *means])
