"""Small random models, and ways to run them that the cache laws compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache as memoize
from functools import partial

import torch

from kvlab.attention import EMPTY, DensePart, Step
from kvlab.cache.base import KVCache, LayerCache
from kvlab.cache.block_store import DTYPES as POOL_DTYPES
from kvlab.cache.budgets import Budget
from kvlab.cache.contiguous import ContiguousCache
from kvlab.cache.dense import DenseCache
from kvlab.cache.evicting import EvictingCache
from kvlab.cache.formats import CodedRows
from kvlab.cache.offloaded import OffloadedCache, OffloadedKVCache
from kvlab.cache.paged import PagedCache
from kvlab.cache.paged_rows import PagedKVCache
from kvlab.cache.quantized import QuantizedCache
from kvlab.cache.scores import METHODS
from kvlab.cache.sliding import SlidingCache
from kvlab.cache.static import StaticCache
from kvlab.codecs import Codec
from kvlab.config import ModelConfig
from kvlab.engine.block_pool import GONE, blocks_for
from kvlab.model.transformer import Transformer
from kvlab.quantization import kivi_split, quantize
from tests.slow_reference import SlowEviction, WindowOracle

CAPACITY, WINDOW, LAYERS = 48, 6, 2
BUDGET = Budget(tokens=12, sinks=2, recent=3)  # of caches that evict; they decide at every fourth position
STRIDE = 4
KV_HEADS = {"mha": 4, "gqa": 2, "mqa": 1, "mla": 4}
LATENT = dict(kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8)
# numbers that one token adds to one layer
STORED = {"mha": 2 * 4 * 8, "gqa": 2 * 2 * 8, "mqa": 2 * 1 * 8, "mla": 12 + 4}
# relative to the largest logit; bf16 keeps 8 bits, and two layers add a few roundings
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Kind:
    """A cache under test: how to make one layer of it, and the window its model declares.

    oracle  makes a layer of what a lossy cache must equal; None where that is no cache at all
    scheme  what kvlab.sizing calls the way it stores
    aligned rows must be equally long and have no padding
    forgets it drops what the window does not see
    whole   makes the cache of its layers
    """

    make: Callable[[], LayerCache]
    window: int | None = None
    oracle: Callable[[], LayerCache] | None = None
    scheme: str | None = None
    aligned: bool = False
    forgets: bool = False
    whole: Callable[[list[LayerCache]], KVCache] = KVCache

    def build(self) -> KVCache:
        return self.whole([self.make() for _ in range(LAYERS)])

    def expected(self, model: Transformer, ids: torch.Tensor, chunks: Sequence[int] | None = None) -> torch.Tensor:
        """The logits that this cache must give: naive ones, or for a lossy cache its oracle's."""
        if self.oracle is None:
            return naive(model, ids)
        return in_chunks(model, ids, KVCache([self.oracle() for _ in range(LAYERS)]), chunks or [ids.shape[1]])


class Dequantized(ContiguousCache):
    """The oracle of a quantising cache: numbers in full precision, and a view of them as if they had been codes."""

    exact = False

    def __init__(self, keys: Codec, values: Codec, residual: int = 0):
        super().__init__()
        self.codecs, self.residual = (keys, values), residual

    def update(self, keys, values, step):
        before = self.length
        part = super().update(keys, values, step)[0]
        counts = kivi_split(before, self.residual) if self.residual else (self.length, self.length)
        keys, values = (
            x if x is None or not n else torch.cat([quantize(x[:, :, :n], codec).dequantize(x.dtype), x[:, :, n:]], 2)
            for x, n, codec in zip((part.keys, part.values), counts, self.codecs, strict=True)
        )
        return (DensePart(keys, values, part.positions),)


def quantized(keys: Codec, values: Codec, residual: int = 0, scheme: str | None = None, window: int | None = None):
    def oracle():
        return Dequantized(keys, values, residual)

    return Kind(lambda: QuantizedCache(keys, values, residual), window, oracle, scheme, aligned=residual > 0)


