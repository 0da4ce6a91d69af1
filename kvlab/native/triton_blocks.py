"""Attention of one query token over pools of blocks, for a GPU: what each program computes. Needs Triton.

As decode_run in triton_kernels.py, but that slots lie where a block table says (PagedAttention, Kwon et al. 2023,
arXiv:2309.06180), and that their positions follow from it. A program reads the blocks of its run through the table;
a block of one head is in one piece, so what a tensor core multiplies comes in long reads.
"""

import triton
import triton.language as tl

from kvlab.native.triton_kernels import LOWEST, finish, load_numbers, places, score


@triton.jit
def first_seen(length, window, sinks):
    """The first slot that the last of `length` tokens may see."""
    start = 0
    if window is not None:
        start = tl.where(sinks > 0, 0, tl.maximum(length - window, 0))
    return start


@triton.jit
def look_up(table, slots, last, length, window, sinks, BLOCK: tl.constexpr):
    """Which slots before `last` the last token sees, and where they lie: block and offset, (slots,) each."""
    sees = slots < last
    if window is not None:
        sees &= (slots >= length - window) | (slots < sinks)
    block = tl.load(table + slots // BLOCK, mask=sees, other=0).to(tl.int64)
    return sees, block, slots % BLOCK


@triton.jit
def plain_rows(pool, strides, block, head, offset, sees, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """Rows of a pool of numbers, (slots, WIDTH); zeros for unseen slots."""
    at, _ = places(strides, block, head, offset)
    return tl.load((pool + at)[:, None] + tl.arange(0, WIDTH)[None, :], mask=sees[:, None], other=0).to(DOT)


@triton.jit
def score_rows(
    queries, keys, strides, block, head, offset, sees, KEYS: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr
):
    """queries · keys of some slots: pointers (heads, 1) -> (heads, slots) fp32, without the softmax's scale."""
    if KEYS[0] == "numbers":
        rows = plain_rows(keys[0], strides, block, head, offset, sees, KEYS[3], DOT)
        q = tl.load(queries + tl.arange(0, KEYS[3])[None, :]).to(DOT)  # (heads, D_k)
        products = tl.dot(q, tl.trans(rows), input_precision="ieee")
    else:
        products = score(queries, keys, strides, block, head, offset, sees, KEYS, TILE, DOT)
    return products


@triton.jit
def value_rows(values, strides, block, head, offset, sees, VALUES: tl.constexpr, DOT: tl.constexpr):
    """Values of some slots as numbers, (slots, D_v); zeros for unseen slots."""
    if VALUES[0] == "numbers":
        rows = plain_rows(values[0], strides, block, head, offset, sees, VALUES[3], DOT)
    else:
        rows = load_numbers(values, strides, block, head, offset, sees, VALUES, DOT)
    return rows


@triton.jit(do_not_specialize=["width", "window", "sinks"])  # tables grow: one kernel serves them all
def decode_blocks(
    queries, keys, key_strides, values, value_strides, tables, lengths, outs, lses, scale, width, window, sinks,
    G: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One run of slots for the G query heads of one key/value head. Programs: (runs, H_kv, requests).

    queries  (R, H, D_k) · tables (R, width) · lengths (R,)
    keys     (pool,) of numbers, or (codes, scales, minima or None); values alike
    outs     (R, H, runs, D_v) fp32 · lses (R, H, runs) fp32, -inf for a head that sees nothing in the run
    """
    D_V: tl.constexpr = VALUES[3]
    run, runs = tl.program_id(0), tl.num_programs(0)
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)  # the bytes of a pool pass 2^31
    length = tl.load(lengths + row).to(tl.int32)
    start = first_seen(length, window, sinks)
    share = tl.cdiv(tl.cdiv(length - start, runs), SLOTS) * SLOTS  # of what this request sees
    last = tl.minimum(start + (run + 1) * share, length)

    padded = tl.arange(0, ROWS)
    heads = (row * tl.num_programs(1) + head) * G + tl.minimum(padded, G - 1)  # padding repeats the last head
    q = (queries + heads * KEYS[3])[:, None]  # (ROWS, 1) pointers
    top, mass = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, D_V), tl.float32)
    for first in range(start + run * share, last, SLOTS):
        slots = first + tl.arange(0, SLOTS)  # positions of the request
        sees, block, offset = look_up(tables + row * width, slots, last, length, window, sinks, BLOCK)
        scores = score_rows(q, keys, key_strides, block, head, offset, sees, KEYS, TILE, DOT) * scale
        scores = tl.where(sees[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - new_top[:, None]), tl.exp(top - new_top)
        numbers = value_rows(values, value_strides, block, head, offset, sees, VALUES, DOT)
        products = tl.dot(weights.to(DOT), numbers, input_precision="ieee")  # (ROWS, D_v)
        mass, out, top = mass * shrink + tl.sum(weights, 1), out * shrink[:, None] + products, new_top

    at, real = heads * runs + run, padded < G
    divisor, lse = finish(top, mass)
    tl.store(lses + at, lse, mask=real)
    tl.store(outs + at[:, None] * D_V + tl.arange(0, D_V)[None, :], out / divisor[:, None], mask=real[:, None])
