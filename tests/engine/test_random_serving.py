"""Thousands of random steps over scheduler, pools and prefix caches, with everything checked after each (world.py).

A hypothesis state machine and a faster seeded walk take 10,500 steps each. KVLAB_ENGINE_STEPS=1000000 makes them take
that many; a failure of the walk names the setup and the seed to repeat it with.
"""

import os
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine.world import CACHES, STOP, Setup, World
from kvlab.engine.request import Identity
from kvlab.engine.scheduler import RequestRefused

STEPS = int(os.environ.get("KVLAB_ENGINE_STEPS", 10_500))
WINDOWS = [(None,), (4,), (None, 1), (None, 5), (None, 3, 9)]
BLOCKS = {1: (20, 64), 3: (7, 22), 16: (3, 7)}  # by block size: few enough to run out of


def random_setup(rng: random.Random, cache: str, preemption: str, store: str = "none") -> Setup:
    block_size, windows = rng.choice([1, 3, 16]), rng.choice(WINDOWS)
    blocks = rng.randint(*BLOCKS[block_size])
    return Setup(
        cache, block_size,
        blocks=tuple(blocks if window is None else max(2, 2 * blocks // 3) for window in windows), windows=windows,
        token_budget=rng.choice([1, 3, 7, 16, 16, 64, 64]), max_running=rng.choice([3, 6, 20]),
        preemption=preemption, swap_blocks=rng.choice([6, 100]), store=store,
    )  # fmt: skip


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("cache, store", [*((cache, "none") for cache in CACHES), ("hash", "sure"), ("hash", "flaky")])
def test_many_random_steps(cache, preemption, store):
    seeds, seen = random.Random(cache + preemption + store.replace("none", "")), Counter()
    while seen["steps"] < STEPS / 6:
        seed = seeds.getrandbits(32)
        setup = random_setup(random.Random(seed), cache, preemption, store)
        world = World(setup, seed)
        try:
            world.live(80)
        except BaseException:
            print(f"World({setup}, {seed}).live(80)")
            raise
        seen.update(world.seen())
    unlikely = {"swap_preemptions", "lost_swaps"} if preemption == "recompute" else set()
    unlikely |= {"hit_tokens", "recovered_tokens"} if cache == "none" else set()
    assert not [name for name in unlikely if seen[name]]
    rare = [name for name in seen.keys() - unlikely if seen[name] < 5]
    assert STEPS < 10_000 or not rare, f"the walk did not go where it should: {seen}"


class Serving(RuleBasedStateMachine):
    """The same world driven by hypothesis, which shrinks a failure to the few calls that matter."""

    steps_taken = 0  # by all machines together

    @initialize(
        cache=st.sampled_from(list(CACHES)), block_size=st.sampled_from([1, 2, 3]), blocks=st.integers(6, 16),
        windows=st.sampled_from(WINDOWS), token_budget=st.sampled_from([1, 3, 8, 64]),
        preemption=st.sampled_from(["recompute", "swap"]), swap_blocks=st.sampled_from([0, 4, 40]),
        store=st.sampled_from(["none", "sure", "flaky"]),
    )  # fmt: skip
    def start(self, cache, block_size, blocks, windows, token_budget, preemption, swap_blocks, store):
        setup = Setup(
            cache, block_size, (blocks,) * len(windows), windows, token_budget, max_running=4,
            preemption=preemption, swap_blocks=swap_blocks, store=store if cache == "hash" else "none",
        )  # fmt: skip
        self.world = World(setup)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), new=st.integers(1, 8), n=st.integers(1, 3),
        adapter=st.sampled_from([None, None, "a"]), beam=st.booleans(), stop=st.sampled_from([(), (STOP,)]),
    )  # fmt: skip
    def submit(self, prompt, new, n, adapter, beam, stop):
        before = self.world.state()
        try:
            self.world.submit(prompt, new, n, Identity(adapter), beam, stop)
        except RequestRefused:
            assert self.world.state() == before

    def anybody(self):
        return bool(self.world.scheduler.requests)

    @rule(cancel_within=st.sampled_from([False, False, False, True]))
    def step(self, cancel_within):
        self.world.step(cancel_within)

    @precondition(anybody)
    @rule(count=st.integers(2, 6))
    def steps(self, count):
        for _ in range(count):
            self.world.step()

    @precondition(anybody)
    @rule(index=st.integers(0, 7))
    def cancel(self, index):
        names = list(self.world.scheduler.requests)
        self.world.scheduler.cancel(names[index % len(names)])
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            type(self).steps_taken += self.world.steps


def test_the_state_machine():
    examples = max(1, STEPS // 40)
    run_state_machine_as_test(
        Serving, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None, derandomize=True)
    )
    assert STEPS < 10_000 or Serving.steps_taken >= STEPS
