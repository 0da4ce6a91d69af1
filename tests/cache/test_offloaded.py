"""Offloaded layers: who travels when, what comes back bit by bit, and what a broken link may not lose."""

import threading
from dataclasses import replace

import pytest
import torch

from kvlab.cache.base import KVCache, NoCache
from kvlab.cache.build import build_cache, check_name
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.link import ThreadLink
from kvlab.cache.offloaded import OffloadedCache, OffloadedKVCache, contents
from kvlab.cache.paged import PagedCache
from kvlab.cache.quantized import QuantizedCache
from kvlab.cache.sliding import SlidingCache
from kvlab.cache.static import StaticCache
from kvlab.codecs import Codec
from kvlab.model.transformer import Transformer
from tests.harness import LAYERS, WINDOW, in_chunks, naive, positions_of, tiny_config, tiny_model, tokens

LONG = 100  # seconds after which a test that waits gives up: no result depends on it
INNER = {
    "contiguous": ContiguousCache,
    "sliding": lambda: SlidingCache(WINDOW),
    "fp8": lambda: QuantizedCache(Codec("e4m3"), Codec("e4m3")),
    "int4": lambda: QuantizedCache(Codec("affine", 4, 4), Codec("affine", 4, 4)),
    "kivi4": lambda: QuantizedCache.kivi(4, 4, 8),
}


class SlowLink(ThreadLink):
    """Delivers nothing before somebody computes, and writes down what happened; `broken` counts fetches that fail."""

    def __init__(self):
        super().__init__()
        self.events: list[str] = []
        self.computing, self.travelling = threading.Semaphore(0), threading.Semaphore(0)
        self.broken = 0

    def copy(self, stored):
        self.events.append("departs")
        self.travelling.release()
        assert self.computing.acquire(timeout=LONG), "nobody computes while this is on its way"
        if self.broken:
            self.broken -= 1
            raise OSError("the link is down")
        copies = super().copy(stored)
        self.events.append("arrives")
        return copies


class Computing(ContiguousCache):
    """Its attention ends only once the next layer's tensors have departed, and only then may these arrive."""

    def __init__(self, link: SlowLink, last: bool):
        super().__init__()
        self.link, self.last = link, last

    def observe(self, queries, view, step, *, scale, window):
        if not self.last:
            assert self.link.travelling.acquire(timeout=LONG), "the next layer has not departed"
            self.link.events.append("computes")
            self.link.computing.release()


def test_the_next_layer_travels_while_this_one_computes():
    """The slow link waits for the computation, and the computation for the link: only both at once come to an end."""
    model, link, ids = three_layers(), SlowLink(), tokens(1, 6)
    cache = OffloadedKVCache(KVCache([Computing(link, index == 2) for index in range(3)]), link=link)
    step = cache.begin(positions_of(ids))
    link.travelling.acquire(timeout=LONG)
    link.computing.release()  # the embedding is computed while the first layer travels
    logits = model(ids, step, cache)
    assert torch.equal(logits, in_chunks(model, ids, KVCache([ContiguousCache() for _ in range(3)]), [6]))
    link.settle()
    one_by_one = [event for event in link.events if event != "computes"]
    assert one_by_one == ["departs", "arrives"] * 3  # one worker, in order
    first, second = (i for i, event in enumerate(link.events) if event == "computes")
    departures = [i for i, event in enumerate(link.events) if event == "departs"]
    assert departures[1] < first < departures[2] < second < len(link.events) - 1


def three_layers() -> Transformer:
    torch.manual_seed(2)
    return Transformer(replace(tiny_config(), num_hidden_layers=3, layer_types=("full_attention",) * 3)).double().eval()


class CountingLink(ThreadLink):
    """Counts slots on their way in and out."""

    def __init__(self):
        super().__init__()
        self.fetched = self.stored = self.homes = 0

    def copy(self, stored):
        self.fetched += sum(x[0, 0, slots].shape[0] for x, slots in stored)
        return super().copy(stored)

    def store(self, x, home, slots):
        self.homes += home is None
        self.stored += x[0, 0, slots].shape[0]
        return super().store(x, home, slots)


def test_only_what_is_new_goes_home():
    link = CountingLink()
    cache, model = OffloadedKVCache(KVCache([ContiguousCache() for _ in range(LAYERS)]), link=link), tiny_model()
    in_chunks(model, tokens(1, 20), cache, [20])
    assert (link.fetched, link.homes) == (0, 3 * LAYERS)  # keys, values, positions
    link.stored = 0
    in_chunks(model, tokens(1, 4, seed=1), cache, [3, 1], start=20)
    assert link.homes == 3 * LAYERS and link.stored == 3 * LAYERS * 4
    assert link.fetched == 3 * LAYERS * (20 + 23)


