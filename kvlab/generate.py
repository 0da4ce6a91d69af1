"""Autoregressive decoding, naive and cached: the same loop, with and without remembering."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from time import perf_counter

import torch
from torch import Tensor

from kvlab.attention import Step
from kvlab.cache.base import KVCache, NoCache
from kvlab.cache.build import build_cache
from kvlab.model.compiled import CompiledStep
from kvlab.model.transformer import Transformer
from kvlab.sampling import Sampler

GREEDY = Sampler()
GOES_ON = torch.tensor([False])  # no prompt ends in a decode step
PREFILL_CHUNK = 2048  # tokens: bounds the scratch memory of a prompt, and the slack of sliding rings


@dataclass(frozen=True)
class Token:
    """One generated token.

    logits   (vocabulary,) the scores it was chosen from
    seconds  since the token before it; for the first one, since the prompt arrived (its TTFT)
    kv_rows  K/V rows that each layer computed for it
    """

    id: int
    logits: Tensor
    seconds: float
    kv_rows: int


@dataclass
class Generation:
    """What `generate` returns: the new tokens, why they ended, and what they cost."""

    token_ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kv_rows: int = 0
    finished: str = "length"  # or "stop"
    warmup_s: float = 0.0
    cache: KVCache | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token: the prefill."""
        return self.seconds[0]

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed after the first token; None where there was only one."""
        decoding = self.seconds[1:]
        return len(decoding) / sum(decoding) if decoding else None


@torch.no_grad()
def last_logits(model: Transformer, token_ids: Sequence[int], start: int, cache: KVCache | None, ends=None) -> Tensor:
    """Run tokens at positions start, start + 1, ... of one row and return the last one's logits (1, vocabulary).

    Some caches must know whether a prompt `ends` here, (1,) bool.
    """
    device = model.model.embed_tokens.weight.device
    ids = torch.tensor([list(token_ids)], device=device)  # (1, T)
    positions = torch.arange(start, start + len(token_ids), dtype=torch.int32, device=device)[None]  # (1, T)
    step = Step.plan(positions) if cache is None else cache.begin(positions, ends)
    return model.unembed(model.hidden_states(ids, step, cache)[:, -1])


def prefill(
    model: Transformer, token_ids: Sequence[int], cache: KVCache, chunk: int = PREFILL_CHUNK, start: int = 0
) -> Tensor:
    """Store a prompt in chunks, cut where the cache decides, and return its last logits (1, vocabulary)."""
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"a prefill chunk is a whole number and holds at least one token, got {chunk!r}")
    if not len(token_ids):
        raise ValueError("there is nothing to prefill: the prompt is empty")
    if stores_nothing(cache) and (start or len(token_ids) > chunk):
        raise ValueError(f"a cache that stores nothing takes a prompt whole, not {chunk} tokens from {start} on: "
                         "give one that stores")  # fmt: skip
    offset = 0
    for size in cache.cut(torch.arange(start, start + len(token_ids))[None], chunk):
        piece, offset = token_ids[offset : offset + size], offset + size
        ends = torch.tensor([offset == len(token_ids)])
        logits = last_logits(model, piece, start + offset - size, cache, ends)
    return logits


def stores_nothing(cache: KVCache) -> bool:
    """Whether this is naive decoding's cache, whose every step must bring all tokens again."""
    return all(type(layer) is NoCache for layer in cache.layers)  # a class made from NoCache may store


def check_request(model: Transformer, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Refuse what cannot be generated: an empty prompt, no new tokens, or more tokens than the model has positions."""
    config = model.config
    if not len(prompt_ids):
        raise ValueError("the prompt is empty: give at least one token")
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens!r}: give a whole number")
    odd = next((token for token in prompt_ids if type(token) is bool or not isinstance(token, Integral)), None)
    if odd is not None:
        raise ValueError(f"a prompt is a list of token ids, which are whole numbers, not {odd!r}: encode text first")
    outside = [token for token in prompt_ids if not 0 <= token < config.vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside {config.name}'s vocabulary of {config.vocab_size}")
    limit, needed = config.max_position_embeddings, len(prompt_ids) + max_new_tokens
    if limit is not None and needed > limit:
        raise ValueError(
            f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones need {needed} positions, but {config.name} "
            f"was trained on {limit}: shorten the prompt or generate fewer tokens"
        )


def stream(
    model: Transformer,
    prompt_ids: Sequence[int],
    cache: KVCache | None = None,
    *,
    max_new_tokens: int = 128,
    sampler: Sampler = GREEDY,
    stop_ids: Collection[int] = (),
    decode: Callable[[int, int], Tensor] | None = None,
) -> Iterator[Token]:
    """Yield tokens as they are chosen, a stop token included. Without a cache, or with one that stores nothing,
    everything is recomputed for each.

    `cache` must be empty. `decode(token_id, position)` replaces the eager decode step (a CompiledStep, say).
    Raises ValueError for requests that cannot be served (see check_request).
    """
    check_request(model, prompt_ids, max_new_tokens)
    cache = None if cache is None or stores_nothing(cache) else cache
    ids, generator = list(prompt_ids), sampler.generator()
    before = perf_counter()
    for count in range(max_new_tokens):
        if cache is None:
            logits, kv_rows = last_logits(model, ids, 0, None), len(ids)
        elif count == 0:
            logits, kv_rows = prefill(model, ids, cache), len(ids)
        elif decode is not None:
            logits, kv_rows = decode(ids[-1], len(ids) - 1), 1
        else:
            logits, kv_rows = last_logits(model, ids[-1:], len(ids) - 1, cache, GOES_ON), 1
        ids.append(int(sampler.pick(logits, generator)))
        now = perf_counter()
        yield Token(ids[-1], logits[0], now - before, kv_rows)
        before = perf_counter()  # what the caller does with a token is not the model's time
        if ids[-1] in stop_ids:
            return


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    cache: KVCache | str | None = "contiguous",
    *,
    max_new_tokens: int = 128,
    sampler: Sampler = GREEDY,
    stop_ids: Collection[int] = (),
    compile: bool = False,
    on_token: Callable[[Token], None] | None = None,
) -> Generation:
    """Generate to the end. `cache` is a KVCache, a name from build_cache, or None for naive decoding.

    `compile=True` decodes with one compiled graph over a static cache; its warm-up is reported in `warmup_s`.
    """
    check_request(model, prompt_ids, max_new_tokens)
    capacity = len(prompt_ids) + max_new_tokens
    if compile:
        cache = "static" if cache == "contiguous" else cache
    if isinstance(cache, str):
        cache = None if cache == "none" else build_cache(model.config, cache, capacity)
    decode = CompiledStep(model, cache) if compile else None
    result = Generation(cache=cache, warmup_s=decode.warm_up() if decode else 0.0)
    for token in stream(
        model, prompt_ids, cache, max_new_tokens=max_new_tokens, sampler=sampler, stop_ids=stop_ids, decode=decode
    ):
        result.token_ids.append(token.id)
        result.seconds.append(token.seconds)
        result.kv_rows += token.kv_rows
        if on_token is not None:
            on_token(token)
    if result.token_ids[-1] in stop_ids:
        result.finished = "stop"
    return result
