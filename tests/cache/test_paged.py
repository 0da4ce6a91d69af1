"""Blocks: shared, copied when written to, given back, never too many, and read back bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import Step
from kvlab.cache.base import CacheFull, CannotRewind
from kvlab.cache.build import build_cache, check_name, paged_cache
from kvlab.cache.paged import PagedCache, layer_groups, paged_layers
from kvlab.cache.paged_rows import PagedKVCache
from kvlab.engine.block_pool import GONE
from kvlab.generate import generate
from kvlab.rows import Rows
from tests.configs import tiny
from tests.harness import in_chunks, tiny_config, tiny_model, tokens

few_examples = settings(max_examples=40, deadline=None)


def cache_of(num_blocks=8, size=4, windows=(None,), layers=1) -> PagedKVCache:
    groups = [i % len(windows) for i in range(layers * len(windows))]
    return PagedKVCache([PagedCache(num_blocks, size, group) for group in groups], list(windows))


def feed(cache: PagedKVCache, positions: torch.Tensor, mark: float) -> None:
    """Store keys that say whose they are: mark + position, in every number."""
    step = cache.begin(positions)
    keys = (positions[:, None, :, None] + mark).double().expand(-1, 2, -1, 8)
    for layer in cache.layers:
        layer.update(keys, keys + 0.25, step)


def at(*rows) -> torch.Tensor:
    return torch.tensor(rows)


def stored(cache: PagedKVCache, row: int, layer: int = 0) -> list[float | None]:
    """What a row's table finds, position by position; None where the block was given back."""
    table, size = cache.groups[cache.layers[layer].group].tables[row], cache.block_size
    keys, values = cache.layers[layer].tensors
    blocks = [(table[p // size], p % size) for p in range(cache.lengths[row])]
    assert all(bool((values[b, :, o] == keys[b, :, o] + 0.25).all()) for b, o in blocks if b != GONE)
    return [None if b == GONE else float(keys[b, 1, o, 3]) for b, o in blocks]


def state(cache: PagedKVCache) -> tuple:
    pools = [(g.pool.waiting(), [g.pool.references(b) for b in range(g.pool.num_blocks)]) for g in cache.groups]
    tables = [[list(table) for table in group.tables] for group in cache.groups]
    return pools, tables, cache.lengths, [[x.tolist() for x in layer.tensors] for layer in cache.layers]


def refused(cache: PagedKVCache, action, error, words: str) -> None:
    before = state(cache)
    with pytest.raises(error, match=words) as caught:
        action()
    assert "\n" not in str(caught.value) and state(cache) == before


def test_blocks_are_taken_as_rows_grow():
    cache = cache_of()
    feed(cache, at([0, 1, 2, 3, 4]), 0)
    assert cache.groups[0].tables == [[0, 1]]
    feed(cache, at([5, 6, 7]), 0)
    assert cache.groups[0].tables == [[0, 1]] and cache.groups[0].pool.available == 6
    feed(cache, at([8]), 0)
    assert cache.groups[0].tables == [[0, 1, 2]] and stored(cache, 0) == list(range(9))


def test_a_fork_that_is_written_to_copies_exactly_one_block():
    cache = cache_of()
    feed(cache, at(range(10)), 0)  # two full blocks and half of a third
    cache.reorder([0, 0])
    pool, (parent, child) = cache.groups[0].pool, cache.groups[0].tables
    assert parent == child == [0, 1, 2] and pool.used_count == 3
    feed(cache, at([-1, -1], [10, 11]), 100)  # the child writes
    parent, child = cache.groups[0].tables
    assert parent == [0, 1, 2] and child == [0, 1, 3] and pool.used_count == 4
    assert stored(cache, 0) == list(range(10)), "the parent reads its old data"
    assert stored(cache, 1) == [*range(10), 110, 111]
    feed(cache, at([10], [-1]), 200)  # nobody else reads the parent's block now: it writes in place
    assert cache.groups[0].tables[0] == [0, 1, 2] and stored(cache, 0) == [*range(10), 210]


def test_two_who_write_to_a_shared_block_need_one_copy():
    cache = cache_of(num_blocks=4)
    feed(cache, at(range(10)), 0)
    cache.reorder([0, 0])
    feed(cache, at([10], [10]), 100)  # 3 blocks are taken, and one is left
    assert cache.groups[0].pool.available == 0
    cache.reorder([0, 1, 1])
    refused(cache, lambda: cache.begin(at([-1], [11], [11])), CacheFull, "0 of 4 blocks")
    feed(cache, at([11], [-1], [-1]), 200)
    assert stored(cache, 0)[-1] == 211 and stored(cache, 1) == stored(cache, 2) == [*range(10), 110]


def test_shared_blocks_are_counted_once():
    cache = cache_of(layers=2)
    feed(cache, at(range(10)), 0)
    one = cache.bytes()
    assert one.payload == 10 * 2 * (2 * 2 * 8) * 8 and one.metadata == 3 * 4
    cache.reorder([0, 0, 0])
    assert cache.bytes().payload == one.payload and cache.bytes().metadata == 3 * one.metadata
    feed(cache, at([-1], [-1], [10]), 100)  # a block of three tokens of its own
    assert cache.bytes().payload == one.payload // 10 * 13
    assert cache.bytes().total == sum(x.nbytes for layer in cache.layers for x in layer.tensors) + 9 * 4


def test_a_step_that_does_not_fit_changes_nothing():
    cache = cache_of(num_blocks=3)
    feed(cache, at(range(7), range(7, 14))[:1], 0)
    refused(cache, lambda: cache.begin(at(range(7, 13))), CacheFull, "1 of 3 blocks of 4 tokens left, 1 too few for 6")
    feed(cache, at(range(7, 12)), 0)
    assert stored(cache, 0) == list(range(12))
    refused(cache, lambda: cache.begin(at([12])), CacheFull, "larger capacity, or rewind or reset it")


def test_a_group_that_is_full_stops_all_before_any_changes():
    cache = cache_of(num_blocks=4, windows=(4, None))
    for start in range(0, 16, 4):
        feed(cache, at(range(start, start + 4)), 0)
    refused(cache, lambda: cache.begin(at([16])), CacheFull, "0 of 4 blocks")
    assert cache.groups[0].pool.available == 2  # the window's own have given blocks back


def test_windows_give_back_what_they_do_not_see():
    cache = cache_of(num_blocks=4, size=2, windows=(5,))
    for p in range(40):
        feed(cache, at([p]), 0)
        assert cache.groups[0].pool.used_count <= 4
        assert stored(cache, 0)[-5:] == list(range(40))[max(0, p - 4) : p + 1]
    assert stored(cache, 0)[:34] == [None] * 34
    assert cache.bytes().payload == 5 * (2 * 2 * 8) * 8
    refused(cache, lambda: cache.rewind([36]), CannotRewind, "to 36 tokens: of the 4 before it .* 2 were given back")
    cache.rewind([38])
    feed(cache, at([38]), 100)
    assert stored(cache, 0)[-5:] == [34, 35, 36, 37, 138]
    cache.rewind([0])
    assert cache.groups[0].pool.available == 4 and cache.groups[0].tables == [[]]


def test_a_block_that_another_row_still_sees_is_not_free():
    cache = cache_of(num_blocks=4, size=2, windows=(4,))
    feed(cache, at(range(4)), 0)
    cache.reorder([0, 0])
    for start in (4, 6):
        feed(cache, at([start, start + 1], [-1, -1]), 100)
    assert cache.groups[0].tables == [[GONE, 1, 2, 3], [0, 1]] and cache.groups[0].pool.available == 0
    refused(cache, lambda: cache.begin(at([8], [-1])), CacheFull, "1 too few for 1 more")
    assert stored(cache, 1) == [0, 1, 2, 3]


def test_a_rewind_leaves_what_others_read():
    cache = cache_of()
    feed(cache, at(range(10)), 0)
    cache.reorder([0, 0])
    cache.rewind([9, 10])
    assert stored(cache, 1) == list(range(10)) and cache.groups[0].tables == [[0, 1, 2], [0, 1, 2]]
    feed(cache, at([9], [-1]), 100)
    assert stored(cache, 1) == list(range(10)) and stored(cache, 0) == [*range(9), 109]
    cache.rewind([4, 10])
    assert cache.groups[0].tables[0] == [0] and float(cache.layers[0].tensors[0][3].abs().max()) == 0


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (at([10, 12]), "row 0 holds tokens up to position 10, so position 12 cannot follow"),
        (at([9]), "up to position 9, so position 9 cannot follow: block tables have no gaps"),
        (at([0]), "up to position 9, so position 0"),
        (at([10], [10]), "holds 1 rows, positions of 2 were given"),
        (at([-1, -1]), "at least one token that is not padding"),
    ],
)
def test_positions_that_do_not_follow_are_refused(where, words):
    cache = cache_of()
    feed(cache, at(range(10)), 0)
    refused(cache, lambda: cache.begin(where), ValueError, words)


def test_rows_and_lengths_that_are_none_are_refused():
    cache = cache_of()
    feed(cache, at(range(10)), 0)
    for rows in ([1], [-1], [], [0.0]):
        refused(cache, lambda rows=rows: cache.reorder(torch.tensor(rows)), ValueError, "row")
    for lengths in ([11], [-1], [9, 9], [9.5], 9):
        refused(cache, lambda lengths=lengths: cache.rewind(lengths), ValueError, "length|rewind")
    empty = cache_of()
    empty.reorder([0])
    empty.reset()
    assert empty.bytes().total == 0 and empty.lengths is None


def test_a_layer_alone_has_no_rows():
    layer = PagedCache(2, 4)
    for action in (lambda: layer.rewind([0]), lambda: layer.reorder(torch.tensor([0]))):
        with pytest.raises(ValueError, match="PagedKVCache"):
            action()
    keys = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="needs steps with block tables, got none"):
        layer.update(keys, keys, Step.plan(at([0])))
    step = Rows.plan([0], [1], [[[0]]], 8).step()
    with pytest.raises(ValueError, match="got blocks of 8"):
        layer.update(keys, keys, step)
    step = Rows.plan([0], [1], [[[0]]], 4).step()
    for wrong, words in (((keys[:, :, :0], keys), "need keys"), ((keys, keys[:, :1]), "do not fit keys")):
        with pytest.raises(ValueError, match=words):
            layer.update(*wrong, step)
    layer.update(keys, keys, step)
    with pytest.raises(ValueError, match=r"holds 2 heads .* torch.float32 .* which 2 heads .* torch.float64"):
        layer.update(keys.double(), keys.double(), step)
    with pytest.raises(ValueError, match="got 0 blocks of 4"):
        PagedCache(0, 4)


