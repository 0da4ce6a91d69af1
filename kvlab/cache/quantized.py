"""A cache of small codes: fewer bytes for every token, and outputs that move a little."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from kvlab.attention import DensePart, Part, Step, View
from kvlab.attention_quantized import QuantizedPart
from kvlab.cache.base import EMPTY, Bytes, CannotRewind, LayerCache
from kvlab.cache.contiguous import continued
from kvlab.cache.dense import DenseCache
from kvlab.cache.tensor_store import Buffer, TensorStore, append_both
from kvlab.codecs import Codec, check_codec, check_static
from kvlab.quantization import check_finite


class QuantizedCache(LayerCache):
    """Keys and values as codes, each by its own codec (None: as they came). Lossy.

    Oracle: attention over the dequantised slots and the residual is what the outputs are, to rounding.

    residual 0: every token is quantised when it arrives, and its own step already reads the codes; so neither chunks
    nor padding change an output, and any rewind works.

    residual R (KIVI, Liu et al. 2024, arXiv:2402.02750): the newest tokens stay in full precision. Each update first
    settles what *earlier* ones stored (a rejected draft leaves no trace): of n tokens, keys grouped along tokens are
    quantised up to floor(n / R) R, rows up to n - R. So outputs depend on where chunks end; rows must hold the same
    tokens, without padding; and a rewind into a group of keys is refused. What is quantised stays quantised.

    rope_width  the last columns of the keys, kept apart (MLA's rotated part) and stored by rope_codec, None: as
                they came. With values None (MLA) the keys' codec applies to the values too.
    key_scales, value_scales  static scales, see quantization.calibrate; larger numbers are clamped and counted
    """

    exact = False

    def __init__(
        self,
        keys: Codec | None,
        values: Codec | None,
        residual: int = 0,
        *,
        rope_width: int = 0,
        rope_codec: Codec | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ):
        self.codecs = (keys, values, rope_codec)
        self.static = (key_scales, value_scales, None)
        self.exact = self.codecs == (None, None, None)
        self.residual, self.rope_width = 0 if self.exact else residual, rope_width
        self.chunk_invariant = self.residual == 0
        for codec, scales in zip(self.codecs, self.static, strict=True):
            check_codec(codec, residual, scales)
        if rope_width < 0:
            raise ValueError(f"rope_width counts columns, got {rope_width}")
        self.reset()

    @classmethod
    def kivi(cls, bits: int, group_size: int = 32, residual: int = 128, value_group_size: int | None = None):
        """KIVI: keys in groups of `group_size` tokens per channel, values in groups of channels per token."""
        keys = Codec("affine", bits, group_size, "tokens")
        return cls(keys, Codec("affine", bits, value_group_size or group_size), residual)

    @property
    def appends(self) -> bool:
        """What leaves a residual moves."""
        return not self.residual

    @property
    def quantized(self) -> tuple[int, int]:
        """Tokens whose keys, and whose values, are codes now; `settle` brings KIVI's to quantization.kivi_split."""
        return self.key_stores[0].quantized if self.length else 0, self.value_stores[0].quantized if self.length else 0

    @property
    def clamped(self) -> int:
        """Keys and values that came in beyond the reach of static scales, since the last reset."""
        return sum(store.clamped for store in self._stores())

    @property
    def positions(self) -> Tensor | None:
        """(B, 1, S) int32, EMPTY for slots that hold no token; None while nothing is stored."""
        return self._positions.live[..., 0] if self.length else None

    def update(self, keys, values, step):
        self.check(step)
        self._check_like(keys, values, step)
        if step.start is None:  # whatever stands in padding must not spoil a scale, nor be refused
            padding = (step.positions < 0)[:, None, :, None]
            keys = keys.masked_fill(padding, 0.0)
            values = None if values is None else values.masked_fill(padding, 0.0)
        check_finite(keys, "keys")
        if values is not None:
            check_finite(values, "values")
        self.settle()
        self._store(keys, values)
        self.start = continued(self.start, self.length, step.start)
        self._positions.append(step.positions[:, None, :, None].to(torch.int32))
        self.length += keys.shape[2]
        return self._view()

    def check(self, step):
        """Raise ValueError for a step that a residual cannot take: padded, or out of line."""
        if self.residual and step.start != self.length:
            firsts = step.positions[:, 0].tolist()
            raise ValueError(
                f"a cache with a residual (of {self.residual} tokens) takes rows of the same length without padding: "
                f"every row must go on at position {self.length}, got rows that begin at {firsts}"
            )

    def settle(self) -> None:
        """Quantise now what the next update would quantise before it stores its own tokens."""
        for store in self._stores():
            store.settle()

    def _store(self, keys: Tensor, values: Tensor | None) -> None:
        if not self.length:
            self._make_stores(values is not None)
            self._kinds = _kinds(keys, values)
        if not self.rope_width and values is not None:
            return append_both(self.key_stores[0], self.value_stores[0], (keys, values))
        widths = [keys.shape[3] - self.rope_width, self.rope_width][: len(self.key_stores)]
        for store, block in zip(self.key_stores, keys.split(widths, 3), strict=True):
            store.append(block)
        if values is not None:
            self.value_stores[0].append(values)

    def _make_stores(self, with_values: bool) -> None:
        keys, values, rope = self.codecs
        self.key_stores = [TensorStore(keys, self.residual, self.static[0])]
        if self.rope_width:
            self.key_stores.append(TensorStore(rope, self.residual))
        self.value_stores = [TensorStore(values, self.residual, self.static[1])] if with_values else self.key_stores

    def _stores(self) -> list[TensorStore]:
        return self.key_stores if self.value_stores is self.key_stores else self.key_stores + self.value_stores

    def _check_like(self, keys: Tensor, values: Tensor | None, step: Step) -> None:
        """Raise ValueError for keys and values that fit neither the step, nor what is stored, nor the codecs."""
        B, T = step.positions.shape
        if keys.dim() != 4 or (keys.shape[0], keys.shape[2]) != (B, T):
            raise ValueError(f"positions {(B, T)} need keys ({B}, heads, {T}, width), got {tuple(keys.shape)}")
        if values is not None and (values.shape[:3] != keys.shape[:3] or values.dtype != keys.dtype):
            raise ValueError(f"values {tuple(values.shape)} {values.dtype} do not fit keys {tuple(keys.shape)} "
                             f"{keys.dtype}")  # fmt: skip
        if self.length:
            stored, fresh = (self.positions.shape[0], *self._kinds), (B, *_kinds(keys, values))
            if stored != fresh:
                raise ValueError(f"this cache holds {_words(*stored)}, which {_words(*fresh)} do not fit")
            return
        if self.rope_width >= keys.shape[3]:
            raise ValueError(f"rope_width {self.rope_width} leaves nothing of keys of width {keys.shape[3]}")
        widths = (keys.shape[3] - self.rope_width, 0 if values is None else values.shape[3], self.rope_width)
        for codec, width, scales in zip(self.codecs, widths, self.static, strict=True):
            if codec is not None and width:
                codec.check_width(width)
                check_static(scales, (1, keys.shape[1], 1, width // (codec.group_size or width)))

    def _view(self) -> View:
        """One part for each range of slots over which all stores keep to codes or to full precision.

        Where KIVI's values stop being codes within a group of keys, the range begins with that group.
        """
        stores = self._stores()
        per = math.lcm(*(store.per for store in stores))
        cuts = sorted({0, self.length, *(store.quantized // per * per for store in stores)})
        return tuple(self._part(first, last) for first, last in pairwise(cuts))

    def _part(self, first: int, last: int) -> Part:
        positions = self.positions[:, :, first:last]
        start = None if self.start is None else self.start + first
        keys = tuple(store.slots(first, last) for store in self.key_stores)
        values = None
        if self.value_stores is not self.key_stores:
            values = tuple(store.slots(first, last) for store in self.value_stores)
        if len(keys) == 1 and all(isinstance(block, Tensor) for block in (*keys, *(values or ()))):
            return DensePart(keys[0], None if values is None else values[0], positions, start)
        return QuantizedPart(keys, values, positions, start)

    # rows, positions and lengths are judged as in every cache that keeps positions
    check_positions, check_reorder = DenseCache.check_positions, DenseCache.check_reorder
    _row_lengths, _check_rows = DenseCache._row_lengths, DenseCache._check_rows

    def check_rewind(self, lengths):
        DenseCache.check_rewind(self, lengths)
        if self.residual and len(set(lengths)) > 1:
            raise CannotRewind(f"a cache with a residual keeps its rows equally long, and cannot rewind to {lengths}")
        for store in self._stores():
            if not all(store.can_truncate(length) for length in lengths):
                raise CannotRewind(
                    f"cannot rewind to {lengths[0]} tokens: {store.quantized} are quantised in groups of {store.per} "
                    f"tokens; rewind to {store.quantized} or more, or to a multiple of {store.per}"
                )

    def rewind(self, lengths):
        self.check_rewind(lengths)
        if not self.length:
            return
        limit = torch.tensor(lengths, dtype=torch.int32, device=self.positions.device)[:, None, None]
        gone = self.positions >= limit  # (B, 1, S)
        self.positions.masked_fill_(gone, EMPTY)
        in_use = (self.positions >= 0).any(0).flatten().nonzero()  # columns that some row still needs
        if not len(in_use):
            return self.reset()
        used = int(in_use[-1]) + 1
        for store in self._stores():
            store.erase(gone)
            store.truncate(used)
        self._positions.truncate(used)
        self.start = self.start if len(set(lengths)) == 1 else None
        self.length = used

    def reorder(self, rows):
        self.check_reorder(rows)
        rows = rows.to(self.positions.device) if self.length else rows
        for store in self._stores():
            store.reorder(rows)
        self._positions.reorder(rows)

    def exchange(self, move):
        for store in self._stores():
            store.exchange(move)
        self._positions.exchange(move)

    def reset(self):
        self.key_stores: list[TensorStore] = []
        self.value_stores = self.key_stores
        self._positions = Buffer(fill=EMPTY)  # (B, 1, C, 1) int32
        self.length, self.start = 0, None
        self._kinds: tuple = ()

    def bytes(self):
        if not self.length:
            return Bytes()
        live = self.positions >= 0
        return sum((store.bytes(live) for store in self._stores()), Bytes(metadata=self._positions.nbytes))


def _kinds(keys: Tensor, values: Tensor | None) -> tuple[int, int, int | None, torch.dtype]:
    return keys.shape[1], keys.shape[3], None if values is None else values.shape[3], keys.dtype


def _words(rows: int, heads: int, key_width: int, value_width: int | None, dtype: torch.dtype) -> str:
    values = "no values" if value_width is None else f"values {(rows, heads, value_width)}"
    return f"{dtype} keys {(rows, heads, key_width)} and {values} (rows, heads, width)"
