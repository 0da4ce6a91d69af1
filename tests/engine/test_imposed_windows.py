"""Windows and sinks imposed on a model that declares none: whole blocks between them are given back."""

from __future__ import annotations

import random

import pytest

from kvlab.cache.base import KVCache
from kvlab.cache.sliding import SlidingCache
from kvlab.cache.tiers import TieredStore
from kvlab.engine.block_pool import GONE, blocks_for
from kvlab.engine.engine import Engine
from kvlab.engine.prefix_cache import HashChain
from kvlab.engine.request import Request
from tests.engine.serving import MODELS, alone, check_nothing_is_lost, some_requests
from tests.harness import LAYERS, tiny_model

WINDOW = 5


def narrowed(sinks: int, window: int = WINDOW) -> KVCache:
    """The oracle: a cache that imposes the same rule, which equals attention with its mask."""
    return KVCache([SlidingCache(window, sinks, imposed=True) for _ in range(LAYERS)])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix", ["none", "hash", "radix"])
def test_every_request_gets_what_the_same_window_gives_it_alone(prefix, preemption):
    """Chunks, sharing, forks and preemption change nothing, whatever blocks were given back meanwhile."""
    hits = preemptions = 0
    for sinks, name, block_size in ((0, "gqa", 1), (2, "mla", 3), (5, "gqa", 3), (5, "mqa", 1), (2, "gqa", 16)):
        model, seed = MODELS[name](), f"{sinks} {prefix} {preemption} {name} {block_size}"
        dice, requests = random.Random(seed), some_requests(len(seed) + block_size, 6)
        budget = dice.choice([2, 7, 24])
        room = blocks_for(sinks, block_size) + (WINDOW + budget + 2 * block_size) // block_size + 1
        engine = Engine(
            model, num_blocks=room, block_size=block_size, prefix=prefix, token_budget=budget, window=WINDOW,
            sinks=sinks, preemption=preemption, swap_blocks=30, max_running=4,
        )  # fmt: skip
        waiting = list(requests)
        while waiting or engine.busy:
            if waiting and (dice.random() < 0.6 or not engine.busy):
                engine.submit(waiting.pop(0))
            engine.step()
        for request in requests:
            for sequence in request.sequences:
                assert sequence.output_ids == alone(model, request, sequence.index, cache=narrowed(sinks)), request.id
        check_nothing_is_lost(engine)
        hits += engine.stats.hit_tokens
        preemptions += engine.stats.preemptions
    assert preemptions and (hits or prefix == "none")


@pytest.mark.parametrize("sinks", [0, 1, 4, 6])
def test_what_lies_between_sinks_and_window_is_given_back(sinks):
    model = tiny_model("gqa")
    engine = Engine(model, num_blocks=40, block_size=4, token_budget=8, window=WINDOW, sinks=sinks)
    request = engine.submit(Request("long", [(7 * i) % 61 for i in range(30)], max_new_tokens=60))
    most = 0
    while engine.busy:
        engine.step()
        for sequence in request.sequences:
            if sequence.tables:
                table = sequence.tables[0]
                assert GONE not in table[: blocks_for(sinks, 4)]
                most = max(most, sum(block != GONE for block in table))
    assert request.sequences[0].output_ids == alone(model, request, cache=narrowed(sinks))
    assert most <= engine.scheduler.tables.most_blocks(90)[0] < blocks_for(90, 4)


def test_a_request_that_only_the_window_makes_fit_is_served():
    model, prompt = tiny_model("gqa"), [(5 * i) % 61 for i in range(60)]
    whole = Engine(model, num_blocks=8, block_size=4, token_budget=4)
    with pytest.raises(ValueError, match="blocks"):
        whole.submit(Request("r", prompt, max_new_tokens=4))
    engine = Engine(model, num_blocks=8, block_size=4, token_budget=4, window=8, sinks=4)
    request = engine.submit(Request("r", prompt, max_new_tokens=4))
    list(engine.run())
    assert request.sequences[0].output_ids == alone(model, request, cache=narrowed(4, window=8))


def test_a_prefix_is_found_by_its_sinks_and_its_end():
    """The blocks between them were given back first, and may be somebody else's by now."""
    model, prompt = tiny_model("gqa"), [(3 * i) % 61 for i in range(40)]
    engine = Engine(model, num_blocks=20, block_size=4, token_budget=8, window=WINDOW, sinks=3)
    cache, pool = engine.scheduler.cache, engine.scheduler.cache.pools[0]
    list(engine.stream(Request("first", prompt, max_new_tokens=2)))
    known = [key for key in _keys(cache, prompt) if pool.find(key) is not None]
    assert len(known) == 10
    taken = cache.allocate(0, pool.free_count + 4)
    left = [index for index, key in enumerate(known) if pool.find(key) is not None]
    assert len(left) == 5 and {0, 9} < set(left), left  # the sinks' block and the one that the window sees
    pool.free(taken)
    before = engine.stats.hit_tokens
    request = engine.submit(Request("second", [*prompt, 9], max_new_tokens=3))
    list(engine.run())
    assert engine.stats.hit_tokens - before == 40
    assert request.sequences[0].output_ids == alone(model, request, cache=narrowed(3))


def test_a_prefix_without_its_sinks_is_none():
    cache = Engine(tiny_model("gqa"), num_blocks=20, block_size=4, window=WINDOW, sinks=3).scheduler.cache
    assert cache.agree([[7, GONE, GONE, 3]]) == 4 and cache.agree([[7, GONE, GONE]]) == 1
    assert cache.agree([[GONE, 1, 2, 3]]) == 0


def _keys(cache: HashChain, prompt: list[int]) -> list[object]:
    keys = [cache.match((), Request("x", prompt).identity).path]
    for block in range(len(prompt) // cache.block_size):
        keys.append(cache.key_of(keys[-1], prompt, block))
    return keys[1:]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("gqa", {"sinks": 4}, "at least one token, and sinks from 0 on, in whole numbers: got None and 4"),
        ("gqa", {"window": 0}, "got 0 and 0"),
        ("gqa", {"window": 4, "sinks": -1}, "got 4 and -1"),
        ("hybrid", {"window": 4}, "windows of its own"),
        ("gqa", {"window": 4, "store": TieredStore()}, "window=None, got 'hash', 4"),
    ],
)
def test_windows_that_cannot_be_imposed(name, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(MODELS[name](), num_blocks=8, block_size=4, **options)
