"""The twin in transformers has the same weights and gives the same tokens."""

from __future__ import annotations

import pytest
import torch

from kvlab.generate import generate
from tests.harness import naive, tiny_model, tokens

pytest.importorskip("transformers")

from kvlab.interop import transformers as interop
from kvlab.interop.transformers import greedy, timed_tokens, twin, unfused, usable
from kvlab.sizing import bytes_ideal


@pytest.mark.parametrize("attention", ["mha", "gqa", "mqa"])
def test_the_twin_gives_the_same_logits(attention):
    model, ids = tiny_model(attention, torch.float32), tokens(2, 12)
    ours, theirs = naive(model, ids), twin(model)(ids).logits
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(ours.abs().max())


def test_its_generate_is_timed_token_by_token():
    model, prompt = tiny_model(dtype=torch.float32), tokens(1, 6)[0].tolist()
    ids, seconds = timed_tokens(twin(model), prompt, 10)
    assert ids == generate(model, prompt, max_new_tokens=10).token_ids
    assert len(seconds) == 10 and min(seconds) > 0


@pytest.mark.parametrize("use_cache", [True, False])
def test_its_cache_changes_no_token_and_has_the_predicted_bytes(use_cache):
    model, prompt = tiny_model(dtype=torch.float32), tokens(1, 6)[0].tolist()
    ids, kept = greedy(twin(model), prompt, 10, use_cache=use_cache)
    assert ids == generate(model, prompt, max_new_tokens=10).token_ids
    assert kept == (bytes_ideal(model.config, 15, 1, "fp32") if use_cache else 0)  # the last token is never run


def test_an_old_transformers_is_not_usable(monkeypatch):
    assert usable()
    monkeypatch.setattr(interop, "version", lambda name: "4.57.1")
    assert usable() is None


def test_unfusing_copies_nothing():
    model = tiny_model(dtype=torch.float32)
    parts, fused = unfused(model), model.model.layers[0].self_attn.qkv_proj.weight
    query = parts["model.layers.0.self_attn.q_proj.weight"]
    key = parts["model.layers.0.self_attn.k_proj.weight"]
    assert query.data_ptr() == fused.data_ptr() and key.shape == (2 * 8, 24)
    assert key.data_ptr() == fused.data_ptr() + query.nbytes