@pytest.mark.parametrize("name", ["paged-kivi2", "paged-int4-g32", "paged-int8-g8", "paged-x"])
def test_pools_refuse_scales_that_tokens_share(name):
    words = rf"fp32, bf16, fp16, fp8, int8, not '{name[6:]}': .* shared between tokens"
    for action in (lambda: build_cache(tiny_config(), name, 32), lambda: check_name(name)):
        with pytest.raises(ValueError, match=words):
            action()


def test_a_paged_cache_needs_a_capacity():
    with pytest.raises(ValueError, match="a paged cache needs a capacity in tokens"):
        build_cache(tiny_config(), "paged")
    for capacity, block_size in (0, 16), (20, 0), (2.5, 16), (20, "4"), (True, 16):
        with pytest.raises(ValueError, match=f"blocks of at least one: got {capacity!r} and {block_size!r}"):
            paged_cache(tiny_config(), capacity, block_size)
    cache = build_cache(tiny_config(), "paged", 33)
    assert [layer.num_blocks for layer in cache.layers] == [3, 3] and cache.block_size == 16


@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("name", ["paged", "paged-fp32", "paged-bf16", "paged-fp16", "paged-int8", "paged-fp8"])
def test_it_can_be_generated_with(name, attention):
    model, prompt = tiny_model(attention, torch.float32), tokens(1, 9)[0].tolist()
    done = generate(model, prompt, name, max_new_tokens=12)
    assert len(done.token_ids) == 12 and done.cache.exact == (name == "paged")
    if name in ("paged", "paged-fp32"):
        assert done.token_ids == generate(model, prompt, max_new_tokens=12).token_ids


