"""Run by test_triton_decode.py without the interpreter: the kernels compiled for GPUs that are not here.

Triton's compiler and assembler need no GPU, and refuse much that its interpreter takes.
"""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from kvlab.attention_quantized import QuantizedPart
from kvlab.codecs import Codec
from kvlab.native import triton_blocks, triton_decode, triton_kernels, triton_paged
from kvlab.quantization import quantize

LIVE, CAPACITY = 1000, 4096


class AbsentGPU:
    """Stands for Triton's driver: says which GPU there would be, and can do nothing with it."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # under this Triton keeps what it has compiled

    def get_current_stream(self, device):
        return 0


class Compiler:
    """Stands for a kernel: compiles it for the arguments of a launch instead of launching it."""

    def __init__(self, kernel):
        self.kernel, self.assembly = kernel, ""

    def __getitem__(self, grid):
        def launch(*arguments):
            self.assembly = self.kernel.warmup(*arguments, grid=grid).asm["ptx"]

        return launch


@pytest.fixture
def compile_for(monkeypatch):
    """What compiles both kernels as `decode` launches them, and returns their assembly."""

    def compiled(capability: int, codec: Codec, dtype: torch.dtype, D: int, group: int = 3, **options) -> list[str]:
        triton.runtime.driver.set_active(AbsentGPU(capability))
        kernels = Compiler(triton_kernels.decode_run), Compiler(triton_kernels.merge_runs)
        block = quantize(torch.zeros(1, 2, CAPACITY, D, dtype=dtype), codec).slots(0, LIVE)
        at = torch.arange(LIVE, dtype=torch.int32)[None, None]
        with monkeypatch.context() as patch:
            patch.setattr(triton_kernels, "decode_run", kernels[0])
            patch.setattr(triton_kernels, "merge_runs", kernels[1])
            queries = torch.zeros(1, 2 * group, 1, D, dtype=dtype)
            part = QuantizedPart((block,), (block,), at)
            triton_decode.decode(queries, part, torch.zeros(1, 1, dtype=torch.int32), scale=0.125, **options)
        return [kernel.assembly for kernel in kernels]

    return compiled


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("codec", [Codec(), Codec("e4m3"), Codec("symmetric", 8, 32), Codec("affine", 4, 32)])
def test_tensor_cores_multiply_what_is_read_in_large_pieces(capability, codec, compile_for):
    decode, merge = compile_for(capability, codec, torch.bfloat16, 128)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16" in decode
    assert "cp.async.cg.shared.global" in decode  # 16 bytes at a time, while earlier slots are computed with
    assert ".entry merge_runs" in merge


@pytest.mark.parametrize(("capability", "dtype"), [(75, torch.float16), (90, torch.float32)])
def test_it_compiles_where_there_are_no_tensor_cores_for_it(capability, dtype, compile_for):
    for codec in (Codec(), Codec("e5m2", 8, 32)):
        decode, _ = compile_for(capability, codec, dtype, 64)
        assert ".entry decode_run" in decode and "mma.sync" not in decode


def test_windows_lengths_and_large_groups_compile(compile_for):
    length = torch.tensor(LIVE)
    for group in (1, 71):
        decode, _ = compile_for(90, Codec(), torch.bfloat16, 64, group, window=100, sinks=4, length=length)
        assert ".entry decode_run" in decode


@pytest.mark.parametrize("kind", ["numbers", "int8", "fp8"])
@pytest.mark.parametrize(("capability", "dtype"), [(75, torch.float16), (90, torch.bfloat16), (90, torch.float32)])
def test_the_kernel_for_blocks_compiles(capability, dtype, kind, monkeypatch):
    triton.runtime.driver.set_active(AbsentGPU(capability))
    kernels = Compiler(triton_blocks.decode_blocks), Compiler(triton_kernels.merge_runs)
    monkeypatch.setattr(triton_blocks, "decode_blocks", kernels[0])
    monkeypatch.setattr(triton_kernels, "merge_runs", kernels[1])
    pool = torch.zeros(80, 2, 16, 64, dtype=dtype)
    if kind != "numbers":
        pool = quantize(pool, Codec() if kind == "int8" else Codec("e4m3"))
    tables, lengths = torch.zeros(3, 70, dtype=torch.int32), torch.tensor([1000, 1, 17])
    for rule in (dict(), dict(window=100, sinks=4)):
        triton_paged.Pools(pool, pool).decode(torch.zeros(3, 6, 64, dtype=dtype), tables, lengths, scale=0.125, **rule)
        assert ".entry decode_blocks" in kernels[0].assembly and ".entry merge_runs" in kernels[1].assembly
        assert ("mma.sync" in kernels[0].assembly) == (dtype == torch.bfloat16)
