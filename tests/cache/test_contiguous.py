"""The growing buffer: written in place, doubled rarely."""

from __future__ import annotations

import pytest
import torch

from kvlab.attention import Step
from kvlab.cache.contiguous import FIRST_CAPACITY, ContiguousCache


def fill(cache, count, start=0, rows=1, kv_heads=2):
    """Append tokens whose keys and values differ in every element; returns the view."""
    shape = (rows, kv_heads, count, 4)
    keys = torch.arange(start * 1000, start * 1000 + rows * kv_heads * count * 4, dtype=torch.float32).view(shape)
    at = torch.arange(start, start + count, dtype=torch.int32).expand(rows, count)
    return cache.update(keys, -keys - 0.5, Step.plan(at))[0], keys


def test_no_step_copies_the_cache_but_log_many():
    cache, moves, where = ContiguousCache(), 0, None
    for position in range(1000):
        fill(cache, 1, position)
        moves += cache.keys.data_ptr() != where
        where = cache.keys.data_ptr()
    assert moves == 1 + 4  # 64, 128, 256, 512, 1024
    assert cache.capacity == 1024 and FIRST_CAPACITY == 64


def test_growing_keeps_keys_apart_from_values():
    cache = ContiguousCache()
    first, _ = fill(cache, 60)
    second, _ = fill(cache, 60, start=60)
    assert second.keys.shape == (1, 2, 120, 4)
    assert torch.equal(second.keys[:, :, :60], first.keys)
    assert torch.equal(second.values, -second.keys - 0.5)


def test_a_rewind_shortens_every_view_and_spares_the_original():
    cache = ContiguousCache()
    original, _ = fill(cache, 100)
    kept = original.keys[:, :, :40].clone()
    cache.rewind([40])
    view, _ = fill(cache, 1, start=40)
    assert view.keys.shape[2] == view.positions.shape[2] == 41
    assert torch.equal(view.keys[:, :, :40], kept)


def test_stored_elements_are_two_per_kv_head_token_and_dimension():
    """32 query heads over 8 KV heads store what 8 heads need: repeating keys before caching would store 4 x."""
    cache = ContiguousCache()
    fill(cache, 10, kv_heads=8)
    assert cache.bytes().payload == 2 * 8 * 10 * 4 * 4


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 3, 1, 4), torch.float32), ((1, 2, 1, 8), torch.float32), ((1, 2, 1, 4), torch.float16)]
)
def test_keys_that_do_not_fit_are_refused_with_both_shapes(shape, dtype):
    cache = ContiguousCache()
    fill(cache, 5)
    keys = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=r"holds \(1, 2, 64, 4\) torch.float32.*do not fit"):
        cache.update(keys, keys, Step.plan(torch.tensor([[5]])))
    assert cache.length == 5


def test_after_a_ragged_rewind_holes_are_not_mistaken_for_tokens():
    cache = ContiguousCache()
    fill(cache, 12, rows=2)
    cache.rewind([12, 10])
    part, _ = fill(cache, 1, start=12, rows=2)  # row 1 goes on after a hole at 10 and 11
    assert part.start is None and (part.positions[1, 0] < 0).sum() == 2


def test_a_reset_cache_starts_at_its_first_slot():
    cache = ContiguousCache()
    fill(cache, 70)
    cache.reset()
    part, _ = fill(cache, 3)
    assert part.keys.shape[2] == 3 and part.start == 0 and cache.capacity == FIRST_CAPACITY
