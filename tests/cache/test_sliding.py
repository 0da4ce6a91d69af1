"""The ring: what it holds, what it overwrites, and what it refuses to forget."""

from __future__ import annotations

import pytest
import torch

from kvlab.attention import Step, visible
from kvlab.cache.base import CannotRewind
from kvlab.cache.sliding import SlidingCache


def feed(cache, first, count):
    """Append tokens first, first + 1, ... whose keys are their numbers; returns what the last query sees, sorted."""
    numbers = torch.arange(first, first + count, dtype=torch.float32)
    keys = numbers.view(1, 1, count, 1).expand(1, 2, count, 4)
    step = Step.plan(torch.arange(first, first + count, dtype=torch.int32)[None])
    part = cache.update(keys, -keys, step)[0]
    assert torch.equal(part.values, -part.keys)
    sees = visible(step.positions, part.positions, cache.window)[0, 0, -1]
    return sorted(part.keys[0, 0, sees, 0].int().tolist())


def test_a_window_of_four_sees_four_tokens():
    cache = SlidingCache(4)
    assert feed(cache, 0, 4) == [0, 1, 2, 3]
    assert feed(cache, 4, 1) == [1, 2, 3, 4]
    assert feed(SlidingCache(4), 0, 6) == [2, 3, 4, 5]


def test_every_query_of_a_step_finds_its_own_window():
    cache = SlidingCache(2)
    feed(cache, 0, 3)
    step = Step.plan(torch.tensor([[3, 4]], dtype=torch.int32))
    keys = torch.tensor([3.0, 4.0]).view(1, 1, 2, 1).expand(1, 2, 2, 4)
    part = cache.update(keys, keys, step)[0]
    sees = visible(step.positions, part.positions, 2)[0, 0]
    assert [sorted(part.keys[0, 0, row, 0].int().tolist()) for row in sees] == [[2, 3], [3, 4]]


def test_memory_stops_growing_at_the_window():
    cache = SlidingCache(8)
    sizes = []
    for position in range(200):
        feed(cache, position, 1)
        sizes.append(cache.bytes())
    assert cache.ring == 8 and sizes[20] == sizes[-1]
    assert sizes[-1].payload == 2 * 2 * 8 * 4 * 4


def test_a_rejected_draft_gives_back_what_the_next_query_reads():
    """Window 6, 20 tokens, a draft of 4 of which 3 are rejected."""
    cache, undisturbed = SlidingCache(6), SlidingCache(6)
    for position in range(20):
        feed(cache, position, 1), feed(undisturbed, position, 1)
    feed(cache, 20, 4), feed(undisturbed, 20, 1)
    cache.rewind([21])
    assert feed(cache, 21, 1) == feed(undisturbed, 21, 1) == [16, 17, 18, 19, 20, 21]


def test_a_ring_that_has_wrapped_refuses_a_far_rewind_unchanged():
    cache = SlidingCache(8)
    for position in range(20):
        feed(cache, position, 1)
    positions, keys = cache.positions.clone(), cache.keys.clone()
    with pytest.raises(CannotRewind, match="cannot rewind row 0 to 16 tokens: of the 7 before it"):
        cache.rewind([16])
    assert torch.equal(cache.positions, positions) and torch.equal(cache.keys, keys)


def test_rewinding_by_nothing_is_always_possible():
    cache = SlidingCache(8)
    for position in range(20):
        feed(cache, position, 1)
    cache.rewind([20])
    assert feed(cache, 20, 1) == list(range(13, 21))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_refused(window):
    with pytest.raises(ValueError, match=f"got {window}"):
        SlidingCache(window)
