"""How many bytes a KV cache takes: one formula, in exact whole numbers.

    bytes = 2 x layers x KV heads x head_dim x bytes of a number x tokens x batch

The 2 is for keys and values. With MLA they are one vector: (kv_lora_rank + qk_rope_head_dim) replaces
2 x KV heads x head_dim. Layers with a window hold no more than their window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from kvlab.config import LARGEST, ModelConfig
from kvlab.schemes import Scheme, parse

GIB = 2**30
MLA_LAYOUTS = ("latent", "expanded")


class SizingError(ValueError):
    """A length, batch, budget or layout that cannot be sized."""


@dataclass(frozen=True)
class Rows:
    """What one token stores in one layer: `heads` rows of keys, and of values unless read from the keys."""

    heads: int
    key_width: int
    value_width: int | None


def rows(config: ModelConfig, mla_layout: str = "latent") -> Rows:
    """The rows of a layer; with MLA the latent, or (expanded) the full heads that some runtimes keep."""
    if mla_layout not in MLA_LAYOUTS:
        raise SizingError(f"unknown MLA layout {mla_layout!r}: one of {', '.join(MLA_LAYOUTS)}")
    if not config.is_mla:
        return Rows(config.num_key_value_heads, config.head_dim, config.head_dim)
    if mla_layout == "latent":
        return Rows(1, config.kv_lora_rank + config.qk_rope_head_dim, None)
    return Rows(config.num_attention_heads, config.head_dim, config.v_head_dim)


def limit(config: ModelConfig, layer_type: str) -> int | None:
    """Tokens that a layer of this type holds at most (chunked: its chunk); None without a limit."""
    return {"sliding_attention": config.sliding_window, "chunked_attention": config.attention_chunk_size}.get(
        layer_type
    )


def tokens_held(config: ModelConfig, layer_type: str, context: int) -> int:
    """Tokens of a `context` that a layer of this type still needs."""
    most = limit(config, layer_type)
    return context if most is None else min(context, most)


def _layer_bytes(config: ModelConfig, tokens: int, scheme: Scheme, mla_layout: str) -> Fraction:
    """Bytes of one layer of one request holding `tokens`."""
    r = rows(config, mla_layout)
    quantised = r.heads * (
        scheme.key_row_bytes(r.key_width) + (scheme.row_bytes(r.value_width) if r.value_width else 0)
    )
    full = 2 * r.heads * (r.key_width + (r.value_width or 0))  # 16 bits: the residual's rows
    recent = min(tokens, scheme.residual)
    return (tokens - recent) * quantised + recent * full


def _request_bytes(config: ModelConfig, scheme: Scheme, mla_layout: str, tokens_of: Callable[[str], int]) -> int:
    """Bytes of one request whose layers of type t hold `tokens_of(t)`, rounded up once per layer type."""
    kinds = {kind: config.layer_types.count(kind) for kind in dict.fromkeys(config.layer_types)}
    return sum(math.ceil(n * _layer_bytes(config, tokens_of(k), scheme, mla_layout)) for k, n in kinds.items())


def bytes_per_token_by_layer(
    config: ModelConfig, dtype: str | None = None, mla_layout: str = "latent"
) -> tuple[int, ...]:
    """Bytes that one token adds to each layer while the layer still keeps it (rounded up)."""
    one = math.ceil(_layer_bytes(config, 1, _without_residual(_scheme(config, dtype)), mla_layout))
    return (one,) * config.num_hidden_layers


def bytes_per_token(config: ModelConfig, dtype: str | None = None, mla_layout: str = "latent") -> int:
    """Bytes that one token adds while every layer, sliding ones included, still keeps it."""
    return _request_bytes(config, _without_residual(_scheme(config, dtype)), mla_layout, lambda kind: 1)


def bytes_ideal(
    config: ModelConfig, context: int, batch: int = 1, dtype: str | None = None, mla_layout: str = "latent"
) -> int:
    """Bytes that `batch` requests of `context` tokens need, sliding layers holding their window at most."""
    check_counts(context=context, batch=batch)
    return batch * _request_bytes(config, _scheme(config, dtype), mla_layout, lambda k: tokens_held(config, k, context))


def bytes_allocated(
    config: ModelConfig,
    context: int,
    batch: int = 1,
    dtype: str | None = None,
    block_size: int = 1,
    mla_layout: str = "latent",
) -> int:
    """Bytes of an engine that gives *every* layer blocks of `block_size` tokens for the full length."""
    check_counts(context=context, batch=batch, block_size=block_size)
    tokens = -(-context // block_size) * block_size
    return batch * _request_bytes(config, _scheme(config, dtype), mla_layout, lambda k: tokens)


def terms(
    config: ModelConfig, context: int, batch: int = 1, dtype: str | None = None, mla_layout: str = "latent"
) -> list[dict]:
    """The formula's factors for each kind of layer; `bytes` is exact and they add up to `bytes_ideal`."""
    check_counts(context=context, batch=batch)
    scheme, r = _scheme(config, dtype), rows(config, mla_layout)
    answer = []
    for kind in dict.fromkeys(config.layer_types):
        held, n = tokens_held(config, kind, context), config.layer_types.count(kind)
        size = batch * math.ceil(n * _layer_bytes(config, held, scheme, mla_layout))
        width = r.key_width + (r.value_width or 0)
        per_number = Fraction(size, n * r.heads * width * held * batch)
        answer.append({"layer_type": kind, "factors": _factors(config, r, n, per_number, held, batch), "bytes": size})
    return answer


