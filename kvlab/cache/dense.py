"""What caches that keep plain tensors share: slots, each with its token position, and what a step must fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.attention import EMPTY, Step
from kvlab.cache.base import Bytes, LayerCache, whole_lengths


class DenseCache(LayerCache):
    """Keys and values as plain tensors, slots in the third dimension."""

    def __init__(self):
        self.keys: Tensor | None = None  # (B, H_kv, C, D_k), C slots of capacity
        self.values: Tensor | None = None  # (B, H_kv, C, D_v), or None where keys are values too
        self.positions: Tensor | None = None  # (B, 1, C) int32

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def _allocate(self, keys: Tensor, values: Tensor | None, capacity: int) -> None:
        B, H_kv, _, D_k = keys.shape
        # zeros, not empty: a NaN in a masked slot would still reach the output
        self.keys = keys.new_zeros(B, H_kv, capacity, D_k)
        self.values = None if values is None else values.new_zeros(B, H_kv, capacity, values.shape[3])
        self.positions = torch.full((B, 1, capacity), EMPTY, dtype=torch.int32, device=keys.device)

    def _check_like(self, keys: Tensor, values: Tensor | None, step: Step) -> None:
        check_like((self.keys, self.values), keys, values, step)

    def _tensors(self) -> list[Tensor]:
        return [x for x in (self.keys, self.values) if x is not None]

    def _forget(self, lengths: Sequence[int]) -> None:
        if self.positions is None:
            return
        self._check_rows(lengths)
        limit = torch.tensor(lengths, dtype=torch.int32, device=self.positions.device)[:, None, None]
        gone = self.positions >= limit  # (B, 1, C)
        self.positions.masked_fill_(gone, EMPTY)
        for stored in self._tensors():
            stored.masked_fill_(gone[..., None], 0.0)  # a rejected token leaves no trace

    def _check_rows(self, lengths: Sequence[int]) -> None:
        if self.positions is not None and len(lengths) != self.positions.shape[0]:
            raise ValueError(f"{len(lengths)} lengths were given for {self.positions.shape[0]} rows")

    def _row_lengths(self) -> Tensor:
        return self.positions.amax((1, 2)) + 1  # (B,)

    def check_positions(self, step):
        fresh = step.positions
        held = fresh.new_zeros(fresh.shape[0]) if self.positions is None else self._row_lengths().to(fresh.dtype)
        if len(held) != len(fresh):
            raise ValueError(f"this cache holds {len(held)} rows, positions of {len(fresh)} were given")
        if step.start is not None:  # every row goes on from start, so only the first token can be stored already
            fresh = fresh[:, :1]
        newest = torch.cat((held[:, None] - 1, fresh), 1).cummax(1).values[:, :-1]  # (B, T), before each token
        back = (fresh >= 0) & (fresh <= newest)
        if back.any():
            row, column = back.nonzero()[0].tolist()
            raise ValueError(
                f"row {row} holds tokens up to position {int(newest[row, column])}, so position "
                f"{int(fresh[row, column])} cannot follow: positions grow in every row; rewind or reset first"
            )

    def check_reorder(self, rows):
        if self.positions is not None and not 0 <= int(rows.min()) <= int(rows.max()) < len(self.positions):
            raise ValueError(
                f"cannot reorder to rows {rows.tolist()}: the cache holds rows 0 to {len(self.positions) - 1}"
            )

    def check_rewind(self, lengths):
        whole_lengths(lengths)
        self._check_rows(lengths)
        held = [0] * len(lengths) if self.positions is None else self._row_lengths().tolist()
        for row, (wanted, now) in enumerate(zip(lengths, held, strict=True)):
            if not 0 <= wanted <= now:
                raise ValueError(f"cannot rewind row {row} to {wanted} tokens: it holds {now}")

    def reorder(self, rows):
        if self.keys is None:
            return
        self.check_reorder(rows)
        rows = rows.to(self.keys.device)
        self.keys = self.keys.index_select(0, rows)
        self.values = None if self.values is None else self.values.index_select(0, rows)
        self.positions = self.positions.index_select(0, rows)

    def reset(self):
        self.keys = self.values = self.positions = None

    def _exchange(self, move: Callable[[Tensor, int], Tensor], used: int) -> None:
        if self.keys is None:
            return
        self.keys, self.positions = move(self.keys, used), move(self.positions[..., None], used)[..., 0]
        self.values = None if self.values is None else move(self.values, used)

    def _live(self) -> Tensor:
        return self.positions >= 0  # (B, 1, C)

    def bytes(self):
        if self.keys is None:
            return Bytes()
        slots = self.positions.numel()
        allocated = sum(stored.numel() * stored.element_size() for stored in self._tensors())
        payload = allocated // slots * int(self._live().sum())
        return Bytes(payload, self.positions.numel() * self.positions.element_size(), allocated - payload)


def check_like(stored: tuple[Tensor | None, Tensor | None], keys: Tensor, values: Tensor | None, step: Step) -> None:
    """Raise ValueError for keys and values that fit neither the step, nor each other, nor what is stored."""
    B, T = step.positions.shape
    if keys.dim() != 4 or (keys.shape[0], keys.shape[2]) != (B, T):
        raise ValueError(f"positions {(B, T)} need keys ({B}, heads, {T}, width), got {tuple(keys.shape)}")
    if values is not None and (values.shape[:3] != keys.shape[:3] or values.dtype != keys.dtype):
        raise ValueError(f"values {_words(values)} do not fit keys {_words(keys)}")
    if stored[0] is None:
        return
    for what, held, fresh in zip(("keys", "values"), stored, (keys, values), strict=True):
        if _kind(held) != _kind(fresh):
            raise ValueError(f"this cache holds {_words(held)}, which {what} {_words(fresh)} do not fit")


def _kind(stored: Tensor | None) -> tuple | None:
    return None if stored is None else (*stored.shape[:2], stored.shape[3], stored.dtype)


def _words(stored: Tensor | None) -> str:
    return "None" if stored is None else f"{tuple(stored.shape)} {stored.dtype}"
