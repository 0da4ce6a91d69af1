"""Positions inside the cache: attention equals a recomputation in which the kept tokens stand at 0, 1, 2, ..."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import Step, attend
from kvlab.cache.base import CannotRewind, KVCache
from kvlab.cache.build import build_cache
from kvlab.cache.rerotated import RerotatedCache
from kvlab.rope import inverse_frequencies, rope_tables, rotate
from tests.harness import KV_HEADS, in_chunks, pad, tiny_model, tokens

few_examples = settings(max_examples=12, deadline=None)
SINKS, WINDOW, D = 4, 8, 8
FREQUENCIES = inverse_frequencies(D, 100.0, None, None)[0]


def turned(x: torch.Tensor, places: list[int]) -> torch.Tensor:
    """(B, H, n, D) rotated by n places."""
    return rotate(x, *rope_tables(torch.tensor([places]), FREQUENCIES, 1.0, x.dtype))


class Stream:
    """Unrotated queries, keys and values of one layer; MLA: two columns that do not rotate, and no values."""

    def __init__(self, length: int, tied: bool = False, rows: int = 1):
        torch.manual_seed(0)
        self.queries, self.keys = (torch.randn(rows, n, length, D, dtype=torch.float64) for n in (4, 2))
        self.plain = [torch.randn(rows, n, length, 2 * tied, dtype=torch.float64) for n in (4, 2)]
        self.values = None if tied else torch.randn(rows, 2, length, D, dtype=torch.float64)

    def feed(self, cache: RerotatedCache, sizes: list[int], start: int = 0) -> torch.Tensor:
        outs = []
        for size in sizes:
            now, places = slice(start, start + size), list(range(start, start + size))
            queries, keys = (
                torch.cat([flat[:, :, now], turned(x[:, :, now], places)], 3)
                for flat, x in zip(self.plain, (self.queries, self.keys), strict=True)
            )
            step = Step.plan(torch.tensor([places] * len(keys), dtype=torch.int32))
            view = cache.update(keys, None if self.values is None else self.values[:, :, now], step)
            outs.append(attend(queries, view, step, scale=0.3))
            start += size
        return torch.cat(outs, 2)

    def expected(self, start: int, stop: int) -> torch.Tensor:
        """Each query over its sinks and window, all of them rotated by their places inside the cache."""
        outs = []
        for p in range(start, stop):
            kept = [s for s in range(p + 1) if s < SINKS or s > p - WINDOW]
            places = list(range(len(kept)))
            assert places[-1] <= SINKS + WINDOW - 1 and kept[-1] == p  # the newest key is at distance 0
            keys = torch.cat([self.plain[1][:, :, kept], turned(self.keys[:, :, kept], places)], 3)
            query = torch.cat([self.plain[0][:, :, p : p + 1], turned(self.queries[:, :, p : p + 1], places[-1:])], 3)
            values = keys if self.values is None else self.values[:, :, kept]
            keys, values = (x.repeat_interleave(2, 1) for x in (keys, values))
            outs.append((query @ keys.transpose(-1, -2) * 0.3).softmax(-1) @ values)
        return torch.cat(outs, 2)


def cache() -> RerotatedCache:
    return RerotatedCache(WINDOW, SINKS, FREQUENCIES)


@pytest.mark.parametrize("tied", [False, True])
def test_every_step_is_a_recomputation_with_places_for_positions(tied):
    """MLA's values are the columns of the keys that do not rotate."""
    stream, width = Stream(60, tied), 2 if tied else D
    got = stream.feed(cache(), [1] * 20 + [20] + [1] * 20)
    torch.testing.assert_close(got[..., :width], stream.expected(0, 60)[..., :width], atol=1e-6, rtol=1e-6)


@few_examples
@given(sizes=st.lists(st.integers(1, 11), min_size=3, max_size=6))
def test_chunks_change_nothing(sizes):
    stream, length = Stream(sum(sizes)), sum(sizes)
    torch.testing.assert_close(stream.feed(cache(), sizes), stream.expected(0, length), atol=1e-6, rtol=1e-6)


def test_turning_gathers_no_rounding():
    """Turned 1,500 times by one token, a key in fp32 would be off by far more."""
    stream, streamed = Stream(1500), cache()
    stream.feed(streamed, [1] * 1499)
    torch.testing.assert_close(
        stream.feed(streamed, [1], 1499), stream.expected(1499, 1500), atol=2e-4, rtol=2e-4
    )  # the angles themselves are fp32
    streamed._turn_back()
    assert torch.equal(streamed.keys[:, :, :SINKS], turned(stream.keys[:, :, :SINKS], [0, 1, 2, 3]))


