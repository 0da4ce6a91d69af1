"""Is what kvlab does on a GPU right, and how fast is it? `python -m kvlab.evaluation.gpu_check` on a CUDA machine.

Checks and times the Triton decode over int8 and fp8 codes, a prompt's attention, and the compiled decode step, and
writes the rows to book/results/gpu-check.json. Exits with 1 where an answer is wrong, with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kvlab.evaluation.gpu_paths import compiled_row, prefill_rows, triton_rows
from kvlab.evaluation.peers import read_bandwidth
from kvlab.evaluation.results import record
from kvlab.hardware import choose_dtype
from kvlab.model import zoo

COMMAND = "python -m kvlab.evaluation.gpu_check"


def absent() -> str | None:
    """Why nothing can be checked here, in words; None on a machine with a CUDA device."""
    if torch.cuda.is_available():
        return None
    build = f"PyTorch {torch.__version__} was built for CUDA {torch.version.cuda}" if torch.version.cuda else (
        f"PyTorch {torch.__version__} was built without CUDA"
    )  # fmt: skip
    return f"no GPU to check: PyTorch finds no CUDA device here ({build})"


def rows_of(device: torch.device, model: str) -> Iterator[dict]:
    """Every row, in the dtype that the device computes well in."""
    dtype = zoo.DTYPES[choose_dtype(torch.cuda.get_device_capability(device))[0]]
    yield from triton_rows(device, dtype)
    yield from prefill_rows(device, dtype)
    exact, fast = (zoo.load(model, dtype=d, device=device).model for d in (torch.float32, dtype))
    yield compiled_row(exact, fast)


def words(row: dict) -> str:
    """One row in one line."""
    what = f"{row['check']} {row.get('cache', '')} {row['dtype']}, {row['batch']} x {row['tokens']:,} tokens"
    if "skipped" in row:
        return f"{what}: skipped, {row['skipped']}"
    ratios = [f"{row[key]:.2f} x {key.removeprefix('vs_').replace('_', ' ')}" for key in row if key.startswith("vs_")]
    verdict = "right" if row["ok"] else "WRONG"
    return f"{what}: {verdict}, off by {row['error']:.2e}; speed {', '.join(ratios)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and time what kvlab does on a GPU, and write the rows."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("book/results/gpu-check.json"))
    parser.add_argument("--model", default=zoo.OFFLINE, help="for the compiled decode step")
    given = parser.parse_args(arguments)
    if (why := absent()) is not None:
        print(why, file=sys.stderr)
        return 2
    device, rows = torch.device("cuda"), []
    gpu = gpu_facts(device)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for row in rows_of(device, given.model):
            print(words(row), flush=True)
            rows.append({key: finite(value) for key, value in row.items()})
    finally:  # what was measured before something broke is worth having
        record(given.out, COMMAND, rows, gpu=gpu, note="medians of turns; launches included")
    return 0 if all(row.get("ok", True) for row in rows) else 1


def finite(value):
    """The value; None for NaN and infinities, which JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def gpu_facts(device: torch.device) -> dict:
    """The GPU that rows were measured on."""
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name, "compute_capability": f"{found.major}.{found.minor}", "memory_bytes": found.total_memory,
        "processors": found.multi_processor_count, "read_bytes_per_s": read_bandwidth(device),
        "cuda": torch.version.cuda,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
