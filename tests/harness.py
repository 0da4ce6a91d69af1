"""Small random models, and ways to run them that the cache laws compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as memoize

import torch

from kvlab.attention import EMPTY, Step
from kvlab.cache.base import DenseCache, KVCache, LayerCache
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.sliding import SlidingCache
from kvlab.cache.static import StaticCache
from kvlab.config import ModelConfig
from kvlab.model.transformer import Transformer

CAPACITY, WINDOW, LAYERS = 48, 6, 2
KV_HEADS = {"mha": 4, "gqa": 2, "mqa": 1, "mla": 4}
LATENT = dict(kv_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8)
# numbers that one token adds to one layer
STORED = {"mha": 2 * 4 * 8, "gqa": 2 * 2 * 8, "mqa": 2 * 1 * 8, "mla": 10 + 4}
# relative to the largest logit; bf16 keeps 8 bits, and two layers add a few roundings
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Kind:
    """A cache under test: how to make one layer of it, and the window its model declares."""

    make: Callable[[], LayerCache]
    window: int | None = None

    def build(self) -> KVCache:
        return KVCache([self.make() for _ in range(LAYERS)])


CACHES = {
    "contiguous": Kind(ContiguousCache),
    "static": Kind(lambda: StaticCache(CAPACITY)),
    "contiguous, model with a window": Kind(ContiguousCache, WINDOW),
    "static, model with a window": Kind(lambda: StaticCache(CAPACITY), WINDOW),
    "sliding": Kind(lambda: SlidingCache(WINDOW), WINDOW),
    "sliding, window of everything": Kind(lambda: SlidingCache(CAPACITY)),
}


def tiny_config(attention: str = "gqa", window: int | None = None) -> ModelConfig:
    return ModelConfig(
        name=f"tiny-{attention}", model_type="llama", vocab_size=61, hidden_size=24, intermediate_size=40,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=KV_HEADS[attention],
        head_dim=10 if attention == "mla" else 8, max_position_embeddings=256, sliding_window=window,
        layer_types=("sliding_attention" if window else "full_attention",) * LAYERS,
        **(LATENT if attention == "mla" else {}),
    )  # fmt: skip


@memoize
def tiny_model(attention: str = "gqa", dtype: torch.dtype = torch.float64, window: int | None = None) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(tiny_config(attention, window)).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 2:  # larger than PyTorch's default, so that attention is far from uniform
            torch.nn.init.normal_(weight, std=0.3)
    return model.to(dtype)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 61, (batch, length), generator=generator)


def positions_of(ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + ids.shape[1]).expand(ids.shape).to(torch.int32)


def naive(model: Transformer, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    positions = positions_of(ids) if positions is None else positions
    return model(ids, Step.plan(positions))


def in_chunks(
    model: Transformer,
    ids: torch.Tensor,
    cache: KVCache,
    chunks: Sequence[int],
    positions: torch.Tensor | None = None,
    start: int = 0,
) -> torch.Tensor:
    """Logits (B, T, vocabulary) of ids fed in chunks of the given sizes."""
    assert sum(chunks) == ids.shape[1]
    positions = positions_of(ids, start) if positions is None else positions
    logits = []
    for part, at in zip(ids.split(list(chunks), 1), positions.split(list(chunks), 1), strict=True):
        logits.append(model(part, cache.begin(at), cache))
    return torch.cat(logits, 1)


def pad(rows: Sequence[torch.Tensor], width: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions (B, width) of rows (T_i,), padded on one side with token 0 at position EMPTY."""
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.full((len(rows), width), EMPTY, dtype=torch.int32)
    for i, row in enumerate(rows):
        span = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, span], positions[i, span] = row, torch.arange(len(row), dtype=torch.int32)
    return ids, positions


def poison(cache: KVCache, value: float = 1e30) -> int:
    """Write `value` into every unused slot of every dense layer; returns how many slots that were."""
    count = 0
    for layer in cache.layers:
        if isinstance(layer, DenseCache) and layer.positions is not None:
            unused = layer.positions < 0  # (B, 1, C)
            count += int(unused.sum())
            for stored in layer._tensors():
                stored.masked_fill_(unused[..., None], value)
    return count


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = TOLERANCE[expected.dtype] * float(expected.abs().max())
    error = float((actual - expected).abs().max())
    assert error <= bound, f"largest difference {error:.3g}, allowed {bound:.3g}"
