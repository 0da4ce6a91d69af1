"""How much does continuous batching serve? The engine against one request after another, and against transformers.

All get the same weights and requests, which arrive together, and take turns. Only tokens that were asked for count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import process_time

from kvlab.engine.stats import Stats
from kvlab.evaluation.engine_latency import Decoding, PrefixHit, decoding, prefix_hits
from kvlab.evaluation.serving import ENGINE, Job, Serve, Settings, draw_jobs, enough, enter, mean_waste
from kvlab.generate import check_request
from kvlab.model.transformer import Transformer

PERCENTS = (50, 90, 99)
MIXES = {  # prompt and new tokens, uniform between these bounds
    "mixed": ((100, 500), (50, 150)),
    "short": ((16, 200), (8, 64)),
}


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
    """One race. `absent` says, for each contestant that could not run, why; `mean_tokens` are a request's, in all."""

    rows: tuple[Row, ...]
    absent: dict[str, str]
    service: Service
    requests: int
    prompt_tokens: int
    useful_tokens: int
    mean_tokens: float


@dataclass(frozen=True)
class Answer:
    """Races by mix of lengths, what hits in the prefix cache save, and one request decoded alone."""

    mixes: dict[str, EnginePeers]
    prefix_hits: list[PrefixHit]
    decoding: list[Decoding]


@dataclass(frozen=True)
class Turn:
    """One contestant once through all jobs; `stats` is the engine's own count."""

    seconds: float
    cpu_s: float
    cache_bytes: int
    stats: Stats | None


def measure(
    model: Transformer,
    requests: int = 32,
    *,
    repeats: int = 3,
    seed: int = 0,
    say: Callable[[str], None] = print,
    tick: Callable[[str], None] = lambda words: None,
) -> Answer:
    """Race on both mixes, then look at single requests. `say` hears who stays away, `tick` every turn that is done."""
    mixes = {}
    for name, (prompt_tokens, new_tokens) in MIXES.items():
        bounds = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
        jobs = draw_jobs(requests, model.config.vocab_size, **bounds, seed=seed)
        mixes[name] = race(model, jobs, repeats=repeats, say=say, tick=tick)
    tick("prefix hits")
    found = prefix_hits(model, repeats=repeats, seed=seed)
    tick("decoding")
    return Answer(mixes, found, decoding(model, seed=seed))


def race(
    model: Transformer,
    jobs: Sequence[Job],
    settings: Settings | None = None,
    *,
    repeats: int = 3,
    say: Callable[[str], None] = print,
    tick: Callable[[str], None] = lambda words: None,
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
            tick(f"turn {number + 1} of {repeats}: {name}")
    useful = sum(job.new_tokens for job in jobs)
    rows = tuple(_row(name, useful, turns[name], turns[ENGINE]) for name in contestants)
    service = _service(turns[ENGINE], mean_waste(model, jobs, settings))
    prompts = sum(len(job.prompt_ids) for job in jobs)
    return EnginePeers(rows, absent, service, len(jobs), prompts, useful, fmean(job.tokens for job in jobs))


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
