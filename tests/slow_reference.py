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
    `shared`: all KV heads of a row keep the same tokens. `window`: the model's own.
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
        shared: bool = False,
        window: int | None = None,
    ):
        super().__init__()
        self.method, self.tokens, self.sinks, self.recent = method, tokens, sinks, recent
        self.stride, self.codec, self.prompt = stride, codec, prompt
        self.shared, self.window = shared, window
        self.kept: dict[tuple[int, int], set[int]] = {}
        self.total: dict[tuple[int, int, int], float] = {}
        self.asked: list[tuple[int, Tensor]] = []  # each query's position and vectors (B, H, D_k)
        self.scale, self.sharing = 1.0, 1  # query heads of a KV head

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

    def held(self, b: int, h: int, p: int) -> list[int]:
        """What the last decision kept, and all since, up to p."""
        last = self.last_decision(p)
        return sorted(self.kept.get((b, h), set(range(last)))) + list(range(last, p + 1))

    def seen(self, b: int, h: int, p: int) -> list[int]:
        """What the query at p sees of it."""
        return [s for s in self.held(b, h, p) if self.window is None or s > p - self.window]

    def observe(self, queries, view, step, *, scale, window):
        B, H = queries.shape[:2]
        self.scale, self.sharing = scale, H // self.keys.shape[1]
        for t, p in enumerate(step.positions[0].tolist()):
            self.asked.append((p, queries[:, :, t]))
            for b, head in product(range(B), range(H)):
                slots = self.seen(b, head // self.sharing, p)
                for s, weight in self.weights(b, head, -1, slots).items():
                    more = weight * (len(slots) if self.method == "h2o-mean" else 1) / self.sharing
                    where = b, head // self.sharing, s
                    self.total[where] = self.total.get(where, 0.0) + more

    def weights(self, b: int, head: int, index: int, slots: list[int]) -> dict[int, float]:
        """What a query asked before gives to those of these slots that it sees."""
        p, queries = self.asked[index]
        seen = [s for s in slots if s <= p and (self.window is None or s > p - self.window)]
        answer = (self.keys[b, head // self.sharing, seen] @ queries[b, head] * self.scale).softmax(0)
        return dict(zip(seen, answer.tolist(), strict=True))

    def decide(self, now: int) -> None:
        for b in range(self.keys.shape[0]):
            held = [self.held(b, h, now - 1) for h in range(self.keys.shape[1])]
            scores = [self.scores(b, h, now, slots) for h, slots in enumerate(held)]
            if self.shared:
                scores = [{s: sum(one[s] for one in scores) / len(scores) for s in held[0]}] * len(scores)
            for h, slots in enumerate(held):
                ranked = sorted(slots, key=lambda s, own=scores[h]: self.rank(s, own[s], now), reverse=True)
                self.kept[b, h] = set(ranked[: self.tokens])

    def rank(self, s: int, score: float, now: int) -> tuple:
        """In sight before out of sight of all to come, protected before others, then by score, then by age."""
        in_sight = self.window is None or s > now - self.window
        return in_sight, in_sight and (s < self.sinks or s >= now - self.recent), score if in_sight else 0, s

    def scores(self, b: int, h: int, now: int, held: list[int]) -> dict[int, float]:
        match self.method:
            case "recent":
                return {s: s for s in held}
            case "random":
                return {s: hashed(s, h, 0) for s in held}
            case "keynorm":
                return {s: -float(self.keys[b, h, s].float().norm()) for s in held}
            case "h2o":
                return {s: self.total[b, h, s] for s in held}
            case "h2o-mean":
                return {s: self.total[b, h, s] / min(now - s, self.window or now) for s in held}
            case "tova":
                heads = range(self.keys.shape[1] * self.sharing)
                return added([self.weights(b, head, -1, held) for head in heads], held)
            case "snapkv":
                return self.smoothed(b, h, now, held)
        raise ValueError(self.method)

    def smoothed(self, b: int, h: int, now: int, held: list[int]) -> dict[int, float]:
        """What the window's queries give to a token and its two neighbours on either side, but for the window's own."""
        heads = range(h * self.sharing, (h + 1) * self.sharing)
        asked = range(-min(self.recent, len(self.asked)), 0)
        given = added([self.weights(b, head, index, held) for index, head in product(asked, heads)], held)
        past = [s for s in held if s < now - self.recent]
        near = {s: past[max(0, i - 2) : i + 3] for i, s in enumerate(past)}
        return {s: sum(given[x] for x in near.get(s, [])) for s in held}


def added(answers: list[dict[int, float]], held: list[int]) -> dict[int, float]:
    return {s: sum(answer.get(s, 0.0) for answer in answers) for s in held}


def hashed(position: int, head: int, seed: int) -> float:
    """The random control's number, in Python's own whole numbers."""
    x = position + (head << 32) + (seed << 44)
    for _ in range(2):
        x = ((x ^ (x >> 23)) * 0x2127599BF4325C37) % 2**64 % 2**63
    return float(x >> 39)
