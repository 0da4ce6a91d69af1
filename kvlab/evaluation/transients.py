"""What a call allocates in passing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Transient:
    """Bytes that were allocated during a call: the most alive at once, and the largest single allocation."""

    peak_bytes: int
    largest_bytes: int


def transient(call: Callable[[], object]) -> Transient:
    """Run `call` once under PyTorch's profiler and add up what its allocator hands out and takes back.

    Every tensor counts, also those inside PyTorch's own kernels, and so does what the call returns. What other
    allocators give does not: the scratch of a GPU library, or of the C++ kernels (tens of kB, whatever the context).
    """
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()  # the answer counts until the profiler has stopped
    del kept
    changes = _changes(profiled)  # frees of what was allocated before the call are not among them
    return Transient(max(accumulate(changes), default=0), max(changes, default=0))


def _changes(profiled: profile) -> list[int]:
    """Bytes of each allocation, negative for those given back, in order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))  # the one public way to single events of the allocator
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"])]


@contextmanager
def _quiet() -> Iterator[None]:
    """Close stderr to C++ for a moment: the profiler announces itself there, whatever its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
