"""A cache in blocks of equal size, which belong to whoever needs them (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.attention import Step, View
from kvlab.attention_paged import PagedPart
from kvlab.cache.base import Bytes, LayerCache
from kvlab.cache.block_store import BlockStore, pool_format
from kvlab.config import ModelConfig

Pairs = Sequence[tuple[int, int]]  # (from, to) block ids


class PagedCache(LayerCache):
    """The blocks of one layer. Which belong to whom is not known here: each step brings its block tables.

    Exact as long as numbers are stored as they come, `kv_dtype` None. Otherwise the oracle is attention over what is
    read back: every token is rounded or coded by itself when it arrives, and its own step already reads that.

    group       the layer group whose tables name these blocks
    kv_dtype    fp32, bf16, fp16, fp8 or int8
    window, sinks  imposed on a model that declares no window: queries see the first `sinks` tokens and the newest
                `window`. Lossy; the oracle is attention with that mask
    rope_width  the last columns of the keys, which get scales of their own where codes are stored (MLA's rotated part)
    """

    def __init__(
        self, num_blocks: int, block_size: int, group: int = 0, kv_dtype: str | None = None, rope_width: int = 0,
        window: int | None = None, sinks: int = 0,
    ):  # fmt: skip
        if {type(num_blocks), type(block_size)} != {int} or num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool has at least one block of one token, got {num_blocks!r} blocks of {block_size!r}")
        self.num_blocks, self.block_size, self.group = num_blocks, block_size, group
        self.dtype, self.codec = pool_format(kv_dtype)
        self.rope_width = rope_width if self.codec else 0
        self.window, self.sinks = window, sinks
        self.exact = kv_dtype is None and window is None
        self.reset()

    def reset(self):
        """Give the memory back; the next step allocates it again."""
        self.key_stores: list[BlockStore] = []  # beside each other in columns
        self.value_stores: list[BlockStore] | None = None  # None where keys are values too
        self._kinds: tuple = ()

    def update(self, keys, values, step):
        self._check(keys, values, step)
        if not self.key_stores:
            self.allocate(keys, values)
        rows = step.rows
        where = rows.places[self.group]
        for store, columns in zip(self.key_stores, self._columns(rows.flatten(keys)), strict=True):
            store.write(columns, *where)
        for store in self.value_stores or ():
            store.write(rows.flatten(values), *where)
        return self._view

    def allocate(self, keys: Tensor, values: Tensor | None) -> None:
        """Take the memory now, for keys (B, H_kv, T, D_k) and values (B, H_kv, T, D_v) like these; none is stored."""
        format = self.num_blocks, self.block_size, self.dtype, self.codec
        self.key_stores = [BlockStore(columns, *format) for columns in self._columns(keys)]
        self.value_stores = None if values is None else [BlockStore(values, *format)]
        self._kinds = _kinds(keys, values)
        stored = None if values is None else tuple(store.stored for store in self.value_stores)
        keys = tuple(store.stored for store in self.key_stores)
        self._view: View = (PagedPart(keys, stored, self.group, window=self.window, sinks=self.sinks),)

    def _columns(self, keys: Tensor) -> list[Tensor]:
        return list(keys.split([keys.shape[-1] - self.rope_width, self.rope_width], -1)) if self.rope_width else [keys]

    def _check(self, keys: Tensor, values: Tensor | None, step: Step) -> None:
        B, T = step.positions.shape
        if step.rows is None or step.rows.block_size != self.block_size:
            got = "none" if step.rows is None else f"blocks of {step.rows.block_size}"
            raise ValueError(
                f"a layer with blocks of {self.block_size} tokens needs steps with block tables, got {got}: plan them "
                "with PagedKVCache.begin or Rows.plan"
            )
        if keys.dim() != 4 or (keys.shape[0], keys.shape[2]) != (B, T):
            raise ValueError(f"positions {(B, T)} need keys ({B}, heads, {T}, width), got {tuple(keys.shape)}")
        if values is not None and values.shape[:3] != keys.shape[:3]:
            raise ValueError(f"values {tuple(values.shape)} do not fit keys {tuple(keys.shape)}")
        if self._kinds and self._kinds != _kinds(keys, values):
            raise ValueError(
                f"this cache holds {_words(*self._kinds)}, which {_words(*_kinds(keys, values))} do not fit"
            )

    @property
    def tensors(self) -> list[Tensor]:
        """Everything stored, (num_blocks, H_kv, block_size, ...) each: numbers or codes, scales, minima."""
        return [x for store in (*self.key_stores, *(self.value_stores or ())) for x in store.tensors]

    def copy_blocks(self, pairs: Pairs) -> None:
        """Copy whole blocks, (from, to) each: what a write to a shared block begins with."""
        if pairs:
            sources, targets = (self._index(blocks) for blocks in zip(*pairs, strict=True))
            for x in self.tensors:
                x[targets] = x[sources]

    def read_blocks(self, blocks: Sequence[int]) -> list[Tensor]:
        """Copies of whole blocks in CPU memory, bit by bit: for each of `tensors` (len(blocks), ...)."""
        return [x[self._index(blocks)].cpu() for x in self.tensors]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Undo read_blocks, into the same blocks or others."""
        for x, content in zip(self.tensors, contents, strict=True):
            x[self._index(blocks)] = content.to(x.device)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Clear blocks whose content failed: a NaN would outlive it in masked slots."""
        for x in self.tensors:
            x[self._index(blocks)] = 0

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Clear single tokens."""
        index = self._index(slots)
        for x in self.tensors:
            x[index // self.block_size, :, index % self.block_size] = 0

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.tensors[0].device if self.tensors else None)

    def bytes(self):
        """All is slack: which slots are in use, block tables say. See bytes_of."""
        return self.bytes_of(0)

    def bytes_of(self, slots: int) -> Bytes:
        """Where the bytes go while `slots` slots are in use, each counted once however many tables name it."""
        stores = (*self.key_stores, *(self.value_stores or ()))
        everywhere = self.num_blocks * self.block_size
        payload = sum(store.tensors[0].nbytes for store in stores) // everywhere * slots
        scales = sum(x.nbytes for store in stores for x in store.tensors[1:]) // everywhere * slots
        return Bytes(payload, scales, sum(x.nbytes for x in self.tensors) - payload - scales)

    def rewind(self, lengths):
        raise ValueError(_NO_ROWS)

    def reorder(self, rows):
        raise ValueError(_NO_ROWS)


_NO_ROWS = "one layer's blocks know no rows: rewind or reorder the PagedKVCache, which has the block tables"


def layer_groups(config: ModelConfig, window: int | None = None, sinks: int = 0) -> tuple[list[int | None], list[int]]:
    """The windows of a model's layer groups, and for each layer the group it is in.

    `window` and `sinks` are imposed on all. Raises ValueError where they cannot be.
    """
    of_layers = [config.window(layer) for layer in range(config.num_hidden_layers)]
    windows = list(dict.fromkeys(of_layers))
    if window is None and type(sinks) is int and sinks == 0:
        return windows, [windows.index(window) for window in of_layers]
    if {type(window), type(sinks)} != {int} or window < 1 or sinks < 0:
        got = f"got {window!r} and {sinks!r}"
        raise ValueError(f"an imposed window has at least one token, and sinks from 0 on, in whole numbers: {got}")
    if windows != [None]:
        raise ValueError(f"the model has windows of its own, {windows}: none can be imposed")
    return [window], [0] * len(of_layers)


def paged_layers(
    config: ModelConfig, num_blocks: int, block_size: int, kv_dtype: str | None = None,
    window: int | None = None, sinks: int = 0,
) -> list[PagedCache]:  # fmt: skip
    """A PagedCache of `num_blocks` blocks for each layer of a model; `window` and `sinks` are imposed on all."""
    rope_width = config.qk_rope_head_dim if config.is_mla else 0
    options = num_blocks, block_size
    return [PagedCache(*options, group, kv_dtype, rope_width, window, sinks) for group in layer_groups(config)[1]]


def _kinds(keys: Tensor, values: Tensor | None) -> tuple[int, int, int | None, torch.dtype]:
    return keys.shape[1], keys.shape[3], None if values is None else values.shape[3], keys.dtype


def _words(heads: int, key_width: int, value_width: int | None, dtype: torch.dtype) -> str:
    values = "no values" if value_width is None else f"values of width {value_width}"
    return f"{heads} heads with {dtype} keys of width {key_width} and {values}"
