"""How many tokens stay: shares that never empty a cache, protected tokens, pyramids."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache.budgets import Budget, pyramid

few_examples = settings(max_examples=100, deadline=None)


@pytest.mark.parametrize(
    ("length", "dropped", "kept"),
    [(2, 0.6, 1), (10, 0.9, 1), (100, 0.9, 10), (1, 0.5, 1), (7, 0.5, 3), (1000, 0.7, 300)],
)
def test_a_share_rounds_down_but_never_to_nothing(length, dropped, kept):
    assert Budget(share=1 - dropped).kept(length) == kept  # 1 - 0.9 is 0.09999999999999998


def test_a_share_of_everything_keeps_everything():
    assert [Budget(share=1.0).kept(n) for n in (1, 7, 1000)] == [1, 7, 1000]
    assert Budget(share=Fraction(1, 4)).kept(100) == 25


def test_what_is_protected_is_the_least_that_a_share_keeps():
    budget = Budget(share=0.1, sinks=2, recent=3)
    assert [budget.kept(n) for n in (3, 20, 200)] == [3, 5, 20]


def test_tokens_are_tokens():
    assert [Budget(tokens=5).kept(n) for n in (1, 5, 6, 1000)] == [1, 5, 5, 5]
    assert Budget(tokens=1).kept(10) == 1
    assert Budget(tokens=8, sinks=4, recent=4).protected == 8


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "either tokens or a share"),
        ({"tokens": 4, "share": 0.5}, "either tokens or a share"),
        ({"tokens": 0}, "at least 1, got 0"),
        ({"tokens": -3}, "got -3"),
        ({"tokens": 2.5}, "whole number of tokens .* got 2.5"),
        ({"tokens": True}, "whole number"),
        ({"share": 0.0}, "above 0 and is 1 at most, got 0"),
        ({"share": 1.2}, "got 1.2"),
        ({"share": -0.1}, "got -0.1"),
        ({"share": float("nan")}, "got nan"),
        ({"tokens": 7, "sinks": 4, "recent": 4}, "7 tokens cannot hold 4 sinks and 4 recent tokens: give at least 8"),
        ({"share": True}, "got True"),
        ({"share": "0.5"}, "got '0.5'"),
        ({"share": 1.0000001}, "got 1.0000001"),
        ({"tokens": 7, "sinks": -1}, "counted from 0, got -1"),
        ({"tokens": 7, "sinks": 1.5}, "counted from 0, got 1.5"),
        ({"tokens": 7, "recent": "2"}, "counted from 0, got 0 and '2'"),
        ({"tokens": 7, "recent": float("nan")}, "got 0 and nan"),
    ],
)
def test_budgets_that_are_none(facts, words):
    with pytest.raises(ValueError, match=words):
        Budget(**facts)


@few_examples
@given(layers=st.integers(1, 80), tokens=st.integers(1, 5000), data=st.data())
def test_a_pyramid_falls_and_adds_up(layers, tokens, data):
    protected = data.draw(st.integers(0, tokens))
    budgets = pyramid(tokens, layers, protected)
    assert sum(budgets) == layers * tokens and len(budgets) == layers
    assert min(budgets) >= max(1, protected)
    assert all(later <= earlier + 1 for earlier, later in pairwise(budgets))  # +1: rounding


def test_a_pyramid_of_round_numbers():
    """64 protected and 200 free on average: the last layer gets a twentieth of 200, the first the mirror image."""
    assert pyramid(264, 5, 64) == [64 + n for n in (390, 295, 200, 105, 10)]
    assert pyramid(100, 1) == [100] and pyramid(100, 3, steepness=1) == [100, 100, 100]


@pytest.mark.parametrize("facts", [(4, 3, 5), (4, 0), (4, 3, 0, 0), (0, 4), (12.5, 4), (12, 4.0), (12, 3, -2)])
def test_pyramids_that_cannot_be(facts):
    with pytest.raises(ValueError, match="no pyramid of"):
        pyramid(*facts)
