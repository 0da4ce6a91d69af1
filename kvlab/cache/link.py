"""The way between the memory where a cache is kept and the one where it is computed on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

Stored = tuple[Tensor, slice]  # a tensor (B, *, slots, *), and the slots that matter


class Link(ABC):
    """Brings stored tensors to where they are computed on, while something else is computed, and takes them home.

    Home is CPU memory. What is copied is done in the order in which it was asked for.
    """

    @abstractmethod
    def fetch(self, stored: Sequence[Stored]) -> Callable[[], list[Tensor]]:
        """Begin to copy; the function that is returned waits, and returns the copies or raises what went wrong."""

    @abstractmethod
    def store(self, x: Tensor, home: Tensor | None, slots: slice) -> Tensor:
        """Copy slots of `x` into its home, or all of them into a new one where there is none; return the home."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until nothing is on its way, whatever became of it: from then on the CPU may read and write homes."""


class ThreadLink(Link):
    """One worker thread. Where home and the place of computing are the same memory this shows the order, no gain."""

    def __init__(self):
        self._worker = ThreadPoolExecutor(1, "kvlab-link")
        self._last: Future | None = None

    def fetch(self, stored):
        self._last = self._worker.submit(self.copy, stored)
        return self._last.result

    def copy(self, stored: Sequence[Stored]) -> list[Tensor]:
        """What the worker does for one fetch."""
        copies = [torch.empty_like(x) for x, _ in stored]
        for copy, (x, slots) in zip(copies, stored, strict=True):
            copy_slots(copy, x, slots)
        return copies

    def store(self, x, home, slots):
        if home is None:
            return x.clone()
        copy_slots(home, x, slots)
        return home

    def settle(self):
        if self._last is not None:
            wait([self._last])


class CudaLink(Link):
    """A stream of its own, and pinned memory at home: without it a copy to a GPU waits for the CPU."""

    def __init__(self, device: torch.device):
        self.device, self._stream = device, torch.cuda.Stream(device)

    def fetch(self, stored):
        with torch.cuda.stream(self._stream):
            copies = [torch.empty_like(x, device=self.device) for x, _ in stored]
            for copy, (x, slots) in zip(copies, stored, strict=True):
                copy_slots(copy, x, slots)
            done = self._stream.record_event()

        def arrive() -> list[Tensor]:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            for copy in copies:
                copy.record_stream(current)  # its memory must not be used again before this stream is done with it
            return copies

        return arrive

    def store(self, x, home, slots):
        if home is None:
            home, slots = torch.empty_like(x, device="cpu", pin_memory=True), slice(None)
        elif not home.is_pinned():  # a reordered cache has new tensors
            home = home.pin_memory()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which computes what is stored
        with torch.cuda.stream(self._stream):
            copy_slots(home, x, slots)
        x.record_stream(self._stream)
        return home

    def settle(self):
        self._stream.synchronize()


def link_to(device: torch.device | str) -> Link:
    """The link between CPU memory and a device."""
    device = torch.device(device)
    return CudaLink(device) if device.type == "cuda" else ThreadLink()


def copy_slots(target: Tensor, source: Tensor, slots: slice) -> None:
    """Copy slots of (B, *, slots, *), head by head: each piece is contiguous, and needs no copy before the copy."""
    for to, at in zip(target.flatten(0, 1), source.flatten(0, 1), strict=True):
        to[slots].copy_(at[slots], non_blocking=True)
