"""A cache with a budget: at fixed positions it scores what it holds, and keeps the best of each KV head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlab.attention import Step
from kvlab.cache.base import Bytes, CannotRewind, LayerCache, prompt_ends, spans_of
from kvlab.cache.budgets import Budget
from kvlab.cache.contiguous import continued
from kvlab.cache.dense import DenseCache, check_like
from kvlab.cache.formats import CodedRows, PlainRows
from kvlab.cache.queries import QueryRing
from kvlab.cache.scores import METHODS, Evidence, Method, keep_best
from kvlab.cache.slots import Slots

STRIDE = 64  # positions between decisions: longer ones cost slots, shorter ones cost prefill, whose chunks they cut


@dataclass
class Row:
    """What is known of a row without reading tensors.

    length   its newest position + 1
    settled  no token below can be given back: it may have left, or its query was counted
    ended    the length at which its prompt ended; None while it has not
    """

    length: int = 0
    settled: int = 0
    ended: int | None = None

    def is_due(self, first: int | None, stride: int) -> bool:
        """Whether to decide before a step whose first position is `first`: a new stride, or the prompt has ended."""
        if first is None or self.length == self.settled:
            return False
        return self.length == self.ended or self.length <= first // stride * stride


class EvictingCache(LayerCache):
    """Keeps `budget` tokens of each KV head at every decision, those that `method` scores highest. Lossy.

    Oracle: attention with an explicit mask, in which a query sees what the last decision at or before its position
    kept, and every token since. A budget that covers everything changes nothing.

    A decision falls where a position is a multiple of `stride`. It is taken by the update that stores this position,
    from what earlier ones stored, and before it reads: so nothing later has a say, and a draft that is rejected
    leaves no trace. No step may cross such a position; KVCache.cut says where to cut, and then neither chunks nor
    other rows change what is kept. Between decisions the cache holds up to `stride` tokens more than its budget.

    whole_prompt: a prompt is stored whole and decided on where it ends (KVCache.begin is told which rows' do), as
    SnapKV was published; what follows is decided on at the strides.

    Methods that score by attention remember Q queries and ask them again at a decision. That costs H x Q x D_k numbers
    (with Q = 64 and G = 3 a fifth of a budget of 512 tokens, with MLA's 128 heads several times the budget), and at
    each decision one product of the Q queries with the keys held; no buffer grows with the prompt squared. Where
    queries are not of the width of what is stored (MLA's unabsorbed layout), observe refuses.

    form  how a token is stored, as numbers or as codes
    seed  of the random control, one for each layer
    """

    exact = False

    def __init__(
        self,
        method: str | Method,
        budget: Budget,
        stride: int = STRIDE,
        *,
        whole_prompt: bool = False,
        form: PlainRows | CodedRows | None = None,
        seed: int = 0,
    ):
        if isinstance(method, str) and method not in METHODS:
            raise ValueError(f"no eviction method {method!r}: {', '.join(METHODS)}")
        if type(stride) is not int or stride < 1:
            raise ValueError(f"decisions lie at least one position apart, got a stride of {stride!r}")
        self.method = METHODS[method] if isinstance(method, str) else method
        self.budget, self.stride, self.whole_prompt, self.seed = budget, stride, whole_prompt, seed
        self.form = form or PlainRows()
        self.asked = {"none": 0, "last": 1, "recent": budget.recent, "all": stride}[self.method.asks]
        if self.method.asks == "recent" and budget.recent == 0:
            raise ValueError("this method asks the queries of the recent window: give at least 1 recent token")
        self.reset()

    def reset(self):
        bounded = self.budget.tokens is not None and not self.whole_prompt
        self.slots = Slots(self.form, self.budget.tokens + self.stride if bounded else None)
        # a prompt may end before a draft that was rejected did: what the draft overwrote is still asked then
        spare = self.stride if self.whole_prompt and self.method.asks != "all" else 0
        self.ring = QueryRing(self.asked + spare)
        self.rows: list[Row] = []
        self.start: int | None = None  # slot i holds position start + i in every row; None when that is not so
        self.scale, self.window = 1.0, None
        self.before: list[int] | None = None  # the lengths before an update that is not observed yet

    @property
    def positions(self) -> Tensor | None:
        """(B, H_kv, C + 1) int32, EMPTY for slots that hold no token; None while nothing is stored."""
        return self.slots.positions if self.rows else None

    def update(self, keys, values, step):
        check_like(self.slots.like, keys, values, step)
        self.check(step)
        if self.before is not None:
            raise ValueError("this method scores by attention, and the last step's queries were never observed")
        if step.start is None:  # whatever stands in padding is never read, and must not be refused
            padding = (step.positions < 0)[:, None, :, None]
            keys = keys.masked_fill(padding, 0.0)
            values = None if values is None else values.masked_fill(padding, 0.0)
        packed, spans = self.form.pack(keys, values), spans_of(step)
        self.rows = self.rows or [Row() for _ in spans]
        self._decide([None if span is None else span[0] for span in spans])
        self.before = [row.length for row in self.rows] if self.asked else None
        used = set(self.slots.used or [0])
        uniform = step.start is not None and len(used) == 1  # all rows hold as many, and now the same positions
        self.start = continued(self.start, max(used), step.start) if uniform else None
        self.slots.append(keys, values, packed, step.positions, [0 if span is None else span[2] for span in spans])
        self._advance(spans, step)
        bounds = (0, self.rows[0].length - 1) if uniform and self.start is None else None
        return (self.slots.part(self.start, bounds),)

    def _advance(self, spans, step: Step) -> None:
        ends = prompt_ends(step) if self.whole_prompt else [False] * len(spans)
        for row, span, end in zip(self.rows, spans, ends, strict=True):
            row.length = row.length if span is None else span[1] + 1
            row.ended = row.length if end else row.ended

    def observe(self, queries, view, step, *, scale, window):
        self.scale, self.window = scale, window
        if not self.asked:
            return
        before, self.before = self.before, None
        width = self.slots.like[0].shape[3]
        if queries.shape[3] != width:
            self.rewind(before)
            raise ValueError(
                f"this method asks stored keys of width {width} again, and queries of width {queries.shape[3]} came: "
                "with MLA use the absorbed layout, or a method that needs no attention"
            )
        self.ring.add(queries, step)

    def settle(self) -> None:
        """Take now the decisions that an update at the next position would take first."""
        self._decide([row.length for row in self.rows])

    def _decide(self, firsts: list[int | None]) -> None:
        """Decide for the rows that are due before a step with these first positions."""
        pairs = enumerate(zip(self.rows, firsts, strict=True))
        due = [i for i, (row, first) in pairs if row.is_due(first, self.stride)]
        if not due:
            return
        rows, used = [self.rows[i] for i in due], [self.slots.used[i] for i in due]
        counts = [self._count(row, held) for row, held in zip(rows, used, strict=True)]
        if counts != used or self.method.adds:
            evidence = self._evidence(self.slots.index(due), rows)
            if self.method.adds:
                evidence = replace(evidence, carried=evidence.carried + self.method.adds(evidence))
                self.slots.carried[self.slots.index(due), :, : self.slots.top] = evidence.carried
            if counts != used:
                self.slots.keep(due, self._best(evidence, counts), counts)
                # what a share keeps grows again
                self.slots.shrink(self.stride, patience=2 if self.budget.tokens is None else 1)
                self.start = None
        for row, count, held in zip(rows, counts, used, strict=True):
            if self.asked or count < held:
                row.settled = row.length

    def _count(self, row: Row, held: int) -> int:
        in_prompt = self.whole_prompt and row.ended is None
        return held if in_prompt else min(held, self.budget.kept(row.length))

    def _evidence(self, index: Tensor | slice, rows: list[Row]) -> Evidence:
        positions = self.slots.positions[index, :, : self.slots.top]
        newest, settled = torch.tensor([[row.length - 1, row.settled] for row in rows], device=positions.device).T
        queries = asked_at = None
        if self.asked:
            first = settled if self.method.asks == "all" else newest - (self.asked - 1)
            queries, asked_at = self.ring.since(index, first[:, None])
        carried = self.slots.carried[index, :, : self.slots.top]
        facts = (newest[:, None, None], queries, asked_at, carried, self.scale, self.window, self.seed)
        return Evidence(self.slots.keys(index), positions, *facts)

    def _best(self, evidence: Evidence, counts: list[int]) -> Tensor:
        at, newest = evidence.positions, evidence.newest
        scores, protected = self.method.score(evidence), (at < self.budget.sinks) | (at > newest - self.budget.recent)
        if self.window is not None:  # out of the sight of all queries to come, sinks included
            gone = at <= newest + 1 - self.window
            scores, protected = scores.masked_fill(gone, -torch.inf), protected & ~gone
        return keep_best(scores, at, torch.tensor(counts, device=at.device), protected)

    def check(self, step):
        """Raise ValueError for a step that crosses a decision, or that does not say whether a prompt ends in it."""
        if self.whole_prompt:
            prompt_ends(step)
        for row, span in enumerate(spans_of(step)):
            if span is not None and span[0] // self.stride != span[1] // self.stride:
                raise ValueError(
                    f"this cache decides at position {(span[0] // self.stride + 1) * self.stride}, inside a step with "
                    f"positions {span[0]} to {span[1]} (row {row}): cut steps as KVCache.cut says"
                )

    # positions and rows are judged as in every cache that keeps positions
    check_positions, check_reorder = DenseCache.check_positions, DenseCache.check_reorder
    _check_rows = DenseCache._check_rows

    def _row_lengths(self) -> Tensor:
        return torch.tensor([row.length for row in self.rows], device=self.positions.device)

    def check_rewind(self, lengths):
        DenseCache.check_rewind(self, lengths)
        for index, (row, length) in enumerate(zip(self.rows, lengths, strict=bool(self.rows))):
            if length < row.settled:
                raise CannotRewind(
                    f"cannot rewind row {index} to {length} tokens: at {row.settled} it was decided what to keep of "
                    "them; recompute the row instead"
                )

    def rewind(self, lengths):
        self.check_rewind(lengths)
        if not self.rows:
            return
        limits = torch.tensor(lengths, device=self.positions.device)[:, None]  # (B, 1)
        self.slots.erase(self.positions[:, :1] >= limits[..., None])  # the same slots in every head
        self.ring.forget(limits)
        for row, length in zip(self.rows, lengths, strict=True):
            row.length, row.ended = length, None if row.ended is not None and row.ended > length else row.ended
        self.before = None
        self.start = self.start if len(set(lengths)) == 1 else None

    def reorder(self, rows):
        if not self.rows:
            return
        self.check_reorder(rows)
        rows = rows.to(self.positions.device)
        self.slots.reorder(rows)
        self.ring.reorder(rows)
        self.rows = [replace(self.rows[row]) for row in rows.tolist()]

    def bytes(self):
        return self.slots.bytes() + Bytes(metadata=self.ring.nbytes)
