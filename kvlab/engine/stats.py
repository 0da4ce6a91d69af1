"""What the engine did, counted: tokens found and computed, preemptions, waiting times; and where its memory is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvlab.engine.block_pool import GONE
from kvlab.engine.prefix_cache import PrefixCache
from kvlab.engine.request import Sequence as Continuation

REMEMBERED = 10_000  # finished sequences whose times are kept


def _recent() -> deque[float]:
    return deque(maxlen=REMEMBERED)


@dataclass
class Stats:
    """Counters since the engine started; times in seconds, of the latest finished sequences.

    restored_tokens  those of hit and recovered tokens whose blocks were read from a store; restoring_s is the time
                     that this took, a part of scheduling_s
    lost_swaps       swapped sequences whose blocks a store had lost: they were computed again

    `usage()` tells where the blocks of each layer group are now: used, free, cached, and the waste in used ones.
    Each token of a sequence is a hit or computed, once. What a preemption threw away and the cache still had is
    recovered, what it had not is recomputed: neither is a hit nor progress.
    """

    usage: Callable[[], list[Usage]] = field(default=list, repr=False, compare=False)
    steps: int = 0
    step_s: float = 0.0  # spent in steps that ran tokens
    scheduling_s: float = 0.0  # the part of it that went to the scheduler
    prompt_tokens: int = 0  # looked up in the prefix cache
    hit_tokens: int = 0
    computed_tokens: int = 0
    recovered_tokens: int = 0
    recomputed_tokens: int = 0
    recompute_preemptions: int = 0
    swap_preemptions: int = 0
    restored_tokens: int = 0
    restoring_s: float = 0.0
    lost_swaps: int = 0
    copied_blocks: int = 0  # written copies of shared blocks
    finished: dict[str, int] = field(default_factory=dict)  # sequences, by reason
    ttft_s: deque[float] = field(default_factory=_recent)
    tpot_s: deque[float] = field(default_factory=_recent)
    queue_s: deque[float] = field(default_factory=_recent)

    @property
    def preemptions(self) -> int:
        return self.recompute_preemptions + self.swap_preemptions

    @property
    def hit_rate(self) -> float:
        """The part of all prompt tokens that was found instead of computed; 0 before the first."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def scheduling_share(self) -> float:
        """The part of the steps' time that the scheduler took; 0 before the first."""
        return self.scheduling_s / self.step_s if self.step_s else 0.0

    def count_step(self, scheduling: float, whole: float) -> None:
        """Count the seconds of a step that ran tokens, and those of them that the scheduler took."""
        self.scheduling_s += scheduling
        self.step_s += whole

    def count_hit(self, sequence: Continuation, tokens: int) -> None:
        """Count an admitted sequence, whose first `tokens` tokens were found in the cache."""
        if sequence.scheduled_s is None:
            self.prompt_tokens += len(sequence.tokens)
        new = max(0, tokens - sequence.peak)
        self.hit_tokens += new
        self.recovered_tokens += tokens - new
        sequence.peak += new

    def count_restored(self, tokens: int, seconds: float) -> None:
        """Count a look into the store, and the tokens whose blocks it loaded."""
        self.restored_tokens += tokens
        self.restoring_s += seconds

    def count_computed(self, sequence: Continuation, start: int, count: int) -> None:
        """Count `count` tokens from position `start` on, computed in one step."""
        new = max(0, start + count - max(start, sequence.peak))
        self.computed_tokens += new
        self.recomputed_tokens += count - new
        sequence.peak += new

    def count_finished(self, sequence: Continuation) -> None:
        reason = sequence.finish_reason
        self.finished[reason] = self.finished.get(reason, 0) + 1
        for kept, seconds in (
            (self.ttft_s, sequence.ttft_s), (self.tpot_s, sequence.tpot_s), (self.queue_s, sequence.queue_s)
        ):  # fmt: skip
            if seconds is not None:
                kept.append(seconds)

    def percentiles(self, percents: Sequence[float] = (50, 99)) -> dict[str, dict[float, float | None]]:
        """TTFT, TPOT and queue time at each percent; None where nothing has finished."""
        times = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "queue_s": self.queue_s}
        return {name: {p: percentile(values, p) for p in percents} for name, values in times.items()}


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The value below which `percent` of all lie, interpolated between neighbours; None without values."""
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, got {percent}")
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Usage:
    """The blocks of one layer group at one moment, and the slots of used blocks that hold no token.

    internal_tokens  slots behind the last token of a block that is partly filled
    reserved_tokens  slots of blocks in which nothing is stored yet
    """

    num_blocks: int
    block_size: int
    used: int
    cached: int
    free: int
    internal_tokens: int
    reserved_tokens: int

    @property
    def waste(self) -> float:
        """The part of the used slots that holds no token."""
        return (self.internal_tokens + self.reserved_tokens) / max(1, self.used * self.block_size)


def usage(cache: PrefixCache, running: Iterable[Continuation]) -> list[Usage]:
    """Count the blocks of each layer group, shared ones once."""
    running = list(running)
    found = []
    for group, pool in enumerate(cache.pools):
        size, filled = pool.block_size, {}  # block -> tokens in it
        for sequence in running:
            for index, block in enumerate(sequence.tables[group]):
                tokens = min(size, max(0, sequence.stored - index * size))
                filled[block] = max(tokens, filled.get(block, 0))
        filled.pop(GONE, None)
        internal = sum(size - tokens for tokens in filled.values() if tokens)
        reserved = sum(size for tokens in filled.values() if not tokens)
        cached = cache.cached_count(group)
        found.append(Usage(pool.num_blocks, size, len(filled), cached, pool.free_count, internal, reserved))
    return found