def test_layers_that_share_a_window_share_their_tables():
    config = tiny("fsfs", window=3)
    assert layer_groups(config) == ([None, 3], [0, 1, 0, 1])
    assert [layer.group for layer in paged_layers(config, 4, 2)] == [0, 1, 0, 1]
    cache = paged_cache(config, 8, 2)
    assert [group.window for group in cache.groups] == [None, 3]
    assert layer_groups(tiny("ss", window=3)) == ([3], [0, 0])


@pytest.mark.parametrize("kv_dtype", [None, "bf16", "int8", "fp8"])
@pytest.mark.parametrize("values", [True, False], ids=["keys and values", "mla"])
def test_blocks_leave_and_come_back_bit_by_bit(kv_dtype, values):
    layer = PagedCache(4, 2, kv_dtype=kv_dtype, rope_width=0 if values else 4)
    keys = torch.randn(1, 2, 6, 12)
    layer.update(keys, keys * 2 if values else None, Rows.plan([0], [6], [[[2, 0, 3]]], 2).step())
    before = [x.clone() for x in layer.tensors]
    assert len(before) == (2 if values or kv_dtype in ("int8", "fp8") else 1) * {"int8": 3, "fp8": 2}.get(kv_dtype, 1)
    saved = layer.read_blocks([2, 3])
    layer.zero_blocks([2, 3])
    assert all(bool(x.any()) for x in saved), "what was saved is a copy"
    assert_blocks(layer, [0], before, [0])
    assert not any(bool(x[[2, 3]].any()) for x in layer.tensors)
    layer.write_blocks([1, 2], saved)
    assert_blocks(layer, [1, 2], before, [2, 3])
    layer.copy_blocks([(1, 2), (2, 1)])  # all are read before any is written
    assert_blocks(layer, [2, 1], before, [2, 3])
    layer.zero_slots([1])
    assert not any(bool(x[0, :, 1].any()) for x in layer.tensors)
    assert all(torch.equal(x[0, :, 0], old[0, :, 0]) for x, old in zip(layer.tensors, before, strict=True))


