"""Published limits of common accelerators, and which dtype a device computes well in. Imports no torch.

Figures are dense (a vendor's "with sparsity" halved), at boost clocks, from the data sheet named in `source`.
Memory is the size on the label with GB read as 2^30 bytes; what a driver leaves free is a little less.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30


class HardwareError(ValueError):
    """A device that is not known, or a figure of it that is."""


@dataclass(frozen=True)
class Hardware:
    """A device: memory in bytes, read bandwidth in bytes/s, peak operations per second by dtype."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float | None
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    compute_capability: tuple[int, int] | None = None  # NVIDIA only

    def peak(self, dtype: str) -> tuple[float, str]:
        """Peak operations/s and the dtype they are of: where `dtype` has none, fp16 for bf16, then fp32."""
        for candidate in (dtype, {"bf16": "fp16", "fp16": "bf16"}.get(dtype), "fp32"):
            if self.flops_per_s.get(candidate):
                return self.flops_per_s[candidate], candidate
        raise HardwareError(f"{self.name}: its peak in {dtype} is not known: give it (--tflops)")

    def bandwidth(self) -> float:
        """Bytes per second read from memory; raises HardwareError where it was never measured."""
        if self.bandwidth_bytes_per_s is None:
            raise HardwareError(
                f"{self.name}: its memory bandwidth is not known: measure it, then --bandwidth-gb-per-s"
            )
        return self.bandwidth_bytes_per_s

    @property
    def ridge(self) -> Mapping[str, float]:
        """Operations per byte at which computing takes as long as reading, by dtype."""
        return {dtype: peak / self.bandwidth() for dtype, peak in self.flops_per_s.items()}


def _device(name: str, gib: int, gb_per_s: float, tflops: dict[str, float], source: str, capability=None) -> Hardware:
    return Hardware(name, gib * GIB, gb_per_s * 1e9, {d: t * 1e12 for d, t in tflops.items()}, source, capability)


_HOPPER = {"fp32": 67.0, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_A100 = {"fp32": 19.5, "fp16": 312.0, "bf16": 312.0, "int8": 624.0}
PRESETS = {
    device.name: device
    for device in (
        _device("t4", 16, 320, {"fp32": 8.1, "fp16": 65.0, "int8": 130.0}, "NVIDIA T4 data sheet", (7, 5)),
        _device("a10g", 24, 600, {"fp32": 35.0, "fp16": 70.0, "bf16": 70.0, "int8": 140.0},
                "NVIDIA A10G data sheet (AWS G5)", (8, 6)),
        _device("l4", 24, 300, {"fp32": 30.3, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5, "int8": 242.5},
                "NVIDIA L4 data sheet, sparse figures halved", (8, 9)),
        _device("a100-40", 40, 1555, _A100, "NVIDIA A100 40GB SXM data sheet", (8, 0)),
        _device("a100-80", 80, 2039, _A100, "NVIDIA A100 80GB SXM data sheet", (8, 0)),
        _device("h100", 80, 3350, _HOPPER, "NVIDIA H100 SXM data sheet, sparse figures halved", (9, 0)),
        _device("h200", 141, 4800, _HOPPER, "NVIDIA H200 SXM data sheet, sparse figures halved", (9, 0)),
        _device("rtx-4090", 24, 1008, {"fp32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
                "NVIDIA Ada architecture white paper (fp16 and fp8 with fp32 accumulation)", (8, 9)),
        _device("mi300x", 192, 5300, {"fp32": 163.4, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
                "AMD Instinct MI300X data sheet"),
        _device("m2-max", 96, 400, {"fp32": 13.6, "fp16": 13.6},
                "Apple M2 Max announcement (2023), 38-core GPU; fp16 taken as fp32"),
    )
}  # fmt: skip


def names() -> tuple[str, ...]:
    """The devices that `lookup` knows; `this` is the machine that runs it."""
    return (*PRESETS, "this")


def lookup(name: str) -> Hardware:
    """The device called `name`; raises HardwareError listing the names."""
    key = str(name).strip().lower()
    if key == "this":
        return this_machine()
    if key not in PRESETS:
        raise HardwareError(f"unknown hardware {name!r}: one of {', '.join(names())}")
    return PRESETS[key]


def this_machine(
    bandwidth_bytes_per_s: float | None = None, flops_per_s: Mapping[str, float] | None = None
) -> Hardware:
    """This machine; its bandwidth and peak are given by whoever measured them, else unknown."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    source = f"this machine: {cores} CPU cores; bandwidth and peak as measured by the caller"
    return Hardware("this", _memory_bytes(), bandwidth_bytes_per_s, dict(flops_per_s or {}), source)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 0


def stamp(**versions: str) -> dict:
    """What a measurement must say of where it was made; `versions` are added as they are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = {"cpu": _cpu_name(), "cores": cores, "memory_bytes": _memory_bytes(), "system": platform.system()}
    return {**machine, "python": platform.python_version(), **versions}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:  # not Linux
        found = ""
    return found or platform.processor() or platform.machine()


def choose_dtype(compute_capability: tuple[int, int] | None) -> tuple[str, str]:
    """The dtype to compute in and why, in words; None is a CPU. A T4 only emulates bf16, and says yes."""
    if compute_capability is None:
        return "fp32", "CPU: fp32, which every CPU computes at full speed"
    major, minor = compute_capability
    if compute_capability >= (8, 0):
        return "bf16", f"GPU of compute capability {major}.{minor}: bf16, which needs 8.0"
    why = "bf16 needs 8.0; the range of fp16 is small, so logits are checked to be finite"
    return "fp16", f"GPU of compute capability {major}.{minor}: fp16, since {why}"


def choose_fp8(compute_capability: tuple[int, int] | None) -> tuple[bool, str]:
    """Whether fp8 can be computed with (else it is only stored) and why, in words."""
    if compute_capability is None:
        return False, "fp8 as storage only: a CPU has no arithmetic in it"
    words = f"compute capability {compute_capability[0]}.{compute_capability[1]}"
    if compute_capability >= (8, 9):
        return True, f"fp8 arithmetic: {words} is at least 8.9"
    return False, f"fp8 as storage only: arithmetic in it needs compute capability 8.9, this is {words}"
