"""Averaging KV heads: nothing changes where they are equal, and the shapes are those of the smaller model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab.attention import Step
from kvlab.cache.build import build_cache
from kvlab.model.pooling import pool_kv_heads
from kvlab.model.transformer import Transformer
from tests.harness import in_chunks, positions_of, tiny_config, tiny_model, tokens


def logits_of(model: Transformer) -> torch.Tensor:
    ids = tokens(2, 12)
    return model(ids, Step.plan(positions_of(ids)))


def with_equal_heads(model: Transformer, groups: int) -> Transformer:
    """A copy whose KV heads are equal within each of `groups` runs of neighbours."""
    copy = Transformer(model.config).to(torch.float64).requires_grad_(False)
    copy.load_state_dict(model.state_dict())
    heads, kv_heads, width = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim
    for layer in copy.model.layers:
        for weights in layer.self_attn.qkv_proj.parameters():
            rows = weights[heads * width :].view(2, groups, kv_heads // groups, width, *weights.shape[1:])
            rows.copy_(rows[:, :, :1].expand_as(rows).clone())
    return copy


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_pooling_equal_heads_changes_nothing(heads):
    model = with_equal_heads(tiny_model("mha"), heads)
    torch.testing.assert_close(logits_of(pool_kv_heads(model, heads)), logits_of(model), rtol=0, atol=1e-11)


def test_pooling_different_heads_does_change_what_is_computed():
    model = tiny_model("mha")
    assert float((logits_of(pool_kv_heads(model, 1)) - logits_of(model)).abs().max()) > 0.1


def test_a_pooled_head_is_the_mean_of_its_neighbours():
    model = tiny_model("mha")
    pooled = pool_kv_heads(model, 2)
    before, after = (m.model.layers[1].self_attn.qkv_proj.weight for m in (model, pooled))
    assert after.shape == ((4 + 2 * 2) * 8, 24) and torch.equal(after[:32], before[:32])
    torch.testing.assert_close(after[40:48], (before[48:56] + before[56:64]) / 2)  # keys: heads 2 and 3
    torch.testing.assert_close(after[48:56], (before[64:72] + before[72:80]) / 2)  # values: heads 0 and 1


def test_the_pooled_model_stores_less_and_the_first_is_unchanged():
    model = tiny_model("mha")
    expected = logits_of(model)
    pooled = pool_kv_heads(model, 1)
    cache = build_cache(pooled.config)
    in_chunks(pooled, tokens(1, 9), cache, [9])
    assert cache.bytes().payload == 9 * 2 * (2 * 1 * 8) * 8  # tokens, layers, numbers, fp64
    assert pooled.config.name == "tiny-mha, pooled to 1 KV head" and pooled.config.num_key_value_heads == 1
    assert pooled.config.num_parameters == sum(weight.numel() for weight in pooled.parameters())
    for weight in pooled.parameters():
        weight.zero_()
    assert torch.equal(logits_of(model), expected)


def test_biases_are_pooled_too():
    config = replace(tiny_config("mha"), model_type="qwen2", attention_bias=True)
    model = Transformer(config).to(torch.float64).requires_grad_(False)
    model = with_equal_heads(model, 2)
    torch.testing.assert_close(logits_of(pool_kv_heads(model, 2)), logits_of(model), rtol=0, atol=1e-11)


@pytest.mark.parametrize("heads", [0, -1, 3, 8])
def test_heads_that_cannot_be_shared_out_are_refused(heads):
    with pytest.raises(ValueError, match=f"the 4 KV heads of tiny-mha cannot be pooled into {heads}"):
        pool_kv_heads(tiny_model("mha"), heads)


def test_a_latent_has_no_heads():
    with pytest.raises(ValueError, match="there are no KV heads to pool"):
        pool_kv_heads(tiny_model("mla"), 1)
