"""The queries that a cache remembers until it decides: asking them again costs less than keeping their answers."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import EMPTY, Step


class QueryRing:
    """The newest `size` queries of each row; the query at position p lives in slot p % size."""

    def __init__(self, size: int):
        self.size = size
        self.reset()

    def reset(self) -> None:
        self.queries: Tensor | None = None  # (B, H, size + 1, D_k); the last slot takes what is not wanted
        self.positions: Tensor | None = None  # (B, size + 1)

    def add(self, queries: Tensor, step: Step) -> None:
        """Remember (B, H, T, D_k) queries; the last chunk may be short, so earlier ones stay until overwritten."""
        if self.queries is None:
            B, H, _, D_k = queries.shape
            self.queries = queries.new_zeros(B, H, self.size + 1, D_k)
            self.positions = step.positions.new_full((B, self.size + 1), EMPTY)
        if step.start is not None and queries.shape[2] == 1:
            slot = slice(step.start % self.size, step.start % self.size + 1)
            self.queries[:, :, slot], self.positions[:, slot] = queries, step.positions
            return
        at = step.positions
        wanted = (at >= 0) & (at > at.amax(1, keepdim=True) - self.size)
        slots = torch.where(wanted, at % self.size, self.size).long()  # (B, T)
        rows = torch.arange(len(at), device=at.device)[:, None]  # (B, 1)
        self.queries[rows, :, slots] = queries.transpose(1, 2)  # (B, T, H, D_k)
        self.positions[rows, slots] = at.masked_fill(~wanted, EMPTY)

    def since(self, rows: Tensor | slice, first: Tensor) -> tuple[Tensor, Tensor]:
        """Of some rows the queries from a position on, first (R, 1): (R, H, size, D_k), and where, (R, size)."""
        at = self.positions[rows, : self.size]
        return self.queries[rows][:, :, : self.size], at.masked_fill(at < first, EMPTY)

    def forget(self, lengths: Tensor) -> None:
        """Forget queries at positions >= lengths (B, 1)."""
        if self.positions is not None:
            self.positions.masked_fill_(self.positions >= lengths, EMPTY)

    def reorder(self, rows: Tensor) -> None:
        if self.queries is not None:
            self.queries, self.positions = self.queries.index_select(0, rows), self.positions.index_select(0, rows)

    @property
    def nbytes(self) -> int:
        return 0 if self.queries is None else self.queries.nbytes + self.positions.nbytes
