"""Blocks on the move: within the pools, out to a store, and back from it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import astuple
from itertools import count

import torch
from torch import Tensor

from kvlab.cache.paged import PagedCache
from kvlab.cache.tiers import TieredStore
from kvlab.engine.block_pool import GONE, BlockPool
from kvlab.engine.plan import Plan, Row
from kvlab.engine.prefix_cache import Key
from kvlab.engine.shelf import Name, Shelf

Content = list[Tensor]  # of one block: for each tensor of a layer (layers, H_kv, block_size, ...)


class BlockMover(Shelf):
    """Does what plans say about blocks, and knows what a store has of them.

    layers_of  the layers of each layer group
    identity   of the model whose keys and values these are, if the blocks of prefixes are to be kept
    """

    def __init__(self, layers_of: Sequence[Sequence[PagedCache]], store: TieredStore, identity: str | None = None):
        self.layers_of, self.store = layers_of, store
        self.keeps_prefixes = identity is not None
        self.identity = f"{identity}, {[[(str(x.dtype), *x.shape[1:]) for x in g[0].tensors] for g in layers_of]}"
        self._loaded: dict[tuple[int, Name], Content] = {}
        self._tickets: dict[tuple[int, int], str] = {}  # (group, CPU block) -> what it is called in the store
        self._numbers, self._own = count(), secrets.token_hex(8)  # tickets of other engines are different ones

    def has(self, group, key):
        return self.keeps_prefixes and self.store.has(self._key(group, key))

    def load(self, group, name):
        if (group, name) not in self._loaded:
            found = self.store.get(self._key(group, name), self._about(group, name))
            if found is None:
                return False
            self._loaded[group, name] = found
        return True

    def move(self, plan: Plan) -> None:
        """Do what a plan asks for before its rows run."""
        for group, layers in enumerate(self.layers_of):
            self._swap_out(group, plan.swap_out[group])
            arriving = plan.swap_in[group] + plan.restore[group]
            self._write(group, [(self._loaded[group, name], block) for name, block in arriving])
            for layer in layers:
                layer.copy_blocks(plan.copies[group])

    def keep(self, filled: Sequence[Sequence[tuple[Key, int]]]) -> None:
        """Put full blocks into the store, for each layer group under their keys; those that it has stay."""
        for group, blocks in enumerate(filled):
            new = {key: block for key, block in blocks if not self.has(group, key)}
            for key, content in zip(new, self._read(group, list(new.values())), strict=True):
                self.store.put(self._key(group, key), self._about(group, key), content)

    def forget(self, swap_pools: Sequence[BlockPool]) -> None:
        """Let go of what was loaded for a step, and of CPU blocks that nobody owns any more."""
        self._loaded.clear()
        for group, place in list(self._tickets):
            if not swap_pools[group].references(place):
                self.store.remove(self._key(group, place))
                del self._tickets[group, place]

    def clear(self, rows: Sequence[Row], restored: Sequence[Sequence[tuple[Name, int]]] = ()) -> None:
        """Zero what failed rows may have written: what is not a number would outlive them in masked slots.

        `restored` are for each layer group the blocks that were being read from the store, if that failed.
        """
        for group, layers in enumerate(self.layers_of):
            size = layers[0].block_size
            written = {block for row in rows for block in row.tables[group][row.start // size :]}
            written |= {block for moves in restored[group : group + 1] for _, block in moves}
            for layer in layers if written else ():
                layer.zero_blocks(sorted(written - {GONE}))

    def _swap_out(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for (_, place), content in zip(pairs, self._read(group, [block for block, _ in pairs]), strict=True):
            self._tickets[group, place] = f"{self._own} {next(self._numbers)}"
            self.store.put(self._key(group, place), self._about(group, place), content)

    def _read(self, group: int, blocks: list[int]) -> list[Content]:
        if not blocks:
            return []
        by_layer = [layer.read_blocks(blocks) for layer in self.layers_of[group]]
        together = [torch.stack(parts, 1) for parts in zip(*by_layer, strict=True)]  # (N, layers, H_kv, block_size, ..)
        return [[x[i].clone() for x in together] for i in range(len(blocks))]

    def _write(self, group: int, moves: Sequence[tuple[Content, int]]) -> None:
        if not moves:
            return
        contents, blocks = zip(*moves, strict=True)
        together = [torch.stack(parts) for parts in zip(*contents, strict=True)]  # (N, layers, H_kv, block_size, ...)
        for index, layer in enumerate(self.layers_of[group]):
            layer.write_blocks(blocks, [x[:, index] for x in together])

    def _key(self, group: int, name: Name) -> str:
        called = name.digest.hex() if isinstance(name, Key) else self._tickets[group, name]
        return hashlib.sha256(json.dumps([self.identity, group, called]).encode()).hexdigest()

    def _about(self, group: int, name: Name) -> dict[str, str]:
        """All that a block's content depends on; hashes may collide, so tokens are named one by one."""
        about = {"identity": self.identity, "group": str(group)}
        if not isinstance(name, Key):
            return about | {"swapped": self._tickets[group, name]}
        whose, tokens = name.spelt()
        return about | {"whose": json.dumps(astuple(whose)), "tokens": json.dumps(tokens)}
