"""Slots of an evicting cache: filled from the left, and closed up again when some of their tokens leave."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import EMPTY, Part
from kvlab.cache.base import Bytes
from kvlab.cache.contiguous import FIRST_CAPACITY
from kvlab.cache.formats import CodedRows, PlainRows
from kvlab.quantization import wide

Packed = tuple[list[Tensor], list[Tensor]]  # payload, and metadata such as scales


class Slots:
    """Tensors (B, H_kv, C + 1, D_i) that share their slots: payload, scales, positions, and scores carried along.

    Row b uses its first used[b] slots, in each head for tokens of its own. The last slot takes what padding would
    write, and is never read. `most` is a number of slots that is never exceeded, None where there is none.
    """

    def __init__(self, form: PlainRows | CodedRows, most: int | None):
        self.form, self.most = form, most
        self.used: list[int] = []
        self.tensors: list[Tensor] = []
        self.payload = 0  # the first so many tensors
        self.like: tuple[Tensor | None, Tensor | None] = (None, None)  # keys and values of no tokens

    @property
    def capacity(self) -> int:
        return self.tensors[0].shape[2] - 1 if self.tensors else 0

    @property
    def top(self) -> int:
        return max(self.used)

    @property
    def positions(self) -> Tensor:
        return self.tensors[-2][..., 0]  # (B, H_kv, C + 1) int32, EMPTY for unused slots

    @property
    def carried(self) -> Tensor:
        return self.tensors[-1][..., 0]  # (B, H_kv, C + 1) fp32 or wider

    def keys(self, rows: Tensor | slice) -> Tensor:
        """Of some rows the keys as numbers, (R, H_kv, S, D_k)."""
        return self.form.keys([x[rows, :, : self.top] for x in self.tensors[:-2]])

    def part(self, start: int | None, bounds: tuple[int, int] | None) -> Part:
        """All slots in use as one part of a view."""
        live = [x[:, :, : self.top] for x in self.tensors]
        return self.form.part(live[:-2], live[-2][..., 0], start, bounds)

    def append(self, keys: Tensor, values: Tensor | None, packed: Packed, positions: Tensor, counts: list[int]) -> None:
        """Store a step: counts[b] tokens of row b at positions (B, T), as keys and values were packed."""
        if not self.tensors:
            self._begin(keys, values, packed)
        self._grow(max(used + count for used, count in zip(self.used, counts, strict=True)))
        fresh = [*packed[0], *packed[1], positions[:, None, :, None].expand(*keys.shape[:3], 1)]
        if len(set(self.used)) == 1 and min(counts) == keys.shape[2]:
            where, turned = (slice(None), slice(None), slice(self.used[0], self.used[0] + counts[0])), False
        else:
            rows = torch.arange(len(positions), device=positions.device)[:, None]  # (B, 1)
            where, turned = (rows, slice(None), self._next(positions)), True
        for stored, new in zip(self.tensors, fresh, strict=False):  # what is carried starts at 0, and is
            stored[where] = (new.transpose(1, 2) if turned else new).to(stored.dtype)  # (B, T, H_kv, D_i)
        self.used = [used + count for used, count in zip(self.used, counts, strict=True)]

    def _begin(self, keys: Tensor, values: Tensor | None, packed: Packed) -> None:
        B, H_kv, _, width = keys.shape
        self.used, self.payload = [0] * B, len(packed[0])
        self.like = keys.new_empty(B, H_kv, 0, width), None if values is None else values[:, :, :0].clone()
        at = torch.empty(B, H_kv, 0, 1, dtype=torch.int32, device=keys.device)
        self.tensors = [x[:, :, :0] for x in (*packed[0], *packed[1], at, at.to(wide(keys.dtype)))]
        self.resize(min(FIRST_CAPACITY, self.most or FIRST_CAPACITY))

    def _next(self, positions: Tensor) -> Tensor:
        """(B, T): each row's next free slots, and the spare one for padding."""
        real = positions >= 0
        used = torch.tensor(self.used, device=real.device)[:, None]
        return torch.where(real, used + real.cumsum(1) - 1, self.capacity)

    def _grow(self, needed: int) -> None:
        if needed > self.capacity:
            twice = 2 * self.capacity
            self.resize(max(needed, twice if self.most is None else min(twice, self.most)))

    def resize(self, capacity: int) -> None:
        """Move to buffers of another capacity."""
        old, top = self.tensors, self.top
        self.tensors = [x.new_zeros(*x.shape[:2], capacity + 1, x.shape[3]) for x in old]
        self.positions.fill_(EMPTY)
        for after, before in zip(self.tensors, old, strict=True):
            after[:, :, :top] = before[:, :, :top]

    def shrink(self, spare: int, patience: int = 1) -> None:
        """Give back all but the slots in use and `spare`, once there are more than `patience` times as many."""
        if self.capacity > patience * (self.top + spare):
            self.resize(self.top + spare)

    def index(self, rows: list[int]) -> Tensor | slice:
        """What picks these rows: a view where it is all of them."""
        return slice(None) if len(rows) == len(self.used) else torch.tensor(rows, device=self.positions.device)

    def keep(self, rows: list[int], kept: Tensor, counts: list[int]) -> None:
        """Of R rows keep the marked slots, (R, H_kv, S) bool, counts[i] in every head, and forget the others.

        Survivors behind the first counts[row] slots move into the holes among these: in steady state new tokens
        overwrite those that leave, where gathering all survivors would copy the whole cache.
        """
        S, index = kept.shape[2], self.index(rows)
        inside = torch.arange(S, device=kept.device) < torch.tensor(counts, device=kept.device)[:, None, None]
        holes, movers = inside & ~kept, kept & ~inside  # (R, H_kv, S), as many of one as of the other
        is_hole, to = holes.byte().topk(S - min(counts), -1)
        source = torch.where(is_hole.bool(), movers.byte().topk(S - min(counts), -1).indices, to)  # else onto itself
        for stored in self.tensors:
            some = stored[index]  # a view of all rows, a copy of some
            source_of, to_of = (x[..., None].expand(-1, -1, -1, stored.shape[3]) for x in (source, to))
            some.scatter_(2, to_of, some.gather(2, source_of))
            some[:, :, :S].masked_fill_(~inside[..., None], EMPTY if stored is self.tensors[-2] else 0)
            stored[index] = some
        for row, count in zip(rows, counts, strict=True):
            self.used[row] = count

    def erase(self, gone: Tensor) -> None:
        """Forget slots, (B, 1, C + 1) bool: each row's last ones."""
        self.used = [used - count for used, count in zip(self.used, gone.sum((1, 2)).tolist(), strict=True)]
        for stored in self.tensors:
            stored.masked_fill_(gone[..., None], EMPTY if stored is self.tensors[-2] else 0)

    def reorder(self, rows: Tensor) -> None:
        self.tensors = [x.index_select(0, rows) for x in self.tensors]
        self.used = [self.used[row] for row in rows.tolist()]
        self.like = tuple(None if x is None else x.new_empty(len(rows), *x.shape[1:]) for x in self.like)

    def bytes(self) -> Bytes:
        """Payload and scales of the slots in use; positions and carried scores of all."""
        if not self.tensors:
            return Bytes()
        share = sum(self.used), len(self.used) * (self.capacity + 1)
        live = [x.nbytes // share[1] * share[0] for x in self.tensors[:-2]]
        slack = sum(x.nbytes for x in self.tensors[:-2]) - sum(live)
        always = sum(x.nbytes for x in self.tensors[-2:])
        return Bytes(sum(live[: self.payload]), sum(live[self.payload :]) + always, slack)
