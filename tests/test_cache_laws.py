"""The laws that every cache keeps, over every cache, attention kind and dtype of the package."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import sizing
from kvlab.cache.base import CannotRewind
from kvlab.cache.paged import PagedCache
from kvlab.quantization import kivi_split
from kvlab.schemes import parse
from tests.harness import (
    CACHES,
    CAPACITY,
    EXACT,
    KV_HEADS,
    LAYERS,
    LOSSY,
    STORED,
    TOLERANCE,
    WINDOW,
    assert_close,
    bookkeeping,
    held,
    in_chunks,
    naive,
    pad,
    poison,
    tiny_config,
    tiny_model,
    tokens,
    unused_slots,
)

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
every_cache = pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
lossy_caches = pytest.mark.parametrize("kind", LOSSY.values(), ids=LOSSY)
OTHER = ("quantized", "paged", "offloaded")
dense_caches = pytest.mark.parametrize("name", [name for name in EXACT if not name.startswith(OTHER)])
every_attention = pytest.mark.parametrize("attention", KV_HEADS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
# Lossy caches run in float64 only: where a number falls between two levels, rounding elsewhere decides, and one level
# is more than any tolerance. tests/cache/test_quantized.py compares them in every dtype, on equal keys and values.
TYPED = {
    f"{dtype}-{name}": (kind, DTYPES[dtype])
    for name, kind in CACHES.items()
    for dtype in DTYPES
    if kind.oracle is None or dtype == "fp64"
}
every_cache_and_dtype = pytest.mark.parametrize(("kind", "dtype"), TYPED.values(), ids=TYPED)
few_examples = settings(max_examples=15, deadline=None)


@st.composite
def cuts(draw, total: int) -> list[int]:
    """Chunk sizes that add up to `total`."""
    sizes = []
    while sum(sizes) < total:
        sizes.append(draw(st.integers(1, total - sum(sizes))))
    return sizes


# Law 1: an exact cache changes nothing, a lossy one gives what its oracle gives, which is not nothing.
@every_cache_and_dtype
@every_attention
def test_a_cache_equals_no_cache_or_its_oracle(kind, attention, dtype):
    model, ids = tiny_model(attention, dtype, kind.window), tokens(2, 20)
    assert_close(in_chunks(model, ids, kind.build(), [12, 8]), expected(kind, model, ids, [12, 8]))


@lossy_caches
def test_a_lossy_cache_really_loses(kind):
    model, ids = tiny_model(window=kind.window), tokens(2, 20)
    error = (in_chunks(model, ids, kind.build(), [12, 8]) - naive(model, ids)).abs().max()
    assert 1e-5 < float(error) / float(naive(model, ids).abs().max()) < 2  # logits of opposite signs


def expected(kind, model, ids, chunks):
    """What a run in `chunks` must give: what one shot gives, unless the cache says that chunks matter to it."""
    return kind.expected(model, ids, None if kind.build().chunk_invariant else chunks)


# Law 2: it does not matter how the tokens arrive.
@every_cache_and_dtype
@every_attention
def test_token_by_token_equals_one_shot(kind, attention, dtype):
    model, ids = tiny_model(attention, dtype, kind.window), tokens(2, 20)
    assert_close(in_chunks(model, ids, kind.build(), [1] * 20), expected(kind, model, ids, [1] * 20))


@every_cache
@few_examples
@given(chunks=cuts(24))
def test_any_chunks_equal_one_shot(kind, chunks):
    model, ids = tiny_model(window=kind.window), tokens(2, 24)
    assert_close(in_chunks(model, ids, kind.build(), chunks), expected(kind, model, ids, chunks))


@lossy_caches
def test_only_a_residual_makes_chunks_matter(kind):
    """A cache that declares itself exempt from the law needs the exemption."""
    model, ids = tiny_model(window=kind.window), tokens(2, 24)
    one_shot, single = (in_chunks(model, ids, kind.build(), chunks) for chunks in ([24], [1] * 24))
    same = float((one_shot - single).abs().max()) <= 1e-9
    assert same == kind.build().chunk_invariant == (not kind.aligned)


# Law 3: a row of a batch is the row alone, however it is padded; or padding is refused.
@every_cache_and_dtype
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_the_row_alone(kind, dtype, side):
    model = tiny_model("gqa", dtype, kind.window)
    rows = [tokens(1, n, seed=n)[0] for n in (3, 8)]
    new = tokens(2, 4, seed=9)
    for width in (8, 40):  # 32 more pads change nothing
        ids, positions = pad(rows, width, side)
        cache = kind.build()
        if kind.aligned:
            with pytest.raises(ValueError, match=r"without padding.* position 0"):
                in_chunks(model, ids, cache, [width], positions)
            assert cache.bytes().total == 0
            continue
        prompt = in_chunks(model, ids, cache, [width], positions)
        at = torch.tensor([[3, 4, 5, 6], [8, 9, 10, 11]], dtype=torch.int32)
        decoded = in_chunks(model, new, cache, [1] * 4, at)
        for i, row in enumerate(rows):
            alone = kind.expected(model, torch.cat([row, new[i]])[None])[0]
            assert_close(prompt[i][positions[i] >= 0], alone[: len(row)])
            assert_close(decoded[i], alone[len(row) :])


@pytest.mark.parametrize(
    "kind", [k for k in CACHES.values() if not k.aligned], ids=[n for n in CACHES if not CACHES[n].aligned]
)
@few_examples
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=3), side=st.sampled_from(["left", "right"]))
def test_ragged_rows_equal_rows_alone(kind, lengths, side):
    model = tiny_model(window=kind.window)
    rows = [tokens(1, n, seed=n)[0] for n in lengths]
    ids, positions = pad(rows, max(lengths), side)
    logits = in_chunks(model, ids, kind.build(), [ids.shape[1]], positions)
    for i, row in enumerate(rows):
        assert_close(logits[i][positions[i] >= 0], kind.expected(model, row[None])[0])


# Law 4: every byte is accounted for.
@pytest.mark.parametrize("kind", EXACT.values(), ids=EXACT)
@every_attention
@every_dtype
@pytest.mark.parametrize("length", [1, 5, 20])
def test_payload_is_what_the_formula_says(kind, attention, dtype, length):
    cache, batch = kind.build(), 2
    in_chunks(tiny_model(attention, dtype, kind.window), tokens(batch, length), cache, [1] * length)
    holds = min(length, WINDOW) if kind.forgets else length
    config = tiny_config(attention)  # without the window: `holds` is what the class promises to keep
    by_formula = sizing.bytes_ideal(config, context=holds, batch=batch, dtype="bf16") // 2 * dtype.itemsize
    assert by_formula == LAYERS * STORED[attention] * holds * batch * dtype.itemsize
    assert cache.bytes().payload == by_formula


@pytest.mark.parametrize("kind", [k for k in LOSSY.values() if k.scheme], ids=lambda k: k.scheme)
@every_attention
@every_dtype
@pytest.mark.parametrize("length", [1, 4, 20, 27])
def test_codes_and_scales_are_what_the_scheme_says(kind, attention, dtype, length):
    """Stored codes and scales equal kvlab.sizing's; of a residual, that of the tokens that are quantised."""
    cache, batch, scheme = kind.build(), 2, parse(kind.scheme)
    in_chunks(tiny_model(attention, dtype, kind.window), tokens(batch, length), cache, [length])
    keys = values = length
    if kind.aligned:
        for layer in cache.layers:
            layer.settle()
        keys, values = kivi_split(length, cache.layers[0].residual)
        assert all(layer.quantized == (keys, keys if attention == "mla" else values) for layer in cache.layers)
    positions, config = sum(layer._positions.nbytes for layer in cache.layers), tiny_config(attention)
    row, count = sizing.rows(config), batch * LAYERS
    numbers = (length - keys) * row.key_width + (length - values) * (row.value_width or 0)  # in full precision
    by_scheme = keys * scheme.key_row_bytes(row.key_width)
    by_scheme += values * scheme.row_bytes(row.value_width) if row.value_width else 0
    stored = cache.bytes().payload + cache.bytes().metadata - positions
    assert stored == count * row.heads * (by_scheme + numbers * dtype.itemsize)
    if not kind.aligned:
        assert stored == sizing.bytes_ideal(config, length, batch, kind.scheme)


