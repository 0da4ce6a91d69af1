"""Eviction against a slow reference, step by step; what it may look at, what it refuses, and what it stores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import sizing
from kvlab.attention import Step, attend
from kvlab.cache.base import CannotRewind, KVCache
from kvlab.cache.budgets import Budget
from kvlab.cache.build import build_cache
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.evicting import EvictingCache
from kvlab.cache.formats import CodedRows
from kvlab.cache.scores import METHODS, Method, shared
from kvlab.cache.sliding import SlidingCache
from kvlab.codecs import Codec
from kvlab.generate import GOES_ON, generate, last_logits, prefill
from tests.harness import (
    INT8,
    KV_HEADS,
    LAYERS,
    STORED,
    assert_close,
    in_chunks,
    naive,
    pad,
    tiny_config,
    tiny_model,
    tokens,
)
from tests.slow_reference import SlowEviction

few_examples = settings(max_examples=8, deadline=None)
every_method = pytest.mark.parametrize("method", METHODS)
BUDGET, STRIDE = Budget(tokens=8, sinks=2, recent=3), 4


def evicting(method: str | Method = "h2o", budget: Budget = BUDGET, stride: int = STRIDE, **facts) -> EvictingCache:
    return EvictingCache(method, budget, stride, **facts)


def slow(method: str, **facts) -> SlowEviction:
    return SlowEviction(method, BUDGET.tokens, BUDGET.sinks, BUDGET.recent, STRIDE, **facts)


class Layer:
    """One layer's attention over fixed random queries, keys and values, fed step by step."""

    def __init__(self, length: int, heads: int = 4, kv_heads: int = 2, batch: int = 1, seed: int = 0, tied=False):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda n, D: torch.randn(batch, n, length, D, generator=generator, dtype=torch.float64)  # noqa: E731
        self.queries, self.keys = 3 * draw(heads, 8), draw(kv_heads, 8)
        self.values = None if tied else draw(kv_heads, 8)

    def feed(self, cache, sizes: list[int], start: int = 0, **facts) -> torch.Tensor:
        """Outputs (B, H, T, D_v) of the tokens from start on, in steps of the given sizes."""
        outs = []
        for size in sizes:
            now = slice(start, start + size)
            at = torch.arange(start, start + size, dtype=torch.int32).expand(len(self.keys), -1)
            step = Step.plan(at, **facts)
            values = None if self.values is None else self.values[:, :, now]
            view = cache.update(self.keys[:, :, now], values, step)
            outs.append(attend(self.queries[:, :, now], view, step, scale=8**-0.5))
            cache.observe(self.queries[:, :, now], view, step, scale=8**-0.5, window=None)
            start += size
        return torch.cat(outs, 2)


def held(layer: EvictingCache | SlidingCache, row: int = 0) -> list[list[int]]:
    """The positions that each KV head of a row holds, sorted."""
    return [sorted(p for p in head if p >= 0) for head in layer.positions[row].tolist()]


def cut(sizes: list[int], stride: int = STRIDE, start: int = 0) -> list[int]:
    """Cut steps at multiples of the stride, by counting."""
    pieces = []
    for size in sizes:
        for at in range(start, start + size):
            pieces.append(1) if at == start or at % stride == 0 else pieces.append(pieces.pop() + 1)
        start += size
    return pieces


# What is kept, and what is read: every method, on every step.
@every_method
@pytest.mark.parametrize(("heads", "kv_heads", "tied"), [(2, 2, False), (4, 2, False), (4, 1, False), (4, 1, True)])
def test_kept_sets_and_outputs_are_those_of_the_slow_reference(method, heads, kv_heads, tied):
    layer, cache, reference = Layer(22, heads, kv_heads, batch=2, tied=tied), evicting(method), slow(method)
    for at in range(22):
        torch.testing.assert_close(layer.feed(cache, [1], at), layer.feed(reference, [1], at))
        for row in range(2):
            assert held(cache, row) == [reference.seen(row, h, at) for h in range(kv_heads)]
    assert len({tuple(head) for row in range(2) for head in held(cache, row)}) > 1 or method in ("recent", "random")


