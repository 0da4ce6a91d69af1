"""How long a prefill and a decode step take at least: a roofline of arithmetic and memory. Imports no torch.

    time = max(flops / peak, bytes / bandwidth, overhead)

Per phase, with T new tokens in each of B requests (prefill T = N; decode T = 1, on a cache that holds N):

    flops = 2 (P_active - V d) B T              every weight once per token; the output head (V d) below
          + 2 V d B                             logits of each request's last token only
          + 2 H (D_k + D_v) B pairs per layer   scores and weighted values over causal (query, key) pairs
    bytes = weights read once + cache written + cache read

An untied input embedding is looked up, neither multiplied nor read. In prefill a layer has N(N+1)/2 pairs,
with a window W the sum of min(p, W) over p = 1..N; a decode step has min(N + 1, W), its own token included.
Prefill writes the cache of N tokens; decode reads it and writes one token more. Activations are not
counted.

Mixture of experts: a token computes with its own k experts; a step of B T tokens reads those of the E
routed experts that any token chose, E (1 - (1 - k/E)^(B T)) of them were choices even. What the published
bytes leave beside the other weights in the config's dtype is the experts' size.

MLA: prefill works on expanded heads (D_k = nope + rope, D_v), decode on the stored layout: absorbed when
that is the latent (D_k = R + D_r, D_v = R; the absorbed projections cost what their weights do, already
counted).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvlab import sizing
from kvlab.config import ModelConfig
from kvlab.hardware import Hardware
from kvlab.sizing import SizingError, bytes_ideal, bytes_per_token, check_counts, limit


@dataclass(frozen=True)
class Phase:
    """One phase on one device; `bytes` are weights and cache moved, `intensity` is flops per byte."""

    phase: str
    tokens: int  # new tokens of all requests together
    flops: int
    attention_flops: int  # of `flops`
    bytes: int
    weights_bytes: int  # of `bytes`
    cache_bytes: int  # of `bytes`
    intensity: float
    compute_s: float
    memory_s: float
    overhead_s: float
    time_s: float
    tokens_per_s: float
    bound: str  # "compute", "memory" or "overhead"
    compute_dtype: str

    def as_dict(self) -> dict:
        """The fields, for JSON."""
        return asdict(self)


def phases(
    config: ModelConfig,
    hardware: Hardware,
    prompt: int,
    batch: int = 1,
    dtype: str | None = None,
    overhead_s: float = 0.0,
    mla_layout: str = "latent",
) -> dict[str, Phase]:
    """The prefill of `batch` prompts of `prompt` tokens, and the decode step after it.

    `dtype` is the cache's; weights and arithmetic are the config's. `overhead_s` is what a step costs however
    small it is (launches, Python), measured by the caller. Raises SizingError where parameters are not known.
    """
    check_counts(prompt=prompt, batch=batch)
    if not 0 <= overhead_s < float("inf"):
        raise SizingError(f"overhead must be a finite time of at least 0 s, not {overhead_s!r} s")
    held = bytes_ideal(config, prompt, batch, dtype, mla_layout)
    cache_traffic = {"prefill": held, "decode": held + batch * bytes_per_token(config, dtype, mla_layout)}
    answer = {}
    for name, context, new in (("prefill", prompt, prompt), ("decode", prompt + 1, 1)):
        attention = batch * attention_flops(config, context, new, mla_layout)
        flops = linear_flops(config, batch * new, batch) + attention
        weights = weights_read(config, batch * new)
        answer[name] = _phase(
            name, batch * new, flops, attention, weights, cache_traffic[name], hardware, config, overhead_s
        )
    return answer


def _phase(name, tokens, flops, attention, weights, cache, hardware, config, overhead_s) -> Phase:
    peak, compute_dtype = hardware.peak(config.dtype)
    compute_s, memory_s = flops / peak, (weights + cache) / hardware.bandwidth()
    time_s = max(compute_s, memory_s, overhead_s)
    bound = "overhead" if overhead_s > max(compute_s, memory_s) else "compute" if compute_s > memory_s else "memory"
    return Phase(
        name, tokens, flops, attention, weights + cache, weights, cache, flops / (weights + cache),
        compute_s, memory_s, overhead_s, time_s, tokens / time_s, bound, compute_dtype,
    )  # fmt: skip


def linear_flops(config: ModelConfig, tokens: int, logit_rows: int) -> int:
    """Operations of all products with weights: 2 per weight and token; logits for `logit_rows` tokens."""
    head = _embedding_parameters(config)
    body = _active_parameters(config) - head * (1 if config.tie_word_embeddings else 2)
    return 2 * body * tokens + 2 * head * logit_rows


def attention_flops(config: ModelConfig, context: int, new: int, mla_layout: str = "latent") -> int:
    """Operations of one request's attention, all layers, computing the last `new` of `context` tokens."""
    key_width, value_width = config.head_dim, config.v_head_dim or config.head_dim
    if config.is_mla and mla_layout == "latent" and new == 1:  # absorbed: every head scores the latent itself
        key_width, value_width = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
    total = sum(pairs(context, new, kind, limit(config, kind)) for kind in config.layer_types)
    return 2 * config.num_attention_heads * (key_width + value_width) * total


def pairs(context: int, new: int, layer_type: str = "full_attention", most: int | None = None) -> int:
    """(query, key) pairs that a causal layer scores for the last `new` of `context` tokens."""

    def upto(n: int) -> int:  # sum of min(p, most) for p = 1..n; chunks: of 1, 2, ..., most, 1, 2, ...
        if layer_type == "chunked_attention":
            whole, rest = divmod(n, most)
            return whole * (most * (most + 1) // 2) + rest * (rest + 1) // 2
        short = n if most is None else min(n, most)
        return short * (short + 1) // 2 + (n - short) * short

    return upto(context) - upto(context - new)


def weights_read(config: ModelConfig, tokens: int) -> int:
    """Bytes of weights that a step over `tokens` tokens reads: all but idle experts, untied embedding."""
    stored, parameters = sizing.weights_bytes(config), config.num_parameters
    if parameters is None:
        return stored  # published as bytes only
    unread = 0 if config.tie_word_embeddings else _embedding_parameters(config)
    every, used = config.num_experts or 0, config.num_experts_per_tok or 0
    if config.num_active_parameters is None or every <= used:
        return stored - stored * unread // parameters
    number = sizing.parse(config.dtype).bits / 8
    expert = (parameters - config.num_active_parameters) / (every - used)  # parameters of expert i in all layers
    expert_bytes = (stored - (parameters - every * expert) * number) / every
    idle = every * (1 - used / every) ** tokens  # expected number that no token chose
    return round(stored - idle * expert_bytes - unread * number)


def _active_parameters(config: ModelConfig) -> int:
    known = config.num_active_parameters or config.num_parameters
    if known is None:
        raise SizingError(f"{config.name}: the number of parameters is not known, so its arithmetic cannot be counted")
    if config.num_experts and config.num_active_parameters is None:
        raise SizingError(f"{config.name}: a mixture of experts whose active parameters are not known")
    return known


def _embedding_parameters(config: ModelConfig) -> int:
    if config.vocab_size is None:
        raise SizingError(f"{config.name}: vocab_size is not known, so the output head cannot be counted")
    return config.vocab_size * config.hidden_size
