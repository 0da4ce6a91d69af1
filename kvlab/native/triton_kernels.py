"""Attention of one query token over codes, for a GPU: what each program computes. Needs Triton to be imported.

A decode step does little arithmetic for each byte it reads, so a GPU is fast at it only while all its processors
read. A batch has fewer key/value heads than a GPU has processors: the slots of a head are cut into runs
(Flash-Decoding, Dao et al. 2023, https://pytorch.org/blog/flash-decoding/), each with an online softmax of its own
(FlashAttention, Dao et al. 2022, https://arxiv.org/abs/2205.14135), and a second kernel merges the runs as parts of
a view are merged. decode.cpp is the same plan for a CPU. Codes become numbers in registers only.

Shapes are those of attention.py. What is the GPU's way:
    Names in capitals are known when a kernel is compiled. A tensor in it has sizes that are powers of two; masks cut
    it to measure, and where the mask is false nothing is read.
    Tensor cores multiply 16 rows or more, so the G query heads of a key/value head are padded to 16. That costs
    arithmetic, of which a decode step has plenty, and no reading.
    Keys, and values, are a tuple (codes, scales, minima or None), with the strides of codes, then of scales; CODEC is
    (kind, bits, bytes of a row, numbers of a row, numbers that share a scale).
"""

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4e38)  # where a maximum starts: finite, for -inf minus -inf would be NaN
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def places(strides, row, head, slots):
    """Where the codes, and the scales, of some slots of one key/value head begin: two (slots,) of elements."""
    codes = row * strides[0] + head * strides[1] + slots * strides[2]
    return codes, row * strides[3] + head * strides[4] + slots * strides[5]


@triton.jit
def visible(positions, exists, p, window, sinks):
    """The rule of attention.py: which slots a query at position p sees, (slots,) pointers -> (slots,) bool."""
    s = tl.load(positions, mask=exists, other=-1)
    sees = (s >= 0) & (s <= p)
    if window is not None:
        sees &= (s > p - window) | (s < sinks)
    return sees


