"""The laws that every cache keeps, over every cache, attention kind and dtype of the package."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import sizing
from kvlab.attention import EMPTY
from kvlab.cache.base import CannotRewind
from tests.harness import (
    CACHES,
    CAPACITY,
    KV_HEADS,
    LAYERS,
    STORED,
    TOLERANCE,
    WINDOW,
    assert_close,
    in_chunks,
    naive,
    pad,
    poison,
    tiny_config,
    tiny_model,
    tokens,
)

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
every_cache = pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
every_attention = pytest.mark.parametrize("attention", KV_HEADS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
few_examples = settings(max_examples=15, deadline=None)


@st.composite
def cuts(draw, total: int) -> list[int]:
    """Chunk sizes that add up to `total`."""
    sizes = []
    while sum(sizes) < total:
        sizes.append(draw(st.integers(1, total - sum(sizes))))
    return sizes


# Law 1: an exact cache changes nothing.
@every_cache
@every_attention
@every_dtype
def test_a_cache_equals_no_cache(kind, attention, dtype):
    model, ids = tiny_model(attention, dtype, kind.window), tokens(2, 20)
    assert_close(in_chunks(model, ids, kind.build(), [20]), naive(model, ids))


# Law 2: it does not matter how the tokens arrive.
@every_cache
@every_attention
@every_dtype
def test_token_by_token_equals_one_shot(kind, attention, dtype):
    model, ids = tiny_model(attention, dtype, kind.window), tokens(2, 20)
    assert_close(in_chunks(model, ids, kind.build(), [1] * 20), naive(model, ids))


@every_cache
@few_examples
@given(chunks=cuts(24))
def test_any_chunks_equal_one_shot(kind, chunks):
    model, ids = tiny_model(window=kind.window), tokens(2, 24)
    assert_close(in_chunks(model, ids, kind.build(), chunks), naive(model, ids))


# Law 3: a row of a batch is the row alone, however it is padded.
@every_cache
@every_dtype
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_the_row_alone(kind, dtype, side):
    model = tiny_model("gqa", dtype, kind.window)
    rows = [tokens(1, n, seed=n)[0] for n in (3, 8)]
    new = tokens(2, 4, seed=9)
    for width in (8, 40):  # 32 more pads change nothing
        ids, positions = pad(rows, width, side)
        cache = kind.build()
        prompt = in_chunks(model, ids, cache, [width], positions)
        at = torch.tensor([[3, 4, 5, 6], [8, 9, 10, 11]], dtype=torch.int32)
        decoded = in_chunks(model, new, cache, [1] * 4, at)
        for i, row in enumerate(rows):
            alone = naive(model, torch.cat([row, new[i]])[None])[0]
            assert_close(prompt[i][positions[i] >= 0], alone[: len(row)])
            assert_close(decoded[i], alone[len(row) :])


@every_cache
@few_examples
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=3), side=st.sampled_from(["left", "right"]))
def test_ragged_rows_equal_rows_alone(kind, lengths, side):
    model = tiny_model(window=kind.window)
    rows = [tokens(1, n, seed=n)[0] for n in lengths]
    ids, positions = pad(rows, max(lengths), side)
    logits = in_chunks(model, ids, kind.build(), [ids.shape[1]], positions)
    for i, row in enumerate(rows):
        assert_close(logits[i][positions[i] >= 0], naive(model, row[None])[0])


# Law 4: every byte is accounted for.
@every_cache
@every_attention
@every_dtype
@pytest.mark.parametrize("length", [1, 5, 20])
def test_payload_is_what_the_formula_says(kind, attention, dtype, length):
    cache, batch = kind.build(), 2
    in_chunks(tiny_model(attention, dtype, kind.window), tokens(batch, length), cache, [1] * length)
    holds = min(length, WINDOW) if kind is CACHES["sliding"] else length
    config = tiny_config(attention)  # without the window: `holds` is what the class promises to keep
    by_formula = sizing.bytes_ideal(config, context=holds, batch=batch, dtype="bf16") // 2 * dtype.itemsize
    assert by_formula == LAYERS * STORED[attention] * holds * batch * dtype.itemsize
    assert cache.bytes().payload == by_formula


@every_cache
def test_metadata_and_slack_are_what_is_allocated(kind):
    cache = kind.build()
    assert cache.bytes().total == 0
    in_chunks(tiny_model(window=kind.window), tokens(2, 20), cache, [7, 13])
    stored = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    positions = [layer.positions for layer in cache.layers]
    assert cache.bytes().payload + cache.bytes().slack == sum(x.nbytes for x in stored)
    assert cache.bytes().metadata == sum(x.nbytes for x in positions)


# Law 5: what lies in unused slots never reaches an output.
@every_cache
@every_attention
def test_poison_in_unused_slots_changes_nothing(kind, attention):
    model, cache = tiny_model(attention, torch.float32, kind.window), kind.build()
    ids, positions = pad([tokens(1, n, seed=n)[0] for n in (4, 9)], 9, "right")
    in_chunks(model, ids, cache, [9], positions)
    assert poison(cache) > 0
    new, at = tokens(2, 3, seed=5), torch.tensor([[4, 5, 6], [9, 10, 11]], dtype=torch.int32)
    clean = kind.build()
    in_chunks(model, ids, clean, [9], positions)
    assert_close(in_chunks(model, new, cache, [1, 2], at), in_chunks(model, new, clean, [1, 2], at))


# Law 6: reorder, rewind and reset act on everything stored, or refuse.
@every_cache
@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0], [1, 0, 1]])
def test_reorder_moves_whole_rows(kind, rows):
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(2, 10)
    in_chunks(model, ids, cache, [10])
    cache.reorder(torch.tensor(rows))
    new = tokens(len(rows), 3, seed=4)
    expected = naive(model, torch.cat([ids[rows], new], 1))[:, 10:]
    assert_close(in_chunks(model, new, cache, [1, 2], start=10), expected)


@every_cache
@few_examples
@given(data=st.data())
def test_a_rewound_cache_never_saw_the_tokens(kind, data):
    """A draft of up to five tokens is rejected in part, in one row more than in the other; then decoding goes on."""
    prompt, draft = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    keep = [data.draw(st.integers(0, draft)) for _ in range(2)]
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(2, prompt)
    in_chunks(model, ids, cache, data.draw(cuts(prompt)))
    drafted = tokens(2, draft, seed=1)
    in_chunks(model, drafted, cache, [draft], start=prompt)
    cache.rewind([prompt + n for n in keep])
    new = tokens(2, 4, seed=2)
    at = torch.stack([torch.arange(prompt + n, prompt + n + 4) for n in keep]).to(torch.int32)
    decoded = in_chunks(model, new, cache, [1, 3], at)
    for i, n in enumerate(keep):
        alone = naive(model, torch.cat([ids[i], drafted[i, :n], new[i]])[None])[0]
        assert_close(decoded[i], alone[prompt + n :])


@every_cache
def test_rewound_tokens_leave_no_trace(kind):
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(1, 10)
    in_chunks(model, ids, cache, [10])
    in_chunks(model, tokens(1, 3, seed=1), cache, [3], start=10)
    cache.rewind([10])
    for layer in cache.layers:
        unused = (layer.positions == EMPTY)[..., None]
        assert int(layer.positions.max()) == 9
        assert all(bool((x.masked_select(unused) == 0).all()) for x in (layer.keys, layer.values))


@every_cache
@pytest.mark.parametrize("lengths", [[11], [-1], [5, 5]])
def test_impossible_rewinds_change_nothing(kind, lengths):
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(1, 10)
    in_chunks(model, ids, cache, [10])
    before = [layer.positions.clone() for layer in cache.layers]
    with pytest.raises(ValueError, match=str(lengths[0]) if len(lengths) == 1 else "2 lengths were given for 1 rows"):
        cache.rewind(lengths)
    assert all(torch.equal(old, layer.positions) for old, layer in zip(before, cache.layers, strict=True))


@every_cache
def test_rewinding_far_works_or_is_refused(kind):
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(1, 20)
    in_chunks(model, ids, cache, [1] * 20)
    if kind is CACHES["sliding"]:
        with pytest.raises(CannotRewind, match="recompute"):
            cache.rewind([12])
        return
    cache.rewind([12])
    new = tokens(1, 4, seed=3)
    expected = naive(model, torch.cat([ids[:, :12], new], 1))[:, 12:]
    assert_close(in_chunks(model, new, cache, [4], start=12), expected)


@every_cache
def test_a_reset_cache_is_a_new_cache(kind):
    model, cache = tiny_model(window=kind.window), kind.build()
    in_chunks(model, tokens(2, 20), cache, [1] * 20)
    cache.reset()
    ids = tokens(2, 15, seed=7)
    assert_close(in_chunks(model, ids, cache, [6, 9]), naive(model, ids))
    assert cache.bytes().payload == _fresh_payload(kind, model, ids)


def _fresh_payload(kind, model, ids):
    cache = kind.build()
    in_chunks(model, ids, cache, [6, 9])
    return cache.bytes().payload


# Law 7: a cache that keeps everything is exact ("sliding, window of everything" runs in the laws above), and says so.
@every_cache
def test_every_cache_of_this_list_declares_itself_exact(kind):
    assert kind.build().exact


def test_the_laws_can_fail():
    """The suite compares numbers that differ when one token differs."""
    model, ids = tiny_model(), tokens(1, 20)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % 61
    with pytest.raises(AssertionError):
        assert_close(in_chunks(model, other, CACHES["contiguous"].build(), [20]), naive(model, ids))
    assert set(TOLERANCE) == set(DTYPES.values())
    assert CAPACITY >= 40 + 4
