"""The C++ kernel for blocks against attention in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import DensePart, Step, attend, attend_part
from kvlab.attention_paged import PagedPart
from kvlab.cache.paged import PagedCache
from kvlab.codecs import Codec
from kvlab.engine.block_pool import GONE, blocks_for, first_needed
from kvlab.native import build, paged
from kvlab.native.rows import HEAD_DIMS
from kvlab.quantization import QuantizedTensor, encode
from kvlab.rows import Rows

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))
CODECS = {"int8": Codec(), "fp8": Codec("e4m3"), "int4": Codec("affine", 4, 32)}


def pool_of(x: torch.Tensor, kind: str):
    return encode(x, CODECS[kind]) if kind in CODECS else x.to(getattr(torch, kind))


def numbers(pool) -> torch.Tensor:
    return pool.dequantize(torch.float64) if isinstance(pool, QuantizedTensor) else pool.double()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_equals_attention_in_float64(data):
    kind, dtype = data.draw(st.sampled_from(["float32", "bfloat16", *CODECS])), data.draw(st.sampled_from([0, 1]))
    size, D = data.draw(st.sampled_from([1, 3, 16, 40])), data.draw(st.sampled_from(HEAD_DIMS))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    window = data.draw(st.sampled_from([None, 1, 50]))
    sinks = data.draw(st.sampled_from([0, 5])) if window else 0
    generator = torch.Generator().manual_seed(sum(lengths))
    owned = [blocks_for(n, size) for n in lengths]
    order = iter(torch.randperm(sum(owned) + 2, generator=generator).tolist())
    tables = [[next(order) for _ in range(n)] for n in owned]
    shape = 2, sum(owned) + 2, kv_heads, size, D
    keys, values = (pool_of(x, kind) for x in torch.randn(shape, generator=generator))
    queries = torch.randn(len(lengths), kv_heads * group, D, generator=generator).to(
        [torch.float32, torch.bfloat16][dtype]
    )

    rectangle = torch.full((len(lengths), max(owned)), GONE, dtype=torch.int32)
    for row, (table, n) in enumerate(zip(tables, lengths, strict=True)):
        seen = 0 if sinks else first_needed(n - 1, window, size)  # what no query sees need not be there
        rectangle[row, seen : len(table)] = torch.tensor(table[seen:], dtype=torch.int32)
    pools = paged.Pools.of(keys, values)
    assert pools.take(queries)
    rule = dict(scale=0.2, window=window, sinks=sinks)
    outs, lses = pools.decode(queries, rectangle, torch.tensor(lengths), **rule)

    for row, (table, n) in enumerate(zip(tables, lengths, strict=True)):
        dense = [numbers(x)[table].transpose(0, 1).flatten(1, 2)[None, :, :n] for x in (keys, values)]
        part, step = DensePart(*dense, torch.arange(n)[None, None]), Step(torch.tensor([[n - 1]]))
        out, lse = attend_part(queries[row][None, :, None].double(), part, step, **rule)
        torch.testing.assert_close(outs[row].double(), out[0, :, 0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lses[row].double(), lse[0, :, 0], rtol=2e-5, atol=2e-5)


def test_poison_that_no_query_sees_stays_outside():
    keys, values = torch.full((2, 4, 1, 8, 64), 1e30)
    keys[1], values[1], keys[3, :, :2], values[3, :, :2] = 0.0, 1.0, 0.0, 2.0
    tables, lengths = torch.tensor([[0, 1, 3]], dtype=torch.int32), torch.tensor([18])
    out, lse = paged.Pools.of(keys, values).decode(torch.ones(1, 2, 64), tables, lengths, scale=1.0, window=10)
    torch.testing.assert_close(out, torch.full((1, 2, 64), (8 * 1.0 + 2 * 2.0) / 10))
    torch.testing.assert_close(lse, torch.full((1, 2), 10.0).log())


@pytest.mark.parametrize(
    ("table", "length", "window"), [([0, GONE], 20, None), ([0, 9], 20, None), ([0, 1], 33, None), ([GONE, 1], 20, 5)]
)
def test_a_table_that_names_no_block_is_refused(table, length, window):
    """Reading beyond a pool would be a crash, or somebody else's memory."""
    queries, pools = torch.zeros(2, 1, 64), paged.Pools.of(*torch.zeros(2, 3, 1, 16, 64))
    tables, lengths = torch.tensor([[1, 2], table], dtype=torch.int32), torch.tensor([16, length])
    with pytest.raises(ValueError, match=rf"request 1 stores {length} tokens .* blocks 0 to 2"):
        pools.decode(queries, tables, lengths, scale=1.0, window=window and length)


