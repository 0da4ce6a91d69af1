"""A decode step over codes on a GPU, by Triton; where that cannot be, why, in words.

The kernels are in triton_kernels.py. With TRITON_INTERPRET=1 in the environment Triton runs them on a CPU, one program
after another: thousands of times slower, and a way to test their arithmetic without a GPU.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.quantization import QuantizedTensor

if TYPE_CHECKING:
    from kvlab.attention_quantized import QuantizedPart

OLDEST = (3, 4)  # of Triton: before it, kernels take no tuples of constants
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (16, 32, 64, 128, 256)  # D_k and D_v: powers of two
SMALLEST = 16  # what tensor cores multiply at least, in rows and in columns
PROGRAMS = 4  # for each processor of the GPU: while one waits for memory, others compute
MOST_RUNS = 64  # the merging kernel holds all runs of a head at once


@cache
def absent() -> str | None:
    """Why the kernels cannot be used here, in words; None where they can."""
    instead = "attention over codes uses PyTorch's own kernels"
    if not torch.cuda.is_available() and not interpreting():
        return f"there is no CUDA device for Triton: {instead}"
    try:
        from triton import __version__
    except ImportError as error:
        return f"Triton cannot be imported ({error}; on Linux: pip install triton): {instead}"
    if tuple(int(number) for number in __version__.split(".")[:2]) < OLDEST:
        return f"Triton {__version__} is older than {OLDEST[0]}.{OLDEST[1]}: {instead}"
    return None


def interpreting() -> bool:
    """Whether Triton was asked to run its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_decode(queries: Tensor, part: QuantizedPart) -> bool:
    """Whether the kernels take these: one query token, on a GPU; keys and values one block each, scaled by channels."""
    return (
        queries.shape[2] == 1
        and (queries.is_cuda or interpreting())
        and queries.dtype in DTYPES
        and part.values is not None
        and len(part.keys) == len(part.values) == 1
        and readable(part.keys[0])
        and readable(part.values[0])
        and absent() is None
    )


def decode(
    queries: Tensor,
    part: QuantizedPart,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one token over a part that it `can_decode` -> (B, H, 1, D_v) and its log-sum-exp (B, H, 1), in fp32.

    queries    (B, H, 1, D_k)
    positions  (B, 1) of the queries. They see what the rule of attention.py says; zeros and -inf where that is nothing
    length     () slots in use, on the device, for a part of fixed size; None reads every slot
    """
    from kvlab.native import triton_kernels as kernels

    (keys,), (values,) = part.keys, part.values
    B, H, _, _ = queries.shape
    _, kv_heads, S, D_v = values.shape
    G, slots, dot = H // kv_heads, slots_at_once(queries), kernels.DTYPES[dot_dtype(queries)]
    runs = count_runs(B * kv_heads, math.ceil(S / slots), processors(queries.device))
    outs = queries.new_empty((B, H, runs, D_v), dtype=torch.float32)
    lses = queries.new_empty((B, H, runs), dtype=torch.float32)
    with torch.cuda.device_of(queries):  # Triton launches on the current device
        kernels.decode_run[(runs, kv_heads, B)](
            queries.contiguous(), positions.contiguous(), tensors(keys), strides(keys), tensors(values),
            strides(values), part.positions, (part.positions.stride(0), part.positions.stride(2)), length,
            outs, lses, scale, S, window, sinks,
            G, codec(keys), codec(values), tile(keys), max(SMALLEST, power_of_two(G)), slots, dot,
        )  # fmt: skip
        if runs > 1:
            of_runs, outs, lses = (outs, lses), outs.new_empty((B, H, 1, D_v)), lses.new_empty((B, H, 1))
            kernels.merge_runs[(B * H,)](*of_runs, outs, lses, runs, power_of_two(runs), D_v)
    return outs[..., : part.value_width], lses


def count_runs(heads: int, most: int, processors: int) -> int:
    """Runs to cut the slots of each head into, up to `most`, so that every processor of the GPU gets its programs."""
    return max(1, min(math.ceil(PROGRAMS * processors / heads), most, MOST_RUNS))


@cache
def processors(device: torch.device) -> int:
    """Of a GPU (NVIDIA's SMs). Interpreted on a CPU there are none: enough for runs that must be merged."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def slots_at_once(queries: Tensor) -> int:
    """What a program reads at a time; half of it where, for want of tensor cores, products take many registers."""
    no_tensor_cores = queries.is_cuda and torch.cuda.get_device_capability(queries.device) < (8, 0)
    return 32 if queries.dtype == torch.float32 or no_tensor_cores else 64


def dot_dtype(queries: Tensor) -> torch.dtype:
    """What is multiplied in: the queries' dtype. Triton's interpreter would multiply bf16 numbers as integers."""
    return torch.float32 if interpreting() and queries.dtype == torch.bfloat16 else queries.dtype


def readable(block: Tensor | QuantizedTensor) -> bool:
    return (
        isinstance(block, QuantizedTensor)
        and block.codec.along == "channels"
        and block.shape[3] in WIDTHS
        and tile(block) >= SMALLEST
        and block.codes.stride(3) == 1
        and (block.scales.shape[3] == 1 or block.scales.stride(3) == 1)
        and (block.minima is None or block.minima.stride() == block.scales.stride())
    )


def tile(block: QuantizedTensor) -> int:
    """Columns that share a scale, and no bytes."""
    return min(block.codec.group_size or block.shape[3], block.codes.shape[3])


def codec(block: QuantizedTensor) -> tuple[str, int, int, int, int]:
    """What a kernel is compiled for: kind, bits, bytes of a row, numbers of a row, numbers that share a scale."""
    width, codec = block.shape[3], block.codec
    return codec.kind, codec.bits, block.codes.shape[3], width, codec.group_size or width


def tensors(block: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return block.codes, block.scales, block.minima


def strides(block: QuantizedTensor) -> tuple[int, ...]:
    return block.codes.stride()[:3] + block.scales.stride()[:3]


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