@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_comes_back_is_what_left_bit_by_bit(make, attention, dtype):
    model = tiny_model(attention, dtype, WINDOW if make is INNER["sliding"] else None)
    plain = KVCache([make() for _ in range(LAYERS)])
    moved = OffloadedKVCache(KVCache([make() for _ in range(LAYERS)]))
    ids = tokens(2, 80)
    outputs = [in_chunks(model, ids, cache, [12, 1, 1, 60, 1, 1, 4]) for cache in (plain, moved)]
    assert torch.equal(*outputs)
    for one, other in zip(plain.layers, moved.layers, strict=True):
        for (x, used), (y, also) in zip(contents(one), contents(other.inner), strict=True):
            assert used == also and x.dtype == y.dtype and x.shape == y.shape
            assert torch.equal(x[:, :, :used].flatten().view(torch.uint8), y[:, :, :used].flatten().view(torch.uint8))


class FlakyLink(ThreadLink):
    """Fails the n-th transfer, in or out."""

    def __init__(self):
        super().__init__()
        self.until_failure = -1

    def _count(self):
        self.until_failure -= 1
        if self.until_failure == 0:
            raise OSError("the link is down")

    def copy(self, stored):
        self._count()
        return super().copy(stored)

    def store(self, x, home, slots):
        self._count()
        return super().store(x, home, slots)


@pytest.mark.parametrize("moment", range(1, 10))
@pytest.mark.parametrize("make", [ContiguousCache, INNER["int4"]], ids=["contiguous", "int4"])
def test_a_link_that_fails_in_a_step_is_heard_and_loses_nothing(make, moment):
    """Fetches fail in the worker, stores in the caller; the step is rewound and done again."""
    model, link, ids = tiny_model(), FlakyLink(), tokens(1, 12)
    cache = OffloadedKVCache(KVCache([make() for _ in range(LAYERS)]), link=link)
    expected = in_chunks(model, ids, KVCache([make() for _ in range(LAYERS)]), [10, 2])
    start = in_chunks(model, ids[:, :10], cache, [10])
    most = 2 + 2 * len(contents(cache.layers[0].inner))
    link.until_failure = moment
    if moment <= most:
        with pytest.raises(OSError, match="the link is down"):
            in_chunks(model, ids[:, 10:], cache, [2], start=10)
        for layer in cache.layers:  # as far as the step came, layer by layer
            if int(layer._at_home().positions.max()) >= 10:
                layer.rewind([10])
    end = in_chunks(model, ids[:, 10:], cache, [2], start=10)
    assert torch.equal(torch.cat([start, end], 1), expected)


class Refusing(ContiguousCache):
    """A layer whose attention fails once."""

    armed = True

    def observe(self, queries, view, step, *, scale, window):
        if self.armed:
            self.armed = False
            raise RuntimeError("out of memory")


def test_a_step_that_fails_in_a_layer_can_be_done_again():
    model, ids = tiny_model(), tokens(1, 9)
    cache = OffloadedKVCache(KVCache([ContiguousCache(), Refusing()]))
    with pytest.raises(RuntimeError, match="out of memory"):
        in_chunks(model, ids, cache, [9])
    cache.rewind([0])
    assert torch.allclose(in_chunks(model, ids, cache, [9]), naive(model, ids))


def test_between_steps_every_layer_is_at_home_and_none_is_on_its_way():
    cache, model = build_cache(tiny_config(), "offloaded"), tiny_model()
    in_chunks(model, tokens(1, 12), cache, [5, 1, 1, 5])
    assert not any(layer._here or layer._arriving for layer in cache.layers)


def test_caches_that_cannot_travel_are_refused():
    for inner in (StaticCache(4), PagedCache(2, 2), NoCache()):
        with pytest.raises(ValueError, match=f"a {type(inner).__name__} cannot be offloaded"):
            OffloadedCache(inner, ThreadLink())


def test_offloaded_caches_have_names():
    assert type(build_cache(tiny_config(), "offloaded").layers[0].inner) is ContiguousCache
    assert type(build_cache(tiny_config(), "offloaded-int4-g4").layers[0].inner) is QuantizedCache
    with pytest.raises(ValueError, match="unknown cache 'treasure'"):
        build_cache(tiny_config(), "offloaded-treasure")


@pytest.mark.parametrize("inner", ["none", "static", "paged", "paged-int8", "offloaded", "offloaded-int4", "h2o-25%"])
def test_a_name_tells_that_a_cache_cannot_travel(inner):
    """`kvlab generate` checks names before it loads a model."""
    for action in (lambda name: build_cache(tiny_config(), name, 8), check_name):
        with pytest.raises(ValueError, match=f"a cache '{inner}' cannot be offloaded"):
            action(f"offloaded-{inner}")


@pytest.mark.parametrize("inner", ["", "contiguous", "sliding", "int8", "kivi2", "window-8", "sinks2-6-rerotated"])
def test_a_name_that_passes_can_be_built(inner):
    check_name(f"offloaded-{inner}")
    assert build_cache(tiny_config(), f"offloaded-{inner}").bytes().total == 0
