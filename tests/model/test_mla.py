"""One latent instead of all keys and values: the same function in three layouts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kvlab.attention import Step
from kvlab.cache.build import build_cache
from kvlab.config import resolve
from kvlab.model.mla import LAYOUTS, halves, softmax_scale
from kvlab.model.transformer import Transformer
from tests.harness import assert_close, in_chunks, naive, tiny_config, tiny_model, tokens


def with_layout(layout: str, dtype=torch.float32) -> Transformer:
    model = copy.deepcopy(tiny_model("mla", dtype))
    for layer in model.model.layers:
        layer.self_attn.layout = layout
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [({"factor": None}, "'factor', got None"), ({"factor": "8"}, "'factor', got '8'"),
     ({"mscale_all_dim": "1"}, "'mscale_all_dim', got '1'"), ({"mscale_all_dim": 1e308}, "got 1e.308")],
)  # fmt: skip
def test_a_scaling_that_the_softmax_cannot_take_is_refused(change, words):
    scaling = {"rope_type": "linear", "factor": 8.0, "mscale_all_dim": 1.0, **change}
    with pytest.raises(ValueError, match=words):
        Transformer(replace(tiny_config("mla"), rope_scaling=scaling))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_without_and_with_a_cache(layout):
    model, ids = with_layout(layout), tokens(2, 20)
    expected = naive(with_layout("expanded"), ids)
    assert float((naive(model, ids) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert_close(in_chunks(model, ids, build_cache(model.config), [9, 1, 1, 9]), expected)


def test_attention_alone_is_equal_to_a_millionth():
    """One layer, rope part included, in fp32: absorbed, unabsorbed and expanded outputs."""
    from kvlab.cache.base import NoCache
    from kvlab.rope import inverse_frequencies, rope_tables

    step = Step.plan(torch.arange(7)[None])
    frequencies, factor = inverse_frequencies(4, 10_000.0, None, None)
    tables = rope_tables(step.positions, frequencies, factor, torch.float32)
    hidden = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(0))
    outs = [with_layout(x).model.layers[0].self_attn(hidden, tables, step, NoCache()) for x in LAYOUTS]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("value_dim", [4, 10, 16])
def test_values_narrower_and_wider_than_keys_of_ten(value_dim):
    """The unabsorbed layout pads narrow values for the kernel, and cuts what comes out."""
    torch.manual_seed(0)
    model = Transformer(replace(tiny_config("mla"), v_head_dim=value_dim)).eval().requires_grad_(False)
    logits = []
    for layout in LAYOUTS:
        for layer in model.model.layers:
            layer.self_attn.layout = layout
        logits.append(in_chunks(model, tokens(1, 12), build_cache(model.config), [7, 1, 4]))
    assert_close(logits[1], logits[0])
    assert_close(logits[2], logits[0])


@pytest.mark.parametrize(
    ("layout", "stored"), [("absorbed", 12 + 4), ("unabsorbed", 12 + 4), ("expanded", 4 * (10 + 8))]
)
def test_what_is_stored_for_a_token(layout, stored):
    """R + D_r numbers for the latent; keys of nope + D_r and values of D_v for every head when expanded."""
    model = with_layout(layout)
    cache = build_cache(model.config)
    in_chunks(model, tokens(1, 9), cache, [9])
    assert cache.bytes().payload == 9 * 2 * stored * 4


def test_the_scale_is_that_of_the_trained_head():
    """nope 128 + rope 64: 0.0722, not that of the 576 stored numbers (0.0417) nor of hidden / heads."""
    config = replace(tiny_config("mla"), qk_nope_head_dim=128, qk_rope_head_dim=64, head_dim=192, kv_lora_rank=512)
    assert softmax_scale(config) == pytest.approx(0.0722, abs=5e-5)


def test_yarn_enters_the_scale_squared():
    yarn = {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = replace(resolve("deepseek-v3"), rope_scaling=yarn)
    mscale = 0.1 * 1.0 * torch.tensor(40.0).log().item() + 1.0
    assert softmax_scale(config) == pytest.approx(192**-0.5 * mscale**2)


def test_halves_puts_neighbours_half_a_head_apart():
    assert halves(torch.arange(8)).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_the_unabsorbed_layout_refuses_what_it_cannot_expand():
    model = with_layout("unabsorbed")
    attention = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="expands dense parts of eager caches, not str"):
        attention._expand_part("codes")
