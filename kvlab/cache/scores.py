"""Which tokens to keep: one short function a method, from what was stored and asked so far to a score for each slot.

Shapes are those of attention.py; S slots are stored, Q queries are remembered. A higher score stays longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvlab.attention import fold, visible

TILE = 64  # remembered queries that are asked at once: the scratch memory is (B, H, TILE, S), however many there are
NEIGHBOURS = 5  # SnapKV's pooling kernel
ASKS = ("none", "last", "recent", "all")


@dataclass(frozen=True)
class Evidence:
    """All that a decision may look at. Nothing in it is later than the newest token stored.

    keys       (B, H_kv, S, D_k) as stored
    positions  (B, H_kv, S), EMPTY for unused slots
    newest     (B, 1, 1) position of each row's newest token
    queries    (B, H, Q, D_k) remembered queries, in any order; None for methods that ask nobody
    asked_at   (B, Q) their positions; EMPTY ones are not asked
    carried    (B, H_kv, S) what earlier decisions added up for a slot
    scale, window  of the layer's attention
    seed       of the random control, one for each layer
    """

    keys: Tensor
    positions: Tensor
    newest: Tensor
    queries: Tensor | None
    asked_at: Tensor | None
    carried: Tensor
    scale: float = 1.0
    window: int | None = None
    seed: int = 0

    def attention(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Weights (B, H_kv, G, q, S) of the remembered queries, some at a time, and what they see, (B, H_kv, 1, q, S).

        Of queries asked since the last decision they are what attention gave. Of older ones (an observation window
        that is longer than the stride) they are what it would give now, over the tokens that are left.
        """
        kv_heads = self.keys.shape[1]
        wide = torch.float64 if self.keys.dtype == torch.float64 else torch.float32
        keys = self.keys.to(wide).transpose(-1, -2) * self.scale  # (B, H_kv, D_k, S)
        for queries, at in zip(self.queries.split(TILE, 2), self.asked_at.split(TILE, 1), strict=True):
            scores = (fold(queries, kv_heads).to(wide) @ keys).unflatten(2, (-1, queries.shape[2]))
            sees = visible(at, self.positions, self.window)[:, :, None]  # (B, H_kv, 1, q, S)
            weights = scores.masked_fill_(~sees, -torch.inf).softmax(-1)
            blind = ~sees.any(-1, keepdim=True)  # a query that is not asked sees nothing, and weighs nothing
            yield (weights.masked_fill_(blind, 0.0) if bool(blind.any()) else weights), sees


def recency(evidence: Evidence) -> Tensor:
    """The newest stay: sinks + window without looking."""
    return evidence.positions.double()  # fp32 counts to 2^24


def priority(evidence: Evidence) -> Tensor:
    """A control: a fixed random number for each token and head, so that what stays is a fair sample of the past."""
    heads = torch.arange(evidence.keys.shape[1], device=evidence.keys.device)[:, None]
    x = evidence.positions.long() + (heads << 32) + (evidence.seed << 44)
    for _ in range(2):  # a hash: neither padding, nor chunks, nor other rows change a token's number
        x = ((x ^ (x >> 23)) * 0x2127599BF4325C37) & (2**63 - 1)
    return (x >> 39).float()  # 24 bits, which fp32 can tell apart


def key_norm(evidence: Evidence) -> Tensor:
    """Keys of small norm stay: they tend to be attended to (Devoto et al. 2024, arXiv:2406.11430)."""
    return -evidence.keys.float().norm(dim=-1)


def last_attention(evidence: Evidence) -> Tensor:
    """TOVA: what the newest query attends to, on average over all heads (Oren et al. 2024, arXiv:2401.06104)."""
    total = sum(weights.sum((1, 2, 3)) for weights, _ in evidence.attention())  # (B, S)
    return total[:, None].expand_as(evidence.positions)


