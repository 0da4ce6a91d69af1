"""The ring: what it holds, what it overwrites, and what it refuses to forget."""

from __future__ import annotations

import pytest
import torch

from kvlab.attention import Step, attend, visible
from kvlab.cache.base import CannotRewind, KVCache
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


def imposed(window, sinks=0):
    return SlidingCache(window, sinks, imposed=True)


def live(cache):
    return sorted(int(p) for p, alive in zip(cache.positions.flatten(), cache._live().flatten(), strict=True) if alive)


def test_four_sinks_and_a_window_of_four_after_twelve_tokens():
    cache = imposed(4, 4)
    for position in range(12):
        feed(cache, position, 1)
    assert live(cache) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert cache.positions[0, 0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, -1]  # and one slot for padding


@pytest.mark.parametrize("sizes", [[1] * 30, [30], [7, 1, 1, 21], [2, 9, 1, 18]])
def test_what_an_imposed_window_lets_be_seen_is_what_the_mask_says(sizes):
    torch.manual_seed(0)
    cache, start = imposed(5, 2), 0
    queries, keys, values = (torch.randn(1, n, 30, 4, dtype=torch.float64) for n in (4, 2, 2))
    sees = visible(torch.arange(30)[None], torch.arange(30)[None, None], 5, 2)
    scores = (queries @ keys.repeat_interleave(2, 1).mT).masked_fill(~sees, -torch.inf)
    expected = scores.softmax(-1) @ values.repeat_interleave(2, 1)
    for size in sizes:
        now = slice(start, start + size)
        step = Step.plan(torch.arange(start, start + size, dtype=torch.int32)[None])
        got = attend(queries[:, :, now], cache.update(keys[:, :, now], values[:, :, now], step), step, scale=1.0)
        torch.testing.assert_close(got, expected[:, :, now])
        start += size


def test_a_window_imposed_on_a_model_replaces_its_own_wider_one():
    cache = imposed(3, 1)
    for position in range(9):
        step = Step.plan(torch.tensor([[position]], dtype=torch.int32))
        keys = torch.zeros(1, 2, 1, 4)
        part = cache.update(keys, torch.full_like(keys, position), step)[0]
    assert float(part.attend(keys, step, scale=1.0, window=7)[0, 0, 0, 0]) == (0 + 6 + 7 + 8) / 4


def test_a_long_step_is_given_back_by_the_next_short_one():
    cache = imposed(6, 2)
    feed(cache, 0, 50)
    assert cache.ring == 55
    feed(cache, 50, 1)
    assert cache.ring == 6 and live(cache) == [0, 1, 45, 46, 47, 48, 49, 50]
    feed(cache, 51, 4)  # a draft
    cache.rewind([52])
    feed(cache, 52, 1)
    assert cache.ring == 9 and live(cache) == [0, 1, 47, 48, 49, 50, 51, 52]


def test_steady_decoding_writes_in_place_and_needs_no_mask():
    cache = imposed(6, 2)
    for position in range(20):
        feed(cache, position, 1)
    where = cache.keys.data_ptr()
    step = Step.plan(torch.tensor([[20]], dtype=torch.int32))
    part = cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), step)[0]
    assert cache.keys.data_ptr() == where and part.keys.shape[2] == 8
    assert part.bounds == (15, 20) and part._all_visible(step, 6)


def test_sinks_are_needed_after_a_rewind_too():
    cache, fresh = imposed(4, 2), imposed(4, 2)
    feed(cache, 0, 6), feed(fresh, 0, 6)
    feed(cache, 6, 3)
    cache.rewind([7])
    feed(fresh, 6, 1)
    assert live(cache) == live(fresh) == [0, 1, 3, 4, 5, 6]


def test_sinks_do_not_count_for_the_window_that_a_rewind_needs():
    cache = imposed(4, 2)
    for position in range(12):
        feed(cache, position, 1)
    with pytest.raises(CannotRewind, match=r"to 10 tokens: of the 3 before it .* 1 are overwritten"):
        cache.rewind([10])
    cache.rewind([11])


@pytest.mark.parametrize("sizes", [[7], [2, 5], [3, 3, 1], [1] * 7])
def test_gaps_in_a_step_overwrite_nothing_that_the_step_reads(sizes):
    """Positions 0, 1, 2, 9, 10, 11, 30 beside a padded row: as in any cache, positions decide what is seen."""
    at = torch.tensor([[0, 1, 2, 9, 10, 11, 30], [-1, -1, 0, 1, -1, 2, 3]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    keys, values, queries = (torch.randn(2, 2, 7, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    cache, outs = KVCache([imposed(3, 1)]), []
    for now in torch.arange(7).split(sizes):
        step = cache.begin(at[:, now])
        view = cache.layers[0].update(keys[:, :, now], values[:, :, now], step)
        outs.append(attend(queries[:, :, now], view, step, scale=1.0))
    sees = visible(at, at[:, None], 3, 1)
    weights = (queries @ keys.mT).masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(torch.cat(outs, 2), weights @ values)


def test_a_window_of_one_token_still_knows_how_long_its_rows_are():
    cache = SlidingCache(1)
    for position in range(10):
        feed(cache, position, 1)
    KVCache([cache]).rewind([9])
    with pytest.raises(ValueError, match="row 0 holds tokens up to position 8, so position 3 cannot follow"):
        KVCache([cache]).begin(torch.tensor([[3]]))
    with pytest.raises(CannotRewind, match="to 8 tokens: of the 1 before it that a window of 1 keeps, 1 are overw"):
        cache.rewind([8])
    feed(cache, 9, 1)
    assert live(cache) == [9]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((4, -1, True), "got -1"), ((4, 2, False), "imposed window only, got 2"), ((4, 1.5, True), "got 1.5"),
        ((2.5,), "whole number .* got 2.5"), ((True,), "got True"), (("4",), "got '4'"),
        ((2**31,), "a window of 2147483648 are more than the 2"),
    ],
)  # fmt: skip
def test_windows_and_sinks_that_cannot_be(facts, words):
    with pytest.raises(ValueError, match=words):
        SlidingCache(*facts)