@every_method
def test_heads_that_share_their_kept_tokens(method):
    """One score for all KV heads of a layer, the mean of theirs."""
    layer, reference = Layer(22, batch=2), slow(method, shared=True)
    cache = evicting(shared(METHODS[method]))
    for at in range(22):
        torch.testing.assert_close(layer.feed(cache, [1], at), layer.feed(reference, [1], at))
        for row in range(2):
            assert held(cache, row) == [reference.seen(row, h, at) for h in range(2)]
            assert len({tuple(head) for head in held(cache, row)}) == 1


def test_a_window_of_queries_longer_than_the_stride_is_asked_about_what_is_left():
    """Six queries asked, decisions two apart: of tokens that left since, nobody is asked again."""
    layer, cache = Layer(30), evicting("snapkv", Budget(10, sinks=1, recent=6), 2)
    reference = SlowEviction("snapkv", 10, 1, 6, 2)
    for at in range(30):
        torch.testing.assert_close(layer.feed(cache, [1], at), layer.feed(reference, [1], at))
        assert held(cache) == [reference.seen(0, h, at) for h in range(2)]


@every_method
@few_examples
@given(sizes=st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_neither_chunks_nor_layout_change_what_is_kept(method, sizes):
    layer, length = Layer(sum(sizes)), sum(sizes)
    whole, single = evicting(method), evicting(method)
    outs = [layer.feed(whole, cut(sizes)), layer.feed(single, [1] * length)]
    torch.testing.assert_close(*outs)
    assert held(whole) == held(single)


@pytest.mark.parametrize("method", ["snapkv", "h2o", "tova"])
def test_the_last_chunk_before_a_decision_may_hold_fewer_queries_than_are_asked(method):
    layer, budget = Layer(17), Budget(tokens=8, sinks=1, recent=6)  # six queries asked, decisions four apart
    short, single = evicting(method, budget), evicting(method, budget)
    layer.feed(short, [4, 4, 3, 1, 2, 2, 1]), layer.feed(single, [1] * 17)
    assert held(short) == held(single)


@pytest.mark.parametrize("attention", KV_HEADS)
@every_method
def test_a_model_reads_what_the_slow_reference_reads(method, attention):
    model, ids = tiny_model(attention), tokens(2, 22)
    expected = in_chunks(model, ids, KVCache([slow(method) for _ in range(LAYERS)]), [22])
    assert_close(in_chunks(model, ids, KVCache([evicting(method) for _ in range(LAYERS)]), [9, 1, 1, 11]), expected)
    assert float((expected - naive(model, ids)).abs().max()) > 1e-3


@every_method
@pytest.mark.parametrize("codec", [INT8, Codec("e4m3"), Codec("affine", 4, 4)], ids=["int8", "fp8", "int4"])
def test_codes_are_kept_and_read_like_the_numbers_they_stand_for(method, codec):
    layer, cache, reference = Layer(22), evicting(method, form=CodedRows(codec, codec)), slow(method, codec=codec)
    torch.testing.assert_close(layer.feed(cache, cut([22])), layer.feed(reference, cut([22])), atol=1e-6, rtol=1e-6)
    assert held(cache) == [reference.seen(0, h, 21) for h in range(2)]


@every_method
def test_a_budget_of_everything_is_exact_to_the_bit(method):
    model, ids = tiny_model(dtype=torch.float32), tokens(2, 22)
    cache = KVCache([evicting(method, Budget(tokens=22, sinks=2, recent=3)) for _ in range(LAYERS)])
    plain = KVCache([ContiguousCache() for _ in range(LAYERS)])
    assert torch.equal(in_chunks(model, ids, cache, [22]), in_chunks(model, ids, plain, cut([22])))


def test_a_share_of_everything_keeps_everything():
    layer, cache = Layer(30), evicting(budget=Budget(share=1.0))
    layer.feed(cache, cut([30]))
    assert held(cache) == [list(range(30))] * 2


@pytest.mark.parametrize(("length", "dropped", "kept"), [(2, 0.6, 1), (10, 0.9, 1), (100, 0.9, 10)])
def test_a_share_never_empties_a_cache(length, dropped, kept):
    layer, cache = Layer(length + 1), evicting(budget=Budget(share=1 - dropped), stride=length)
    layer.feed(cache, [length])
    cache.settle()
    assert [len(head) for head in held(cache)] == [kept] * 2
    assert layer.feed(cache, [1], length).isfinite().all()


def test_sinks_and_recent_tokens_of_streaming_llm():
    """4 + 4 after 12 tokens: 0 to 3 and 8 to 11."""
    cache = evicting("recent", Budget(tokens=8, sinks=4, recent=4))
    Layer(12).feed(cache, [4, 4, 4])
    cache.settle()
    assert held(cache) == [[0, 1, 2, 3, 8, 9, 10, 11]] * 2 and cache.start is None


def test_deciding_at_every_position_is_a_window():
    """A query sees what was kept before it and itself: one token less is kept than the window holds."""
    layer, cache = Layer(20), evicting("recent", Budget(tokens=7, sinks=2), stride=1)
    window = SlidingCache(6, 2, imposed=True)
    torch.testing.assert_close(layer.feed(cache, [1] * 20), layer.feed(window, [1] * 20))


def chosen(*positions: int) -> Method:
    """Keeps these positions before all others."""
    return Method(lambda evidence: torch.isin(evidence.positions, torch.tensor(positions)).float())


def test_kept_tokens_need_not_be_the_newest():
    """0, 1, 5, 6, 7 are kept: the queries at 8 and 9 see all five, and each other's past."""
    layer, cache = Layer(10), evicting(chosen(0, 1, 5, 6, 7), Budget(tokens=5))
    layer.feed(cache, [4, 4])
    got = layer.feed(cache, [2], 8)
    assert held(cache) == [[0, 1, 5, 6, 7, 8, 9]] * 2
    for i, query in enumerate((8, 9)):
        seen = [0, 1, 5, 6, 7, 8, 9][: 6 + i]
        keys, values = (x[:, :, seen].repeat_interleave(2, 1) for x in (layer.keys, layer.values))
        weights = (keys @ layer.queries[:, :, query, :, None] * 8**-0.5).softmax(2)  # (1, H, slots, 1)
        torch.testing.assert_close(got[:, :, i], (weights * values).sum(2))


def test_ties_break_neither_sinks_nor_the_recent_window():
    same = Method(lambda evidence: torch.zeros(evidence.positions.shape))
    cache = evicting(same, Budget(tokens=6, sinks=2, recent=2))
    Layer(16).feed(cache, cut([16]))
    cache.settle()
    assert held(cache) == [[0, 1, 12, 13, 14, 15]] * 2  # among equals the newer
    high = Method(lambda evidence: torch.full(evidence.positions.shape, torch.inf))
    cache = evicting(high, Budget(tokens=4, sinks=2, recent=2))
    Layer(16).feed(cache, cut([16]))
    cache.settle()
    assert held(cache) == [[0, 1, 14, 15]] * 2


# Rows, padding, and what a decision may not know.
@every_method
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_row_keeps_what_it_keeps_alone(method, side):
    model, rows = tiny_model(), [tokens(1, n, seed=n)[0] for n in (5, 18, 13)]
    ids, positions = pad(rows, 21, side)
    cache = KVCache([evicting(method) for _ in range(LAYERS)])
    in_chunks(model, ids, cache, [21], positions)
    at = torch.tensor([[5, 6], [18, 19], [13, 14]], dtype=torch.int32)
    decoded = in_chunks(model, tokens(3, 2, seed=1), cache, [1, 1], at)
    for i, row in enumerate(rows):
        alone = KVCache([evicting(method) for _ in range(LAYERS)])
        expected = in_chunks(model, torch.cat([row, tokens(3, 2, seed=1)[i]])[None], alone, [len(row), 1, 1])
        assert_close(decoded[i], expected[0, -2:])
        for together, apart in zip(cache.layers, alone.layers, strict=True):
            assert held(together, i) == held(apart)


@pytest.mark.parametrize("form", [None, CodedRows(INT8, INT8)])
def test_what_stands_in_padding_is_not_looked_at(form):
    layer, cache = Layer(4), evicting(form=form)
    layer.keys[:, :, 0] = layer.values[:, :, 0] = torch.nan
    step = Step.plan(torch.tensor([[-1, 0, 1, 2]], dtype=torch.int32))
    view = cache.update(layer.keys, layer.values, step)
    assert attend(layer.queries, view, step, scale=1.0)[:, :, 1:].isfinite().all()
    assert held(cache) == [[0, 1, 2]] * 2


@every_method
def test_nothing_later_has_a_say(method):
    """Two texts that part after position 15 keep the same of what came before."""
    one, other = evicting(method), evicting(method)
    for cache, seed in ((one, 1), (other, 2)):
        Layer(16).feed(cache, cut([16]))
        Layer(19, seed=seed).feed(cache, [3], 16)
    assert [[p for p in head if p < 16] for head in held(one)] == [[p for p in head if p < 16] for head in held(other)]


def test_an_update_evicts_before_it_stores_and_not_after():
    layer, cache = Layer(12), evicting()
    layer.feed(cache, [4, 4])
    layer.feed(cache, [4], 8)
    assert [len(head) for head in held(cache)] == [12, 12]  # full, and nothing was decided yet
    cache.rewind([9])
    assert held(cache) == [list(range(9))] * 2
    layer.feed(cache, [3], 9)
    cache.settle()
    assert [len(head) for head in held(cache)] == [8, 8]


def test_the_models_own_window_decides_first():
    """What no query to come can see leaves before all else, sinks included."""
    model, ids = tiny_model(window=6), tokens(1, 17)
    cache = KVCache([evicting("keynorm", Budget(tokens=12, sinks=2, recent=1)) for _ in range(LAYERS)])
    assert_close(in_chunks(model, ids, cache, [17]), naive(model, ids))
    for layer in cache.layers:
        assert all({12, 13, 14, 15, 16} <= set(head) for head in held(layer))


@every_method
def test_a_prompt_kept_whole_is_decided_on_at_its_end(method):
    layer, cache, reference = Layer(24), evicting(method, whole_prompt=True), slow(method, prompt=14)
    ends = lambda yes: torch.tensor([yes])  # noqa: E731
    got = [layer.feed(cache, [4, 4, 4], prompt_ends=ends(False)), layer.feed(cache, [2], 12, prompt_ends=ends(True))]
    assert held(cache) == [list(range(14))] * 2
    got.append(layer.feed(cache, cut([10], start=14), 14, prompt_ends=ends(False)))
    torch.testing.assert_close(torch.cat(got, 2), layer.feed(reference, cut([14]) + cut([10], start=14)))
    assert held(cache) == [reference.seen(0, h, 23) for h in range(2)]


def test_a_long_prompt_gives_its_memory_back():
    model = tiny_model()
    cache = build_cache(model.config, "snapkv-16-prompt")
    prefill(model, tokens(1, 200)[0].tolist(), cache, chunk=50)
    before = cache.bytes()
    prefill(model, [1], cache, start=200)
    assert cache.bytes().payload == before.payload // 200 * 17
    assert cache.bytes().total < before.total / 4


def test_half_a_prompt_takes_half_its_memory():
    layer, cache = Layer(60), evicting(budget=Budget(tokens=24), whole_prompt=True)
    layer.feed(cache, cut([48]), prompt_ends=torch.tensor([False]))
    layer.feed(cache, [1], 48, prompt_ends=torch.tensor([True]))
    cache.settle()
    assert cache.slots.capacity == 24 + STRIDE
    buffers = [x.data_ptr() for x in cache.slots.tensors]
    layer.feed(cache, cut([11], start=49), 49, prompt_ends=torch.tensor([False]))
    assert [x.data_ptr() for x in cache.slots.tensors] == buffers  # and it suffices


def test_two_prompts_in_one_conversation_are_decided_on_at_either_end():
    """The question that follows a compressed context is itself compressed with it, when it has ended."""
    layer, cache = Layer(12), evicting("recent", Budget(tokens=4, sinks=1), stride=100, whole_prompt=True)
    layer.feed(cache, [6], prompt_ends=torch.tensor([True]))
    layer.feed(cache, [5], 6, prompt_ends=torch.tensor([True]))
    assert held(cache) == [[0, 3, 4, 5, 6, 7, 8, 9, 10]] * 2
    layer.feed(cache, [1], 11, prompt_ends=torch.tensor([False]))
    assert held(cache) == [[0, 8, 9, 10, 11]] * 2


# What is stored.
@pytest.mark.parametrize("attention", KV_HEADS)
def test_payload_is_the_budget_and_the_stride_at_most(attention):
    model, cache = tiny_model(attention), KVCache([evicting() for _ in range(LAYERS)])
    for length in range(1, 30):
        in_chunks(model, tokens(1, 1, seed=length), cache, [1], start=length - 1)
        kept = length if length <= 12 else 9 + (length - 1) % 4
        assert cache.bytes().payload == LAYERS * STORED[attention] * kept * 8
        by_formula = sizing.bytes_ideal(tiny_config(attention), context=kept, dtype="fp32") * 2
        assert cache.bytes().payload == by_formula


def test_in_steady_state_nothing_is_allocated():
    layer, cache = Layer(200), evicting()
    layer.feed(cache, [4, 4, 4, 1])
    buffers, size = [x.data_ptr() for x in cache.slots.tensors], cache.bytes().total
    layer.feed(cache, [1] * 180, 13)
    assert [x.data_ptr() for x in cache.slots.tensors] == buffers and cache.bytes().total == size
    assert cache.slots.capacity == BUDGET.tokens + STRIDE


def test_codes_are_stored_as_codes():
    plain, coded = evicting(), evicting(form=CodedRows(INT8, INT8))
    for cache in (plain, coded):
        Layer(30).feed(cache, cut([30]))
    assert coded.bytes().payload * 8 == plain.bytes().payload  # 8 bits against 64
    assert coded.slots.tensors[0].dtype == torch.uint8
    assert coded.bytes().metadata > plain.bytes().metadata  # scales and minima


def test_remembered_queries_are_counted():
    sizes = {method: evicting(method) for method in METHODS}
    for cache in sizes.values():
        Layer(30).feed(cache, cut([30]))
    asked = {name: cache.ring.nbytes for name, cache in sizes.items()}
    one = 4 * 8 * 8 + 4  # four heads of width 8 in fp64, and a position
    assert asked == {"recent": 0, "random": 0, "keynorm": 0, "tova": 2 * one, "snapkv": 4 * one, "h2o": 5 * one,
                     "h2o-mean": 5 * one}  # fmt: skip


# What is refused, with the cache as it was.
def state(cache: EvictingCache) -> list:
    tensors = [x.clone().tolist() for x in (*cache.slots.tensors, cache.ring.queries, cache.ring.positions)]
    return [tensors, [vars(row).copy() for row in cache.rows], list(cache.slots.used), cache.start]


def test_a_step_across_a_decision_is_refused_and_cut_says_where():
    layer, cache = Layer(20), evicting()
    layer.feed(cache, [4, 2])
    before = state(cache)
    with pytest.raises(ValueError, match=r"decides at position 8, inside a step with positions 6 to 9 \(row 0\): cut"):
        KVCache([cache]).begin(torch.arange(6, 10, dtype=torch.int32)[None])
    with pytest.raises(ValueError, match="decides at position 8"):
        layer.feed(cache, [4], 6)
    assert state(cache) == before
    assert KVCache([cache]).cut(torch.arange(6, 15)[None]) == [2, 4, 3]


@few_examples
@given(starts=st.lists(st.integers(0, 9), min_size=1, max_size=3), T=st.integers(1, 15), longest=st.integers(1, 6))
def test_cut_steps_cross_no_decision_and_are_as_long_as_they_may(starts, T, longest):
    rows = [[-1] * (start % 3) + list(range(start, start + T - start % 3)) for start in starts]
    positions = torch.tensor([row[:T] for row in rows], dtype=torch.int32)
    cache = KVCache([evicting(stride=4), ContiguousCache(), evicting(stride=6)])
    sizes = cache.cut(positions, longest)
    assert sum(sizes) == T and max(sizes) <= longest and min(sizes) > 0
    for piece in positions.split(sizes, 1):
        KVCache([evicting(stride=4), evicting(stride=6)]).begin(piece)
    assert KVCache([ContiguousCache()]).cut(positions) == [T]


@pytest.mark.parametrize(
    ("longest", "T", "words"),
    [(0, 3, "at least 1, got 0"), (-1, 3, "got -1"), (2.5, 3, "got 2.5"), (None, 0, "at least one token")],
)
def test_steps_that_hold_nothing_are_not_cut(longest, T, words):
    with pytest.raises(ValueError, match=words):
        KVCache([evicting()]).cut(torch.arange(T)[None], longest)


def test_a_cache_that_never_sees_queries_says_so():
    layer, cache = Layer(8), evicting()
    step = Step.plan(torch.arange(4, dtype=torch.int32)[None])
    cache.update(layer.keys[:, :, :4], layer.values[:, :, :4], step)
    with pytest.raises(ValueError, match="scores by attention, and the last step's queries were never observed"):
        layer.feed(cache, [1], 4)
    cache = evicting("keynorm")  # which asks nobody
    cache.update(layer.keys[:, :, :4], layer.values[:, :, :4], step)
    layer.feed(cache, [1], 4)


def test_mla_without_absorption_has_no_queries_for_what_is_stored():
    model = tiny_model("mla")
    cache = KVCache([evicting() for _ in range(LAYERS)])
    in_chunks(model, tokens(1, 3), cache, [3])
    before = state(cache.layers[0])
    for layer in model.model.layers:
        layer.self_attn.layout = "unabsorbed"
    try:
        with pytest.raises(ValueError, match=r"stored keys of width 16 .* queries of width 10 .* absorbed layout"):
            in_chunks(model, tokens(1, 1), cache, [1], start=3)
        assert state(cache.layers[0]) == before
        by_norm = KVCache([evicting("keynorm") for _ in range(LAYERS)])
        expected = in_chunks(model, tokens(1, 20), by_norm, [20])
    finally:
        for layer in model.model.layers:
            layer.self_attn.layout = "absorbed"
    assert_close(in_chunks(model, tokens(1, 20), KVCache([evicting("keynorm") for _ in range(LAYERS)]), [20]), expected)


def test_a_prompt_kept_whole_must_end():
    cache = evicting(whole_prompt=True)
    with pytest.raises(ValueError, match=r"decides where a prompt ends: say in which rows one does"):
        KVCache([cache]).begin(torch.arange(3, dtype=torch.int32)[None])
    assert cache.bytes().total == 0


@pytest.mark.parametrize(
    "ends", [torch.tensor([True]), torch.tensor([[False], [False]]), torch.tensor([0, 1]), [True, False]]
)
def test_which_prompts_end_is_said_of_each_row(ends):
    cache = evicting(whole_prompt=True)
    with pytest.raises(ValueError, match="which prompts end is a bool tensor with one entry for each of 2 rows, got"):
        Layer(3, batch=2).feed(cache, [3], prompt_ends=ends)
    assert cache.bytes().total == 0


def test_codes_refuse_what_cannot_be_quantised_and_stay_as_they_were():
    layer, cache = Layer(9), evicting(form=CodedRows(INT8, INT8))
    layer.feed(cache, [4, 4])
    before = state(cache)
    layer.keys[0, 0, 8, 0] = torch.nan
    with pytest.raises(ValueError, match="keys contain NaN"):
        layer.feed(cache, [1], 8)
    assert state(cache) == before  # the decision at 8 was not taken either


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: evicting("h20"), "no eviction method 'h20': recent, random, keynorm, tova, snapkv, h2o, h2o-mean"),
        (lambda: evicting(stride=0), "at least one position apart, got a stride of 0"),
        (lambda: evicting(stride=2.5), "at least one position apart, got a stride of 2.5"),
        (lambda: Method(METHODS["recent"].score, "some"), "asks none, last, recent, all of its queries, not 'some'"),
        (lambda: evicting("snapkv", Budget(tokens=8)), "the recent window: give at least 1 recent token"),
        (lambda: CodedRows(Codec("affine", 2, 4, "tokens"), INT8), "KIVI.* share scales"),
    ],
)
def test_caches_that_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_windows_and_budgets_of_one_token_work():
    for budget in (Budget(tokens=1), Budget(tokens=1, recent=1), Budget(share=1e-9)):
        layer, cache = Layer(9), evicting("tova", budget)
        assert layer.feed(cache, cut([9])).isfinite().all()
        cache.rewind([8])
        assert [len(head) for head in held(cache)] == [1, 1]


