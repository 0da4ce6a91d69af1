"""Choosing the next token from logits: greedy, temperature, top-k and top-p (Holtzman et al. 2019)."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """How to choose: temperature 0 is greedy; `top_k` keeps k tokens, `top_p` the likeliest of that mass.

    Raises ValueError for values outside temperature >= 0, top_k >= 1, 0 < top_p <= 1.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature!r}")
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k must be a whole number >= 1, or None to keep all, got {self.top_k!r}")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, or None to keep all, got {self.top_p!r}")
        if not _is_integer(self.seed):
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")

    def generator(self, request: int | str = 0) -> torch.Generator:
        """Return the random stream of one request: seed and request decide, never who shares the batch."""
        digest = hashlib.blake2b(f"{self.seed}/{request}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)  # a CPU stream everywhere

    def generators(self, batch: int) -> list[torch.Generator]:
        """Return the random streams of requests 0 .. batch − 1."""
        return [self.generator(row) for row in range(batch)]

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return kept probabilities (B, V), fp32, highest first and 0 where cut, and their token ids (B, V).

        Equal logits stand in order of their ids, so a cut between them keeps the lower ones. What top-p cuts
        is missing from the sum.
        """
        ordered, ids = logits.to(torch.float32).sort(dim=-1, descending=True, stable=True)  # (B, V)
        if self.temperature > 0:
            # The highest is subtracted before dividing: a tiny temperature then gives −inf, never inf − inf.
            ordered = (ordered - ordered[:, :1]) / max(self.temperature, torch.finfo(torch.float32).tiny)
        if self.top_k is not None:
            ordered[:, self.top_k :] = -math.inf
        mass = ordered.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            before = mass.double().cumsum(dim=-1) - mass  # the mass of all likelier tokens; 0 for the first
            mass = mass.masked_fill(before >= self.top_p, 0.0)
        return mass, ids

    def pick(self, logits: Tensor, generators: torch.Generator | Sequence[torch.Generator] | None = None) -> Tensor:
        """Return one token id per row of logits (B, V) as int64 (B,).

        Each row draws one number from its own generator (`Sampler.generators`); greedy needs none and takes
        the lowest id among equals. Raises ValueError for logits that are not finite and for a wrong number
        of generators.
        """
        check_logits(logits)
        if self.temperature == 0:
            return logits.argmax(dim=-1)  # (B, V) -> (B,)
        streams = [generators] if isinstance(generators, torch.Generator) else list(generators or ())
        if len(streams) != len(logits):
            raise ValueError(
                f"sampling draws each row from its own generator: {len(streams)} generators for "
                f"{len(logits)} rows; Sampler.generators({len(logits)}) makes them"
            )
        mass, ids = self.probabilities(logits)
        heights = mass.double().cumsum(dim=-1)  # (B, V)
        draws = torch.cat([torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams])
        target = draws.to(heights.device)[:, None] * heights[:, -1:]  # (B, 1)
        # The first token whose height exceeds the target. The clamp guards the last one against rounding.
        place = torch.searchsorted(heights, target, right=True)
        place = place.minimum((mass > 0).sum(dim=-1, keepdim=True) - 1)
        return ids.gather(-1, place).squeeze(-1)  # (B, 1) -> (B,)


def check_logits(logits: Tensor) -> None:
    """Refuse what is not (batch, vocabulary) or not finite, and name the first such row."""
    if logits.ndim != 2 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be (batch, vocabulary), got shape {tuple(logits.shape)}")
    finite = torch.isfinite(logits).all(dim=-1)
    if not finite.all():
        row = int(finite.logical_not().nonzero()[0])
        raise ValueError(
            f"logits of row {row} are not finite: the model overflowed or its weights "
            "are corrupt; a wider dtype (bf16 or fp32 instead of fp16) is the usual way out"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
