"""What every dense cache refuses, with nothing changed: wrong rows, lengths, positions, shapes."""

from __future__ import annotations

import pytest
import torch

from kvlab.cache.base import KVCache
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.sliding import SlidingCache
from kvlab.cache.static import StaticCache

KINDS = {
    "contiguous": lambda: [ContiguousCache(), ContiguousCache()],
    "static": lambda: [StaticCache(16), StaticCache(16)],
    "sliding": lambda: [SlidingCache(6), SlidingCache(6)],
    "hybrid": lambda: [ContiguousCache(), SlidingCache(6)],
}


@pytest.fixture(params=KINDS)
def cache(request) -> KVCache:
    """Two layers, two rows of 10 tokens."""
    cache = KVCache(KINDS[request.param]())
    feed(cache, positions(range(10)))
    return cache


def positions(row, rows: int = 2) -> torch.Tensor:
    return torch.tensor([list(row)] * rows, dtype=torch.int32)


def feed(cache: KVCache, where: torch.Tensor) -> None:
    step = cache.begin(where)
    for layer in cache.layers:
        layer.update(*torch.randn(2, where.shape[0], 3, where.shape[1], 4), step)


def state(cache: KVCache) -> list:
    names = ("keys", "values", "positions", "length", "cursor", "start", "uniform")
    found = [getattr(layer, name, None) for layer in cache.layers for name in names]
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in found]


def refused(cache: KVCache, action, words: str) -> None:
    before = state(cache)
    with pytest.raises(ValueError, match=words) as caught:
        action()
    assert "\n" not in str(caught.value) and state(cache) == before


@pytest.mark.parametrize("rows", [[0, 2], [-1, 0], [[0, 1]], [], [0.0, 1.0], [True, False]])
def test_rows_that_are_not_there_cannot_be_reordered(cache, rows):
    refused(cache, lambda: cache.reorder(torch.tensor(rows)), "rows")


def test_rows_may_be_a_list_of_either_width(cache):
    keys = cache.layers[0].keys.clone()
    cache.reorder(torch.tensor([1, 0], dtype=torch.int32))
    cache.reorder([1, 1, 0])
    assert torch.equal(cache.layers[0].keys, keys[[0, 0, 1]])


@pytest.mark.parametrize(
    "lengths", [[9.5, 9], [True, True], [None, 9], ["9", "9"], 9, [9], [9, 9, 9], [9, 11], [-1, 9]]
)
def test_lengths_that_are_none_cannot_be_rewound_to(cache, lengths):
    refused(cache, lambda: cache.rewind(lengths), "length|rewind")


def test_lengths_may_be_a_tensor(cache):
    cache.rewind(torch.tensor([9, 9]))
    assert int(cache.layers[0].positions.max()) == 8


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (positions([9]), "holds tokens up to position 9, so position 9 cannot follow"),
        (positions([3]), "position 3 cannot follow"),
        (positions([10, 10]), "position 10 cannot follow"),
        (positions([11, 10]), "position 10 cannot follow"),
        (torch.tensor([[10, 11], [-1, 9]]), "row 1 .* position 9 cannot follow"),
        (positions([10], rows=3), "holds 2 rows, positions of 3"),
        (positions([-5]), "positions must be -1"),
        (positions([10]).long() + 2**32, "positions must be -1"),
        (positions([10]).float(), "int32 or int64"),
    ],
)
def test_positions_grow_in_every_row(cache, where, words):
    refused(cache, lambda: cache.begin(where), words)


def test_padding_and_gaps_are_no_steps_back(cache):
    feed(cache, torch.tensor([[-1, 10], [10, -1]], dtype=torch.int32))
    feed(cache, torch.tensor([[12, 13], [11, -1]], dtype=torch.int32))
    assert cache.layers[0].positions.amax((1, 2)).tolist() == [13, 11]


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        ((2, 3, 2, 4), (2, 3, 2, 4), "need keys"),
        ((1, 3, 1, 4), (1, 3, 1, 4), "need keys"),
        ((2, 3, 1, 4), (2, 3, 2, 4), "do not fit keys"),
        ((2, 3, 1, 4), (2, 1, 1, 4), "do not fit keys"),
        ((2, 3, 1, 4), (2, 3, 1, 6), "which values .* do not fit"),
        ((2, 3, 1, 4), None, "which values None do not fit"),
    ],
)
def test_keys_and_values_fit_the_step_and_each_other(cache, keys, values, words):
    step = cache.begin(positions([10]))
    before = state(cache)
    for layer in cache.layers:
        with pytest.raises(ValueError, match=words):
            layer.update(torch.ones(keys), None if values is None else torch.ones(values), step)
    with pytest.raises(ValueError, match="do not fit keys"):
        cache.layers[0].update(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4).half(), step)
    assert state(cache) == before


@pytest.mark.parametrize("layers", [[ContiguousCache()] * 3, iter([StaticCache(4)] * 2)])
def test_one_layer_cache_cannot_stand_for_several(layers):
    with pytest.raises(ValueError, match="make one for each"):
        KVCache(layers)
    with pytest.raises(ValueError, match="at least one layer"):
        KVCache(iter(()))
