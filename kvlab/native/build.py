"""Compile the C++ kernel where there is a compiler, and say so where there is none.

It is built once a process in about two seconds, without PyTorch's headers, and called through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("decode.cpp")
# sums may be taken in any order, which is what vectorising needs; infinities keep their meaning
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math",
         "-fno-math-errno", "-shared", "-fPIC", "-std=c++17")  # fmt: skip
FUNCTIONS = {torch.float32: "decode_fp32", torch.bfloat16: "decode_bf16"}
HEAD_DIMS = (64, 128)  # the loops over a head are unrolled


@cache
def library() -> ctypes.CDLL | str:
    """The compiled kernel; where it cannot be had, why, in words."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler was found: attention uses PyTorch's own kernels"
    with tempfile.TemporaryDirectory() as folder:  # once loaded, the file is no longer needed
        target = Path(folder) / "decode.so"
        done = subprocess.run([compiler, *FLAGS, SOURCE, "-o", target], capture_output=True, text=True)
        if done.returncode != 0:
            first = (done.stderr.strip() or "no message").splitlines()[0]
            return f"{compiler} could not compile the kernel ({first}): attention uses PyTorch's own kernels"
        loaded = ctypes.CDLL(str(target))
    for name in FUNCTIONS.values():
        function = getattr(loaded, name)
        function.restype = None
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 7 + [ctypes.c_float, ctypes.c_int64]
    return loaded


def can_decode(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes these tensors: one query token, on a CPU, slots of a head one after another."""
    D = queries.shape[3]
    return (
        queries.shape[2] == 1
        and not queries.is_cuda
        and queries.dtype in FUNCTIONS
        and D in HEAD_DIMS
        and keys.shape[3] == values.shape[3] == D
        and keys.stride() == values.stride()
        and keys.stride()[2:] == (D, 1)
        and isinstance(library(), ctypes.CDLL)
    )


def decode(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of (B, H, 1, D) queries over every slot of (B, H_kv, S, D) keys and values -> (B, H, 1, D)."""
    B, H, _, D = queries.shape
    kv_heads, S = keys.shape[1], keys.shape[2]
    queries = queries.contiguous()
    out = torch.empty_like(queries)
    getattr(library(), FUNCTIONS[queries.dtype])(
        queries.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), B, kv_heads, H // kv_heads, D, S,
        keys.stride(0), keys.stride(1), scale, torch.get_num_threads(),
    )  # fmt: skip
    return out