def window_attention(evidence: Evidence) -> Tensor:
    """SnapKV: what the newest queries attend to, on average over them and over the query heads that share a KV head,
    smoothed over neighbouring tokens (Li et al. 2024, arXiv:2404.14469)."""
    total = add_attention(evidence)  # (B, H_kv, S)
    in_window = evidence.positions >= _first_asked(evidence)
    order = evidence.positions.argsort(-1)  # slots lie in any order; neighbours are neighbours in the text
    sorted_ = total.masked_fill(in_window, 0.0).gather(-1, order)
    pooled = avg_pool1d(sorted_, NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)
    return torch.zeros_like(total).scatter_(-1, order, pooled)


def accumulated_attention(evidence: Evidence) -> Tensor:
    """H2O: all attention that a token ever got from its KV head's queries (Zhang et al. 2023, arXiv:2306.14048)."""
    return evidence.carried


def attention_over_uniform(evidence: Evidence) -> Tensor:
    """H2O, normalised: attention as a multiple of what it is when all tokens get the same, on average over the queries
    that could see the token. The plain sum favours early tokens, which more queries see."""
    queries = evidence.newest - evidence.positions + 1
    return evidence.carried / (queries if evidence.window is None else queries.clamp(max=evidence.window))


def add_attention(evidence: Evidence) -> Tensor:
    """(B, H_kv, S): what the remembered queries add to the accumulated attention."""
    return sum(weights.sum((2, 3)) / weights.shape[2] for weights, _ in evidence.attention())


def add_attention_over_uniform(evidence: Evidence) -> Tensor:
    """(B, H_kv, S): the same, each query's weights as multiples of 1 / (the tokens it sees)."""
    return sum((weights.mean(2) * sees[:, :, 0].sum(-1, keepdim=True)).sum(2) for weights, sees in evidence.attention())


def _first_asked(evidence: Evidence) -> Tensor:
    asked = evidence.asked_at.masked_fill(evidence.asked_at < 0, 2**31 - 1)
    return asked.amin(1)[:, None, None]  # (B, 1, 1)


@dataclass(frozen=True)
class Method:
    """A way to score.

    score  from Evidence to (B, H_kv, S)
    asks   which queries it remembers: none, the last, those of the recent window, or all since the last decision
    adds   what `carried` gains at each decision, for methods that accumulate
    """

    score: Callable[[Evidence], Tensor]
    asks: str = "none"
    adds: Callable[[Evidence], Tensor] | None = None

    def __post_init__(self):
        if self.asks not in ASKS:
            raise ValueError(f"a method asks {', '.join(ASKS)} of its queries, not {self.asks!r}")


def shared(method: Method) -> Method:
    """The method with one score for all KV heads of a layer, their mean: the heads keep the same tokens."""

    def score(evidence: Evidence) -> Tensor:
        apart = method.score(evidence)
        return apart.mean(1, keepdim=True).expand_as(apart)  # (B, H_kv, S)

    return replace(method, score=score)


METHODS = {
    "recent": Method(recency),
    "random": Method(priority),
    "keynorm": Method(key_norm),
    "tova": Method(last_attention, "last"),
    "snapkv": Method(window_attention, "recent"),
    "h2o": Method(accumulated_attention, "all", add_attention),
    "h2o-mean": Method(attention_over_uniform, "all", add_attention_over_uniform),
}


def keep_best(scores: Tensor, positions: Tensor, counts: Tensor, protected: Tensor) -> Tensor:
    """Mark the counts[row] slots of each KV head with the highest scores: (B, H_kv, S) bool.

    Unused slots lose to all others, protected ones win, and among equals the newer token wins, wherever it is stored.
    """
    scores = scores.nan_to_num(nan=torch.finfo(scores.dtype).min)  # finite, so that no score reaches a protected slot
    scores = scores.masked_fill(protected, torch.inf).masked_fill(positions < 0, -torch.inf)  # EMPTY < sinks, too
    by_age = positions.argsort(-1, descending=True)
    order = by_age.gather(-1, scores.gather(-1, by_age).argsort(dim=-1, descending=True, stable=True))
    wins = torch.arange(positions.shape[-1], device=positions.device) < counts[:, None, None]  # (B, 1, S)
    return torch.zeros_like(protected).scatter_(-1, order, wins.expand_as(protected))