@triton.jit
def load_levels(slots, columns, sees, CODEC: tl.constexpr):
    """What codes stand for before scale and minimum: (slots, 1) pointers, (1, n) columns -> (slots, n) fp32.

    Packed numbers that share a byte lie PLANE columns apart (packing.pack). Each reads the byte anew; all but the
    first find it in the processor's own cache.
    """
    KIND: tl.constexpr = CODEC[0]
    BITS: tl.constexpr = CODEC[1]
    PLANE: tl.constexpr = CODEC[2]
    byte = tl.load(slots + columns % PLANE, mask=sees, other=0)
    # 8-bit floats by moving bits, as in packing.fp8_numbers: GPUs before 8.9 have no instruction for it
    if KIND == "e5m2":
        levels = (byte.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "e4m3":
        bits = (byte.to(tl.int8, bitcast=True).to(tl.int16) << 7) & ~0x4000
        levels = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif KIND == "symmetric" and BITS == 8:
        levels = byte.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        levels = ((byte >> (BITS * (columns // PLANE))) & (2**BITS - 1)).to(tl.float32)
        if KIND == "symmetric":
            levels -= 2 ** (BITS - 1)
    return levels


@triton.jit
def score(queries, keys, strides, row, head, slots, sees, CODEC: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr):
    """queries · keys of some slots: pointers (heads, 1) -> (heads, slots) fp32, without the softmax's scale.

    In code space, tile by tile of columns that share a scale: q · x = scale (q · levels) + minimum sum(q). Levels are
    exact in bf16 and fp16, so tensor cores lose nothing; an error made here would be exponentiated.
    """
    WIDTH: tl.constexpr = CODEC[3]
    GROUP: tl.constexpr = CODEC[4]
    codes, scales, minima = keys
    at, group = places(strides, row, head, slots)
    products = tl.zeros((queries.shape[0], slots.shape[0]), tl.float32)
    for first in tl.static_range(0, WIDTH, TILE):
        columns = (first + tl.arange(0, TILE))[None, :]
        q = tl.load(queries + columns).to(DOT)  # (heads, TILE)
        levels = load_levels((codes + at)[:, None], columns, sees[:, None], CODEC)  # (slots, TILE)
        scale = tl.load(scales + group + first // GROUP, mask=sees, other=0).to(tl.float32)
        products += tl.dot(q, tl.trans(levels.to(DOT)), input_precision="ieee") * scale[None, :]
        if minima is not None:
            minimum = tl.load(minima + group + first // GROUP, mask=sees, other=0).to(tl.float32)
            products += tl.sum(q.to(tl.float32), 1)[:, None] * minimum[None, :]
    return products


@triton.jit
def load_numbers(values, strides, row, head, slots, sees, CODEC: tl.constexpr, DOT: tl.constexpr):
    """Values of some slots as numbers again, (slots, D_v); zeros for unseen slots."""
    WIDTH: tl.constexpr = CODEC[3]
    GROUP: tl.constexpr = CODEC[4]
    codes, scales, minima = values
    at, group = places(strides, row, head, slots)
    levels = load_levels((codes + at)[:, None], tl.arange(0, WIDTH)[None, :], sees[:, None], CODEC)  # (slots, D_v)
    numbers = tl.reshape(levels, (slots.shape[0], WIDTH // GROUP, GROUP))
    group = group[:, None] + tl.arange(0, WIDTH // GROUP)[None, :]  # (slots, D_v / GROUP)
    numbers *= tl.load(scales + group, mask=sees[:, None], other=0).to(tl.float32)[:, :, None]
    if minima is not None:
        numbers += tl.load(minima + group, mask=sees[:, None], other=0).to(tl.float32)[:, :, None]
    if DOT == tl.float16:  # a last rounding beyond its range stays finite, as in QuantizedTensor.dequantize
        numbers = tl.clamp(numbers, -65504.0, 65504.0)
    return tl.reshape(numbers, (slots.shape[0], WIDTH)).to(DOT)


@triton.jit
def finish(top, mass):
    """From the largest score and the mass: a divisor and the log-sum-exp; 1 and -inf where nothing was seen."""
    divisor = tl.where(mass == 0.0, 1.0, mass)
    return divisor, tl.where(mass == 0.0, float("-inf"), top + tl.log(divisor))


@triton.jit(do_not_specialize=["S", "window", "sinks"])  # S grows from step to step: one kernel serves them all
def decode_run(
    queries, query_positions, keys, key_strides, values, value_strides, positions, position_strides, length,
    outs, lses, scale, S, window, sinks,
    G: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One run of slots for the G query heads of one key/value head. Programs: (runs, H_kv, B).

    queries  (B, H, D_k) · query_positions (B,) · positions (B, S)
    length   () slots in use; None: all S
    outs     (B, H, runs, D_v) fp32 · lses (B, H, runs) fp32, -inf for a head that sees nothing in the run
    """
    D_V: tl.constexpr = VALUES[3]
    run, runs = tl.program_id(0), tl.num_programs(0)
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)  # the bytes of a cache pass 2^31
    live = S if length is None else tl.load(length).to(tl.int32)
    share = tl.cdiv(tl.cdiv(live, runs), SLOTS) * SLOTS  # of the slots in use, whatever the capacity
    last = tl.minimum((run + 1) * share, live)

    padded = tl.arange(0, ROWS)
    heads = (row * tl.num_programs(1) + head) * G + tl.minimum(padded, G - 1)  # padding repeats the last head
    q = (queries + heads * KEYS[3])[:, None]  # (ROWS, 1) pointers
    p, position = tl.load(query_positions + row), positions + row * position_strides[0]
    top, mass = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, D_V), tl.float32)
    for first in range(run * share, last, SLOTS):
        slots = first + tl.arange(0, SLOTS)
        sees = visible(position + slots * position_strides[1], slots < last, p, window, sinks)
        scores = score(q, keys, key_strides, row, head, slots, sees, KEYS, TILE, DOT) * scale  # (ROWS, SLOTS)
        scores = tl.where(sees[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - new_top[:, None]), tl.exp(top - new_top)
        numbers = load_numbers(values, value_strides, row, head, slots, sees, VALUES, DOT)
        products = tl.dot(weights.to(DOT), numbers, input_precision="ieee")  # (ROWS, D_v)
        mass, out, top = mass * shrink + tl.sum(weights, 1), out * shrink[:, None] + products, new_top

    at, real = heads * runs + run, padded < G
    divisor, lse = finish(top, mass)
    tl.store(lses + at, lse, mask=real)
    tl.store(outs + at[:, None] * D_V + tl.arange(0, D_V)[None, :], out / divisor[:, None], mask=real[:, None])


@triton.jit
def merge_runs(outs, lses, out, lse, runs, RUNS: tl.constexpr, WIDTH: tl.constexpr):
    """Weigh each run by exp(its lse); programs (query heads,). outs (heads, runs, D_v) -> out (heads, D_v)."""
    head = tl.program_id(0)
    run, columns = tl.arange(0, RUNS), tl.arange(0, WIDTH)
    at = head * runs + run
    lses_of_runs = tl.load(lses + at, mask=run < runs, other=float("-inf"))
    top = tl.maximum(tl.max(lses_of_runs, 0), LOWEST)
    weights = tl.exp(lses_of_runs - top)
    mass = tl.sum(weights, 0)
    parts = tl.load(outs + at[:, None] * WIDTH + columns[None, :], mask=(run < runs)[:, None], other=0)
    divisor, total = finish(top, mass)
    tl.store(out + head * WIDTH + columns, tl.sum(parts * weights[:, None], 0) / divisor)
    tl.store(lse + head, total)
