"""Rows of a flat batch, wherever their blocks lie, are what each row is alone over plain tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import DensePart, Step, attend, attend_part
from kvlab.cache.paged import PagedCache
from kvlab.engine.block_pool import GONE, blocks_for, first_needed
from kvlab.rows import Rows

few_examples = settings(max_examples=40, deadline=None)


def test_tokens_find_their_slots():
    rows = Rows.plan([5, 0], [1, 4], [[[7, 2], [3]], [[GONE, 4], [0]]], block_size=4)
    assert rows.positions.tolist() == [5, 0, 1, 2, 3]
    assert rows.starts == (0, 1, 5) and rows.lengths == (6, 4)
    assert [slots.tolist() for slots in rows.slots] == [[9, 12, 13, 14, 15], [17, 0, 1, 2, 3]]
    assert [table.tolist() for table in rows.tables] == [[[7, 2], [3, GONE]], [[GONE, 4], [0, GONE]]]
    assert rows.step().positions.tolist() == [[5, 0, 1, 2, 3]]


def test_some_rows_are_rows_too():
    rows = Rows.plan([5, 0, 2], [1, 4, 1], [[[7, 2], [3], [1]]], block_size=4)
    (singles,) = rows.singles
    assert singles.positions.tolist() == [5, 2] and singles.tokens.tolist() == [0, 5]
    assert singles.lengths == (6, 3) and singles.tables[0].tolist() == [[7, 2], [1, GONE]]
    (chunk,) = rows.chunks
    assert chunk.tokens.tolist() == [1, 2, 3, 4] and chunk.starts == (0, 4)
    assert singles.select([0, 1]) is singles and singles.select([1]).tokens.tolist() == [5]


def test_rows_of_very_different_lengths_are_not_padded_to_each_other():
    rows = Rows.plan([900, 3, 500, 0], [1] * 4, [[list(range(60)), [61], list(range(62, 94)), [95]]], block_size=16)
    assert [alike.lengths for alike in rows.alike] == [(4, 1), (901, 501)]


@pytest.mark.parametrize(
    ("stored", "counts", "tables", "words"),
    [
        ([3], [0], [[[1]]], "at least one token"),
        ([], [], [[]], "at least one token"),
        ([4, 3], [1, 2], [[[1, 2], [3]], [[1, 2], [3, 4]]], "row 1 has 1 blocks of 4 tokens in layer group 0.* its 5"),
    ],
)
def test_rows_that_cannot_be_stored_are_refused(stored, counts, tables, words):
    with pytest.raises(ValueError, match=words):
        Rows.plan(stored, counts, tables, block_size=4)


class Case:
    """Some rows, their keys and values, and a layer that stores them in blocks in any order, poison all around."""

    def __init__(self, data, dtype=torch.float64, heads=(1, 2), D=8, sizes=(1, 3, 16), longest=40, kv_dtype=None):
        self.size, self.kv_heads = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(heads))
        self.heads = self.kv_heads * data.draw(st.sampled_from([1, 3]))
        self.mla, self.window = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 4, 20]))
        self.sinks = data.draw(st.integers(0, 5)) if self.window and data.draw(st.booleans()) else 0
        self.stored = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=4))
        self.counts = [data.draw(st.sampled_from([1, 1, 1, 2, 7])) for _ in self.stored]
        self.lengths = [a + b for a, b in zip(self.stored, self.counts, strict=True)]
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        self.keys = [torch.randn(1, self.kv_heads, n, D, generator=generator).to(dtype) for n in self.lengths]
        self.values = [torch.randn(x.shape, generator=generator).to(dtype) for x in self.keys]
        self.queries = [torch.randn(1, self.heads, n, D, generator=generator).to(dtype) for n in self.counts]
        owned = [blocks_for(n, self.size) for n in self.lengths]
        order = iter(torch.randperm(sum(owned) + 3, generator=generator).tolist())
        self.tables = [[next(order) for _ in range(n)] for n in owned]
        self.layer = PagedCache(sum(owned) + 3, self.size, kv_dtype=kv_dtype)
        self._fill()

    def _fill(self):
        self.layer.allocate(self.keys[0], None if self.mla else self.values[0])
        if self.layer.codec is None:
            for x in self.layer.tensors:
                x.fill_(1e30)
        before = [row for row, n in enumerate(self.stored) if n]
        if before:
            counts, tables = [self.stored[row] for row in before], [self.tables[row] for row in before]
            rows = Rows.plan([0] * len(before), counts, [tables], self.size)
            parts = [[x[row][:, :, : self.stored[row]] for row in before] for x in (self.keys, self.values)]
            self.layer.update(*self._flat(parts), rows.step())

    def _flat(self, parts):
        keys, values = (torch.cat(x, 2) for x in parts)
        return keys, None if self.mla else values

    def run(self) -> tuple[tuple, Step, torch.Tensor]:
        """Store the step's tokens; the view, the step, and the queries (1, H, N, D)."""
        tables = [list(table) for table in self.tables]
        for table, before in zip(tables, self.stored, strict=True):
            gone = 0 if self.sinks else first_needed(before, self.window, self.size)
            table[:gone] = [GONE] * gone
        step = Rows.plan(self.stored, self.counts, [tables], self.size).step()
        fresh = [[x[row][:, :, n:] for row, n in enumerate(self.stored)] for x in (self.keys, self.values)]
        return self.layer.update(*self._flat(fresh), step), step, torch.cat(self.queries, 2)

    def alone(self, row: int, read=lambda x: x) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of one row over plain tensors, which `read` may change first."""
        n, before = self.lengths[row], self.stored[row]
        keys, values = (read(x[row]) for x in (self.keys, self.values))
        part = DensePart(keys, None if self.mla else values, torch.arange(n)[None, None])
        step = Step.plan(torch.arange(before, n)[None])
        return attend_part(self.queries[row], part, step, scale=0.3, window=self.window, sinks=self.sinks)


def assert_rows(case: Case, out, lse, read=lambda x: x, bound=1e-12):
    for row, (outs, lses) in enumerate(zip(out.split(case.counts, 2), lse.split(case.counts, 2), strict=True)):
        for actual, expected in zip((outs, lses), case.alone(row, read), strict=True):
            torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=bound, atol=bound)


@few_examples
@given(data=st.data())
def test_a_flat_batch_is_its_rows_alone(data):
    """One chunk beside decoding rows, windows, sinks, MLA; poison in every slot that no row holds."""
    case = Case(data)
    view, step, queries = case.run()
    options = dict(scale=0.3, window=case.window, sinks=case.sinks)
    out, lse = view[0].attend_with_lse(queries, step, **options)
    assert_rows(case, out, lse)
    torch.testing.assert_close(attend(queries, view, step, **options), out)


@few_examples
@given(data=st.data(), kv_dtype=st.sampled_from(["int8", "fp8", "bf16"]))
def test_what_is_read_is_what_was_stored(data, kv_dtype):
    """Lossy pools: a query reads back codes, of its own chunk too."""
    case = Case(data, dtype=torch.float64, kv_dtype=kv_dtype)
    view, step, queries = case.run()

    def read(x):
        store = PagedCache(1, x.shape[2], kv_dtype=kv_dtype)
        rows = Rows.plan([0], [x.shape[2]], [[[0]]], x.shape[2])
        part = store.update(x, None, rows.step())[0]
        stored = part.keys[0]
        return stored.to(x.dtype) if isinstance(stored, torch.Tensor) else stored.dequantize(x.dtype)

    out, lse = view[0].attend_with_lse(queries, step, scale=0.3, window=case.window, sinks=case.sinks)
    assert_rows(case, out, lse, read, bound=1e-9)


def test_padding_sees_nothing():
    layer = PagedCache(4, 4)
    keys, queries = torch.randn(2, 1, 3, 8, dtype=torch.float64), torch.randn(2, 2, 3, 8, dtype=torch.float64)
    rows = Rows.plan([0, 0], [2, 1], [[[0], [1]]], 4, tokens=torch.tensor([0, 1, 5]))
    step = Step(torch.tensor([[0, 1, -1], [-1, -1, 0]]), rows=rows)
    (part,) = layer.update(keys, keys, step)
    out, lse = part.attend_with_lse(queries, step, scale=0.3)
    assert (out[0, :, 2] == 0).all() and (out[1, :, :2] == 0).all() and (lse[1, :, :2] == -torch.inf).all()
    torch.testing.assert_close(out[1, :, 2], keys[1, 0, 2].expand(2, -1))
    assert torch.equal(part.attend(queries, step, scale=0.3)[1, :, :2], torch.zeros(2, 2, 8, dtype=torch.float64))


def test_blocks_are_a_part_among_others():
    """Attention over blocks and plain tensors is attention over their union."""
    keys, values = torch.randn(2, 1, 2, 9, 8, dtype=torch.float64)
    queries = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    layer, rows = PagedCache(3, 4), Rows.plan([0], [9], [[[2, 0, 1]]], 4)
    (paged,) = layer.update(keys, values, rows.step())
    other = DensePart(keys.flip(2), values.flip(2), torch.arange(9)[None, None])
    step = Step(torch.tensor([[7, 8]]), 7, rows=Rows.plan([7], [2], [[[2, 0, 1]]], 4))
    at = torch.arange(9).repeat(2)[None, None]
    union = DensePart(torch.cat([keys, other.keys], 2), torch.cat([values, other.values], 2), at)
    expected = attend(queries, (union,), Step(step.positions), scale=0.3)
    torch.testing.assert_close(attend(queries, (paged, other), step, scale=0.3), expected)
