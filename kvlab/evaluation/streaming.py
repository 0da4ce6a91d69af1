"""Does a budgeted cache stay flat? A long stream of random tokens through one random layer of a model's shape.

One layer, because a layer's time and bytes do not depend on how many there are; random, because neither do they on
what it says, and a stream may then be longer than the positions that a model was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from kvlab.cache.base import KVCache
from kvlab.cache.build import build_cache
from kvlab.config import ModelConfig
from kvlab.model.transformer import Transformer

BASELINE = "contiguous"
VOCABULARY = 64  # the embedding is looked up, not multiplied with: its height costs nothing
BLOCK = 32  # steps of one contestant before the next has its turn: whole strides, or a decision would go uncounted


@dataclass(frozen=True)
class Stretch:
    """Some steps of a stream, up to position `end`: seconds of one, cache bytes then, and tokens that are held."""

    end: int
    median_s: float
    mean_s: float
    slowest_s: float
    bytes_total: int
    bytes_payload: int


@dataclass(frozen=True)
class Overhead:
    """A decode step of one layer beside that of the contiguous cache which holds as many tokens.

    ratio_median  of a typical step: without decisions, which fall at every stride
    ratio_mean    of all steps, decisions included
    """

    name: str
    median_s: float
    mean_s: float
    ratio_median: float
    ratio_mean: float


def one_layer(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Transformer:
    """The first layer of a model's shape with random weights."""
    torch.manual_seed(seed)
    shape = replace(config, num_hidden_layers=1, layer_types=config.layer_types[:1], vocab_size=VOCABULARY)
    return Transformer(shape).to(dtype).eval().requires_grad_(False)


def stream_through(
    model: Transformer,
    cache: KVCache,
    tokens: int = 20_000,
    stretch: int = 1000,
    clock: Callable[[], float] = perf_counter,
    tick: Callable[[Stretch], None] = lambda stretch: None,
) -> list[Stretch]:
    """Decode `tokens` random tokens one by one, and say for every `stretch` of them what a step took."""
    if tokens < 1 or stretch < 1:
        raise ValueError(f"a stream and a stretch hold at least one token, got {tokens} and {stretch}")
    answer = []
    for start in range(0, tokens, stretch):
        end = min(start + stretch, tokens)
        times = [_step(model, cache, position, clock) for position in range(start, end)]
        now = cache.bytes()
        answer.append(Stretch(end, median(times), sum(times) / len(times), max(times), now.total, now.payload))
        tick(answer[-1])
    return answer


def overheads(
    model: Transformer,
    names: Sequence[str],
    held: int = 512,
    blocks: int = 10,
    clock: Callable[[], float] = perf_counter,
) -> list[Overhead]:
    """Decode steps of caches of about `held` tokens, in turns, beside a contiguous cache of `held` tokens.

    The named caches should keep as many; each has streamed past its budget before it is timed.
    """
    if held < 1 or blocks < 1:
        raise ValueError(f"at least one token is held and one block timed, got {held} and {blocks}")
    caches = {name: build_cache(model.config, name) for name in (BASELINE, *names)}
    reached = {name: held if name == BASELINE else held + 2 * BLOCK for name in caches}
    for name, cache in caches.items():
        _fill(model, cache, reached[name])
    times = {name: [] for name in caches}
    for _ in range(blocks):
        for name, cache in caches.items():
            block = []
            for _ in range(BLOCK):
                block.append(_step(model, cache, reached[name], clock))
                if name == BASELINE:
                    cache.rewind([held])
                else:
                    reached[name] += 1
            times[name].append(block)
    return _compared(times)


def _compared(times: dict[str, list[list[float]]]) -> list[Overhead]:
    typical = {name: median(median(block) for block in blocks) for name, blocks in times.items()}
    whole = {name: median(sum(block) / len(block) for block in blocks) for name, blocks in times.items()}
    return [
        Overhead(name, typical[name], whole[name], typical[name] / typical[BASELINE], whole[name] / whole[BASELINE])
        for name in times
    ]


@torch.no_grad()
def _step(model: Transformer, cache: KVCache, position: int, clock: Callable[[], float]) -> float:
    device = model.model.embed_tokens.weight.device
    token = torch.tensor([[position * 7 % VOCABULARY]], device=device)
    at = torch.tensor([[position]], dtype=torch.int32, device=device)
    started = clock()
    out = model.hidden_states(token, cache.begin(at), cache)
    out[0, 0, 0].item()  # a GPU is waited for
    return clock() - started


@torch.no_grad()
def _fill(model: Transformer, cache: KVCache, tokens: int) -> None:
    device = model.model.embed_tokens.weight.device
    ids = torch.randint(0, VOCABULARY, (1, tokens), device=device)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)[None]
    sizes = cache.cut(positions, 256)
    for some, at in zip(ids.split(sizes, 1), positions.split(sizes, 1), strict=True):
        model.hidden_states(some, cache.begin(at), cache)