def test_an_empty_cache_is_rewound_to_nothing():
    cache = KVCache([evicting()])
    cache.rewind([0, 0])
    with pytest.raises(ValueError, match="cannot rewind row 1 to 2 tokens: it holds 0"):
        cache.rewind([0, 2])


def test_rewinding_ends_at_the_last_decision():
    layer, cache, undisturbed = Layer(24), evicting(), evicting()
    layer.feed(cache, cut([19])), layer.feed(undisturbed, cut([17]))
    before = state(cache)
    with pytest.raises(CannotRewind, match="cannot rewind row 0 to 15 tokens: at 16 it was decided what to keep"):
        KVCache([cache]).rewind([15])
    assert state(cache) == before
    cache.rewind([17])
    torch.testing.assert_close(layer.feed(cache, cut([7], start=17), 17), layer.feed(undisturbed, [1] * 7, 17))
    assert held(cache) == held(undisturbed)


def test_a_method_that_asks_nobody_can_go_back_until_something_left():
    layer, cache = Layer(12), evicting("keynorm", Budget(tokens=9))
    layer.feed(cache, [4, 4, 2])
    cache.rewind([3])
    layer.feed(cache, cut([9], start=3), 3)
    fresh = evicting("keynorm", Budget(tokens=9))
    layer.feed(fresh, [4, 4, 4])
    for one in (cache, fresh):
        one.settle()
    assert held(cache) == held(fresh) and [len(head) for head in held(cache)] == [9, 9]


