"""One rule for every mask, one arithmetic for every split of a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import EMPTY, DensePart, Step, attend, attend_live, fold, merge, unfold, visible

torch.manual_seed(0)
few_examples = settings(max_examples=60, deadline=None)


def steps(*positions: int) -> Step:
    return Step.plan(torch.tensor([positions], dtype=torch.int32))


def part(S: int, kv_heads: int = 2, D: int = 8, start: int = 0, dtype=torch.float64, batch: int = 1) -> DensePart:
    keys, values = torch.randn(2, batch, kv_heads, S, D, dtype=dtype)
    positions = torch.arange(start, start + S, dtype=torch.int32).expand(batch, 1, S)
    return DensePart(keys, values, positions, start)


def reference(queries, keys, values, sees, scale):
    """Softmax attention written out in float64: one query head at a time, an explicit mask, nothing shared."""
    B, H, T, _ = queries.shape
    out = torch.zeros(B, H, T, values.shape[3], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            kv = h // (H // keys.shape[1])
            for t in range(T):
                allowed = sees[b, 0 if sees.shape[1] == 1 else kv, t].nonzero().flatten()
                if len(allowed):
                    scores = (keys[b, kv, allowed].double() @ queries[b, h, t].double()) * scale
                    out[b, h, t] = scores.softmax(0) @ values[b, kv, allowed].double()
    return out


def masks(T: int, S: int, window=None, sinks=0, start: int | None = None) -> list[str]:
    start = S - T if start is None else start
    sees = visible(torch.arange(start, start + T)[None], torch.arange(S)[None, None], window, sinks)
    return ["".join("1" if x else "0" for x in row) for row in sees[0, 0]]


def test_a_window_counts_the_querys_own_token():
    assert [row.count("1") for row in masks(5, 5, window=3)] == [1, 2, 3, 3, 3]
    assert masks(3, 3, window=1) == ["100", "010", "001"]


def test_the_last_queries_see_all_earlier_slots():
    assert masks(1, 8) == ["11111111"]
    assert masks(2, 5) == ["11110", "11111"]


def test_sinks_stay_visible_behind_the_window_and_empty_slots_never_are():
    assert masks(1, 8, window=2, sinks=3) == ["11100011"]
    empty = torch.full((1, 1, 4), EMPTY)
    assert not visible(torch.tensor([[5]]), empty, window=2, sinks=3).any()


def test_kept_slots_in_any_order_are_visible_to_later_queries():
    kept = torch.tensor([[[7, 0, 5, 1, 6]]])
    assert visible(torch.tensor([[8, 9]]), kept).all()


@pytest.mark.parametrize("positions", [torch.zeros(1, 0), torch.zeros(3)])
def test_a_step_without_tokens_is_refused(positions):
    with pytest.raises(ValueError, match="at least one token"):
        Step.plan(positions)


def test_a_step_knows_where_it_starts_only_if_all_rows_agree():
    assert steps(4, 5, 6).start == 4
    assert steps(4, 6).start is None and steps(EMPTY, 0).start is None
    assert Step.plan(torch.tensor([[3], [3]])).start == 3
    assert Step.plan(torch.tensor([[3], [4]])).start is None


# every path through `attend` against the reference: with and without the facts that allow a shortcut
@pytest.mark.parametrize("facts", [True, False], ids=["planned", "unplanned"])
@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize(("T", "start"), [(1, 0), (1, 6), (7, 0), (4, 3), (2, 5), (1, 9)])
def test_attend_equals_the_reference(T, start, window, facts):
    queries, stored = torch.randn(2, 6, T, 8, dtype=torch.float64), part(7, batch=2)
    at = torch.arange(start, start + T, dtype=torch.int32).expand(2, T)
    step = Step.plan(at) if facts else Step(at)
    out = attend(queries, (stored,), step, scale=0.3, window=window)
    sees = visible(at, stored.positions, window)
    torch.testing.assert_close(out, reference(queries, stored.keys, stored.values, sees, 0.3))


@few_examples
@given(data=st.data())
def test_attention_over_parts_is_attention_over_their_union(data):
    """Cut a cache anywhere, in any order: merging by log-sum-exp gives what one softmax gives."""
    S, T = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    window, sinks = data.draw(st.sampled_from([None, 1, 4])), data.draw(st.integers(0, 2))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=S, max_size=S)))
    whole, queries, step = part(S), torch.randn(1, 4, T, 8, dtype=torch.float64), steps(*range(S - 1, S - 1 + T))
    pieces = []
    for name in range(4):
        mine = (owner == name).nonzero().flatten()
        pieces.append(DensePart(whole.keys[:, :, mine], whole.values[:, :, mine], whole.positions[:, :, mine]))
    options = dict(scale=0.35, window=window, sinks=sinks)
    one = attend(queries, (whole,), Step(step.positions), **options)
    torch.testing.assert_close(attend(queries, tuple(pieces), step, **options), one)


def test_the_merge_of_large_scores_stays_finite():
    near, far = part(3), part(3, start=3)
    queries = torch.randn(1, 2, 1, 8, dtype=torch.float64) * 1e4
    out = attend(queries, (near, far), steps(5), scale=1.0)
    both = DensePart(
        torch.cat([near.keys, far.keys], 2),
        torch.cat([near.values, far.values], 2),
        torch.cat([near.positions, far.positions], 2),
    )
    torch.testing.assert_close(out, attend(queries, (both,), steps(5), scale=1.0))


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_query_that_sees_nothing_gets_zeros(pieces):
    stored = part(4)
    step = Step.plan(torch.tensor([[EMPTY, 2]], dtype=torch.int32))
    out = attend(torch.randn(1, 2, 2, 8, dtype=torch.float64), (stored,) * pieces, step, scale=1.0)
    assert bool((out[:, :, 0] == 0).all()) and bool(out[:, :, 1].abs().sum() > 0)


def test_merging_weighs_by_mass():
    """Three slots with equal scores beside one: the union is their plain mean."""
    outs = [torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 1, 1), 5.0)]
    lses = [torch.log(torch.full((1, 1, 1), 3.0)), torch.zeros(1, 1, 1)]
    assert float(merge(list(zip(outs, lses, strict=True)))) == pytest.approx(2.0)


def test_values_may_be_the_keys_themselves():
    """MLA stores one latent: the first value_width columns of the keys serve as values."""
    stored, queries = part(5, kv_heads=1), torch.randn(1, 4, 1, 8, dtype=torch.float64)
    shared = DensePart(stored.keys, None, stored.positions, 0, value_width=6)
    separate = DensePart(stored.keys, stored.keys[..., :6].contiguous(), stored.positions)
    for view, twin in [((shared,), (separate,)), ((shared, shared), (separate, separate))]:
        out = attend(queries, view, steps(4), scale=0.2)
        assert out.shape == (1, 4, 1, 6)
        torch.testing.assert_close(out, attend(queries, twin, steps(4), scale=0.2))


@pytest.mark.parametrize("start", [None, 0], ids=["unplanned", "consecutive"])
@pytest.mark.parametrize("window", [None, 2, 6])
def test_live_attention_reads_only_the_live_slots(window, start):
    whole, queries = part(6), torch.randn(1, 4, 1, 8, dtype=torch.float64)
    buffer = [torch.cat([x, torch.full_like(x, 1e30)], 2) for x in (whole.keys, whole.values)]
    positions = torch.cat([whole.positions, torch.full_like(whole.positions, EMPTY)], 2)
    live = DensePart(*buffer, positions, start, length=torch.tensor(6))
    expected = attend(queries, (whole,), steps(5), scale=0.3, window=window)
    torch.testing.assert_close(attend(queries, (live,), steps(5), scale=0.3, window=window), expected)


def test_live_attention_describes_itself_to_the_compiler():
    whole, queries = part(6, dtype=torch.float32), torch.randn(1, 4, 1, 8)
    tensors = (queries, whole.keys, whole.values, whole.positions, torch.tensor([[5]]), torch.tensor(4))
    args = (*tensors, 0.3, None, 0, False)
    torch.library.opcheck(attend_live, args)


def test_heads_that_share_a_key_head_are_neighbours():
    x = torch.arange(2 * 6 * 3 * 4.0).view(2, 6, 3, 4)
    assert torch.equal(fold(x, 2)[:, 1, 3:6], x[:, 4])
    assert torch.equal(unfold(fold(x, 2), 6), x)
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        fold(x, 4)
