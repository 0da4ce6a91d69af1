"""What one request waits for in the engine, against the same work without one: prefix hits, and decoding.

Contestants take turns, token by token where they can, and what is reported are ratios of medians.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter

from kvlab.cache.base import KVCache
from kvlab.cache.build import build_cache
from kvlab.engine.block_pool import blocks_for
from kvlab.engine.engine import Engine
from kvlab.engine.request import Request
from kvlab.generate import prefill, stream
from kvlab.model.transformer import Transformer

BLOCK_SIZE = 16
CONTIGUOUS = "contiguous cache"
WARM_TOKENS = 3  # the prompt's, and two decode steps


@dataclass(frozen=True)
class PrefixHit:
    """A prompt whose beginning the engine has already: medians over the turns.

    hit_tokens   found in the prefix cache, as the engine counted them
    ttft_s       the engine's time to first token
    missing_s    prefilling just the other tokens, behind a contiguous cache that holds the beginning
    ratio        ttft_s / missing_s
    """

    prompt_tokens: int
    hit_tokens: int
    ttft_s: float
    missing_s: float
    ratio: float


@dataclass(frozen=True)
class Decoding:
    """One request alone: the median time of a token behind `context` others."""

    contestant: str
    context: int
    token_s: float
    vs_contiguous: float


def prefix_hits(
    model: Transformer,
    hits: Sequence[int] = (0, 512, 1024, 1536),
    prompt_tokens: int = 1600,
    *,
    repeats: int = 3,
    seed: int = 0,
) -> list[PrefixHit]:
    """TTFT against hit length, beside computing only the missing tokens; both run those in one chunk.

    Raises ValueError for hits that are not whole blocks or leave no token to compute.
    """
    wrong = [hit for hit in hits if hit % BLOCK_SIZE or not 0 <= hit < prompt_tokens]
    if wrong:
        raise ValueError(f"a hit is whole blocks of {BLOCK_SIZE} tokens, fewer than {prompt_tokens}: got {wrong[0]}")
    random, vocabulary = Random(seed), model.config.vocab_size
    cache = build_cache(model.config)
    head = [random.randrange(vocabulary) for _ in range(prompt_tokens)]
    room = (len(hits) + 1) * blocks_for(prompt_tokens + 1, BLOCK_SIZE)  # a turn's prompts overwrite no needed block
    engine = Engine(model, num_blocks=room, token_budget=prompt_tokens)
    _first_token(engine, "head", head)
    times: dict[int, list[tuple[int, float, float]]] = {hit: [] for hit in hits}
    for turn in range(repeats):
        cache.reset()
        prefill(model, head, cache)
        for hit in sorted(hits, reverse=True):  # rewinding the contiguous cache keeps only what comes next
            fresh = [random.randrange(vocabulary) for _ in range(prompt_tokens - hit)]
            found, ttft_s = _first_token(engine, f"{turn}, {hit}", head[:hit] + fresh)
            times[hit].append((found, ttft_s, _missing(model, cache, hit, fresh)))
    return [_hit(prompt_tokens, turns) for turns in times.values()]


def _first_token(engine: Engine, name: str, prompt: list[int]) -> tuple[int, float]:
    """The tokens of a prompt that were found, and the seconds from arrival to the first token."""
    before = engine.stats.hit_tokens
    request = engine.submit(Request(name, prompt, max_new_tokens=1))
    for _ in engine.run():
        pass
    return engine.stats.hit_tokens - before, request.sequences[0].ttft_s


def _missing(model: Transformer, cache: KVCache, start: int, fresh: list[int]) -> float:
    cache.rewind([start])
    before = perf_counter()
    prefill(model, fresh, cache, chunk=len(fresh), start=start).argmax(-1).item()
    return perf_counter() - before


def _hit(prompt_tokens: int, turns: list[tuple[int, float, float]]) -> PrefixHit:
    found, ttfts, missing = zip(*turns, strict=True)
    ttft_s, missing_s = median(ttfts), median(missing)
    return PrefixHit(prompt_tokens, min(found), ttft_s, missing_s, ttft_s / missing_s)


def decoding(model: Transformer, context: int = 2048, *, steps: int = 32, seed: int = 0) -> list[Decoding]:
    """Decode one request with the contiguous cache, the paged cache and the engine, a token of each in turn."""
    random = Random(seed)
    prompt = [random.randrange(model.config.vocab_size) for _ in range(context)]
    count = WARM_TOKENS + steps
    capacity = context + count
    engine = Engine(model, num_blocks=blocks_for(capacity, BLOCK_SIZE), block_size=BLOCK_SIZE, token_budget=context)
    streams: dict[str, Iterator] = {
        CONTIGUOUS: stream(model, prompt, build_cache(model.config), max_new_tokens=count),
        "paged cache": stream(model, prompt, build_cache(model.config, "paged", capacity), max_new_tokens=count),
        "engine": engine.stream(Request("alone", prompt, max_new_tokens=count)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(count):
        for name, tokens in streams.items():
            before = perf_counter()
            next(tokens)
            seconds[name].append(perf_counter() - before)
    medians = {name: median(found[WARM_TOKENS:]) for name, found in seconds.items()}
    return [Decoding(name, context, token_s, medians[CONTIGUOUS] / token_s) for name, token_s in medians.items()]