def assert_blocks(layer: PagedCache, blocks: list[int], before: list[torch.Tensor], were: list[int]) -> None:
    for x, old in zip(layer.tensors, before, strict=True):
        assert x.dtype == old.dtype and torch.equal(x[blocks], old[were])


def test_the_rotated_part_of_mla_has_scales_of_its_own():
    """Large rotated columns must not spoil the latent's codes."""
    keys = torch.cat([torch.randn(1, 1, 8, 12), 1000 * torch.randn(1, 1, 8, 4)], -1)
    step, errors = Rows.plan([0], [8], [[[0]]], 8).step(), []
    for rope_width in (0, 4):
        part = PagedCache(1, 8, kv_dtype="int8", rope_width=rope_width).update(keys, None, step)[0]
        numbers = torch.cat([block.dequantize() for block in part.keys], -1)[0]
        errors.append(float((numbers - keys[0])[..., :12].abs().max()))
    assert errors[1] < 0.03 < 1 < errors[0]


def test_bytes_are_those_of_the_stored_tensors():
    cache = paged_cache(tiny_config(), 32, 16, "int8")
    assert cache.bytes().total == 0
    in_chunks(tiny_model(), tokens(1, 10), cache, [10])
    rows = 10 * 2 * 2 * 2  # tokens, layers, keys and values, heads
    found = cache.bytes()
    assert found.payload == rows * 8 and found.metadata == rows * (2 + 2) + 4  # codes; scale, minimum; one table entry
    assert found.total == sum(x.nbytes for layer in cache.layers for x in layer.tensors) + 4
    assert cache.layers[0].bytes().slack == sum(x.nbytes for x in cache.layers[0].tensors)


@few_examples
@given(data=st.data())
def test_rows_always_read_what_they_stored(data):
    """Any steps, rewinds and reorders; full pools refuse and change nothing; blocks are neither lost nor doubled."""
    size, window = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([None, 4]))
    cache = cache_of(num_blocks=data.draw(st.integers(6, 14)), size=size, windows=(window, None))
    rows: list[list[float]] = [[] for _ in range(data.draw(st.integers(1, 3)))]
    for turn in range(12):
        before, wanted = [list(row) for row in rows], state(cache)
        try:
            match data.draw(st.sampled_from(["step", "step", "rewind", "reorder"])):
                case "step":
                    counts = [data.draw(st.integers(0, 4)) for _ in rows]
                    if any(counts):
                        rows = step(cache, rows, counts, mark=1000.0 * (turn + 1))
                case "rewind" if cache.lengths is not None:
                    rows = [row[: data.draw(st.integers(0, len(row)))] for row in rows]
                    cache.rewind([len(row) for row in rows])
                case "reorder" if cache.lengths is not None:
                    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
                    rows = [list(rows[i]) for i in order]
                    cache.reorder(order)
        except (CacheFull, CannotRewind):
            rows = before
            assert state(cache) == wanted
        check(cache, rows, window)


def step(cache: PagedKVCache, rows: list[list[float]], counts: list[int], mark: float) -> list[list[float]]:
    """Store counts[row] tokens more; what the rows hold then."""
    fresh = [range(len(row), len(row) + count) for row, count in zip(rows, counts, strict=True)]
    feed(cache, torch.tensor([[*some, *[-1] * (max(counts) - len(some))] for some in fresh]), mark)
    return [[*row, *(mark + p for p in some)] for row, some in zip(rows, fresh, strict=True)]


def check(cache: PagedKVCache, rows: list[list[float]], window: int | None) -> None:
    if cache.lengths is None:
        return
    assert cache.lengths == [len(row) for row in rows]
    for index, group in enumerate(cache.groups):
        group.pool.check()
        named = [block for table in group.tables for block in table if block != GONE]
        assert group.pool.used_count == len(set(named))
        assert all(group.pool.references(block) == named.count(block) for block in set(named))
        for i, row in enumerate(rows):
            seen = 0 if group.window is None else max(0, len(row) - group.window + 1)
            assert stored(cache, i, index)[seen:] == row[seen:]
