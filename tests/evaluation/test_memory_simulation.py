"""The simulated memories: nobody's slots overlap, nothing is lost, every request finishes."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.evaluation.memory_simulation import Blocks, FirstFit, Job, Split, serve

LONGEST = 24
LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12)
MEMORIES = {
    "longest": lambda: FirstFit(50, lambda job: LONGEST),
    "exact": lambda: FirstFit(50, lambda job: job.total),
    "blocks of 1": lambda: Blocks(50, 1),
    "blocks of 5": lambda: Blocks(50, 5),
}


@pytest.mark.parametrize("name", MEMORIES)
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS)
def test_every_request_finishes_and_gives_its_slots_back(name, lengths):
    memory = MEMORIES[name]()
    outcome = serve(memory, lengths, steps=400)
    assert outcome.finished == len(lengths)
    assert memory.given() == [] and all(share >= 0 for share in astuple(outcome.split))
    assert sum(astuple(outcome.split)) == pytest.approx(1)
    if name == "exact":
        assert outcome.split.internal == 0
    if name == "blocks of 1":
        assert outcome.split.reserved == outcome.split.internal == 0
    if name.startswith("blocks"):
        memory.pool.check()


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), max_size=12), leavers=st.sets(st.integers(0, 11)))
def test_first_fit_takes_the_first_gap(sizes, leavers):
    memory, jobs = FirstFit(30, lambda job: job.prompt), [Job(size, 1) for size in sizes]
    for index, job in enumerate(jobs):
        before = [owner for start, end, owner in memory.pieces for _ in range(start, end)]
        taken = {slot for start, end, _ in memory.pieces for slot in range(start, end)}
        gaps = [s for s in range(30) if s + job.prompt <= 30 and not taken & set(range(s, s + job.prompt))]
        assert memory.admit(job) == bool(gaps)
        if gaps:
            assert (gaps[0], gaps[0] + job.prompt, job) in memory.pieces
        assert len(before) == len(taken)  # no slot has two owners
        if index in leavers:
            memory.leave(job)


def test_the_split_of_a_known_moment():
    memory = FirstFit(20, lambda job: 10)
    memory.admit(Job(prompt=3, answer=5, written=1))
    assert Split.of(memory) == Split(tokens=4 / 20, reserved=4 / 20, internal=2 / 20, external=10 / 20)


def test_a_request_that_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="a request of 61 tokens does not fit in 50 slots"):
        serve(Blocks(50, 5), [(60, 1)], steps=3)