@pytest.mark.parametrize("method", ["h2o", "snapkv", "tova"])
def test_rejected_queries_have_no_say(method):
    """A draft's last query is still in its slot when the prompt ends before it."""
    layer, drafted, plain = Layer(18), evicting(method, whole_prompt=True), evicting(method, whole_prompt=True)
    ends, goes_on = torch.tensor([True]), torch.tensor([False])
    layer.feed(drafted, [4, 4, 4, 4], prompt_ends=goes_on)
    drafted.rewind([13])
    layer.feed(drafted, [1], 13, prompt_ends=ends)
    layer.feed(plain, [4, 4, 4, 1], prompt_ends=goes_on), layer.feed(plain, [1], 13, prompt_ends=ends)
    for cache in (drafted, plain):
        layer.feed(cache, [2], 14, prompt_ends=goes_on)
    assert held(drafted) == held(plain)
    assert torch.equal(drafted.slots.carried, plain.slots.carried)


def test_reset_and_reorder_take_everything_along():
    layer, cache, fresh = Layer(20, batch=2), evicting(), evicting()
    layer.feed(cache, cut([20]))
    cache.reset()
    assert cache.bytes().total == 0 and cache.positions is None
    layer.feed(cache, cut([14]))
    cache.reorder(torch.tensor([1, 0]))
    turned = Layer(20, batch=2)
    turned.queries, turned.keys, turned.values = (x.flip(0) for x in (layer.queries, layer.keys, layer.values))
    turned.feed(fresh, cut([14]))
    torch.testing.assert_close(turned.feed(cache, cut([6], start=14), 14), turned.feed(fresh, cut([6], start=14), 14))
    assert [held(cache, row) for row in range(2)] == [held(fresh, row) for row in range(2)]


@pytest.mark.parametrize(
    "name", ["h2o-8", "tova-25%", "snapkv-8-prompt", "h2o-8-prompt+int8", "sinks2-6", "recent-8-pyramid"]
)
def test_generation_does_not_depend_on_the_prefill_chunk(name):
    model, prompt = tiny_model(), tokens(1, 37)[0].tolist()
    expected = generate(model, prompt, name, max_new_tokens=10).token_ids
    for chunk in (1, 5, 64):
        cache = build_cache(model.config, name)
        chosen = [int(prefill(model, prompt, cache, chunk).argmax())]
        while len(chosen) < 10:
            chosen.append(int(last_logits(model, chosen[-1:], 36 + len(chosen), cache, GOES_ON).argmax()))
        assert chosen == expected