@every_cache
def test_all_that_is_allocated_is_counted(kind):
    cache = kind.build()
    in_chunks(tiny_model(window=kind.window), tokens(2, 20), cache, [7, 13])
    stored = [x for layer in cache.layers for x, _ in unused_slots(cache, layer)]
    assert cache.bytes().total == sum(x.nbytes for x in stored) + bookkeeping(cache)


@dense_caches
def test_metadata_and_slack_are_what_is_allocated(name):
    kind = CACHES[name]
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
    lengths = (9, 9) if kind.aligned else (4, 9)
    ids, positions = pad([tokens(1, n, seed=n)[0] for n in lengths], 9, "right")
    in_chunks(model, ids, cache, [9], positions)
    assert poison(cache) > 0
    new, at = tokens(2, 3, seed=5), torch.stack([torch.arange(n, n + 3, dtype=torch.int32) for n in lengths])
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
    wanted = expected(kind, model, torch.cat([ids[rows], new], 1), [10, 1, 2])[:, 10:]
    assert_close(in_chunks(model, new, cache, [1, 2], start=10), wanted)


@every_cache
@few_examples
@given(data=st.data())
def test_a_rewound_cache_never_saw_the_tokens(kind, data):
    """A draft of up to five tokens is rejected in part, in one row more than in the other; then decoding goes on."""
    prompt, draft = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    keep = [data.draw(st.integers(0, draft)) for _ in range(2)]
    keep = keep[:1] * 2 if kind.aligned else keep
    chunks = data.draw(cuts(prompt))
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(2, prompt)
    in_chunks(model, ids, cache, chunks)
    drafted = tokens(2, draft, seed=1)
    in_chunks(model, drafted, cache, [draft], start=prompt)
    try:
        cache.rewind([prompt + n for n in keep])
    except CannotRewind:  # only where the draft made the cache decide what to keep
        stride = cache.layers[0].stride
        assert stride and prompt + min(keep) < (prompt + draft - 1) // stride * stride
        return
    new = tokens(2, 4, seed=2)
    at = torch.stack([torch.arange(prompt + n, prompt + n + 4) for n in keep]).to(torch.int32)
    decoded = in_chunks(model, new, cache, [1, 3], at)
    for i, n in enumerate(keep):
        accepted = torch.cat([ids[i], drafted[i, :n], new[i]])[None]
        alone = expected(kind, model, accepted, chunks + [n] * (n > 0) + [1, 3])[0]
        assert_close(decoded[i], alone[prompt + n :])


