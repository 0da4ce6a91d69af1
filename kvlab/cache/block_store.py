"""One stored tensor of a layer, cut into blocks: as numbers, or as 8-bit codes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs import Codec, recipe
from kvlab.native import paged as native
from kvlab.quantization import QuantizedTensor, Stored, encode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODES = ("fp8", "int8")


def pool_format(kv_dtype: str | None) -> tuple[torch.dtype | None, Codec | None]:
    """What pools of `kv_dtype` hold: numbers of a dtype (None: as they come), or codes.

    Each row, of one token in one head, has scales of its own. So what a token is read as depends on nothing but the
    token: neither on chunks, nor on preemption, nor on who stored it. Raises ValueError for other dtypes.
    """
    if kv_dtype in CODES:
        return None, recipe(kv_dtype, 1).keys
    if kv_dtype is not None and kv_dtype not in DTYPES:
        raise ValueError(
            f"pools of blocks hold {', '.join([*DTYPES, *CODES])}, not {kv_dtype!r}: there a token must be readable "
            "without others, so no scale may be shared between tokens or wait for them"
        )
    return DTYPES.get(kv_dtype), None


class BlockStore:
    """(num_blocks, H_kv, block_size, D), zero at birth: what lies in unused slots is finite."""

    def __init__(self, like: Tensor, num_blocks: int, block_size: int, dtype: torch.dtype | None, codec: Codec | None):
        """`like` is (B, H_kv, T, D): the heads, the width, the device, and the dtype where none is given."""
        heads, width = like.shape[1], like.shape[3]
        if codec is None:
            self.stored: Stored = like.new_zeros(num_blocks, heads, block_size, width, dtype=dtype or like.dtype)
            return
        codec.check_width(width)
        sample = encode(like[:1, :, :1], codec)
        pools = [
            None if x is None else x.new_zeros(num_blocks, heads, block_size, x.shape[3])
            for x in (sample.codes, sample.scales, sample.minima)
        ]
        self.stored = QuantizedTensor(*pools, codec)

    @property
    def tensors(self) -> list[Tensor]:
        """Numbers; or codes, scales and minima."""
        if isinstance(self.stored, Tensor):
            return [self.stored]
        return [x for x in (self.stored.codes, self.stored.scales, self.stored.minima) if x is not None]

    def write(self, fresh: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """Store (N, H_kv, D) tokens, each at an offset (N,) in a block (N,)."""
        if isinstance(self.stored, Tensor):
            parts = [fresh.to(self.stored.dtype)]
        elif native.can_encode(fresh, self.stored):
            return native.encode(fresh, self.stored, blocks, offsets)
        else:
            coded = encode(fresh[:, :, None], self.stored.codec)  # (N, H_kv, 1, ...)
            parts = [x[:, :, 0] for x in (coded.codes, coded.scales, coded.minima) if x is not None]
        for pool, part in zip(self.tensors, parts, strict=True):
            pool[blocks, :, offsets] = part