def test_a_gap_is_what_the_other_ring_has():
    """Without turning, sinks stand far away: the two differ as soon as a token has left."""
    model, ids = tiny_model(), tokens(1, 12)
    far = in_chunks(model, ids, build_cache(model.config, "sinks2-4"), [12])
    near = in_chunks(model, ids, build_cache(model.config, "sinks2-4-rerotated"), [12])
    torch.testing.assert_close(far[:, :6], near[:, :6])
    assert float((far - near)[:, 6:].abs().max()) > 1e-2


@pytest.mark.parametrize("attention", KV_HEADS)
def test_models_of_every_kind_run_it_in_any_chunks(attention):
    model, ids = tiny_model(attention), tokens(2, 30)
    runs = [
        in_chunks(model, ids, build_cache(model.config, "sinks2-4-rerotated"), c)
        for c in ([30], [1] * 30, [7, 1, 1, 21])
    ]
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_the_row_alone(side):
    model, rows = tiny_model(), [tokens(1, n, seed=n)[0] for n in (3, 14)]
    ids, positions = pad(rows, 16, side)
    together = build_cache(model.config, "sinks2-4-rerotated")
    got = in_chunks(model, ids, together, [16], positions)
    new, at = tokens(2, 5, seed=9), torch.tensor([list(range(n, n + 5)) for n in (3, 14)], dtype=torch.int32)
    decoded = in_chunks(model, new, together, [1] * 5, at)
    for i, row in enumerate(rows):
        alone = in_chunks(
            model, torch.cat([row, new[i]])[None], build_cache(model.config, "sinks2-4-rerotated"), [len(row) + 5]
        )
        torch.testing.assert_close(got[i][positions[i] >= 0], alone[0, : len(row)], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(decoded[i], alone[0, len(row) :], atol=1e-5, rtol=1e-5)


def test_drafts_rows_and_resets_find_the_original_keys():
    stream, streamed = Stream(40, rows=2), cache()
    stream.feed(streamed, [1] * 20)
    stream.feed(streamed, [4], 20)
    stream.feed(streamed, [1], 24)
    KVCache([streamed]).rewind([23, 23])
    torch.testing.assert_close(stream.feed(streamed, [1, 3], 23), stream.expected(23, 27), atol=1e-6, rtol=1e-6)
    stream.feed(streamed, [1], 27)
    KVCache([streamed]).reorder(torch.tensor([1, 1]))
    got = stream.feed(streamed, [1], 28)
    for x in (stream.queries, stream.keys, stream.values):  # row 1's past, and each row's own new token
        x[0, :, :28] = x[1, :, :28]
    torch.testing.assert_close(got, stream.expected(28, 29), atol=1e-6, rtol=1e-6)
    streamed.reset()
    assert streamed.bytes().total == 0
    torch.testing.assert_close(stream.feed(streamed, [40]), stream.expected(0, 40), atol=1e-6, rtol=1e-6)


def test_a_draft_that_moved_the_window_for_the_first_time_can_be_taken_back():
    stream, streamed = Stream(20), cache()
    stream.feed(streamed, [6, 4, 4, 1])  # turned by 3
    streamed.rewind([11])
    assert torch.equal(streamed.keys[:, :, :SINKS], turned(stream.keys[:, :, :SINKS], [0, 1, 2, 3]))
    torch.testing.assert_close(stream.feed(streamed, [1] * 9, 11), stream.expected(11, 20), atol=1e-6, rtol=1e-6)


def test_after_a_rewind_a_window_of_one_knows_how_far_it_has_moved():
    stream, one = Stream(12), RerotatedCache(1, 1, FREQUENCIES)
    stream.feed(one, [1] * 10)
    one.rewind([9])
    again = stream.feed(one, [1], 9)
    torch.testing.assert_close(again, stream.feed(RerotatedCache(1, 1, FREQUENCIES), [10])[:, :, 9:])


def test_a_refused_rewind_changes_nothing():
    stream, streamed = Stream(40), cache()
    stream.feed(streamed, [1] * 30)
    keys, positions = streamed.keys.clone(), streamed.positions.clone()
    with pytest.raises(CannotRewind, match="cannot rewind row 0 to 25 tokens"):
        streamed.rewind([25])
    assert torch.equal(streamed.keys, keys) and torch.equal(streamed.positions, positions)


def test_no_sinks_no_turning():
    with pytest.raises(ValueError, match="nothing to re-rotate"):
        RerotatedCache(8, 0, FREQUENCIES)
