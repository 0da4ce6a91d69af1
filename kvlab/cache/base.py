"""What every cache promises: store, say what to read, account for each byte, and forget on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvlab.attention import EMPTY, DensePart, Step, View

__all__ = ["EMPTY", "Bytes", "CacheFull", "CannotRewind", "KVCache", "LayerCache", "NoCache", "Step"]


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
    chunk_invariant: bool = True  # whether outputs are the same however the tokens are cut into steps
    stride: int | None = None  # the layer decides what to keep at multiples of it, which no step may cross
    appends: bool = False  # whether an update writes no slot that was in use, and moves none

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

    def exchange(self, move: Callable[[Tensor, int], Tensor]) -> None:
        """Replace every stored tensor (B, *, slots, *) by move(tensor, slots in use): equal numbers, elsewhere.

        Raises ValueError, at the first call, for a cache whose tensors must stay where they are.
        """
        raise ValueError(f"a {type(self).__name__} cannot be offloaded: its tensors must stay where they are")

    def observe(self, queries: Tensor, view: View, step: Step, *, scale: float, window: int | None) -> None:
        """Called after attention with what was asked; only caches that score tokens care."""

    def check(self, step: Step) -> None:
        """Raise CacheFull if this step does not fit. Called for all layers before any of them changes."""

    def check_positions(self, step: Step) -> None:
        """Raise ValueError if a row would store a position twice. Called for the first layer: all hold the same."""

    def check_rewind(self, lengths: Sequence[int]) -> None:
        """Raise CannotRewind if `rewind(lengths)` would. Called for all layers before any of them changes."""

    def check_reorder(self, rows: Tensor) -> None:
        """Raise ValueError if there are no such rows. Called for all layers before any of them changes."""


class NoCache(LayerCache):
    """Store nothing: the view is the fresh keys and values. This is naive decoding's cache."""

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
        self.layers = list(layers)
        if not self.layers:
            raise ValueError("a KVCache needs at least one layer")
        if len({id(layer) for layer in self.layers}) < len(self.layers):  # [ContiguousCache()] * 30
            raise ValueError("one layer cache stands in several places, which would mix their keys: make one for each")

    @property
    def exact(self) -> bool:
        return all(layer.exact for layer in self.layers)

    @property
    def compilable(self) -> bool:
        return all(layer.compilable for layer in self.layers)

    @property
    def chunk_invariant(self) -> bool:
        return all(layer.chunk_invariant for layer in self.layers)

    def begin(self, positions: Tensor, rows: Tensor | None = None) -> Step:
        """Plan a step for (B, T) positions; `rows` (B,) marks the rows whose prompt ends in it.

        Raises CacheFull, with every layer as it was, if the step does not fit, and ValueError for positions that
        do not go on from what is stored.
        """
        step = Step.plan(positions, rows)
        self.layers[0].check_positions(step)
        for layer in self.layers:
            layer.check(step)
        return step

    def cut(self, positions: Tensor, longest: int | None = None) -> list[int]:
        """How to cut the T columns of (B, T) positions into steps: their sizes, none above `longest`.

        Caches that decide what to keep at fixed positions refuse steps that cross one, in any row.
        Raises ValueError for positions of no tokens, and for steps that could hold none.
        """
        if positions.dim() != 2 or not positions.shape[1]:
            raise ValueError(f"positions must be (B, T) with at least one token, got shape {tuple(positions.shape)}")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise ValueError(f"the longest step holds a whole number of tokens and at least 1, got {longest!r}")
        newest = positions.cummax(1).values  # padding stays where its row stands
        crossed = torch.zeros_like(newest[:, 1:], dtype=torch.bool)
        for stride in {layer.stride for layer in self.layers if layer.stride is not None}:
            periods = newest.div(stride, rounding_mode="floor")
            crossed |= (periods[:, 1:] != periods[:, :-1]) & (newest[:, :-1] >= 0)
        T = positions.shape[1]
        ends = [0, *(crossed.any(0).nonzero().flatten() + 1).tolist(), T]
        return [min(longest or T, b - at) for a, b in pairwise(ends) for at in range(a, b, longest or T)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget, in all layers or in none, every token at position >= lengths[row]."""
        lengths = whole_lengths(lengths)
        if any(length < 0 for length in lengths):
            raise ValueError(f"cannot rewind to a negative length: {lengths}")
        for layer in self.layers:
            layer.check_rewind(lengths)
        for layer in self.layers:
            layer.rewind(lengths)

    def reorder(self, rows: Tensor) -> None:
        """Make row i of every layer what row rows[i] was; ValueError, with nothing changed, without such a row."""
        rows = row_numbers(rows)
        for layer in self.layers:
            layer.check_reorder(rows)
        for layer in self.layers:
            layer.reorder(rows)

    def reset(self) -> None:
        """Forget everything, in all layers."""
        for layer in self.layers:
            layer.reset()

    def bytes(self) -> Bytes:
        """The bytes of all layers."""
        return sum((layer.bytes() for layer in self.layers), Bytes())


def whole_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """Lengths as a list of ints; raises ValueError for anything else: 9.5 tokens would be cut to 9 somewhere."""
    found = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    if not isinstance(found, Sequence) or any(type(length) is not int for length in found):
        raise ValueError(f"lengths must be a list of whole numbers, one for each row, got {found!r}")
    return list(found)


def prompt_ends(step: Step) -> list[bool]:
    """The rows whose prompt ends in a step; raises ValueError where that is not said of each row."""
    ends, B = step.prompt_ends, len(step.positions)
    if ends is None:
        raise ValueError(
            "this cache decides where a prompt ends: say in which rows one does, KVCache.begin(positions, rows)"
        )
    if not isinstance(ends, Tensor) or ends.dtype != torch.bool or ends.shape != (B,):
        found = f"{ends.dtype} {tuple(ends.shape)}" if isinstance(ends, Tensor) else repr(ends)
        raise ValueError(f"which prompts end is a bool tensor with one entry for each of {B} rows, got {found}")
    return ends.tolist()


def row_numbers(rows: Sequence[int] | Tensor) -> Tensor:
    """Row numbers as a tensor (B,); raises ValueError for anything else."""
    rows = torch.as_tensor(rows)
    if rows.dim() != 1 or not rows.numel() or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"rows must be row numbers, one for each new row, got {rows.dtype} {tuple(rows.shape)}")
    return rows


def spans_of(step: Step) -> list[tuple[int, int, int] | None]:
    """Each row's first and last position in a step, and its number of tokens; None for a row of padding."""
    if step.start is not None:
        B, T = step.positions.shape
        return [(step.start, step.start + T - 1, T)] * B
    rows = [[at for at in row if at >= 0] for row in step.positions.tolist()]
    return [(row[0], row[-1], len(row)) if row else None for row in rows]
