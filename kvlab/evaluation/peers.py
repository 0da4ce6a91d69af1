"""How fast is it? kvlab, transformers, llama.cpp and the memory bandwidth, in one run, as ratios.

Absolute times on a shared machine move by a factor of four between runs. So all contestants take turns, and what is
reported is a median of turns and a ratio to what stood beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from kvlab.cache.build import build_cache
from kvlab.generate import check_request, stream
from kvlab.model.compiled import CompiledStep
from kvlab.model.transformer import Transformer
from kvlab.sizing import bytes_ideal

WARM_STEPS = 2  # decode steps that are not counted
REFERENCE = "transformers"

Timed = Callable[[list[int], int], tuple[list[int], list[float]]]  # (prompt, count) -> token ids, seconds of each


@dataclass(frozen=True)
class Row:
    """One contestant at one context: medians over the turns, and how far they spread.

    of_bound       share of the speed that the measured memory bandwidth allows
    vs_reference   speed relative to transformers in the same turns; None without it
    """

    contestant: str
    context: int
    prefill_s: float
    tokens_per_s: float
    slowest_per_s: float
    fastest_per_s: float
    of_bound: float
    vs_reference: float | None = None
    prefill_vs_reference: float | None = None


@dataclass(frozen=True)
class Peers:
    """The answer of `kvlab peers`. `absent` says, for each contestant that could not run, why."""

    rows: tuple[Row, ...]
    absent: dict[str, str]
    bandwidth_bytes_per_s: float
    weights_bytes: int
    warmup_s: float | None


def read_bandwidth(device: torch.device, turns: int = 7) -> float:
    """Bytes per second at which a large tensor is read, the best of a few turns."""
    size = 2**27  # 512 MiB of fp32: no cache holds it
    data = torch.ones(size, device=device)
    best = float("inf")
    for _ in range(turns):
        before = perf_counter()
        data.sum().item()
        best = min(best, perf_counter() - before)
    return data.nbytes / best


def race(
    model: Transformer,
    contexts: Sequence[int] = (64, 512, 2048),
    *,
    repeats: int = 5,
    steps: int = 24,
    compiled: bool = True,
    say: Callable[[str], None] = print,
    tick: Callable[[str], None] = lambda words: None,
) -> Peers:
    """Run every contestant on the same random prompts, in turns. `say` gets words, `tick` one call a turn."""
    check_request(model, [0] * max(contexts), steps)  # before a minute of compiling
    contestants, absent, warmup_s = enter(model, max(contexts) + steps, compiled, say)
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    prompts = {n: torch.randint(model.config.vocab_size, (n,)).tolist() for n in contexts}
    times: dict[tuple[str, int], list[list[float]]] = {}
    bandwidths = []
    for _ in range(repeats):
        bandwidths.append(read_bandwidth(model.model.embed_tokens.weight.device))
        for context in contexts:
            for name, run in contestants.items():
                times.setdefault((name, context), []).append(run(prompts[context], steps)[1])
                tick(f"{name} at {context}")
    bandwidth, dtype = median(bandwidths), model.model.embed_tokens.weight.dtype  # a median, like the speeds
    bounds = {n: bandwidth / (weights_bytes + _cache_bytes(model, n + steps // 2, dtype)) for n in contexts}
    rows = [_row(name, context, turns, bounds[context]) for (name, context), turns in times.items()]
    return Peers(tuple(_compared(rows)), absent, bandwidth, weights_bytes, warmup_s)


def _cache_bytes(model: Transformer, context: int, dtype: torch.dtype) -> int:
    return bytes_ideal(model.config, context, 1, "bf16") * dtype.itemsize // 2


def _row(name: str, context: int, turns: list[list[float]], bound: float) -> Row:
    speeds = [1 / median(turn[1 + WARM_STEPS :]) for turn in turns]  # the first token is the prefill
    speed = median(speeds)
    return Row(name, context, median(turn[0] for turn in turns), speed, min(speeds), max(speeds), speed / bound)


def _compared(rows: list[Row]) -> list[Row]:
    by = {row.context: row for row in rows if row.contestant == REFERENCE}
    out = []
    for row in rows:
        other = by.get(row.context)
        ratios = {} if other is None else {
            "vs_reference": row.tokens_per_s / other.tokens_per_s,
            "prefill_vs_reference": other.prefill_s / row.prefill_s,
        }  # fmt: skip
        out.append(Row(**{**asdict(row), **ratios}))
    return out


def enter(
    model: Transformer, capacity: int, compiled: bool, say: Callable[[str], None]
) -> tuple[dict[str, Timed], dict[str, str], float | None]:
    """Set up every contestant that can run here; say in words which cannot, and why."""
    contestants: dict[str, Timed] = {"kvlab eager": _eager(model)}
    absent, warmup_s = {}, None
    if compiled:
        say("compiling the decode step (about a minute)")
        contestants["kvlab compiled"], warmup_s = _compiled(model, capacity)
    for name, make in (("transformers", _transformers), ("llama.cpp", _llama_cpp)):
        try:
            contestants[name] = make(model, capacity)
        except (ImportError, ValueError) as error:
            absent[name] = f"{error}".splitlines()[0]
            say(f"{name} does not take part: {absent[name]}")
    return contestants, absent, warmup_s


def _eager(model: Transformer) -> Timed:
    def run(prompt, count):
        tokens = list(stream(model, prompt, build_cache(model.config), max_new_tokens=count))
        return [token.id for token in tokens], [token.seconds for token in tokens]

    return run


def _compiled(model: Transformer, capacity: int) -> tuple[Timed, float]:
    cache = build_cache(model.config, "static", capacity)
    step = CompiledStep(model, cache)

    def run(prompt, count):
        cache.reset()
        tokens = list(stream(model, prompt, cache, max_new_tokens=count, decode=step))
        return [token.id for token in tokens], [token.seconds for token in tokens]

    return run, step.warm_up()


def _transformers(model: Transformer, capacity: int) -> Timed:
    from kvlab.interop.transformers import timed_tokens, twin

    other = twin(model)
    return lambda prompt, count: timed_tokens(other, prompt, count)


def _llama_cpp(model: Transformer, capacity: int) -> Timed:
    from kvlab.interop.llama_cpp import LlamaCpp, write_gguf

    if model.model.embed_tokens.weight.dtype != torch.bfloat16:
        raise ValueError("its file stores bf16 weights: run with --dtype bf16 to compare")
    with tempfile.TemporaryDirectory() as folder:  # the file is mapped, so it may be unlinked once it is open
        path = write_gguf(model, Path(folder) / "same-weights.gguf")
        return LlamaCpp(path, capacity + 8, torch.get_num_threads()).timed_tokens
