"""Run by test_triton_decode.py with TRITON_INTERPRET=1: what the kernel for blocks computes, on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import DensePart, Step, attend, attend_part
from kvlab.cache.paged import PagedCache
from kvlab.codecs import Codec
from kvlab.engine.block_pool import GONE, blocks_for, first_needed
from kvlab.native import paged, triton_paged
from kvlab.quantization import QuantizedTensor, encode
from kvlab.rows import Rows

CODECS = {"int8": Codec(), "fp8": Codec("e4m3"), "int4": Codec("affine", 4, 32)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 2e-3}  # see triton_interpreted.py


def pool_of(x: torch.Tensor, kind: str):
    return encode(x, CODECS[kind]) if kind in CODECS else x.to(getattr(torch, kind))


def numbers(pool) -> torch.Tensor:
    return pool.dequantize(torch.float64) if isinstance(pool, QuantizedTensor) else pool.double()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_it_is_attention(data):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    kind, dtype = draw("float32", "bfloat16", "float16", *CODECS), draw(*TOLERANCE)
    size, D_k, D_v = draw(1, 3, 16, 40), draw(64, 128), draw(64, 128)
    kv_heads, group = draw(1, 2), draw(1, 3, 17)
    lengths = data.draw(st.lists(st.sampled_from([1, 63, 65, 150]), min_size=1, max_size=3))
    window, sinks = draw((None, 0), (1, 0), (40, 0), (40, 4))
    generator = torch.Generator().manual_seed(sum(lengths))
    owned = [blocks_for(n, size) for n in lengths]
    order = iter(torch.randperm(sum(owned) + 2, generator=generator).tolist())
    tables = [[next(order) for _ in range(n)] for n in owned]
    keys, values = (
        pool_of(torch.randn(sum(owned) + 2, kv_heads, size, D, generator=generator), kind) for D in (D_k, D_v)
    )
    queries = torch.randn(len(lengths), kv_heads * group, D_k, generator=generator).to(dtype)
    rectangle = torch.full((len(lengths), max(owned)), GONE, dtype=torch.int32)
    for row, (table, n) in enumerate(zip(tables, lengths, strict=True)):
        seen = 0 if sinks else first_needed(n - 1, window, size)
        rectangle[row, seen : len(table)] = torch.tensor(table[seen:], dtype=torch.int32)
    rule = dict(scale=0.2, window=window, sinks=sinks)
    pools = triton_paged.Pools.of(keys, values)
    assert pools.take(queries)
    outs, lses = pools.decode(queries, rectangle, torch.tensor(lengths), **rule)
    assert outs.dtype == lses.dtype == torch.float32

    for row, (table, n) in enumerate(zip(tables, lengths, strict=True)):
        dense = [numbers(x)[table].transpose(0, 1).flatten(1, 2)[None, :, :n] for x in (keys, values)]
        part, step = DensePart(*dense, torch.arange(n)[None, None]), Step(torch.tensor([[n - 1]]))
        out, lse = attend_part(queries[row][None, :, None].double(), part, step, **rule)
        bound = TOLERANCE[dtype] * max(1.0, float(out.abs().max()))
        torch.testing.assert_close(outs[row].double(), out[0, :, 0], rtol=0, atol=bound)
        torch.testing.assert_close(
            lses[row].double(), lse[0, :, 0], rtol=1e-5, atol=1e-5 if dtype.itemsize == 4 else 2e-3
        )


def test_what_no_query_sees_is_not_read():
    keys, values = torch.full((2, 6, 1, 8, 64), torch.nan)  # where the mask is false, nothing is read
    keys[1], values[1], keys[3, :, :2], values[3, :, :2] = 0.0, 1.0, 0.0, 2.0
    tables, lengths = torch.tensor([[0, 1, 3]], dtype=torch.int32), torch.tensor([18])
    pools = triton_paged.Pools.of(keys, values)
    out, lse = pools.decode(torch.ones(1, 2, 64), tables, lengths, scale=1.0, window=10)
    torch.testing.assert_close(out, torch.full((1, 2, 64), (8 * 1.0 + 2 * 2.0) / 10))
    torch.testing.assert_close(lse, torch.full((1, 2), 10.0).log())


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
def test_rows_of_a_step_are_answered_by_it(kv_dtype, monkeypatch):
    """Beside a chunk, through the cache, as on a GPU."""
    torch.manual_seed(0)
    lengths, counts, size = [150, 30, 40], [1, 1, 8], 16
    tables = [[list(range(10)), [10, 11], [12, 13, 14]]]
    layer = PagedCache(15, size, kv_dtype=kv_dtype)
    step = Rows.plan([0] * 3, lengths, tables, size).step()
    layer.update(*torch.randn(2, 1, 2, sum(lengths), 64), step)
    step = Rows.plan([n - c for n, c in zip(lengths, counts, strict=True)], counts, tables, size).step()
    view, queries = layer.update(*torch.randn(2, 1, 2, 10, 64), step), torch.randn(1, 6, 10, 64)
    expected = attend(queries, view, step, scale=0.3)
    asked, decode = [], triton_paged.Pools.decode
    monkeypatch.setattr(paged.Pools, "of", lambda *args: None)  # as if there were no compiler
    monkeypatch.setattr(
        triton_paged.Pools, "decode", lambda *args, **rule: asked.append(args[3]) or decode(*args, **rule)
    )
    view[0].__dict__.pop("_pools")
    torch.testing.assert_close(attend(queries, view, step, scale=0.3), expected, rtol=1e-5, atol=1e-5)
    assert [x.tolist() for x in asked] == [[150, 30]]
