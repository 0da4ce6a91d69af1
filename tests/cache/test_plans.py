"""Names of caches that keep less: what each stands for, and what a wrong one is told."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from kvlab.cache.budgets import Budget
from kvlab.cache.build import build_cache, check_name
from kvlab.cache.evicting import EvictingCache
from kvlab.cache.formats import CodedRows, PlainRows
from kvlab.cache.plans import parse
from kvlab.cache.rerotated import RerotatedCache
from kvlab.cache.scores import METHODS
from kvlab.cache.sliding import SlidingCache
from tests.harness import tiny_config


def layer(name: str, window: int | None = None, attention: str = "gqa"):
    return build_cache(tiny_config(attention, window), name).layers[0]


@pytest.mark.parametrize(
    ("name", "kind", "window", "sinks"),
    [
        ("window-256", SlidingCache, 256, 0),
        ("window-1", SlidingCache, 1, 0),
        ("sinks4-252", SlidingCache, 252, 4),
        ("sinks0-9", SlidingCache, 9, 0),
        ("sinks4-252-rerotated", RerotatedCache, 252, 4),
    ],
)
def test_windows(name, kind, window, sinks):
    made = layer(name)
    assert (type(made), made.window, made.sinks, made.imposed, made.exact) == (kind, window, sinks, True, False)


@pytest.mark.parametrize(
    ("name", "budget", "stride"),
    [
        ("h2o-256", Budget(256, None, 4, 128), 32),
        ("h2o-mean-64", Budget(64, None, 4, 32), 8),
        ("snapkv-256", Budget(256, None, 4, 32), 32),
        ("tova-12", Budget(12, None, 3, 3), 1),
        ("keynorm-1", Budget(1, None, 0, 1), 1),
        ("h2o-25%", Budget(None, Fraction(1, 4), 4, 32), 64),
        ("snapkv-12.5%", Budget(None, Fraction(1, 8), 4, 32), 64),
        ("tova-100%", Budget(None, Fraction(1), 4, 32), 64),
        ("random-256-sinks8-recent64-stride16", Budget(256, None, 8, 64), 16),
        ("recent-256-stride16-sinks0-recent0", Budget(256, None, 0, 0), 16),
    ],
)
def test_methods_with_their_budgets(name, budget, stride):
    made, method = layer(name), max((x for x in METHODS if name.startswith(x)), key=len)
    assert (made.method, made.budget, made.stride) == (METHODS[method], budget, stride)
    assert isinstance(made.form, PlainRows) and not made.whole_prompt


def test_options():
    assert layer("snapkv-256-prompt").whole_prompt
    assert layer("h2o-256").method is METHODS["h2o"]
    alike = layer("h2o-256-shared-stride16").method
    assert alike.score is not METHODS["h2o"].score and (alike.asks, alike.adds) == ("all", METHODS["h2o"].adds)
    coded = layer("h2o-256+int4-g8")
    assert isinstance(coded.form, CodedRows) and coded.form.key_codec.bits == 4 and coded.form.rope_width == 0
    assert layer("h2o-256-prompt+int8").form.key_codec.bits == 8
    assert layer("h2o-256+int4", attention="mla").form.rope_width == 4


def test_a_pyramid_gives_the_first_layers_more():
    config = replace(tiny_config(), num_hidden_layers=5, layer_types=("full_attention",) * 5)
    layers = build_cache(config, "snapkv-264-sinks32-recent32-pyramid").layers
    assert [x.budget.tokens for x in layers] == [454, 359, 264, 169, 74]
    assert [x.seed for x in layers] == list(range(5))


@pytest.mark.parametrize(("name", "own"), [("window-8", 6), ("sinks2-6", 6), ("h2o-8", 8), ("sinks2-6-rerotated", 5)])
def test_a_layer_whose_own_window_is_within_the_budget_keeps_it(name, own):
    made = layer(name, window=own)
    assert (type(made), made.window, made.imposed, made.exact) == (SlidingCache, own, False, True)


@pytest.mark.parametrize(
    ("name", "kind"), [("window-8", SlidingCache), ("h2o-8", EvictingCache), ("h2o-5%", EvictingCache)]
)
def test_a_layer_whose_own_window_is_wider_is_narrowed(name, kind):
    assert type(layer(name, window=9)) is kind and not layer(name, window=9).exact


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("window-0", "at least the query's own token, got 0"),
        ("sinks4-0", "at least the query's own token, got 0"),
        ("sinks0-256-rerotated", "without sinks there is nothing to re-rotate"),
        ("window-256+int8", r"keeps keys and values as they came; recent-256\+int8"),
        ("sinks4-252-rerotated+int8", "codes cannot be turned"),
        ("h2o", "cannot read the cache 'h2o'.*h2o-256 or h2o-25%"),
        ("h2o-", "cannot read the cache 'h2o-'"),
        ("h2o-256-sink4", "cannot read the cache 'h2o-256-sink4'.*-sinks4, -recent64"),
        ("h2o-256-snapkv", "cannot read"),
        ("h2o--5", "cannot read"),
        ("window-25%", "cannot read the cache 'window-25%'"),
        ("window", "cannot read"),
        ("sinks4", "cannot read"),
        ("sinks-4-256", "cannot read"),
        ("h2o-0", "at least 1, got 0"),
        ("h2o-0%", "above 0 and is 1 at most, got 0"),
        ("h2o-150%", "above 0 and is 1 at most, got 3/2"),
        ("h2o-8-sinks4-recent8", "8 tokens cannot hold 4 sinks and 8 recent tokens: give at least 12"),
        ("h2o-256-stride0", "at least one position apart"),
        ("h2o-256-sinks4-sinks8", "an option is given twice"),
        ("snapkv-256-recent0", "give at least 1 recent token"),
        ("h2o-25%-pyramid", "give the budget in tokens"),
        ("h2o-256+kivi2", "drops tokens one by one, which 'kivi2' cannot"),
        ("h2o-256+int4-g32-r64", "drops tokens one by one"),
        ("h2o-256+int5", "drops tokens one by one, which 'int5' cannot"),
        ("h3o-256", "unknown cache 'h3o-256'.*window-N.*h2o-N"),
    ],
)
def test_names_that_mean_nothing(name, words):
    with pytest.raises(ValueError, match=words) as caught:
        check_name(name)
    assert "\n" not in str(caught.value)


def test_codes_that_do_not_fit_a_row_are_refused_for_the_model():
    with pytest.raises(ValueError, match="a row of 8 numbers cannot be cut into groups of 64"):
        layer("h2o-256+int4-g64")


@pytest.mark.parametrize("name", ["contiguous", "int4-g64", "kivi2-g32-r128", "q8_0", "nonsense", "", "windows"])
def test_other_names_are_left_to_others(name):
    assert parse(name) is None
