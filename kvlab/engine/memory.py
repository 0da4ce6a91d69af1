"""The blocks of all layers, as plans talk about them: moved out to CPU memory and back, copied, cleared."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvlab.cache.paged import PagedCache
from kvlab.engine.block_pool import GONE, BlockPool
from kvlab.engine.plan import Plan, Row


class Memory:
    """The layers of a model by layer group, and what of their blocks was swapped out."""

    def __init__(self, layers: Sequence[PagedCache], groups: int):
        self.layers = [[layer for layer in layers if layer.group == group] for group in range(groups)]
        self.swapped: dict[tuple[int, int], list[list[Tensor]]] = {}  # (group, CPU block) -> its content, by layer

    def move(self, plan: Plan) -> None:
        """Do what a plan asks for before its rows run: out to CPU memory, back from it, and copies before writes."""
        for group, layers in enumerate(self.layers):
            for block, place in plan.swap_out[group]:
                self.swapped[group, place] = [layer.read_blocks([block]) for layer in layers]
            for place, block in plan.swap_in[group]:
                for layer, content in zip(layers, self.swapped.pop((group, place)), strict=True):
                    layer.write_blocks([block], content)
            for layer in layers:
                layer.copy_blocks(plan.copies[group])

    def clear(self, rows: Sequence[Row]) -> None:
        """Zero what failed rows may have written: what is not a number would outlive them in masked slots."""
        for group, layers in enumerate(self.layers):
            for layer in layers if rows else ():
                first = [row.start // layer.block_size for row in rows]
                written = {block for row, at in zip(rows, first, strict=True) for block in row.tables[group][at:]}
                layer.zero_blocks(sorted(written - {GONE}))

    def forget(self, swap_pools: Sequence[BlockPool]) -> None:
        """Drop the swapped blocks that nobody will ask for again."""
        self.swapped = {at: x for at, x in self.swapped.items() if swap_pools[at[0]].references(at[1])}
