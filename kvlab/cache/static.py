"""A cache of fixed size: nothing is allocated while decoding, so one compiled graph serves every step."""

from __future__ import annotations

import torch

from kvlab.attention import DensePart
from kvlab.cache.base import CacheFull
from kvlab.cache.contiguous import continued
from kvlab.cache.dense import DenseCache


class StaticCache(DenseCache):
    """`capacity` slots for each row, filled from the left. Exact.

    The number of slots in use lives in `cursor`, a device tensor, so that a compiled graph can read and advance it;
    a Python integer would be baked into the graph.
    """

    compilable = True

    def __init__(self, capacity: int):
        super().__init__()
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"a static cache needs a whole capacity of at least one token, got {capacity!r}")
        self.limit = capacity
        self.cursor: torch.Tensor | None = None  # () int64
        self.start: int | None = None

    def check(self, step):
        used, T = self._used(), step.positions.shape[1]
        if used + T > self.limit:
            raise CacheFull(
                f"the static cache has room for {self.limit} tokens and holds {used}: {T} more do not fit; "
                "create it with a larger capacity, or rewind or reset it"
            )
        self.start = continued(self.start, used, step.start)

    def update(self, keys, values, step):
        if torch.compiler.is_compiling():
            return self._update_in_graph(keys, values, step)
        self._check_like(keys, values, step)
        self.check(step)
        if self.keys is None:
            self._allocate(keys, values, self.limit)
            self.cursor = torch.zeros((), dtype=torch.int64, device=keys.device)
        used = self._used() + keys.shape[2]
        new = slice(used - keys.shape[2], used)
        self.keys[:, :, new] = keys
        if values is not None:
            self.values[:, :, new] = values
        self.positions[:, :, new] = step.positions[:, None]
        self.cursor.fill_(used)
        live = None if values is None else self.values[:, :, :used]
        return (DensePart(self.keys[:, :, :used], live, self.positions[:, :, :used], self.start),)

    def _update_in_graph(self, keys, values, step):
        slots = self.cursor + torch.arange(keys.shape[2], device=keys.device)  # (T,)
        self.keys.index_copy_(2, slots, keys)
        if values is not None:
            self.values.index_copy_(2, slots, values)
        self.positions.index_copy_(2, slots, step.positions[:, None].to(torch.int32))
        self.cursor.add_(keys.shape[2])
        return (DensePart(self.keys, self.values, self.positions, self.start, length=self.cursor),)

    def _used(self) -> int:
        return 0 if self.cursor is None else int(self.cursor)

    def rewind(self, lengths):
        self.check_rewind(lengths)
        self._forget(lengths)
        if self.cursor is not None:
            in_use = self._live().any(0).flatten().nonzero()  # columns that some row still needs
            self.cursor.fill_(int(in_use[-1]) + 1 if len(in_use) else 0)
            if len(set(lengths)) > 1:
                self.start = None

    def reset(self):
        """Forget everything and keep the buffers, which a compiled graph holds on to."""
        if self.keys is not None:
            for stored in self._tensors():
                stored.zero_()
            self.positions.fill_(-1)
            self.cursor.zero_()
        self.start = None