def _factors(config: ModelConfig, r: Rows, layers: int, per_number: Fraction, held: int, batch: int) -> dict:
    first: dict = {"num_hidden_layers": layers}
    if r.value_width is None:
        first["kv_lora_rank + qk_rope_head_dim"] = r.key_width
    elif r.value_width == r.key_width:
        heads = "num_attention_heads" if config.is_mla else "num_key_value_heads"
        first = {"keys_and_values": 2} | first | {heads: r.heads, "head_dim": r.key_width}
    else:
        first |= {"num_attention_heads": r.heads, "head_dim + v_head_dim": r.key_width + r.value_width}
    number = per_number.numerator if per_number.denominator == 1 else float(per_number)
    return first | {"bytes_per_number": number, "tokens": held, "batch": batch}


def layout(config: ModelConfig, mla_layout: str = "latent") -> str:
    """How keys and values are shared: mha, gqa, mqa or mla, and which layers hold a window only."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    name = "mha" if heads == kv_heads else "mqa" if kv_heads == 1 else "gqa"
    if config.is_mla:
        name = "mla" if mla_layout == "latent" else "mla, expanded"
    for kind, word in (("sliding_attention", "sliding window"), ("chunked_attention", "chunk")):
        n, most = config.layer_types.count(kind), limit(config, kind)
        if n:
            name += (
                f", {word} {most}"
                if n == len(config.layer_types)
                else f", {word} {most} in {n} of {len(config.layer_types)} layers"
            )
    return name


def weights_bytes(config: ModelConfig) -> int:
    """Bytes of the published weights; raises SizingError where neither they nor the parameters are known."""
    if config.weights_bytes is not None:
        return config.weights_bytes
    if config.num_parameters is None:
        raise SizingError(f"{config.name}: the number of parameters is not known: say how large the weights are")
    return config.num_parameters * parse(config.dtype).bits // 8


def max_batch(
    config: ModelConfig, budget_bytes: int, context: int, dtype: str | None = None, mla_layout: str = "latent"
) -> int:
    """The most requests of `context` tokens whose caches fit in `budget_bytes`; 0 when not even one does."""
    return max(0, _whole(budget_bytes)) // bytes_ideal(config, context, 1, dtype, mla_layout)


def max_context(
    config: ModelConfig,
    budget_bytes: int,
    batch: int = 1,
    dtype: str | None = None,
    mla_layout: str = "latent",
) -> int | None:
    """The longest context at which `batch` requests fit in `budget_bytes`; 0 when not even one token does.

    None: memory sets no limit, because every layer holds a window only and all windows fit. Beyond LARGEST nothing
    is counted.
    """
    budget_bytes = _whole(budget_bytes)
    check_counts(batch=batch)

    def fits(context: int) -> bool:
        return bytes_ideal(config, context, batch, dtype, mla_layout) <= budget_bytes

    limits = [limit(config, kind) for kind in set(config.layer_types)]
    if None not in limits and fits(max(limits)):
        return None
    low, high = 0, 1  # `low` fits (nothing is stored), `high` is tried next: bytes never shrink with the length
    while high <= LARGEST and fits(high):
        low, high = high, min(2 * high, LARGEST + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _scheme(config: ModelConfig, dtype: str | None) -> Scheme:
    return parse(config.dtype if dtype is None else dtype)


def _without_residual(scheme: Scheme) -> Scheme:
    return Scheme(scheme.name, scheme.bits, scheme.group_size, scheme.group_bytes, scheme.keys_along_tokens)


def _whole(budget_bytes: int | float) -> int:
    """80e9 is a whole number of bytes too; raises SizingError for what is none."""
    if isinstance(budget_bytes, float) and budget_bytes.is_integer():
        return int(budget_bytes)
    if type(budget_bytes) is not int:
        raise SizingError(f"budget_bytes must be a whole number of bytes, not {budget_bytes!r}")
    return budget_bytes


def check_counts(**counts: int) -> None:
    """Raise SizingError naming the first of `counts` that is not a whole number from 1 to LARGEST."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise SizingError(f"{name} must be a whole number of at least 1, not {value!r}")
        if value > LARGEST:
            raise SizingError(f"{name} must be at most {LARGEST:,}, not a number of {len(str(value))} digits")
