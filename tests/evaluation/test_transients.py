"""What a call allocates in passing, against calls whose allocations are known."""

from __future__ import annotations

import os

import pytest
import torch

from kvlab.evaluation.transients import Transient, transient


def test_what_is_alive_at_once_and_the_largest():
    def call():
        first = torch.empty(1000)  # 4,000 bytes
        second = torch.empty(500)
        del first
        return torch.empty(800) if second.numel() else None

    assert transient(call) == Transient(6000, 4000)


def test_what_was_there_before_does_not_count():
    held = [torch.empty(10_000)]

    def call():
        held.clear()
        return torch.empty(100)

    assert transient(call) == Transient(400, 400)
    assert transient(lambda: None) == Transient(0, 0)


def test_buffers_inside_pytorchs_kernels_count():
    """A product of numbers that do not lie side by side copies them first."""
    x = torch.empty(64, 128)[:, ::2]
    made = transient(lambda: torch.addmm(x, x, x)).peak_bytes
    assert made > 64 * 64 * 4


def test_nothing_is_said_on_stderr_and_errors_still_are(capfd):
    def call():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        transient(call)
    transient(lambda: torch.empty(1))
    assert capfd.readouterr().err == ""
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"
