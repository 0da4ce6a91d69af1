"""The scoring functions by hand: what each looks at, and how the best are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache import scores
from kvlab.cache.scores import METHODS, Evidence, keep_best
from tests.slow_reference import hashed

few_examples = settings(max_examples=25, deadline=None)


def evidence(S: int = 12, asked: int = 4, heads: int = 4, kv_heads: int = 2, seed: int = 0, **facts) -> Evidence:
    """Slots 0 .. S - 1 at their own positions, and the last `asked` of S queries."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, kv_heads, S, 8, generator=generator, dtype=torch.float64)
    queries = torch.randn(1, heads, asked, 8, generator=generator, dtype=torch.float64)
    facts = {"keys": keys, "queries": queries, **facts}
    positions = torch.arange(S, dtype=torch.int32).expand(1, facts["keys"].shape[1], S)
    carried = torch.zeros(1, facts["keys"].shape[1], S, dtype=torch.float64)
    asked_at = torch.arange(S - asked, S, dtype=torch.int32)[None]
    facts = {"positions": positions, "asked_at": asked_at, "carried": carried, **facts}
    return Evidence(newest=torch.tensor([[[S - 1]]]), scale=8**-0.5, **facts)


def weights_of(given: Evidence) -> torch.Tensor:
    """(H, q, S): the attention of the asked queries, one at a time."""
    keys, at = given.keys[0], given.asked_at[0].tolist()
    sharing = given.queries.shape[1] // keys.shape[0]
    out = torch.zeros(given.queries.shape[1], len(at), keys.shape[1], dtype=torch.float64)
    for head, (i, p) in ((head, pair) for head in range(len(out)) for pair in enumerate(at)):
        kept = [s for s, held in enumerate(given.positions[0, head // sharing].tolist()) if 0 <= held <= p]
        out[head, i, kept] = (keys[head // sharing, kept] @ given.queries[0, head, i] * given.scale).softmax(0)
    return out


@pytest.mark.parametrize("tile", [1, 3, 64])
def test_attention_is_asked_again_a_tile_at_a_time(monkeypatch, tile):
    monkeypatch.setattr(scores, "TILE", tile)
    given = evidence(asked=7)
    got = torch.cat([weights for weights, _ in given.attention()], 3)  # (1, H_kv, G, q, S)
    torch.testing.assert_close(got.flatten(1, 2)[0], weights_of(given))
    torch.testing.assert_close(scores.add_attention(given)[0, 1], weights_of(given)[2:].mean(0).sum(0))


def test_queries_that_are_not_asked_and_slots_that_are_empty_weigh_nothing():
    given = evidence(asked=2)
    positions = given.positions.clone()
    positions[:, 0, 3] = -1
    given = evidence(asked=2, positions=positions, asked_at=torch.tensor([[-1, 11]], dtype=torch.int32))
    total = scores.add_attention(given)
    assert total[0, 0, 3] == 0 and total.isfinite().all()
    torch.testing.assert_close(total.sum(-1), torch.ones(1, 2, dtype=torch.float64))  # one query's worth of attention


def test_h2o_adds_up_what_the_query_heads_of_a_kv_head_give():
    given = evidence()
    earlier = evidence(carried=torch.full((1, 2, 12), 0.5))
    assert torch.equal(METHODS["h2o"].score(earlier), earlier.carried)
    torch.testing.assert_close(METHODS["h2o"].adds(given)[0, 0], weights_of(given)[:2].mean(0).sum(0))


@pytest.mark.parametrize("S", [1, 5, 40])
def test_uniform_attention_gives_equal_normalised_scores_where_the_sum_favours_the_early(S):
    given = evidence(S, asked=S, queries=torch.zeros(1, 4, S, 8, dtype=torch.float64))
    added = evidence(S, asked=S, carried=METHODS["h2o-mean"].adds(given))
    torch.testing.assert_close(METHODS["h2o-mean"].score(added), torch.ones(1, 2, S, dtype=torch.float64))
    plain = METHODS["h2o"].adds(given)[0, 0]
    assert (plain[:-1] > plain[1:]).all()


def test_a_model_with_a_window_lets_fewer_queries_see_a_token():
    given = evidence(asked=12, queries=torch.zeros(1, 4, 12, 8, dtype=torch.float64), window=4)
    added = evidence(carried=METHODS["h2o-mean"].adds(given), window=4)
    torch.testing.assert_close(METHODS["h2o-mean"].score(added), torch.ones(1, 2, 12, dtype=torch.float64))


def test_tova_takes_the_newest_query_and_all_heads_agree():
    given = evidence(asked=1)
    got = METHODS["tova"].score(given)
    torch.testing.assert_close(got[0, 0], weights_of(given).sum((0, 1)))
    assert torch.equal(got[0, 0], got[0, 1])


def test_snapkv_smooths_what_its_window_attends_to_and_leaves_the_window_out():
    given = evidence(asked=4)
    raw = weights_of(given)[2:].mean(0).sum(0)[:8]  # KV head 1, the tokens before the window
    expected = [sum(raw[max(0, i - 2) : i + 3]) / 5 for i in range(8)]
    torch.testing.assert_close(METHODS["snapkv"].score(given)[0, 1, :8], torch.stack(expected))


def test_snapkv_smooths_over_neighbours_in_the_text_wherever_they_are_stored():
    given, order = evidence(asked=4), torch.randperm(12, generator=torch.Generator().manual_seed(3))
    shuffled = evidence(asked=4, keys=given.keys[:, :, order], positions=given.positions[:, :, order])
    torch.testing.assert_close(METHODS["snapkv"].score(shuffled), METHODS["snapkv"].score(given)[:, :, order])


def test_scores_belong_to_kv_heads():
    """GQA's saving must survive: nothing is repeated for query heads."""
    for method in METHODS.values():
        given = evidence(asked=1 if method.asks == "last" else 4, heads=8, kv_heads=2)
        assert method.score(given).shape == (1, 2, 12)


def test_small_keys_stay():
    keys = torch.ones(1, 1, 4, 8) * torch.tensor([3.0, 1.0, 4.0, 2.0])[:, None]
    assert METHODS["keynorm"].score(evidence(4, kv_heads=1, keys=keys))[0, 0].argsort().tolist() == [2, 0, 3, 1]


def test_the_random_control_is_the_same_number_whatever_stands_beside_a_token():
    given = evidence(seed=5)
    got = METHODS["random"].score(given)
    assert got.tolist() == [[[hashed(s, h, 0) for s in range(12)] for h in range(2)]]
    assert not torch.equal(got[0, 0], got[0, 1])


def test_the_random_control_is_fair():
    """Of 64 tokens 16 stay: over 200 heads, each token stays about 50 times."""
    stayed = torch.zeros(64)
    for layer in range(100):  # of two heads
        given = replace(evidence(64), seed=layer)
        stayed += METHODS["random"].score(given)[0].topk(16).indices.flatten().bincount(minlength=64)
    assert 25 <= stayed.min() and stayed.max() <= 80
    assert abs(float(stayed[:32].sum() / stayed.sum()) - 0.5) < 0.05


def test_no_method_but_the_control_knows_the_seed():
    for name, method in METHODS.items():
        given = evidence(asked=1 if method.asks == "last" else 4)
        same = torch.equal(method.score(given), method.score(replace(given, seed=7)))
        assert same == (name != "random")


def test_ties_go_to_the_newer_token_wherever_it_is_stored():
    positions = torch.tensor([[[7, 2, 9, 4, 0]]])
    kept = keep_best(torch.zeros(1, 1, 5), positions, torch.tensor([2]), positions < 0)
    assert positions[kept].tolist() == [7, 9]


def test_protected_slots_stay_whatever_they_score_and_empty_ones_never():
    positions = torch.tensor([[[0, 1, 2, 3, -1, -1]]])
    high = torch.tensor([[[-torch.inf, 5.0, torch.inf, 0.0, torch.inf, 9.0]]])
    protected = positions < 1  # EMPTY is below every sink, too
    kept = keep_best(high, positions, torch.tensor([2]), protected)
    assert sorted(positions[kept].tolist()) == [0, 2]
    everything = keep_best(high, positions, torch.tensor([4]), protected)
    assert sorted(positions[everything].tolist()) == [0, 1, 2, 3]


@few_examples
@given(data=st.data(), S=st.integers(1, 12))
def test_the_best_are_the_first_of_a_sorted_list(data, S):
    values = data.draw(st.lists(st.integers(0, 3), min_size=S, max_size=S))
    positions = data.draw(st.permutations(range(S)))
    safe = data.draw(st.lists(st.booleans(), min_size=S, max_size=S))
    count = data.draw(st.integers(1, S))
    ranked = sorted(range(S), key=lambda i: (safe[i], 0 if safe[i] else values[i], positions[i]), reverse=True)
    mask = torch.tensor([[safe]])
    kept = keep_best(torch.tensor([[values]]).float(), torch.tensor([[positions]]), torch.tensor([count]), mask)
    assert kept[0, 0].nonzero().flatten().tolist() == sorted(ranked[:count])
