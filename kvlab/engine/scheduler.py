"""Continuous batching: before each step, which requests run, for how many tokens, and in which blocks.

Iteration-level scheduling is from Orca (Yu et al. 2022), chunked prefill from Sarathi-Serve (Agrawal et al. 2024).
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Literal

from kvlab.engine.admission import RequestRefused, check_servable
from kvlab.engine.block_tables import BlockTables
from kvlab.engine.plan import Plan, Row, add_pairs
from kvlab.engine.prefix_cache import PrefixCache
from kvlab.engine.request import Request, Sequence, State
from kvlab.engine.shelf import Shelf
from kvlab.engine.stats import Stats, Usage, usage


class Scheduler:
    """Serves requests in the order in which they came, each step with at most `token_budget` tokens.

    Sequences that run are planned oldest first, and one that gets less than it asks for ends the step. So decoding
    goes on while a prompt is prefilled in chunks, no prompt overtakes an older one, and whoever is admitted finds
    all older prompts stored. When blocks run out, the newest sequence that runs gives up its own: it waits again, in
    front, and is recomputed or swapped back in. Nobody starves, because the oldest can take every block.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        token_budget: int = 512,
        max_running: int = 64,
        max_length: int | None = None,
        preemption: Literal["recompute", "swap"] = "recompute",
        swap_blocks: int = 0,
        shelf: Shelf | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if any(type(most) is not int or most < 1 for most in (token_budget, max_running)):
            raise ValueError(f"token_budget, max_running are whole numbers >= 1, got {token_budget!r}, {max_running!r}")
        if preemption not in ("recompute", "swap"):
            raise ValueError(f"preemption is 'recompute' or 'swap', got {preemption!r}")
        self.cache, self.tables = cache, BlockTables(cache, token_budget, swap_blocks, shelf)
        self.token_budget, self.max_running, self.max_length = token_budget, max_running, max_length
        self.preemption, self.clock = preemption, clock
        self.requests: dict[str, Request] = {}  # those that are not finished
        self.waiting: deque[Sequence] = deque()  # oldest first, and all newer than those that run
        self.running: list[Sequence] = []  # oldest first
        self.reset_stats()
        self._arrivals = 0
        self._planned: Plan | None = None

    def reset_stats(self) -> None:
        """Count from zero again."""
        self.stats = Stats(self.usage)

    def submit(self, request: Request) -> Sequence:
        """Queue a request and return its first sequence. Raises RequestRefused for one that could never be served."""
        if request.sequences or request.id in self.requests:
            raise RequestRefused(f"request {request.id} was submitted before: make a new one, with an id of its own")
        check_servable(request, self.tables, self.max_running, self.max_length)
        request.arrival_s = self.clock()
        sequence = Sequence(request, 0, (self._arrivals, 0), list(request.prompt_ids))
        self._arrivals += 1
        request.sequences.append(sequence)
        self.requests[request.id] = request
        self.waiting.append(sequence)
        return sequence

    def plan(self) -> Plan:
        """Decide on the next step; empty when nobody is there. `complete` or `abandon` it before the next one."""
        if self._planned is not None:
            raise ValueError("the last plan is still open: complete or abandon it first")
        plan = self._planned = Plan.empty(len(self.cache.pools))
        budget = self.token_budget
        for sequence in list(self.running):
            if not budget or sequence.state is not State.RUNNING:  # preempted by an older one
                break
            budget -= self._plan_row(plan, sequence, budget)
        while budget and not plan.preempted and self.waiting and self._admit(plan, self.waiting[0]):
            budget -= self._plan_row(plan, self.running[-1], budget)
        return plan

    @property
    def planned(self) -> bool:
        """Whether a plan is open."""
        return self._planned is not None

    def take_back(self) -> None:
        """Undo a plan that could not be made: whoever ran, or was to run, waits again in order and is recomputed."""
        plan, self._planned = self._planned, None
        self.tables.swapped_in(plan.swap_in)
        for sequence in [*self.running, *self.waiting]:
            if sequence.tables or sequence in plan.preempted:
                self.tables.release(sequence)
                sequence.state = State.WAITING
        self.stats.recompute_preemptions += len(self.running)
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()

    def complete(self, plan: Plan, drawn: list[list[int]]) -> list[Sequence]:
        """Take over what a step computed: `drawn` has one list of tokens for each of plan.samples.

        More tokens than one fork the sequence, none drops it (a beam that lost). Beams may so become more than
        `max_running`: nobody is admitted until they are fewer. Returns the sequences that got a token, those that are
        finished by it included.
        """
        if plan is not self._planned or len(drawn) != len(plan.samples):
            raise ValueError(f"complete the last plan, with {len(plan.samples)} lists of tokens: got {len(drawn)}")
        self._planned = None
        self.stats.steps += 1
        self.tables.swapped_in(plan.swap_in)
        for row in plan.rows:
            if row.sequence.state is not State.RUNNING:
                continue  # cancelled within the step
            row.sequence.stored = row.start + row.count
            self.stats.count_computed(row.sequence, row.start, row.count)
            self.tables.register(row.sequence)
        continued: list[Sequence] = []
        for row, tokens in zip(plan.samples, drawn, strict=True):
            if row.sequence.state is State.RUNNING:
                continued += self._continue(row.sequence, tokens)
        return continued

    def abandon(self, plan: Plan, error: str = "the step failed") -> None:
        """Give up a step that failed: what it was to compute or to swap is lost, and these sequences end in "error"."""
        if plan is not self._planned:
            raise ValueError("only the last plan, while it is open, can be abandoned")
        self._planned = None
        self.tables.swapped_in(plan.swap_in)
        for sequence in [row.sequence for row in plan.rows] + plan.preempted:
            if sequence.state in (State.RUNNING, State.SWAPPED):
                self.fail(sequence, error)

    def fail(self, sequence: Sequence, error: str) -> None:
        """End one sequence in "error", even within a step: nothing that the step computed for it is kept."""
        sequence.error = f"request {sequence.request.id}: {error}"
        self._finish(sequence, "error")

    def cancel(self, request_id: str) -> None:
        """End a request at once, all its sequences, even within a step. Raises ValueError if it is not there."""
        if request_id not in self.requests:
            raise ValueError(f"request {request_id} is not there: it was never submitted, or is finished already")
        for sequence in self.requests[request_id].sequences:
            if sequence.state is not State.FINISHED:
                self._finish(sequence, "cancelled")

    def usage(self) -> list[Usage]:
        """Where the blocks of each layer group are now."""
        return usage(self.cache, self.running)

    def _plan_row(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Plan the next tokens of a sequence that runs, preempting newer ones if need be, and return how many."""
        count = min(budget, sequence.remaining)
        self.tables.give_back(sequence)
        while not self.tables.fits_step(sequence, count):
            victim = self.running[-1]
            self._preempt(plan, victim)
            if victim is sequence:
                return 0
        copies = self.tables.extend(sequence, count)
        add_pairs(plan.copies, copies)
        self.stats.copied_blocks += sum(map(len, copies))
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self.clock()
        draws = sequence.draws if count == sequence.remaining else 0
        tables = tuple(tuple(table) for table in sequence.tables)
        plan.rows.append(Row(sequence, sequence.stored, count, tables, draws))
        return count

    def _admit(self, plan: Plan, sequence: Sequence) -> bool:
        """Let the oldest waiting sequence run if all its known tokens can be stored."""
        if sum(other.draws for other in self.running) + sequence.draws > self.max_running:
            return False  # a prompt that will be continued n times takes n places
        if sequence.state is State.SWAPPED:
            if not self.tables.fits_swapped(sequence):
                return False
            if self.tables.can_swap_in(sequence):
                add_pairs(plan.swap_in, self.tables.swap_in(sequence))
            else:  # what is gone is computed again
                self.tables.release(sequence)
                sequence.state = State.WAITING
                self.stats.lost_swaps += 1
        if sequence.state is State.WAITING:
            self.tables.attach_prefix(sequence)
            if not self.tables.fits_whole(sequence):
                self.tables.release(sequence)
                return False
            if self.tables.shelf.keeps_prefixes:
                self._restore(plan, sequence)
            self.stats.count_hit(sequence, sequence.stored)
        sequence.state = State.RUNNING
        self.running.append(self.waiting.popleft())
        return True

    def _restore(self, plan: Plan, sequence: Sequence) -> None:
        found, began = sequence.stored, self.clock()
        add_pairs(plan.restore, self.tables.restore_prefix(sequence))
        self.stats.count_restored(sequence.stored - found, self.clock() - began)

    def _preempt(self, plan: Plan, sequence: Sequence) -> None:
        if self.preemption == "swap" and self.tables.can_swap_out(sequence):
            add_pairs(plan.swap_out, self.tables.swap_out(sequence))
            sequence.state = State.SWAPPED
            self.stats.swap_preemptions += 1
        else:
            self.tables.release(sequence)
            sequence.state = State.WAITING
            self.stats.recompute_preemptions += 1
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        plan.preempted.append(sequence)

    def _continue(self, sequence: Sequence, tokens: list[int]) -> list[Sequence]:
        if not tokens:
            self._finish(sequence, "dropped")
            return []
        sequences = [sequence] + [self._fork(sequence) for _ in tokens[1:]]
        for continued, token in zip(sequences, tokens, strict=True):
            continued.tokens.append(token)
            if continued.first_token_s is None:
                continued.first_token_s = self.clock()
            if token in continued.request.stop_ids:
                self._finish(continued, "stop")
            elif len(continued.output_ids) >= continued.request.max_new_tokens:
                self._finish(continued, "length")
        return sequences

    def _fork(self, parent: Sequence) -> Sequence:
        siblings = parent.request.sequences
        child = Sequence(parent.request, len(siblings), (parent.order[0], len(siblings)), list(parent.tokens))
        child.scheduled_s, child.first_token_s = parent.scheduled_s, parent.first_token_s
        child.state = State.RUNNING
        self.tables.fork(parent, child)
        siblings.append(child)
        insort(self.running, child, key=lambda sequence: sequence.order)
        return child

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.tables.release(sequence)
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        sequence.state, sequence.finish_reason, sequence.finished_s = State.FINISHED, reason, self.clock()
        self.stats.count_finished(sequence)
        if sequence.request.finished:
            del self.requests[sequence.request.id]
