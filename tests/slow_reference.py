"""Eviction as the papers say it, token by token in Python loops: everything is stored, and a mask says what is seen."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kvlab.cache.contiguous import ContiguousCache
from kvlab.codecs import Codec
from kvlab.quantization import quantize


@dataclass(frozen=True)
class MaskedPart:
    """All slots, and which of them each query sees, (B, H_kv, T, S) bool."""

    keys: Tensor
    values: Tensor | None
    sees: Tensor

    def attend(self, queries, step, *, scale, window=None, sinks=0):
        values = self.keys if self.values is None else self.values
        shared = queries.shape[1] // self.keys.shape[1]
        keys, values, sees = (x.repeat_interleave(shared, 1) for x in (self.keys, values, self.sees))
        scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(~sees, -torch.inf)
        return scores.softmax(-1) @ values


class WindowOracle(ContiguousCache):
    """A query at p sees s where p - window < s <= p, and the sinks."""

    exact = False

    def __init__(self, window: int, sinks: int = 0):
        super().__init__()
        self.window, self.sinks = window, sinks

    def update(self, keys, values, step):
        part = super().update(keys, values, step)[0]
        slots, queries = part.positions[0, 0].tolist(), step.positions[0].tolist()
        rows = [[s <= p and (s > p - self.window or s < self.sinks) for s in slots] for p in queries]
        sees = torch.tensor(rows).expand(*keys.shape[:2], -1, -1)
        return (MaskedPart(part.keys, part.values, sees),)


class SlowEviction(ContiguousCache):
    """A method with a budget of `tokens`; rows are equally long, positions begin at 0.

    Decides where a position is a multiple of `stride`; with a `prompt`, first where that ends, then at the multiples.
    Per row and KV head: `kept`, the positions that the last decision left, and `total`, what H2O adds up.
    """

    exact = False

    def __init__(
        self,
        method: str,
        tokens: int,
        sinks: int,
        recent: int,
        stride: int,
        codec: Codec | None = None,
        prompt: int = 0,
    ):
        super().__init__()
        self.method, self.tokens, self.sinks, self.recent = method, tokens, sinks, recent
        self.stride, self.codec, self.prompt = stride, codec, prompt
        self.kept: dict[tuple[int, int], set[int]] = {}
        self.total: dict[tuple[int, int, int], float] = {}
        self.asked: list[dict[tuple[int, int], dict[int, float]]] = []  # of each query: (row, query head) -> weights

    def update(self, keys, values, step):
        if self.codec is not None:
            keys, values = (None if x is None else quantize(x, self.codec).dequantize(x.dtype) for x in (keys, values))
        first = int(step.positions[0, 0])
        if first and self.last_decision(first) == first:
            self.decide(first)
        part = super().update(keys, values, step)[0]
        B, H_kv, T, _ = keys.shape
        sees = torch.zeros(B, H_kv, T, self.length, dtype=torch.bool)
        for b, h, t in product(range(B), range(H_kv), range(T)):
            sees[b, h, t, self.seen(b, h, first + t)] = True
        return (MaskedPart(part.keys, part.values, sees),)

    def last_decision(self, p: int) -> int:
        """The last position up to p at which something is decided, or 0."""
        at = p - p % self.stride
        return at if at > self.prompt else self.prompt if p >= self.prompt else 0

    def seen(self, b: int, h: int, p: int) -> list[int]:
        """What the query at p sees: what the last decision kept, and all since."""
        last = self.last_decision(p)
        return sorted(self.kept.get((b, h), set(range(last)))) + list(range(last, p + 1))

    def observe(self, queries, view, step, *, scale, window):
        B, H = queries.shape[:2]
        sharing = H // self.keys.shape[1]
        for t, p in enumerate(step.positions[0].tolist()):
            answer = {}
            for b, head in product(range(B), range(H)):
                slots = self.seen(b, head // sharing, p)
                weights = (self.keys[b, head // sharing, slots] @ queries[b, head, t] * scale).softmax(0).tolist()
                answer[b, head] = dict(zip(slots, weights, strict=True))
                for s, weight in answer[b, head].items():
                    more = weight * (len(slots) if self.method == "h2o-mean" else 1) / sharing
                    self.total[b, head // sharing, s] = self.total.get((b, head // sharing, s), 0.0) + more
            self.asked.append(answer)

    def decide(self, now: int) -> None:
        for b, h in product(range(self.keys.shape[0]), range(self.keys.shape[1])):
            held = self.seen(b, h, now - 1)
            scores = {s: self.score(b, h, s, now, held) for s in held}
            safe = {s for s in held if s < self.sinks or s >= now - self.recent}
            ranked = sorted(held, key=lambda s: (s in safe, scores[s], s), reverse=True)
            self.kept[b, h] = set(ranked[: self.tokens])

    def score(self, b: int, h: int, s: int, now: int, held: list[int]) -> float:
        match self.method:
            case "recent":
                return s
            case "random":
                return hashed(s, h, 0)
            case "keynorm":
                return -float(self.keys[b, h, s].float().norm())
            case "h2o":
                return self.total[b, h, s]
            case "h2o-mean":
                return self.total[b, h, s] / (now - s)
            case "tova":
                return sum(weights.get(s, 0.0) for (row, _), weights in self.asked[-1].items() if row == b)
            case "snapkv":
                return self.smoothed(b, h, s, [x for x in held if x < now - self.recent])
        raise ValueError(self.method)

    def smoothed(self, b: int, h: int, s: int, past: list[int]) -> float:
        """What the window's queries give to s and its two neighbours on either side, among those before the window."""
        if s not in past:
            return 0.0
        near = past[max(0, past.index(s) - 2) : past.index(s) + 3]
        sharing = len(self.asked[0]) // self.keys.shape[0] // self.keys.shape[1]
        heads = range(h * sharing, (h + 1) * sharing)
        return sum(query[b, head].get(x, 0.0) for x, query, head in product(near, self.asked[-self.recent :], heads))


def hashed(position: int, head: int, seed: int) -> float:
    """The random control's number, in Python's own whole numbers."""
    x = position + (head << 32) + (seed << 44)
    for _ in range(2):
        x = ((x ^ (x >> 23)) * 0x2127599BF4325C37) % 2**64 % 2**63
    return float(x >> 39)
