"""How much does continuous batching serve? The engine against one request after another, and against transformers.

All get the same weights and requests, which arrive together, and take turns. Only tokens that were asked for count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from time import process_time

import torch

from kvlab.engine.stats import Stats
from kvlab.evaluation.engine_latency import decoding, prefix_hits
from kvlab.evaluation.results import record
from kvlab.evaluation.serving import ENGINE, Job, Serve, Settings, draw_jobs, enough, enter, mean_waste
from kvlab.generate import check_request
from kvlab.model import zoo
from kvlab.model.transformer import Transformer

PERCENTS = (50, 90, 99)
MIXES = (((16, 200), (8, 64)), ((100, 500), (50, 150)))  # prompt and new tokens, uniform between these bounds


@dataclass(frozen=True)
class Row:
    """One contestant: medians over the turns, and how far they spread.

    tokens_per_s      tokens that were asked for, per second
    cpu_tokens_per_s  the same per second of processor time of all threads, which no other program's load can take
    cache_bytes       the most that was allocated for keys and values
    engine_ratio      the engine's speed relative to this one's, in the same turns
    engine_cpu_ratio  the same of cpu_tokens_per_s
    """

    contestant: str
    tokens_per_s: float
    slowest_per_s: float
    fastest_per_s: float
    cpu_tokens_per_s: float
    cache_bytes: int
    engine_ratio: float
    engine_cpu_ratio: float


@dataclass(frozen=True)
class Service:
    """What the engine's requests saw in its median turn, and what it cost.

    percentiles       TTFT, TPOT and queue time in seconds, by percent
    scheduling_share  the part of the steps' time that the scheduler took
    waste             the part of used slots that held no token, over all steps
    """

    percentiles: dict[str, dict[float, float | None]]
    steps: int
    scheduling_share: float
    preemptions: int
    recomputed_tokens: int
    waste: float


@dataclass(frozen=True)
class EnginePeers:
    """The answer. `absent` says, for each contestant that could not run, why."""

    rows: tuple[Row, ...]
    absent: dict[str, str]
    service: Service
    requests: int
    prompt_tokens: int
    useful_tokens: int


@dataclass(frozen=True)
class Waste:
    """The part of used slots that held no token while jobs of these lengths were served; `mean_tokens` are a job's."""

    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    mean_tokens: float
    waste: float


@dataclass(frozen=True)
class Turn:
    """One contestant once through all jobs; `stats` is the engine's own count."""

    seconds: float
    cpu_s: float
    cache_bytes: int
    stats: Stats | None


def race(
    model: Transformer,
    jobs: Sequence[Job],
    settings: Settings | None = None,
    *,
    repeats: int = 3,
    say: Callable[[str], None] = print,
) -> EnginePeers:
    """Let every contestant serve all jobs, in turns. Raises ValueError for jobs that cannot be served."""
    for job in jobs:
        check_request(model, job.prompt_ids, job.new_tokens)
    settings = settings or enough(jobs)
    contestants, absent = enter(model, jobs, settings, say)
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number in range(repeats):
        for name, serve in contestants.items():
            turns[name].append(_turn(name, serve, jobs))
            say(f"turn {number + 1} of {repeats}: {name} took {turns[name][-1].seconds:.1f} s")
    useful = sum(job.new_tokens for job in jobs)
    rows = tuple(_row(name, useful, turns[name], turns[ENGINE]) for name in contestants)
    service = _service(turns[ENGINE], mean_waste(model, jobs, settings))
    return EnginePeers(rows, absent, service, len(jobs), sum(len(job.prompt_ids) for job in jobs), useful)


def _turn(name: str, serve: Serve, jobs: Sequence[Job]) -> Turn:
    before = process_time()
    (tokens, seconds, cache_bytes), stats = serve(jobs)
    cpu_s = process_time() - before
    given = [len(ids) for ids in tokens]
    if given != [job.new_tokens for job in jobs]:
        raise ValueError(f"{name} was asked for {[job.new_tokens for job in jobs]} tokens and gave {given}")
    return Turn(seconds, cpu_s, cache_bytes, stats)


def _row(name: str, useful: int, turns: Sequence[Turn], engine: Sequence[Turn]) -> Row:
    speeds = [useful / turn.seconds for turn in turns]
    seconds, cpu_s = median(turn.seconds for turn in turns), median(turn.cpu_s for turn in turns)
    return Row(
        name, useful / seconds, min(speeds), max(speeds), useful / cpu_s, max(turn.cache_bytes for turn in turns),
        seconds / median(turn.seconds for turn in engine), cpu_s / median(turn.cpu_s for turn in engine),
    )  # fmt: skip


def _service(turns: Sequence[Turn], waste: float) -> Service:
    stats = sorted(turns, key=lambda turn: turn.seconds)[len(turns) // 2].stats
    return Service(
        stats.percentiles(PERCENTS), stats.steps, stats.scheduling_share, stats.preemptions, stats.recomputed_tokens,
        waste,
    )  # fmt: skip


def wastes(model: Transformer, count: int, seed: int = 0) -> list[Waste]:
    """Waste at block size 16 for short jobs and for longer ones."""
    found = []
    for prompt_tokens, new_tokens in MIXES:
        jobs = draw_jobs(count, model.config.vocab_size, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed)
        mean_tokens = fmean(len(job.prompt_ids) + job.new_tokens for job in jobs)
        found.append(Waste(prompt_tokens, new_tokens, mean_tokens, mean_waste(model, jobs, enough(jobs))))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the race and both latency measurements, and record their rows."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.evaluation.peers_engine", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--model", default=zoo.OFFLINE, help="a model to run [%(default)s]")
    parser.add_argument("--dtype", default="bf16", help="fp32, bf16 or fp16 [%(default)s]")
    parser.add_argument("--requests", type=int, default=32, help="how many arrive together [%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each contestant [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and tokens [%(default)s]")
    options = parser.parse_args(arguments)
    if options.requests < 1 or options.repeats < 1:
        parser.error(f"at least 1 request and 1 turn are needed, got {options.requests} and {options.repeats}")
    say = lambda words: print(words, file=sys.stderr, flush=True)  # noqa: E731
    loaded = zoo.load(options.model, dtype=options.dtype)
    say(loaded.words)
    jobs = draw_jobs(options.requests, loaded.config.vocab_size, seed=options.seed)
    result = race(loaded.model, jobs, repeats=options.repeats, say=say)
    rows = [{"measured": "throughput", **asdict(row)} for row in result.rows]
    rows += [{"measured": "prefix hit", **asdict(row)} for row in prefix_hits(loaded.model, repeats=options.repeats)]
    rows += [{"measured": "decode", **asdict(row)} for row in decoding(loaded.model)]
    rows += [{"measured": "waste", **asdict(row)} for row in wastes(loaded.model, options.requests, options.seed)]
    command = f"python -m kvlab.evaluation.peers_engine --out {options.out.name} --model {options.model}"
    command += (
        f" --dtype {options.dtype} --requests {options.requests} --repeats {options.repeats} --seed {options.seed}"
    )
    facts = {name: value for name, value in asdict(result).items() if name != "rows"}
    record(options.out, command, rows, threads=torch.get_num_threads(), **facts)


if __name__ == "__main__":
    main()
