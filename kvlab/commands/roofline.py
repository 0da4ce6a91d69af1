"""`kvlab roofline`: the least time of a prefill and of a decode step on a device."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from kvlab.commands.options import Batch, Dtype, Json, MlaLayout, Model
from kvlab.terminal import print_json, print_table, seconds, warn_about

Device = Annotated[str, typer.Option("--hardware", help="h100, a100-80, t4, rtx-4090, ..., or this.")]
Prompt = Annotated[int, typer.Option("--prompt", help="Tokens of each prompt.")]
Overhead = Annotated[float, typer.Option("--overhead-ms", help="Measured cost of a step that does nothing, in ms.")]
Bandwidth = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--bandwidth-gb-per-s", help="Measured, instead of the published one."),
]
Tflops = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--tflops", help="Measured, in the model's dtype, instead of the published one."),
]


def roofline(
    model: Model,
    hardware: Device,
    prompt: Prompt,
    batch: Batch = 1,
    dtype: Dtype = None,
    overhead_ms: Overhead = 0.0,
    bandwidth_gb_per_s: Bandwidth = None,
    tflops: Tflops = None,
    mla_layout: MlaLayout = "latent",
    json: Json = False,
) -> None:
    """Say what bounds prefill and decode on a device, and their least time."""
    from kvlab.config import resolve
    from kvlab.hardware import lookup
    from kvlab.roofline import phases

    config = resolve(model)
    device = as_measured(lookup(hardware), config.dtype, bandwidth_gb_per_s, tflops)
    answer = phases(config, device, prompt, batch, dtype, overhead_ms / 1e3, mla_layout)
    warn_about(config, prompt)
    if json:
        about = {"model": config.name, "hardware": device.name, "source": device.source}
        about |= {"prompt": prompt, "batch": batch, "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s}
        print_json(about | {name: phase.as_dict() for name, phase in answer.items()})
    else:
        show(config.name, device.name, f"{batch} x {prompt:,} tokens", list(answer.values()))


def as_measured(device, dtype: str, bandwidth_gb_per_s: float | None, tflops: float | None):
    """The device with the figures that were measured instead of the published ones."""
    from dataclasses import replace

    for option, value in (("--bandwidth-gb-per-s", bandwidth_gb_per_s), ("--tflops", tflops)):
        if value is not None and not 0 < value < 1e15:
            raise ValueError(f"{option} must be a positive number, not {value}")
    if bandwidth_gb_per_s is not None:
        device = replace(device, bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9)
    return device if tflops is None else replace(device, flops_per_s={dtype: tflops * 1e12})


def show(model: str, device: str, what: str, phases: list) -> None:
    """The phases for people."""
    columns = ["phase", "flops", "bytes", "flops/byte", "at least", "bound by", "tokens/s"]
    lines = [
        [p.phase, f"{p.flops:.3e}", f"{p.bytes:,}", f"{p.intensity:,.1f}", seconds(p.time_s), p.bound,
         f"{p.tokens_per_s:,.0f}"]
        for p in phases
    ]  # fmt: skip
    title = f"{model} on {device}, {what}, arithmetic in {phases[0].compute_dtype}"
    print_table(title, columns, lines, right=(1, 2, 3, 4, 6))
