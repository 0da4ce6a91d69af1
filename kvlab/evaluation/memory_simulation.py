"""A busy server's memory, counted in slots: requests in one piece each against requests in blocks.

No model and no time: a request is two lengths, a prompt is stored when its request is admitted, and in a step each
request that runs stores one more token. Waste is split as by Kwon et al. 2023 (PagedAttention, section 3.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from kvlab.engine.block_pool import BlockPool, blocks_for


@dataclass(eq=False)
class Job:
    """A request as lengths, in tokens."""

    prompt: int
    answer: int
    written: int = 0  # of the answer

    @property
    def stored(self) -> int:
        return self.prompt + self.written

    @property
    def total(self) -> int:
        return self.prompt + self.answer


class Memory(Protocol):
    """`size` slots, and who has them."""

    size: int

    def admit(self, job: Job) -> bool:
        """Give a job room for its next token, or nothing."""

    def grow(self, job: Job) -> bool:
        """Give an admitted job room for its next token, or nothing."""

    def leave(self, job: Job) -> None: ...

    def given(self) -> list[tuple[Job, int]]:
        """Each admitted job and its number of slots."""


class FirstFit:
    """Each job in one piece of ask(job) slots, in the first gap that is long enough."""

    def __init__(self, size: int, ask: Callable[[Job], int]):
        self.size, self.ask = size, ask
        self.pieces: list[tuple[int, int, Job | None]] = []  # (start, end, whose), in order

    def admit(self, job):
        wanted, start = self.ask(job), 0
        for index, (next_start, next_end, _) in enumerate([*self.pieces, (self.size, self.size, None)]):
            if next_start - start >= wanted:
                self.pieces.insert(index, (start, start + wanted, job))
                return True
            start = next_end
        return False

    def grow(self, job):
        return True  # it has all it asked for

    def leave(self, job):
        self.pieces = [piece for piece in self.pieces if piece[2] != job]

    def given(self):
        return [(job, end - start) for start, end, job in self.pieces]


class Blocks:
    """Each job in as many blocks as its tokens need, and one more when the last is full."""

    def __init__(self, size: int, block_size: int):
        self.pool, self.tables = BlockPool(size // block_size, block_size), {}
        self.size = size

    def admit(self, job):
        missing = blocks_for(job.stored + 1, self.pool.block_size) - len(self.tables.get(job, []))
        if missing > self.pool.available:
            return False
        self.tables[job] = self.tables.get(job, []) + self.pool.allocate(missing)
        return True

    grow = admit  # the first blocks and the next one are found alike

    def leave(self, job):
        self.pool.free(self.tables.pop(job))

    def given(self):
        return [(job, len(table) * self.pool.block_size) for job, table in self.tables.items()]


@dataclass(frozen=True)
class Split:
    """Shares of a memory: with tokens; kept for later tokens of the owner; never used by its owner; owned by nobody."""

    tokens: float
    reserved: float
    internal: float
    external: float

    @classmethod
    def of(cls, memory: Memory) -> Split:
        given = memory.given()
        tokens = sum(job.stored for job, _ in given)
        reserved = sum(min(slots, job.total) - job.stored for job, slots in given)
        internal = sum(max(0, slots - job.total) for job, slots in given)
        external = memory.size - sum(slots for _, slots in given)
        return cls(*(slots / memory.size for slots in (tokens, reserved, internal, external)))


@dataclass(frozen=True)
class Outcome:
    """Means over the counted steps, and how many requests finished in them and were preempted in all."""

    split: Split
    running: float
    finished: int
    preempted: int


def serve(memory: Memory, lengths: Iterable[tuple[int, int]], steps: int, warm_up: int = 0) -> Outcome:
    """Serve (prompt, answer) lengths, first come first served; the first `warm_up` steps are not counted.

    A job that cannot grow sends the newest one back to the queue, with the tokens that it has: they are stored again
    when it is admitted again, which takes no step. Raises ValueError for a request that cannot fit.
    """
    waiting, running = deque(Job(*pair) for pair in lengths), []
    samples, finished, preempted = [], 0, 0
    for step in range(steps):
        while waiting and memory.admit(waiting[0]):
            running.append(waiting.popleft())
        if waiting and not running:
            raise ValueError(f"a request of {waiting[0].total} tokens does not fit in {memory.size} slots")
        for job in list(running):
            while job in running and not memory.grow(job):
                waiting.appendleft(running.pop())
                memory.leave(waiting[0])
                preempted += 1
            job.written += job in running
        if step >= warm_up:
            samples.append((Split.of(memory), len(running)))
        for job in [job for job in running if job.written == job.answer]:
            running.remove(job)
            memory.leave(job)
            finished += step >= warm_up
    names = Split.__dataclass_fields__
    means = Split(**{name: fmean(getattr(split, name) for split, _ in samples) for name in names})
    return Outcome(means, fmean(count for _, count in samples), finished, preempted)
