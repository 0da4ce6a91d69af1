"""Attention over whatever a cache stores: a view is a tuple of parts, and positions decide what is seen.

Shapes, here and everywhere in kvlab:

    B     rows of the batch            H     query heads          D_k   width of a query and of a key
    T     query tokens of this step    H_kv  key/value heads      D_v   width of a value
    S     slots that are read          G     H / H_kv, the query heads that share one key/value head

One rule stands for every mask. A query at position p sees a slot at position s exactly when

    0 <= s <= p   and   (s > p - window   or   s < sinks).

Causality, padding, unused slots, windows, eviction holes and ring order all follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlab.native import decode as native

if TYPE_CHECKING:
    from kvlab.rows import Rows

EMPTY = -1  # the position of a slot that holds no token, and of a padding query


@dataclass(frozen=True)
class Step:
    """One forward pass, planned once and shared by all layers.

    positions    (B, T) integer token positions, EMPTY for padding
    start        where every row holds start, start + 1, ...; None when rows differ or are padded
    prompt_ends  (B,) bool, the rows whose prompt ends in this step; None when nobody asked
    rows         for paged caches: which tokens belong together, and where they are stored
    """

    positions: Tensor
    start: int | None = None
    prompt_ends: Tensor | None = None
    rows: Rows | None = None

    @classmethod
    def plan(cls, positions: Tensor, prompt_ends: Tensor | None = None) -> Step:
        """Look at the positions once, so that layers need not: reading a GPU tensor makes the CPU wait."""
        if positions.dim() != 2 or positions.numel() == 0:
            raise ValueError(f"positions must be (B, T) with at least one token, got shape {tuple(positions.shape)}")
        if positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"positions must be int32 or int64, got {positions.dtype}")
        first = positions[0, 0]
        consecutive = first + torch.arange(positions.shape[1], device=positions.device)
        uniform = bool((positions == consecutive).all()) and int(first) >= 0
        lowest, highest = (0, consecutive[-1]) if uniform else positions.aminmax()
        if int(lowest) < EMPTY or int(highest) > 2**31 - 1:  # caches store them as int32
            raise ValueError(f"positions must be {EMPTY} (padding) or 0 to 2^31 - 1: {int(lowest)} to {int(highest)}")
        return cls(positions, int(first) if uniform else None, prompt_ends)


def visible(query_positions: Tensor, slot_positions: Tensor, window: int | None = None, sinks: int = 0) -> Tensor:
    """The rule: (B, T) query and (B, 1|H_kv, S) slot positions -> (B, 1|H_kv, T, S) bool."""
    p = query_positions[:, None, :, None]  # (B, 1, T, 1)
    s = slot_positions[:, :, None, :]  # (B, 1|H_kv, 1, S)
    sees = (s >= 0) & (s <= p)
    if window is not None:
        sees &= (s > p - window) | (s < sinks)
    return sees


class Part(Protocol):
    """Something stored that queries can attend to; a cache answers with one or more of them."""

    def attend(self, queries: Tensor, step: Step, *, scale: float, window: int | None, sinks: int) -> Tensor:
        """Attention over this part alone: (B, H, T, D_k) -> (B, H, T, D_v)."""

    def attend_with_lse(
        self, queries: Tensor, step: Step, *, scale: float, window: int | None, sinks: int
    ) -> tuple[Tensor, Tensor]:
        """The same, in fp32 or wider, with the log-sum-exp of its scores (B, H, T) for merging."""


View = tuple[Part, ...]


@dataclass(frozen=True)
class DensePart:
    """Keys and values as plain tensors.

    keys         (B, H_kv, S, D_k)
    values       (B, H_kv, S, D_v), or None where keys are values too (MLA)
    positions    (B, 1 | H_kv, S) integer, EMPTY for unused slots
    start        slot i of every row holds position start + i; None when that is not known
    length       slots in use as a device tensor, for compiled steps; None when the tensors are already cut
    value_width  columns of the output to keep; None keeps all
    """

    keys: Tensor
    values: Tensor | None
    positions: Tensor
    start: int | None = None
    length: Tensor | None = None
    value_width: int | None = None

    def attend(self, queries, step, *, scale, window=None, sinks=0):
        if self.length is not None:
            facts = (self.positions, step.positions, self.length, scale, window, sinks, self.start is not None)
            return self._values_of(attend_live(queries, self.keys, self._values, *facts))
        if self._causal_square(step, window):
            return self._values_of(_causal(queries, self.keys, self._values, scale))
        if self._all_visible(step, window):
            if native.can_decode(queries, self.keys, self._values):
                return self._values_of(native.decode(queries, self.keys, self._values, scale)[0].to(queries.dtype))
            return self._values_of(_folded(queries, self.keys, self._values, None, scale))
        sees = visible(step.positions, self.positions, window, sinks)
        return self._values_of(_folded(queries, self.keys, self._values, sees, scale))

    def attend_with_lse(self, queries, step, *, scale, window=None, sinks=0):
        wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
        q = fold(queries, self.keys.shape[1]).to(wide)  # (B, H_kv, G*T, D_k)
        scores = q @ self.keys.to(wide).transpose(-1, -2) * scale  # (B, H_kv, G*T, S)
        sees = visible(step.positions, self.positions, window, sinks)  # (B, 1|H_kv, T, S)
        scores = scores.masked_fill(~_repeat_rows(sees, queries, self.keys), -torch.inf)
        lse = scores.logsumexp(-1)  # (B, H_kv, G*T)
        weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()  # a query that sees nothing weighs nothing
        out = self._values_of(weights @ self._values.to(wide))
        return unfold(out, queries.shape[1]), unfold(lse[..., None], queries.shape[1])[..., 0]

    @property
    def _values(self) -> Tensor:
        # CPU flash attention refuses D_k != D_v: the whole key is passed as the value and the output is cut
        return self.keys if self.values is None else self.values

    def _values_of(self, out: Tensor) -> Tensor:
        return out[..., : self.value_width]

    def _all_visible(self, step: Step, window: int | None) -> bool:
        if self.start is None or step.start is None:
            return False
        newest_query = step.start + step.positions.shape[1] - 1
        newest_slot = self.start + self.keys.shape[2] - 1
        return newest_slot <= step.start and (window is None or self.start > newest_query - window)

    def _causal_square(self, step: Step, window: int | None) -> bool:
        # SDPA aligns is_causal to the top left, which is right only where queries and slots are the same tokens
        T = step.positions.shape[1]
        same_tokens = self.start is not None and self.start == step.start and self.keys.shape[2] == T
        return same_tokens and T > 1 and (window is None or T <= window)


def attend_part(queries: Tensor, part: Part, step: Step, *, scale: float, window: int | None = None, sinks: int = 0):
    """Attention over one part, with what merging needs: -> (B, H, T, D_v), (B, H, T)."""
    return part.attend_with_lse(queries, step, scale=scale, window=window, sinks=sinks)


def attend(queries: Tensor, view: View, step: Step, *, scale: float, window: int | None = None, sinks: int = 0):
    """Softmax attention of (B, H, T, D_k) queries over the union of a view's parts -> (B, H, T, D_v).

    `scale` is always passed: it is D_k ** -0.5 of the head as trained, which MLA's stored width is not.
    A query that sees nothing (padding) gets zeros.
    """
    if len(view) == 1:
        return view[0].attend(queries, step, scale=scale, window=window, sinks=sinks)
    answers = [attend_part(queries, part, step, scale=scale, window=window, sinks=sinks) for part in view]
    return merge(answers).to(queries.dtype)


def merge(answers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Combine attention over disjoint parts: each output weighs exp(its lse) / sum of exp(lse)."""
    outs, lses = zip(*answers, strict=True)
    lse = torch.stack(lses)  # (parts, B, H, T)
    weights = lse.sub(lse.logsumexp(0).nan_to_num(neginf=0.0)).exp()
    return (weights[..., None] * torch.stack(outs)).sum(0)


