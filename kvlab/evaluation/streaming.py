"""Does a budgeted cache stay flat, and what does deciding cost? `python -m kvlab.evaluation.streaming` records it.

A long stream of random tokens goes through one random layer of a model's shape: one layer, because its time and bytes
do not depend on how many there are; random, because neither do they on what it says, and a stream may then be longer
than the positions that a model was trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from tqdm import tqdm

from kvlab.cache.base import KVCache
from kvlab.cache.build import build_cache
from kvlab.config import ModelConfig, resolve
from kvlab.evaluation.results import Results, record
from kvlab.model.transformer import Transformer
from kvlab.model.zoo import DTYPES

COMMAND = "python -m kvlab.evaluation.streaming"
BASELINE = "contiguous"
BUDGETED = (
    "window-512", "sinks4-508", "sinks4-508-rerotated", "recent-512", "random-512", "keynorm-512", "tova-512",
    "snapkv-512", "h2o-512", "h2o-mean-512", "recent-512+int8",
)  # fmt: skip
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


@dataclass(frozen=True)
class Ends:
    """Decode steps at both ends of a stream, in turns: `early` and `late` tokens after its start."""

    early: int
    late: int
    early_s: float
    late_s: float
    ratio: float
    early_bytes: int
    late_bytes: int


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
    """Decode steps of caches of about `held` tokens, in turns, beside a contiguous cache of that many.

    That one goes back to `held` tokens after each block of steps. The named caches should keep as many; each has
    streamed past its budget before it is timed.
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
            start = reached[name]
            times[name].append([_step(model, cache, position, clock) for position in range(start, start + BLOCK)])
            if name == BASELINE:
                cache.rewind([held])
            else:
                reached[name] += BLOCK
    return _compared(times)


def both_ends(
    model: Transformer,
    name: str,
    early: int = 1024,
    late: int = 20_000,
    blocks: int = 10,
    clock: Callable[[], float] = perf_counter,
) -> Ends:
    """Decode in turns with two caches of one kind, of which one has seen `early` tokens and the other `late`.

    In turns, because a machine's speed moves more in the minutes between than a cache's may.
    """
    if not 1 <= early <= late or blocks < 1:
        raise ValueError(f"a stream's ends lie at 1 <= early <= late, and a block is timed: {early}, {late}, {blocks}")
    caches, times = {}, {early: [], late: []}
    for reached in times:
        caches[reached] = build_cache(model.config, name)
        _fill(model, caches[reached], reached)
    for block in range(blocks):
        for reached, cache in caches.items():
            steps = range(reached + block * BLOCK, reached + (block + 1) * BLOCK)
            times[reached].append(sum(_step(model, cache, position, clock) for position in steps) / BLOCK)
    first, last = (median(times[reached]) for reached in (early, late))
    held = [caches[reached].bytes().total for reached in (early, late)]
    return Ends(early, late, first, last, last / first, *held)


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


def measured(
    model: Transformer, names: Sequence[str] = BUDGETED, tokens: int = 20_000, work: Path | None = None
) -> Iterator[dict]:
    """All rows: overheads of a decode step, both ends in turns, and the stretches of each stream.

    `work` is a file that keeps the rows so far. The contiguous cache streams too: it is what is not flat.
    """
    facts = {"measure": "streaming", "shape": model.config.name, "tokens": tokens, "threads": torch.get_num_threads()}
    kept = Results(work, {**facts, "dtype": str(model.model.embed_tokens.weight.dtype), "names": list(names)})

    def once(id: str, measure: Callable[[], list]) -> list[dict]:
        if id not in kept.rows:
            kept.add({"id": id, "rows": [asdict(row) for row in measure()]})
        return kept.rows[id]["rows"]

    yield from ({"measure": "overhead", **row} for row in once("overheads", lambda: overheads(model, names)))
    for name in (BASELINE, *names):
        rows = once(f"ends-{name}", lambda name=name: [both_ends(model, name, late=tokens)])
        yield from ({"measure": "ends", "name": name, **row} for row in rows)
        stream = lambda name=name: stream_through(model, build_cache(model.config, name), tokens)  # noqa: E731
        yield from ({"measure": "stretch", "name": name, **row} for row in once(f"stream-{name}", stream))


def main(arguments: Sequence[str] | None = None) -> None:
    """Stream through every budgeted cache and record the rows; a run that broke off continues."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("book/results/streaming.json"))
    parser.add_argument("--work", type=Path, default=Path("_build/streaming.jsonl"), help="a file for rows so far")
    parser.add_argument("--shape", default="smollm2-135m", help="the model whose first layer is built, at random")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--tokens", type=int, default=20_000)
    given = parser.parse_args(arguments)
    for folder in (given.work.parent, given.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    model = one_layer(resolve(given.shape), DTYPES[given.dtype])
    rows = list(tqdm(measured(model, tokens=given.tokens, work=given.work), unit="row"))
    threads = torch.get_num_threads()
    record(given.out, COMMAND, rows, shape=given.shape, dtype=given.dtype, threads=threads, tokens=given.tokens)


if __name__ == "__main__":
    main()
