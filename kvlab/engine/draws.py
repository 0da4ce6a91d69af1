"""Drawing tokens for many sequences at once, each from its own stream of random numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvlab.engine.plan import Row
from kvlab.engine.request import Request
from kvlab.sampling import Sampler


class Draws:
    """The streams of all sequences: who shares a sequence's steps changes nothing, and preemption neither."""

    def __init__(self):
        self.streams: dict[tuple[Request, int], torch.Generator] = {}  # names may come again, requests do not

    def pick(self, row: Row, logits: Tensor, best: int) -> list[int]:
        """As many tokens as a row's sequence wants, from logits (1, vocabulary) whose greatest is `best`."""
        request, first = row.sequence.request, row.sequence.index
        if row.sequence.error:
            return []
        if request.temperature == 0:
            return [best]
        streams = [self._stream(request, index) for index in range(first, first + row.draws)]
        return [int(sampler_of(request).pick(logits, stream)) for stream in streams]

    def keep(self, requests: Iterable[Request]) -> None:
        """Forget the streams of all other requests."""
        kept = set(requests)
        self.streams = {key: stream for key, stream in self.streams.items() if key[0] in kept}

    def _stream(self, request: Request, index: int) -> torch.Generator:
        key = (request, index)
        if key not in self.streams:
            self.streams[key] = sampler_of(request).generator(index)
        return self.streams[key]


def sampler_of(request: Request) -> Sampler:
    """A request's way to draw; raises ValueError, naming it, for top_k and top_p that cannot be."""
    try:
        return Sampler(request.temperature, request.top_k, request.top_p, request.seed)
    except ValueError as error:
        raise ValueError(f"request {request.id}: {error}") from None
