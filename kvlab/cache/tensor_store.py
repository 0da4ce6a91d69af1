"""One stored tensor of a cache: its oldest slots as codes, its newest as they came."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.cache.base import Bytes
from kvlab.cache.contiguous import FIRST_CAPACITY
from kvlab.native import encode as native
from kvlab.quantization import Codec, QuantizedTensor, Stored, count_clamped, encode, kivi_split, wide

QUANTIZE_AT_ONCE = 2048  # slots; arithmetic on codes is in fp32, and no buffer of it should grow with the prompt


class Buffer:
    """A tensor that grows along its third dimension: written in place, doubled when it is full."""

    def __init__(self, first: int = FIRST_CAPACITY, fill: int = 0):
        self.first, self.fill, self.used = first, fill, 0
        self.data: Tensor | None = None

    @property
    def live(self) -> Tensor:
        return self.data[:, :, : self.used]

    def append(self, fresh: Tensor) -> None:
        self.make_room(fresh, fresh.shape[2])
        self.data[:, :, self.used - fresh.shape[2] : self.used] = fresh

    def make_room(self, like: Tensor, count: int) -> None:
        """Count `count` more slots as used, for the caller to fill."""
        needed = self.used + count
        capacity = 0 if self.data is None else self.data.shape[2]
        if needed > capacity:
            self._move(like, 0, max(needed, 2 * capacity, self.first))
        self.used = needed

    def drop_first(self, count: int) -> None:
        """Forget the oldest `count`; a buffer that a prompt made large becomes small again."""
        self.used -= count
        self._move(self.data, count, max(self.first, 2 * self.used))

    def _move(self, like: Tensor, start: int, capacity: int) -> None:
        old = self.data
        self.data = like.new_full((*like.shape[:2], capacity, like.shape[3]), self.fill)  # unused slots are finite
        if self.used:
            self.data[:, :, : self.used] = old[:, :, start : start + self.used]

    def truncate(self, used: int) -> None:
        if self.data is not None:
            self.used = used
            self.data[:, :, used:].fill_(self.fill)

    def reorder(self, rows: Tensor) -> None:
        if self.data is not None:
            self.data = self.data.index_select(0, rows)

    def exchange(self, move: Callable[[Tensor, int], Tensor]) -> None:
        if self.data is not None:
            self.data = move(self.data, self.used)

    @property
    def nbytes(self) -> int:
        return 0 if self.data is None else self.data.nbytes

    def nbytes_of(self, count: int) -> int:
        """Bytes of `count` slots, each of one row."""
        return 0 if self.data is None else self.nbytes // (self.data.shape[0] * self.data.shape[2]) * count


def append_both(keys: TensorStore, values: TensorStore, fresh: tuple[Tensor, Tensor]) -> None:
    """Store keys and values; where one codec serves both, in one go: for a single token, calls are what costs."""
    together = keys.codec == values.codec and fresh[0].shape == fresh[1].shape
    at_once = keys.on_arrival and values.on_arrival and fresh[0].shape[2] <= QUANTIZE_AT_ONCE
    if not (together and at_once) or keys.encodes_in_place(fresh[0]):
        keys.append(fresh[0])
        values.append(fresh[1])
        return
    heads = fresh[0].shape[1]
    coded = encode(torch.cat(fresh, 1), keys.codec)
    keys.append_coded(coded.heads(0, heads))
    values.append_coded(coded.heads(heads, 2 * heads))


class TensorStore:
    """(B, H_kv, S, D): slots 0 .. quantized as codes, the rest, the residual, as they came.

    codec     None keeps everything as it came
    residual  the newest tokens to keep as they came; 0 quantises on arrival. Groups along tokens leave `residual`
              tokens at a time (KIVI's keys), rows one by one (KIVI's values), and only when `settle` is called
    scales    (1, H_kv, 1, D/group_size) static scales; None computes them from what is stored
    """

    def __init__(self, codec: Codec | None, residual: int = 0, scales: Tensor | None = None):
        self.codec, self.residual, self.static = codec, residual, scales
        self.per = codec.group_size if codec is not None and codec.along == "tokens" else 1  # slots that share a scale
        self.codes, self.tail = Buffer(), Buffer()
        self.scales, self.minima = Buffer(-(-FIRST_CAPACITY // self.per)), Buffer(-(-FIRST_CAPACITY // self.per))
        self._clamped: Tensor | None = None

    @property
    def quantized(self) -> int:
        return self.codes.used

    @property
    def length(self) -> int:
        return self.codes.used + self.tail.used

    @property
    def clamped(self) -> int:
        """Numbers that came in beyond the reach of static scales."""
        return 0 if self._clamped is None else int(self._clamped)

    @property
    def on_arrival(self) -> bool:
        """Whether tokens are quantised as they come, by scales of their own."""
        return self.codec is not None and not self.residual and self.static is None

    def append(self, x: Tensor) -> None:
        """Store (B, H_kv, T, D)."""
        if self.codec is None or self.residual:
            self.tail.append(x)
        else:
            self._quantize(x)

    def settle(self) -> None:
        """Quantise what the residual no longer covers. What is quantised is never quantised again."""
        if self.codec is None or not self.residual:
            return
        target = kivi_split(self.length, self.residual)[0 if self.codec.along == "tokens" else 1]
        due = target - self.quantized
        if due > 0:
            self._quantize(self.tail.live[:, :, :due])
            self.tail.drop_first(due)

    def encodes_in_place(self, x: Tensor) -> bool:
        """Whether a kernel writes the codes of (B, H_kv, T, D) where they belong."""
        static = self.codec is None or self.static is not None
        return not static and self.codes.used > 0 and native.can_encode(x, self._buffers_coded(), self.codes.used)

    def _quantize(self, x: Tensor) -> None:
        if self.encodes_in_place(x):
            slot = self.codes.used
            for buffer in (self.codes, self.scales, self.minima):
                buffer.make_room(buffer.data, 1)
            native.encode(x, self._buffers_coded(), slot)
            return
        for piece in x.split(QUANTIZE_AT_ONCE // self.per * self.per or self.per, 2):
            if self.static is not None:
                beyond = count_clamped(piece, self.codec, self.static)
                self._clamped = beyond if self._clamped is None else self._clamped + beyond
            self.append_coded(encode(piece, self.codec, self.static))

    def append_coded(self, coded: QuantizedTensor) -> None:
        """Store slots that are codes already."""
        self.codes.append(coded.codes)
        if self.static is None:
            self.scales.append(coded.scales)
        if coded.minima is not None:
            self.minima.append(coded.minima)

    def slots(self, start: int, stop: int) -> Stored:
        """Slots start .. stop. Across `quantized` they come dequantised, in a copy: keep such ranges short."""
        if stop <= self.quantized:
            coded = self._coded()
            return coded if (start, stop) == (0, self.quantized) else coded.slots(start, stop)
        tail = self.tail.live[:, :, max(start - self.quantized, 0) : stop - self.quantized]
        if start >= self.quantized:
            return tail
        dtype = wide(tail.dtype)  # what attention computes in: no rounding that codes would not have
        return torch.cat([self._coded().slots(start, self.quantized).dequantize(dtype), tail.to(dtype)], 2)

    def _buffers_coded(self) -> QuantizedTensor:
        """The whole capacity, slots in use or not."""
        return QuantizedTensor(self.codes.data, self.scales.data, self.minima.data, self.codec)

    def _coded(self) -> QuantizedTensor:
        codes = self.codes.live
        scales = self.scales.live if self.static is None else self.static.expand(*codes.shape[:3], -1)
        minima = self.minima.live if self.minima.used else None
        return QuantizedTensor(codes, scales, minima, self.codec)

    def can_truncate(self, length: int) -> bool:
        """Whether slots length, length + 1, ... can go: never from within a group of tokens."""
        return length >= self.quantized or length % self.per == 0

    def truncate(self, length: int) -> None:
        kept = min(length, self.quantized)
        self.tail.truncate(length - kept)
        self.codes.truncate(kept)
        self.scales.truncate(kept // self.per)
        self.minima.truncate(kept // self.per if self.minima.used else 0)

    def erase(self, gone: Tensor) -> None:
        """Zero single slots, (B, 1, S) bool, so that they leave no trace; groups along tokens have none to erase."""
        coded, tail = gone[:, :, : self.quantized, None], gone[:, :, self.quantized :, None]
        if self.codec is not None and self.per == 1:
            for buffer in (self.codes, self.scales, self.minima):
                if buffer.used:
                    buffer.live.masked_fill_(coded, 0)
        if self.tail.used:
            self.tail.live.masked_fill_(tail, 0)

    def reorder(self, rows: Tensor) -> None:
        for buffer in self._buffers():
            buffer.reorder(rows)

    def exchange(self, move: Callable[[Tensor, int], Tensor]) -> None:
        """Replace every buffer's tensor by move(tensor, slots in use); static scales stay."""
        for buffer in self._buffers():
            buffer.exchange(move)

    def bytes(self, live: Tensor) -> Bytes:
        """(B, 1, S) bool, the slots that hold tokens. Payload: codes and residual; metadata: scales and minima."""
        coded, tail = int(live[:, :, : self.quantized].sum()), int(live[:, :, self.quantized :].sum())
        payload = self.codes.nbytes_of(coded) + self.tail.nbytes_of(tail)
        scales = self.scales.nbytes_of(coded // self.per) + self.minima.nbytes_of(coded // self.per)
        slack = sum(buffer.nbytes for buffer in self._buffers()) - payload - scales
        return Bytes(payload, scales + (0 if self.static is None else self.static.nbytes), slack)

    def _buffers(self) -> tuple[Buffer, ...]:
        return self.codes, self.scales, self.minima, self.tail