@pytest.mark.parametrize("change", ["head of 32", "float64", "strided", "other values", "fp16 pools"])
def test_it_takes_only_what_it_can_read(change):
    queries, keys, values = torch.zeros(2, 4, 64), *torch.zeros(2, 3, 2, 16, 64)
    assert paged.Pools.of(keys, values).take(queries)
    match change:
        case "head of 32":
            queries, keys, values = queries[..., :32], keys[..., :32], values[..., :32]
        case "float64":
            queries = queries.double()
        case "strided":
            keys = keys.transpose(2, 3).contiguous().transpose(2, 3)
        case "other values":
            values = values[..., :32]
        case "fp16 pools":
            keys, values = keys.half(), values.half()
    pools = paged.Pools.of(keys, values)
    assert pools is None or not pools.take(queries)


def test_rows_that_decode_beside_a_chunk_are_answered_together(monkeypatch):
    """The kernel's answers are those of gathered blocks, window and sinks included."""
    torch.manual_seed(0)
    lengths, counts, size = [700, 30, 40], [1, 1, 8], 16
    order = iter(torch.randperm(60).tolist())
    tables = [[[next(order) for _ in range(blocks_for(n, size))] for n in lengths]]
    layer = PagedCache(60, size)
    layer.update(*torch.randn(2, 1, 2, 770, 64), Rows.plan([0] * 3, lengths, tables, size).step())
    step = Rows.plan([699, 29, 32], counts, tables, size).step()
    view, queries = layer.update(*torch.randn(2, 1, 2, 10, 64), step), torch.randn(1, 6, 10, 64)
    asked, decode = [], PagedPart._decode
    for options in (dict(), dict(window=100), dict(window=100, sinks=20)):
        with monkeypatch.context() as patch:
            patch.setattr(PagedPart, "_decode", lambda *args: asked.append(args[2].lengths) or decode(*args))
            out = attend(queries, view, step, scale=0.3, **options)
            patch.setattr(PagedPart, "_can_decode", lambda *args: False)
            torch.testing.assert_close(out, attend(queries, view, step, scale=0.3, **options), rtol=1e-5, atol=1e-5)
    assert asked == [(700, 30)] * 3


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_stored_codes_are_those_of_pytorch(data):
    """Bit by bit: zeros, constants, tiny and huge rows, ties, both signs of zero."""
    kind, dtype = data.draw(st.sampled_from(list(CODECS))), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    N, heads, D = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from(HEAD_DIMS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    x = torch.randn(N, heads, D, generator=generator) * 2.0 ** data.draw(st.integers(-140, 120))
    x += data.draw(st.sampled_from([0.0, 1.0, -3.5])) * float(x.abs().max())
    x = x.round(decimals=data.draw(st.sampled_from([0, 1, 30]))).clamp(-3e38, 3e38)
    x[0, 0] = data.draw(st.sampled_from([0.0, -0.0, 100.0, -3.5, 1e-45]))
    x[-1, -1, 0], x = data.draw(st.sampled_from([-0.0, 448.0, 2.0**-9 * 1.5])), x.to(dtype)
    pool = encode(torch.zeros(3, heads, 5, D, dtype=dtype), CODECS[kind])
    slots = torch.randperm(15, generator=generator)[:N]
    fresh = torch.cat([x, x], 2)[..., :D]  # a view, as the model's are
    assert paged.can_encode(fresh, pool)
    paged.encode(fresh, pool, slots // 5, slots % 5)
    wanted = encode(x[:, :, None], CODECS[kind])
    for mine, theirs in ((pool.codes, wanted.codes), (pool.scales, wanted.scales), (pool.minima, wanted.minima)):
        if mine is not None:
            assert torch.equal(mine[slots // 5, :, slots % 5].view(torch.uint8), theirs[:, :, 0].view(torch.uint8))


def test_every_e4m3_number_and_every_tie_is_rounded_as_pytorch_does():
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448
    ties = (numbers[1:] + numbers[:-1]) / 2
    every = torch.cat([numbers, ties, ties * 1.0001, ties * 0.9999])
    rows = torch.nn.functional.pad(every, (0, -len(every) % 63)).view(-1, 1, 63)
    fresh = torch.cat([torch.full((len(rows), 1, 1), 448.0), rows], 2)  # a scale of 1
    pool = encode(torch.zeros(1, 1, len(rows), 64), CODECS["fp8"])
    for x in (fresh, -fresh):
        paged.encode(x, pool, torch.zeros(len(rows), dtype=torch.int64), torch.arange(len(rows)))
        assert torch.equal(pool.codes[0], encode(x.transpose(0, 1)[None], CODECS["fp8"]).codes[0])


@pytest.mark.parametrize(("block", "offset"), [(3, 0), (-1, 0), (0, 5)])
def test_a_token_without_a_slot_is_refused(block, offset):
    pool = encode(torch.zeros(3, 2, 5, 64), Codec())
    before = pool.codes.clone()
    with pytest.raises(IndexError, match=f"token 1 goes to offset {offset} of block {block}, .* 3 blocks of 5 tokens"):
        paged.encode(torch.randn(2, 2, 64), pool, torch.tensor([0, block]), torch.tensor([0, offset]))
    assert torch.equal(pool.codes, before)