class Rounded(ContiguousCache):
    """The oracle of a pool of another dtype: numbers as they are after a round trip."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def update(self, keys, values, step):
        return super().update(*(x if x is None else x.to(self.dtype).to(x.dtype) for x in (keys, values)), step)


def paged(block_size: int, kv_dtype: str | None = None, window: int | None = None):
    """Blocks for three rows of CAPACITY tokens."""
    oracle = None
    if kv_dtype in POOL_DTYPES:
        oracle = partial(Rounded, POOL_DTYPES[kv_dtype])
    elif kv_dtype:
        codec = Codec("e4m3") if kv_dtype == "fp8" else Codec()
        oracle = partial(Dequantized, codec, codec)
    layer = partial(PagedCache, blocks_for(3 * CAPACITY, block_size), block_size, kv_dtype=kv_dtype)
    whole = partial(PagedKVCache, windows=[window])
    return Kind(layer, window, oracle, forgets=window is not None, whole=whole)


def evicting(method: str, codec: Codec | None = None, window: int | None = None):
    form = None if codec is None else CodedRows(codec, codec)

    def oracle():
        return SlowEviction(method, BUDGET.tokens, BUDGET.sinks, BUDGET.recent, STRIDE, codec, window=window)

    return Kind(lambda: EvictingCache(method, BUDGET, STRIDE, form=form), window, oracle)


def offloaded(kind: Kind) -> Kind:
    """The same layers, kept elsewhere."""
    return replace(kind, whole=lambda layers: OffloadedKVCache(KVCache(layers)), scheme=None)


def bare(layer: LayerCache) -> LayerCache:
    """What a layer is once nothing is wrapped around it."""
    return layer.inner if isinstance(layer, OffloadedCache) else layer


INT8 = Codec("affine", 8, 8)
CACHES = {
    "contiguous": Kind(ContiguousCache),
    "static": Kind(lambda: StaticCache(CAPACITY)),
    "contiguous, model with a window": Kind(ContiguousCache, WINDOW),
    "static, model with a window": Kind(lambda: StaticCache(CAPACITY), WINDOW),
    "sliding": Kind(lambda: SlidingCache(WINDOW), WINDOW, forgets=True),
    "sliding, window of everything": Kind(lambda: SlidingCache(CAPACITY)),
    "paged": paged(16),
    "paged, blocks of 1": paged(1),
    "paged, blocks of 3": paged(3),
    "paged, blocks of 3, model with a window": paged(3, window=WINDOW),
    "paged, bf16": paged(3, "bf16"),
    "paged, int8": paged(16, "int8"),
    "paged, fp8": paged(3, "fp8"),
    "quantized, residual of everything": Kind(lambda: QuantizedCache.kivi(2, 4, CAPACITY), aligned=True),
    "int8": quantized(INT8, INT8, scheme="int8-g8"),
    "int8, model with a window": quantized(INT8, INT8, scheme="int8-g8", window=WINDOW),
    "int4": quantized(Codec("affine", 4, 4), Codec("affine", 4, 4), scheme="int4-g4"),
    "fp8": quantized(Codec("e4m3"), Codec("e4m3")),
    "int4 keys, symmetric int8 values": quantized(Codec("affine", 4), Codec("symmetric", 8)),
    "kivi4": quantized(Codec("affine", 4, 4, "tokens"), Codec("affine", 4, 4), 8, scheme="kivi4-g4"),
    "kivi2": quantized(Codec("affine", 2, 4, "tokens"), Codec("affine", 2, 4), 4, scheme="kivi2-g4"),
    "window": Kind(lambda: SlidingCache(WINDOW, imposed=True), oracle=lambda: WindowOracle(WINDOW), forgets=True),
    "sinks and window": Kind(
        lambda: SlidingCache(WINDOW, 2, imposed=True), oracle=lambda: WindowOracle(WINDOW, 2), forgets=True
    ),
    **{method: evicting(method) for method in METHODS},
    "snapkv, model with a window": evicting("snapkv", window=15),
    "random, int8": evicting("random", INT8),
}
CACHES |= {
    f"offloaded {name}": offloaded(CACHES[name])
    for name in ("contiguous", "contiguous, model with a window", "sliding", "int4", "fp8", "kivi4")
}
EXACT = {name: kind for name, kind in CACHES.items() if kind.oracle is None}
LOSSY = {name: kind for name, kind in CACHES.items() if kind.oracle is not None}


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
    """Logits (B, T, vocabulary) of ids fed in chunks of the given sizes, cut further where the cache decides."""
    assert sum(chunks) == ids.shape[1]
    positions = positions_of(ids, start) if positions is None else positions
    chunks = [size for at in positions.split(list(chunks), 1) for size in cache.cut(at)]
    logits = []
    for part, at in zip(ids.split(chunks, 1), positions.split(chunks, 1), strict=True):
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
    """Write `value` into every unused slot of every layer; returns how many slots that were."""
    return sum(
        _poison(stored, unused, value) for layer in cache.layers for stored, unused in unused_slots(cache, layer)
    )


def _poison(stored: torch.Tensor, unused: torch.Tensor, value: float) -> int:
    stored.masked_fill_(unused, 126 if stored.dtype == torch.uint8 else value)  # 126: e4m3's largest number
    return int(unused.sum())


def held(cache: KVCache) -> list[torch.Tensor]:
    """For each layer the positions that it holds, EMPTY among them; where the cache needs none, of row behind row."""
    if isinstance(cache, PagedKVCache):
        return [torch.cat([torch.arange(length) for length in cache.lengths])] * len(cache.layers)
    return [bare(layer).positions.clone() for layer in cache.layers]


def bookkeeping(cache: KVCache) -> int:
    """Bytes of what a cache stores beside keys and values: positions or tables, accumulated scores, queries."""
    if isinstance(cache, PagedKVCache):
        return sum(4 * len(group.tables) * max(map(len, group.tables)) for group in cache.groups)
    return sum(x.nbytes for layer in cache.layers for x in _other_tensors(bare(layer)))


def _other_tensors(layer: LayerCache) -> list[torch.Tensor]:
    if isinstance(layer, DenseCache):
        return [layer.positions]
    if isinstance(layer, EvictingCache):
        ring = [] if layer.ring.queries is None else [layer.ring.queries, layer.ring.positions]
        return [*layer.slots.tensors[-2:], *ring]
    return [layer._positions.data]


def unused_slots(cache: KVCache, layer: LayerCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each stored tensor (B, H_kv, C, D) of a layer with its unused slots (B, 1 | H_kv, C, 1)."""
    layer = bare(layer)
    if isinstance(layer, PagedCache):
        used, group = torch.zeros(layer.num_blocks, 1, layer.block_size, 1, dtype=torch.bool), cache.groups[layer.group]
        for table, length in zip(group.tables, cache.lengths, strict=True):
            for p in range(length):
                used[table[p // layer.block_size], 0, p % layer.block_size] |= table[p // layer.block_size] != GONE
        return [(x, ~used) for x in layer.tensors]
    if isinstance(layer, DenseCache):
        return [(x, layer.positions[..., None] < 0) for x in layer._tensors() if layer.positions is not None]
    if isinstance(layer, EvictingCache):
        return [(x, layer.positions[..., None] < 0) for x in layer.slots.tensors[:-2]]
    answer = []
    for store in layer._stores():
        empty, count = layer.positions[..., None] < 0, store.quantized
        parts = [(store.codes, empty[:, :, :count]), (store.tail, empty[:, :, count:])]
        groups = empty[:, :, : count : store.per]  # groups along tokens are full, and never empty
        for buffer, unused in [*parts, (store.scales, groups), (store.minima, groups)]:
            if buffer.data is not None:
                beyond = torch.ones_like(buffer.data[:, :1, buffer.used :, :1], dtype=torch.bool)
                answer.append((buffer.data, torch.cat([unused, beyond], 2)))
    return answer


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = TOLERANCE[expected.dtype] * float(expected.abs().max())
    error = float((actual - expected).abs().max())
    assert error <= bound, f"largest difference {error:.3g}, allowed {bound:.3g}"
