"""What every cache promises: store, say what to read, account for each byte, and forget on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.attention import EMPTY, DensePart, Step, View

__all__ = ["EMPTY", "Bytes", "CacheFull", "CannotRewind", "DenseCache", "KVCache", "LayerCache", "NoCache", "Step"]


class CacheFull(ValueError):
    """A step does not fit; nothing was stored."""


class CannotRewind(ValueError):
    """What a rewind would need is no longer stored; nothing was changed."""


@dataclass(frozen=True)
class Bytes:
    """Where the memory goes.

    payload   keys and values of live tokens
    metadata  positions, scales, tables
    slack     allocated for keys and values, and not in use
    """

    payload: int = 0
    metadata: int = 0
    slack: int = 0

    @property
    def total(self) -> int:
        return self.payload + self.metadata + self.slack

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.payload + other.payload, self.metadata + other.metadata, self.slack + other.slack)


class LayerCache(ABC):
    """The cache of one layer. `exact` caches change no output; lossy ones declare an oracle in their docstring."""

    exact: bool = True
    compilable: bool = False

    @abstractmethod
    def update(self, keys: Tensor, values: Tensor | None, step: Step) -> View:
        """Store (B, H_kv, T, D_k) keys and (B, H_kv, T, D_v) values (None: keys are values), and say what to read."""

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget every token at position >= lengths[row]; raise CannotRewind where eviction made that impossible."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Make row i what row rows[i] was (beam search, batch selection); the number of rows may change."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @abstractmethod
    def bytes(self) -> Bytes:
        """Count every stored byte."""

    def observe(self, queries: Tensor, view: View, step: Step, *, scale: float, window: int | None) -> None:
        """Called after attention with what was asked; only caches that score tokens care."""

    def check(self, step: Step) -> None:
        """Raise CacheFull if this step does not fit. Called for all layers before any of them changes."""

    def check_rewind(self, lengths: Sequence[int]) -> None:
        """Raise CannotRewind if `rewind(lengths)` would. Called for all layers before any of them changes."""


class NoCache(LayerCache):
    """Store nothing: the view is the fresh keys and values. This is naive decoding's cache."""

    compilable = True

    def update(self, keys, values, step):
        return (DensePart(keys, values, step.positions[:, None], step.start),)

    def rewind(self, lengths):
        pass

    def reorder(self, rows):
        pass

    def reset(self):
        pass

    def bytes(self):
        return Bytes()


class KVCache:
    """One layer cache for each layer of a model, stepped together."""

    def __init__(self, layers: Sequence[LayerCache]):
        if not layers:
            raise ValueError("a KVCache needs at least one layer")
        self.layers = list(layers)

    @property
    def exact(self) -> bool:
        return all(layer.exact for layer in self.layers)

    @property
    def compilable(self) -> bool:
        return all(layer.compilable for layer in self.layers)

    def begin(self, positions: Tensor, rows: Tensor | None = None) -> Step:
        """Plan a step for (B, T) positions; `rows` (B,) marks the rows whose prompt ends in it.

        Raises CacheFull, with every layer as it was, if the step does not fit.
        """
        step = Step.plan(positions, rows)
        for layer in self.layers:
            layer.check(step)
        return step

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget, in all layers or in none, every token at position >= lengths[row]."""
        if any(length < 0 for length in lengths):
            raise ValueError(f"cannot rewind to a negative length: {list(lengths)}")
        for layer in self.layers:
            layer.check_rewind(lengths)
        for layer in self.layers:
            layer.rewind(lengths)

    def reorder(self, rows: Tensor) -> None:
        """Make row i of every layer what row rows[i] was."""
        for layer in self.layers:
            layer.reorder(rows)

    def reset(self) -> None:
        """Forget everything, in all layers."""
        for layer in self.layers:
            layer.reset()

    def bytes(self) -> Bytes:
        """The bytes of all layers."""
        return sum((layer.bytes() for layer in self.layers), Bytes())


class DenseCache(LayerCache):
    """Shared by caches that keep plain tensors: slots in the third dimension, each with its token position."""

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

    def _check_like(self, keys: Tensor, values: Tensor | None) -> None:
        stored, fresh = (self.keys.shape, self.keys.dtype), (keys.shape, keys.dtype)
        same = stored[0][:2] == fresh[0][:2] and stored[0][3] == fresh[0][3] and stored[1] == fresh[1]
        if not same or (values is None) != (self.values is None):
            raise ValueError(
                f"this cache holds {tuple(stored[0])} {stored[1]}, which keys {tuple(fresh[0])} {fresh[1]} do not fit"
            )

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

    def check_rewind(self, lengths):
        self._check_rows(lengths)
        held = [0] * len(lengths) if self.positions is None else self._row_lengths().tolist()
        for row, (wanted, now) in enumerate(zip(lengths, held, strict=True)):
            if not 0 <= wanted <= now:
                raise ValueError(f"cannot rewind row {row} to {wanted} tokens: it holds {now}")

    def reorder(self, rows):
        if self.keys is None:
            return
        self.keys = self.keys.index_select(0, rows)
        self.values = None if self.values is None else self.values.index_select(0, rows)
        self.positions = self.positions.index_select(0, rows)

    def reset(self):
        self.keys = self.values = self.positions = None

    def _live(self) -> Tensor:
        return self.positions >= 0  # (B, 1, C)

    def bytes(self):
        if self.keys is None:
            return Bytes()
        slots = self.positions.numel()
        allocated = sum(stored.numel() * stored.element_size() for stored in self._tensors())
        payload = allocated // slots * int(self._live().sum())
        return Bytes(payload, self.positions.numel() * self.positions.element_size(), allocated - payload)
