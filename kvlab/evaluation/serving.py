"""Many requests at once: what they ask for, and everyone who can serve them here with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter

from kvlab.cache.build import build_cache
from kvlab.cache.paged import layer_groups
from kvlab.engine.block_pool import BlockPool, blocks_for
from kvlab.engine.engine import Engine
from kvlab.engine.prefix_cache import NoPrefixCache
from kvlab.engine.request import Request
from kvlab.engine.scheduler import Scheduler
from kvlab.engine.stats import Stats
from kvlab.generate import generate
from kvlab.interop.transformers_batches import ContinuousBatches, Served, static_batch
from kvlab.model.transformer import Transformer

ENGINE, ONE_BY_ONE = "kvlab engine", "kvlab one by one"


@dataclass(frozen=True)
class Job:
    """A prompt, and how many tokens are to follow it."""

    prompt_ids: tuple[int, ...]
    new_tokens: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return len(self.prompt_ids) + self.new_tokens


@dataclass(frozen=True)
class Settings:
    """What the engine gets, and transformers' continuous batching likewise."""

    num_blocks: int
    block_size: int = 16
    token_budget: int = 512


Serve = Callable[[Sequence[Job]], tuple[Served, Stats | None]]


def draw_jobs(
    count: int,
    vocab_size: int,
    *,
    prompt_tokens: tuple[int, int] = (16, 200),
    new_tokens: tuple[int, int] = (8, 64),
    seed: int = 0,
) -> list[Job]:
    """Jobs of random tokens, both lengths uniform between their bounds."""
    random = Random(seed)
    return [
        Job(
            tuple(random.randrange(vocab_size) for _ in range(random.randint(*prompt_tokens))),
            random.randint(*new_tokens),
        )
        for _ in range(count)
    ]


def enough(jobs: Sequence[Job], block_size: int = 16, token_budget: int = 512) -> Settings:
    """Settings under which no job ever waits for memory; a last token needs no keys."""
    return Settings(sum(blocks_for(job.tokens - 1, block_size) for job in jobs), block_size, token_budget)


def mean_waste(model: Transformer, jobs: Sequence[Job], settings: Settings) -> float:
    """The part of used slots that holds no token, over all steps: the schedule tells it, and no model runs."""
    windows, _ = layer_groups(model.config)
    pools = [BlockPool(settings.num_blocks, settings.block_size) for _ in windows]
    scheduler = Scheduler(
        NoPrefixCache(pools, windows), token_budget=settings.token_budget, max_running=settings.num_blocks
    )
    for request in _requests(jobs):
        scheduler.submit(request)
    slots = unused = 0
    while scheduler.requests:
        plan = scheduler.plan()
        scheduler.complete(plan, [[0] * row.draws for row in plan.samples])
        for usage in scheduler.usage():
            slots += usage.used * usage.block_size
            unused += usage.internal_tokens + usage.reserved_tokens
    return unused / max(1, slots)


def _requests(jobs: Sequence[Job]) -> list[Request]:
    return [Request(f"{i}", job.prompt_ids, max_new_tokens=job.new_tokens) for i, job in enumerate(jobs)]


def enter(
    model: Transformer, jobs: Sequence[Job], settings: Settings, say: Callable[[str], None]
) -> tuple[dict[str, Serve], dict[str, str]]:
    """Set up every contestant that can run here, and warm it up; say in words which cannot, and why."""
    makers = {
        ONE_BY_ONE: _one_by_one, ENGINE: _engine, "transformers static": _static,
        "transformers continuous": _continuous,
    }  # fmt: skip
    warm_up = [Job(job.prompt_ids, min(job.new_tokens, 2)) for job in jobs]
    contestants, absent = {}, {}
    for name, make in makers.items():
        try:
            serve = make(model, settings)
            serve(warm_up)
        except (ImportError, ValueError, RuntimeError) as error:
            if name.startswith("kvlab"):
                raise
            absent[name] = f"{error}".splitlines()[0]
            say(f"{name} does not take part: {absent[name]}")
        else:
            contestants[name] = serve
    return contestants, absent


def _one_by_one(model: Transformer, settings: Settings) -> Serve:
    """Eager decoding with the contiguous cache, one request after another."""

    def serve(jobs):
        before, tokens, most = perf_counter(), [], 0
        for job in jobs:
            done = generate(model, job.prompt_ids, build_cache(model.config), max_new_tokens=job.new_tokens)
            tokens.append(done.token_ids)
            most = max(most, done.cache.bytes().total)
        return (tokens, perf_counter() - before, most), None

    return serve


def _engine(model: Transformer, settings: Settings) -> Serve:
    """One engine, whose memory is warm after the first jobs; without prefix cache, for the same prompts come again."""
    engine = Engine(
        model, num_blocks=settings.num_blocks, block_size=settings.block_size, prefix="none",
        token_budget=settings.token_budget, max_running=settings.num_blocks,
    )  # fmt: skip

    def serve(jobs):
        requests = _requests(jobs)
        engine.reset_stats()
        before = perf_counter()
        for request in requests:
            engine.submit(request)
        for _ in engine.run():
            pass
        seconds = perf_counter() - before
        tokens = [request.sequences[0].output_ids for request in requests]
        return (tokens, seconds, engine.cache.bytes().total), engine.stats

    return serve


def _static(model: Transformer, settings: Settings) -> Serve:
    from kvlab.interop.transformers import twin

    other = twin(model)
    return lambda jobs: (static_batch(other, *_columns(jobs)), None)


def _continuous(model: Transformer, settings: Settings) -> Serve:
    from kvlab.interop.transformers import twin

    batches = ContinuousBatches(twin(model), settings.num_blocks, settings.block_size, settings.token_budget)
    return lambda jobs: (batches.serve(*_columns(jobs)), None)


def _columns(jobs: Sequence[Job]) -> tuple[list[tuple[int, ...]], list[int]]:
    return [job.prompt_ids for job in jobs], [job.new_tokens for job in jobs]