@every_cache
def test_rewound_tokens_leave_no_trace(kind):
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(1, 9)
    in_chunks(model, ids, cache, [9])
    in_chunks(model, tokens(1, 3, seed=1), cache, [3], start=9)
    cache.rewind([9])
    for layer, positions in zip(cache.layers, held(cache), strict=True):
        assert int(positions.max()) == 8
        if kind.forgets and isinstance(layer, PagedCache):
            continue  # blocks that were given back before keep their content until they are overwritten
        assert all(bool((x.masked_select(unused) == 0).all()) for x, unused in unused_slots(cache, layer))


@every_cache
@pytest.mark.parametrize("lengths", [[11], [-1], [5, 5]])
def test_impossible_rewinds_change_nothing(kind, lengths):
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(1, 10)
    in_chunks(model, ids, cache, [10])
    before = held(cache)
    with pytest.raises(ValueError, match=str(lengths[0]) if len(lengths) == 1 else "2 lengths were given for 1 rows"):
        cache.rewind(lengths)
    assert all(torch.equal(*pair) for pair in zip(before, held(cache), strict=True))


@every_cache
def test_rewinding_far_works_or_is_refused(kind):
    model, cache, ids = tiny_model(window=kind.window), kind.build(), tokens(1, 20)
    in_chunks(model, ids, cache, [1] * 20)
    if kind.forgets or cache.layers[0].stride or (kind.aligned and kind.oracle):
        before = [[x.clone() for x, _ in unused_slots(cache, layer)] for layer in cache.layers]
        with pytest.raises(CannotRewind, match=r"recompute|in groups of 4"):
            cache.rewind([11])
        after = [[x for x, _ in unused_slots(cache, layer)] for layer in cache.layers]
        assert all(torch.equal(*pair) for pairs in zip(before, after, strict=True) for pair in zip(*pairs, strict=True))
        return
    cache.rewind([12])
    new = tokens(1, 4, seed=3)
    wanted = kind.expected(model, torch.cat([ids[:, :12], new], 1))[:, 12:]
    assert_close(in_chunks(model, new, cache, [4], start=12), wanted)


@every_cache
def test_a_reset_cache_is_a_new_cache(kind):
    model, cache = tiny_model(window=kind.window), kind.build()
    in_chunks(model, tokens(2, 20), cache, [1] * 20)
    cache.reset()
    ids = tokens(2, 15, seed=7)
    assert_close(in_chunks(model, ids, cache, [6, 9]), expected(kind, model, ids, [6, 9]))
    assert cache.bytes().payload == _fresh_payload(kind, model, ids)


def _fresh_payload(kind, model, ids):
    cache = kind.build()
    in_chunks(model, ids, cache, [6, 9])
    return cache.bytes().payload


# Law 7: a cache that keeps everything is exact ("window of everything" and "residual of everything" run in the laws
# above), and caches say which they are.
@every_cache
def test_every_cache_declares_itself(kind):
    assert kind.build().exact == (kind.oracle is None and not kind.aligned)


def test_the_laws_can_fail():
    """The suite compares numbers that differ when one token differs."""
    model, ids = tiny_model(), tokens(1, 20)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % 61
    with pytest.raises(AssertionError):
        assert_close(in_chunks(model, other, CACHES["contiguous"].build(), [20]), naive(model, ids))
    assert set(TOLERANCE) == set(DTYPES.values())
    assert CAPACITY >= 40 + 4
