"""The fixed buffer: never written past its end, and reset without being moved."""

from __future__ import annotations

import pytest
import torch

from kvlab.attention import Step
from kvlab.cache.base import CacheFull, KVCache
from kvlab.cache.static import StaticCache
from tests.harness import in_chunks, tiny_model, tokens


def test_one_token_too_many_is_refused_and_nothing_changes():
    model, cache = tiny_model(), KVCache([StaticCache(10), StaticCache(10)])
    in_chunks(model, tokens(1, 10), cache, [10])
    before = [x.clone() for layer in cache.layers for x in (layer.keys, layer.values, layer.positions)]
    with pytest.raises(CacheFull, match="room for 10 tokens and holds 10: 1 more"):
        in_chunks(model, tokens(1, 1), cache, [1], start=10)
    after = [x for layer in cache.layers for x in (layer.keys, layer.values, layer.positions)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert [int(layer.cursor) for layer in cache.layers] == [10, 10]


def test_a_layer_that_is_full_stops_all_layers_before_any_changes():
    model, cache = tiny_model(), KVCache([StaticCache(20), StaticCache(10)])
    with pytest.raises(CacheFull, match="room for 10"):
        in_chunks(model, tokens(1, 12), cache, [12])
    assert cache.bytes().total == 0
    in_chunks(model, tokens(1, 10), cache, [10])  # it still works


def test_an_update_without_begin_is_checked_too():
    layer, keys = StaticCache(3), torch.ones(1, 1, 4, 2)
    with pytest.raises(CacheFull):
        layer.update(keys, keys, Step.plan(torch.arange(4)[None]))
    assert layer.bytes().total == 0


def test_reset_keeps_the_buffers_a_graph_may_hold():
    model, cache = tiny_model(), KVCache([StaticCache(10), StaticCache(10)])
    in_chunks(model, tokens(1, 10), cache, [10])
    where = [layer.keys.data_ptr() for layer in cache.layers]
    cache.reset()
    in_chunks(model, tokens(1, 10), cache, [10])
    assert where == [layer.keys.data_ptr() for layer in cache.layers]


@pytest.mark.parametrize("capacity", [0, -3, 2.5, True, "8"])
def test_a_capacity_of_nothing_is_refused(capacity):
    with pytest.raises(ValueError, match=f"at least one token, got {capacity!r}"):
        StaticCache(capacity)
