"""Attention over codes: a query is multiplied with levels, and scales and offsets are applied to what comes out.

With keys x = level x scale + offset,   q · x = scale (q · levels) + offset sum(q).
Along tokens the scale belongs to a channel and is folded into the query instead. Values work the same way: weights
take the scales in. Slots are read some at a time with a running log-sum-exp (the online softmax of FlashAttention,
Dao et al. 2022, arXiv:2205.14135), so that no buffer grows with the cache.

A decode step over many slots is answered by the kernels of kvlab/native instead, in C++ on a CPU and by Triton on a
GPU, where they can be had: the same function in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.attention import DensePart, Step, fold, unfold, visible
from kvlab.native import decode as native
from kvlab.native import triton_decode
from kvlab.quantization import QuantizedTensor, Stored, wide

CHUNK = 2048  # slots read at a time; with fewer, the calls cost more than the reading
TILE = 512  # query tokens answered at a time


@dataclass(frozen=True)
class QuantizedPart:
    """Slots whose keys and values are each codes or plain tensors, in one or more blocks of columns.

    keys         (B, H_kv, S, D_i), block beside block: their widths D_i add up to D_k
    values       the same for D_v, or None where keys are values too (MLA)
    positions    (B, 1 | H_kv, S) integer, EMPTY for unused slots
    start        slot i of every row holds position start + i; None when that is not known
    value_width  columns of the output to keep; None keeps all
    """

    keys: tuple[Stored, ...]
    values: tuple[Stored, ...] | None
    positions: Tensor
    start: int | None = None
    value_width: int | None = None

    def attend(self, queries, step, *, scale, window=None, sinks=0):
        if 2 * queries.shape[2] >= self.positions.shape[2]:
            # a prompt: numbers for its own slots are no more than the keys and values that it just brought, and
            # PyTorch's kernels answer several times sooner
            dense = self.dequantized(queries.dtype)
            return dense.attend(queries, step, scale=scale, window=window, sinks=sinks)
        return self.attend_with_lse(queries, step, scale=scale, window=window, sinks=sinks)[0].to(queries.dtype)

    def dequantized(self, dtype: torch.dtype) -> DensePart:
        """The same slots in full: the oracle of this part."""
        keys = _numbers(self.keys, dtype)
        values = None if self.values is None else _numbers(self.values, dtype)
        return DensePart(keys, values, self.positions, self.start, value_width=self.value_width)

    def attend_with_lse(self, queries, step, *, scale, window=None, sinks=0):
        if triton_decode.can_decode(queries, self):
            return triton_decode.decode(queries, self, step.positions, scale=scale, window=window, sinks=sinks)
        keys, values = self.keys, self.keys if self.values is None else self.values
        whole = len(keys) == len(values) == 1 and self._all_visible(0, self.positions.shape[2], step, window)
        if whole and native.can_decode(queries, keys[0], values[0]):
            out, lse = native.decode(queries, keys[0], values[0], scale)
            return out[..., : self.value_width], lse
        answers = []
        for first in range(0, queries.shape[2], TILE):
            tile = slice(first, first + TILE)
            planned = Step(step.positions[:, tile], None if step.start is None else step.start + first)
            answers.append(self._attend_tile(queries[:, :, tile], planned, scale, window, sinks))
        if len(answers) == 1:
            return answers[0]
        outs, lses = zip(*answers, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def _attend_tile(self, queries, step, scale, window, sinks) -> tuple[Tensor, Tensor]:
        H, kv_heads = queries.shape[1], self.keys[0].shape[1]
        q = fold(queries.to(wide(queries.dtype)) * scale, kv_heads)  # (B, H_kv, G*T, D_k)
        softmax = OnlineSoftmax()
        for first, last in self._chunks(step, window, sinks):
            keys = tuple(_slots(block, first, last) for block in self.keys)
            values = keys if self.values is None else tuple(_slots(block, first, last) for block in self.values)
            scores = _scores(q, keys)  # (B, H_kv, G*T, last - first)
            if not self._all_visible(first, last, step, window):
                sees = visible(step.positions, self.positions[:, :, first:last], window, sinks)
                scores = scores.masked_fill_(~sees.repeat(1, 1, H // kv_heads, 1), -torch.inf)
            softmax.add(scores, values)
        if softmax.total is None:
            width = sum(block.shape[3] for block in self.values or self.keys)
            out, lse = q.new_zeros(*q.shape[:3], width), q.new_full((*q.shape[:3], 1), -torch.inf)
        else:
            out, lse = softmax.answer()
        return unfold(out, H)[..., : self.value_width], unfold(lse, H)[..., 0]

    def _chunks(self, step: Step, window: int | None, sinks: int) -> Iterator[tuple[int, int]]:
        S = self.positions.shape[2]
        size = CHUNK
        for block in (*self.keys, *(self.values or ())):
            if isinstance(block, QuantizedTensor) and block.codec.along == "tokens":
                size = max(size // block.codec.group_size, 1) * block.codec.group_size
        for first in range(0, S, size):
            last = min(first + size, S)
            if self._some_visible(first, last, step, window, sinks):
                yield first, last

    def _some_visible(self, first: int, last: int, step: Step, window: int | None, sinks: int) -> bool:
        if self.start is None or step.start is None:
            return True
        newest_query = step.start + step.positions.shape[1] - 1
        in_window = window is None or self.start + last - 1 > step.start - window or self.start + first < sinks
        return self.start + first <= newest_query and in_window

    def _all_visible(self, first: int, last: int, step: Step, window: int | None) -> bool:
        if self.start is None or step.start is None:
            return False
        newest_query = step.start + step.positions.shape[1] - 1
        causal = self.start + last - 1 <= step.start
        return causal and (window is None or self.start + first > newest_query - window)


class OnlineSoftmax:
    """Softmax over scores that arrive chunk by chunk: the largest score, the mass, and the weighted values so far."""

    def __init__(self):
        self.top = self.total = self.out = None  # (B, H_kv, G*T, 1), the same, (B, H_kv, G*T, D_v)

    def add(self, scores: Tensor, values: tuple[Stored, ...]) -> None:
        """Take in (B, H_kv, G*T, S) scores, which are overwritten, and the values of their slots."""
        # a row that sees nothing so far keeps a finite top, so that exp gives zeros instead of NaN
        top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
        if self.top is not None:
            top = torch.maximum(top, self.top)
        weights = scores.sub_(top).exp_()
        total, out = weights.sum(-1, keepdim=True), _weighted(weights, values)
        if self.top is not None:
            shrink = (self.top - top).exp_()
            total, out = total.addcmul_(self.total, shrink), out.addcmul_(self.out, shrink)
        self.top, self.total, self.out = top, total, out

    def answer(self) -> tuple[Tensor, Tensor]:
        """The attention output and its log-sum-exp; zeros and -inf for rows that saw nothing."""
        return self.out / self.total.masked_fill(self.total == 0, 1.0), self.total.log().add_(self.top)


def _numbers(blocks: tuple[Stored, ...], dtype: torch.dtype) -> Tensor:
    numbers = [block.to(dtype) if isinstance(block, Tensor) else block.dequantize(dtype) for block in blocks]
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers, 3)


def _slots(block: Stored, first: int, last: int) -> Stored:
    return block.slots(first, last) if isinstance(block, QuantizedTensor) else block[:, :, first:last]


def _scores(q: Tensor, keys: tuple[Stored, ...]) -> Tensor:
    blocks = zip(q.split([block.shape[3] for block in keys], -1), keys, strict=True)
    scores = [_block_scores(q_block, block) for q_block, block in blocks]
    return scores[0] if len(scores) == 1 else sum(scores[1:], scores[0])


def _block_scores(q: Tensor, keys: Stored) -> Tensor:
    """(B, H_kv, G*T, D) queries and (B, H_kv, S, D) keys -> (B, H_kv, G*T, S)."""
    if isinstance(keys, Tensor):
        return q @ keys.to(q.dtype).transpose(-1, -2)
    along_tokens = keys.codec.along == "tokens"
    return _scores_along_tokens(q, keys) if along_tokens else _scores_along_channels(q, keys)


def _scores_along_channels(q: Tensor, keys: QuantizedTensor) -> Tensor:
    levels, scales, offsets = keys.terms(q.dtype)  # (B, H_kv, S, D), (B, H_kv, S, n)
    n = scales.shape[3]
    if n == 1:
        scores = (q @ levels.mT).mul_(scales.mT)
        return scores if offsets is None else scores.addcmul_(q.sum(-1, keepdim=True), offsets.mT)
    levels.unflatten(-1, (n, -1)).mul_(scales[..., None])
    scores = q @ levels.mT
    return scores if offsets is None else scores.add_(q.unflatten(-1, (n, -1)).sum(-1) @ offsets.mT)


def _scores_along_tokens(q: Tensor, keys: QuantizedTensor) -> Tensor:
    levels, scales, offsets = keys.terms(q.dtype)  # scales (B, H_kv, n, D), n groups of tokens
    levels = levels.unflatten(2, (-1, keys.codec.group_size))  # (B, H_kv, n, group_size, D)
    folded = q[:, :, None] * scales[:, :, :, None]  # (B, H_kv, n, G*T, D)
    scores = (folded @ levels.mT).transpose(2, 3)  # (B, H_kv, G*T, n, group_size)
    if offsets is not None:
        scores = scores + (q @ offsets.mT)[..., None]
    return scores.flatten(-2)


def _weighted(weights: Tensor, values: tuple[Stored, ...]) -> Tensor:
    outs = [_block_weighted(weights, block) for block in values]
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


def _block_weighted(weights: Tensor, values: Stored) -> Tensor:
    """(B, H_kv, G*T, S) weights and (B, H_kv, S, D) values -> (B, H_kv, G*T, D)."""
    if isinstance(values, Tensor):
        return weights @ values.to(weights.dtype)
    along_tokens = values.codec.along == "tokens"
    return _weighted_along_tokens(weights, values) if along_tokens else _weighted_along_channels(weights, values)


def _weighted_along_channels(weights: Tensor, values: QuantizedTensor) -> Tensor:
    levels, scales, offsets = values.terms(weights.dtype)  # (B, H_kv, S, D), (B, H_kv, S, n)
    n = scales.shape[3]
    if n == 1:
        out = (weights * scales.mT) @ levels
        return out if offsets is None else out.add_((weights * offsets.mT).sum(-1, keepdim=True))
    levels.unflatten(-1, (n, -1)).mul_(scales[..., None])
    out = weights @ levels
    if offsets is not None:
        out.unflatten(-1, (n, -1)).add_((weights @ offsets)[..., None])
    return out


def _weighted_along_tokens(weights: Tensor, values: QuantizedTensor) -> Tensor:
    levels, scales, offsets = values.terms(weights.dtype)  # scales (B, H_kv, n, D)
    levels = levels.unflatten(2, (-1, values.codec.group_size))  # (B, H_kv, n, group_size, D)
    grouped = weights.unflatten(-1, (-1, values.codec.group_size)).transpose(2, 3)  # (B, H_kv, n, G*T, group_size)
    out = ((grouped @ levels) * scales[:, :, :, None]).sum(2)  # (B, H_kv, G*T, D)
    return out if offsets is None else out + grouped.sum(-1).mT @ offsets