def fold(x: Tensor, kv_heads: int) -> Tensor:
    """View the G query heads that share a key head as more rows: (B, H, T, D) -> (B, H_kv, G*T, D)."""
    B, H, T, D = x.shape
    if H % kv_heads:
        raise ValueError(f"{H} query heads cannot share {kv_heads} key/value heads evenly")
    return x.reshape(B, kv_heads, H // kv_heads * T, D)


def unfold(x: Tensor, heads: int) -> Tensor:
    """Undo fold: (B, H_kv, G*T, D) -> (B, H, T, D)."""
    return x.reshape(x.shape[0], heads, -1, x.shape[3])


def _repeat_rows(sees: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return sees.repeat(1, 1, queries.shape[1] // keys.shape[1], 1)  # (B, 1|H_kv, G*T, S), rows in fold's order


def _folded(queries: Tensor, keys: Tensor, values: Tensor, sees: Tensor | None, scale: float) -> Tensor:
    q = fold(queries, keys.shape[1])
    mask = None if sees is None else _repeat_rows(sees, queries, keys)
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    if mask is not None:  # kernels disagree on rows that see nothing: NaN, zeros or a mean
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return unfold(out, queries.shape[1])


def _causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    if queries.is_cuda:
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    # CPU: enable_gqa would copy the keys for every query head. Heads of a group as a batch over keys of stride 0
    # copy nothing, and leave the cores more tasks to share evenly.
    grouped = queries.unflatten(1, (keys.shape[1], -1)).transpose(1, 2)  # (B, G, H_kv, T, D)
    shared = (grouped.shape[1], -1, -1, -1)
    rows = [
        scaled_dot_product_attention(q, k.expand(shared), v.expand(shared), is_causal=True, scale=scale)
        for q, k, v in zip(grouped, keys[:, None], values[:, None], strict=True)
    ]
    return torch.stack(rows).transpose(1, 2).flatten(1, 2)  # (B, H, T, D_v)


@torch.library.custom_op("kvlab::attend_live", mutates_args=())
def attend_live(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    query_positions: Tensor,
    length: Tensor,
    scale: float,
    window: int | None,
    sinks: int,
    consecutive: bool,
) -> Tensor:
    """Attend to the first `length` slots of fixed buffers; opaque to the compiler, so one graph serves all lengths.

    `consecutive`: the live slots hold consecutive positions up to the last query's, in every row.
    """
    if keys.is_cuda:  # reading the length would stall a GPU: it masks the whole buffer instead
        return _folded(queries, keys, values, visible(query_positions, positions, window, sinks), scale).contiguous()
    live = int(length)
    keys, values = keys[:, :, :live], values[:, :, :live]
    if not consecutive or queries.shape[2] > 1 or (window is not None and live > window):
        sees = visible(query_positions, positions[:, :, :live], window, sinks)
        return _folded(queries, keys, values, sees, scale).contiguous()
    if native.can_decode(queries, keys, values, fewest=1):  # who compiles a step does not mind compiling this
        return native.decode(queries, keys, values, scale)[0].to(queries.dtype)
    return _folded(queries, keys, values, None, scale).contiguous()


@attend_live.register_fake
def _(queries, keys, values, positions, query_positions, length, scale, window, sinks, consecutive):
    return queries.new_empty((*queries.shape[:3], values.shape[3]))
