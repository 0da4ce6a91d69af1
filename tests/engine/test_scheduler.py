"""The scheduler, step by step: exact block ids, chunks, preemption, admission, forks, cancels, windows, counters."""

import pytest

from engine.world import STOP, Setup, World, expected_output
from kvlab.engine.block_pool import GONE, BlockPool
from kvlab.engine.prefix_cache import HashChain, NoPrefixCache
from kvlab.engine.request import NOBODY, Request, State
from kvlab.engine.scheduler import RequestRefused, Scheduler

BOTH = pytest.mark.parametrize("cache", ["hash", "radix"])
KINDS = pytest.mark.parametrize("preemption", ["recompute", "swap"])


def rows(plan):
    """What runs: (request, tokens stored before, tokens now, tokens drawn)."""
    return [(row.sequence.request.id, row.start, row.count, row.draws) for row in plan.rows]


# block ids and orders, ten blocks of 16


def test_a_prompt_of_55_tokens_and_one_that_shares_48():
    world = World(Setup("hash", 16, (10,), token_budget=64))
    common = list(range(48))
    first = world.submit(common + [100 + i for i in range(7)], 20)
    assert world.step().rows[0].tables == ((0, 1, 2, 3),)
    pool = world.cache.pools[0]
    assert [pool.key_of(block) is not None for block in range(4)] == [True, True, True, False]

    second = world.submit(common + [200 + i for i in range(5)], 20)
    row = world.step().rows[1]
    assert (row.start, row.count, row.tables) == (48, 5, ((0, 1, 2, 4),))
    assert [pool.references(block) for block in range(5)] == [2, 2, 2, 1, 1]

    world.cancel(first)
    world.cancel(second)
    assert pool.waiting() == [5, 6, 7, 8, 9, 3, 4, 2, 1, 0]
    assert (pool.free_count, pool.cached_count, pool.used_count) == (7, 3, 0)

    world.submit(common + [100 + i for i in range(7)], 1)  # the three cached blocks leave the queue, one is taken
    assert world.step().rows[0].tables == ((0, 1, 2, 5),)
    assert pool.waiting() == [6, 7, 8, 9, 3, 4, 5, 2, 1, 0]


def test_decoding_takes_a_block_when_the_last_one_is_full():
    world = World(Setup("hash", 16, (10,), token_budget=64))
    world.submit(list(range(55)), 30)
    lengths = [len(world.step().rows[0].tables[0]) for _ in range(30)]
    assert lengths == [4] * 10 + [5] * 16 + [6] * 4  # positions 55 to 63 fill block 3, then 64 begins block 4
    assert [world.scheduler.stats.computed_tokens, world.scheduler.stats.hit_tokens] == [84, 0]


def test_tails_wait_in_front_of_heads_and_reused_blocks_lose_their_key():
    world = World(Setup("hash", 16, (10,), token_budget=200))
    first = world.submit(list(range(87)), 9)  # six blocks, five full
    second = world.submit([200 + i for i in range(47)], 9)  # three, two full
    world.step()
    world.cancel(first), world.cancel(second)
    pool = world.cache.pools[0]
    assert pool.waiting() == [9, 5, 4, 3, 2, 1, 0, 8, 7, 6]
    world.submit([*range(32), *[300 + i for i in range(40)]], 1)  # two blocks of the first text are found
    assert world.step().rows[0].tables == ((0, 1, 9, 5, 4),)
    assert pool.key_of(4) is None or world.cache.match(list(range(87)), NOBODY).num_blocks == 4
    assert world.cache.match(list(range(87)), NOBODY).num_blocks == 4  # the fifth was block 4
    assert pool.waiting() == [3, 2, 8, 7, 6, 4, 5, 9, 1, 0]


# chunks and the token budget


def test_prefill_is_cut_to_the_budget_and_decoding_goes_on():
    world = World(Setup("hash", 4, (32,), token_budget=8))
    world.submit([1] * 3, 4)
    world.submit([2] * 20, 2)
    world.submit([3] * 2, 2)
    assert rows(world.step()) == [("r0", 0, 3, 1), ("r1", 0, 5, 0)]
    assert rows(world.step()) == [("r0", 3, 1, 1), ("r1", 5, 7, 0)]
    assert rows(world.step()) == [("r0", 4, 1, 1), ("r1", 12, 7, 0)]
    assert rows(world.step()) == [("r0", 5, 1, 1), ("r1", 19, 1, 1), ("r2", 0, 2, 1)]
    assert rows(world.step()) == [("r1", 20, 1, 1), ("r2", 2, 1, 1)]
    assert rows(world.step()) == []


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 21])
@pytest.mark.parametrize("cache", ["none", "hash", "radix"])
def test_the_answers_do_not_depend_on_the_size_of_chunks(cache, budget):
    world = World(Setup(cache, 3, (40,), token_budget=budget))
    requests = [world.submit([7] * length, 5) for length in (21, 4, 21, 20)]
    world.drain()
    assert [r.sequences[0].output_ids for r in requests] == [expected_output(r, 0) for r in requests]


def test_no_more_sequences_run_than_allowed():
    world = World(Setup("none", 4, (64,), max_running=3, token_budget=64))
    for n in 1, 2, 2, 1:
        world.submit([1] * 5, 6, n=n)
    most = 0
    while world.scheduler.requests:
        world.step()
        most = max(most, len(world.scheduler.running))
    assert most == 3
    assert [r.id for r in world.first_tokens] == ["r0", "r1", "r2", "r3"]


# preemption


@pytest.mark.parametrize("cache", ["none", "hash", "radix"])
@KINDS
def test_two_answers_that_do_not_fit_together(cache, preemption):
    """Seven blocks of 16; each request ends with 68 stored tokens, five blocks: the newer one must give way."""
    prompts = [list(range(34)), list(range(40, 74))]
    world = World(Setup(cache, 16, (7,), token_budget=128, preemption=preemption, swap_blocks=8))
    requests = [world.submit(prompt, 35) for prompt in prompts]
    lengths = dict.fromkeys(requests, 0)
    preempted = []
    while world.scheduler.requests:
        plan = world.step()
        preempted += plan.preempted
        for row in plan.samples:
            length = len(row.sequence.output_ids)
            assert length == lengths[row.sequence.request] + 1  # one token more, none lost, none twice
            lengths[row.sequence.request] = length
    world.drain()
    assert preempted and {s.request for s in preempted} == {requests[1]}
    roomy = World(Setup(cache, 16, (20,), token_budget=128))
    same = [roomy.submit(prompt, 35) for prompt in prompts]
    roomy.drain()
    assert [r.sequences[0].tokens for r in requests] == [r.sequences[0].tokens for r in same]
    stats = world.scheduler.stats
    assert stats.computed_tokens == 2 * 68 and stats.hit_tokens == 0
    assert stats.preemptions == len(preempted)
    if preemption == "swap":
        assert stats.swap_preemptions == 1 and stats.recomputed_tokens == 0
    else:
        assert stats.recompute_preemptions == 1
        assert 0 < stats.recomputed_tokens <= 68 and (stats.recovered_tokens > 0) == (cache != "none")


@KINDS
def test_the_newest_gives_way_and_waits_in_front(preemption):
    world = World(Setup("none", 2, (9,), token_budget=16, preemption=preemption, swap_blocks=20))
    for _ in range(3):
        world.submit([1, 2, 3, 4], 6)
    world.step()  # two blocks each
    world.submit([1], 1)
    plan = world.step()  # each needs a third block; nine are there, so nobody waits but the newcomer
    assert [row.sequence.request.id for row in plan.rows] == ["r0", "r1", "r2"]
    world.step()
    plan = world.step()  # a fourth block for r0: r2 gives up its three
    assert [s.request.id for s in plan.preempted] == ["r2"]
    assert [s.request.id for s in world.scheduler.waiting] == ["r2", "r3"]
    state = State.SWAPPED if preemption == "swap" else State.WAITING
    assert world.scheduler.waiting[0].state is state
    moved = plan.swap_out[0]
    assert len(moved) == (3 if preemption == "swap" else 0)
    world.drain()
    assert [r.id for r in world.first_tokens] == ["r0", "r1", "r2", "r3"]


def test_swapping_falls_back_to_recomputing_when_cpu_memory_is_full():
    world = World(Setup("none", 2, (6,), token_budget=16, preemption="swap", swap_blocks=1))
    for _ in range(2):
        world.submit([1, 2, 3, 4], 6)
    world.drain()
    stats = world.scheduler.stats
    assert stats.swap_preemptions == 0 and stats.recompute_preemptions >= 1


def test_a_cpu_block_is_taken_until_it_was_copied_back():
    world = World(Setup("none", 2, (6,), token_budget=16, preemption="swap", swap_blocks=4))
    for _ in range(2):
        world.submit([1, 2, 3, 4], 6)
    pool = world.tables.swap_pools[0]
    while not any(plan.swap_in[0] for plan in [world.scheduler.plan()]):
        plan = world.scheduler._planned
        world.run(plan)
        world.scheduler.complete(plan, [world.draw(row) for row in plan.samples])
    plan = world.scheduler._planned
    slots = [slot for slot, _ in plan.swap_in[0]]
    assert pool.used_count == len(slots) == 3
    world.run(plan)
    world.scheduler.complete(plan, [world.draw(row) for row in plan.samples])
    assert pool.used_count == 0
    world.drain()


@pytest.mark.parametrize("cache", ["none", "hash", "radix"])
def test_what_preemption_costs_is_no_hit_and_is_bounded(cache):
    """Prompts without a common token: hit rate 0, whatever is thrown away and found again; no endless going around."""
    world = World(Setup(cache, 4, (14,), token_budget=16))
    for index in range(8):
        world.submit([100 * index + i for i in range(9)], 16)
    world.drain()
    stats = world.scheduler.stats
    assert stats.preemptions >= 3 and stats.recomputed_tokens > 0
    assert stats.hit_tokens == 0 and stats.hit_rate == 0.0
    assert stats.computed_tokens == 8 * 24 and stats.prompt_tokens == 8 * 9
    assert stats.preemptions <= 8 * 6  # each costs an older sequence a new block, of six at most
    assert [r.id for r in world.first_tokens] == [f"r{i}" for i in range(8)]


def test_the_hit_rate_of_a_shared_prompt():
    world = World(Setup("hash", 4, (40,), token_budget=64))
    for _ in range(4):
        world.submit(list(range(10)), 1)
        world.drain()
    stats = world.scheduler.stats
    assert (stats.prompt_tokens, stats.hit_tokens, stats.computed_tokens) == (40, 24, 16)
    assert stats.hit_rate == 0.6


# admission


def test_what_can_never_fit_is_refused_with_the_reason_and_the_rest_goes_on():
    world = World(Setup("hash", 16, (4,), token_budget=32, max_length=300, max_running=2))
    before = world.state()
    for prompt, new, n, words in [
        (100, 1, 1, "request r0: 100 prompt tokens and 1 new ones need 7 blocks of 16 tokens and can never fit into 4"),
        (60, 6, 1, "60 prompt tokens and 6 new ones need 5 blocks"),
        (10, 291, 1, "10 prompt tokens and 291 new ones exceed the model's 300"),
        (10, 1, 3, "n=3, but only 2 sequences can run"),
    ]:
        with pytest.raises(RequestRefused, match=words):
            world.submit([1] * prompt, new, n=n)
        assert world.state() == before
    largest = world.submit([1] * 60, 5)  # stores 64 tokens: the last one drawn needs no slot
    small = world.submit([2] * 10, 3)
    world.drain()
    assert largest.finished and small.finished


def test_a_pool_without_blocks_refuses_everything():
    with pytest.raises(RequestRefused, match="need 1 blocks of 16 tokens and can never fit into 0"):
        World(Setup("hash", 16, (4, 0), (None, 8))).submit([1], 1)  # one layer group has blocks, the other none
    with pytest.raises(RequestRefused, match="need 1 blocks of 16 tokens and can never fit into 0"):
        World(Setup("hash", 16, (0,))).submit([1], 1)


def test_a_request_is_submitted_once():
    world = World(Setup())
    request = world.submit([1], 1)
    with pytest.raises(RequestRefused, match="request r0 was submitted before"):
        world.scheduler.submit(request)
    with pytest.raises(RequestRefused, match="request r0 was submitted before"):
        world.scheduler.submit(Request("r0", [1]))
    world.drain()
    world.scheduler.submit(Request("r0", [1], 1))  # the name is free again
    with pytest.raises(RequestRefused, match="request r0 was submitted before"):
        world.scheduler.submit(request)


def test_a_prompt_waits_until_all_of_it_fits_and_is_not_overtaken():
    """Chunked prefill would let the first chunk in, and give it up again and again."""
    world = World(Setup("none", 4, (8,), token_budget=8))
    world.submit([1] * 15, 9)
    world.submit([2] * 24, 2)  # six blocks
    world.submit([3] * 2, 2)  # would fit at once
    while not world.first_tokens[1:]:
        plan = world.step()
        assert not plan.preempted
    assert [r.id for r in world.first_tokens] == ["r0", "r1"]
    world.drain()
    assert world.scheduler.stats.preemptions == 0


@KINDS
def test_one_of_many_beside_a_stream_of_short_ones_is_served_in_its_turn(preemption):
    world = World(Setup("hash", 4, (12,), token_budget=8, preemption=preemption, swap_blocks=12))
    for index in range(30):
        world.submit([index] * (40 if index == 5 else 3), 4)
        world.step()
    world.drain()
    assert [r.id for r in world.first_tokens] == [f"r{i}" for i in range(30)]


# forks


@BOTH
@pytest.mark.parametrize(("length", "copies"), [(9, 2), (8, 0), (11, 2)])
def test_parallel_samples_share_the_prompt_and_copy_its_last_block_once_each(cache, length, copies):
    """Three answers to one prompt: of four blocks the last is shared by three; two write copies, one writes it."""
    world = World(Setup(cache, 4, (20,), token_budget=64))
    request = world.submit(list(range(length)), 4, n=3)
    plan = world.step()
    assert rows(plan) == [("r0", 0, length, 3)]
    assert len(request.sequences) == 3
    usage = world.scheduler.usage()[0]
    assert usage.used == -(-length // 4)  # shared, and nothing was copied yet
    plan = world.step()
    assert len(plan.copies[0]) == copies == world.scheduler.stats.copied_blocks
    last = [row.tables[0][length // 4] for row in plan.rows]
    assert len(set(last)) == 3 and {target for _, target in plan.copies[0]} <= set(last)
    assert len({source for source, _ in plan.copies[0]} - set(last)) == 0
    world.drain()
    assert len({tuple(s.output_ids) for s in request.sequences}) > 1


def test_a_child_that_writes_copies_one_block_and_its_parent_reads_the_old_one():
    scheduler = Scheduler(NoPrefixCache([BlockPool(8, 4)]), token_budget=16)
    parent = scheduler.submit(Request("r", [1, 2, 3, 4, 5], 8))
    scheduler.complete(scheduler.plan(), [[6, 7]])  # two tokens: a fork
    child = parent.request.sequences[1]
    assert parent.tables == child.tables == [[0, 1]] and (parent.tokens[-1], child.tokens[-1]) == (6, 7)
    plan = scheduler.plan()  # the parent is older and writes first, so the copy is its own
    assert plan.copies == [[(1, 2)]]
    assert [row.tables for row in plan.rows] == [((0, 2),), ((0, 1),)]
    pool = scheduler.cache.pools[0]
    assert [pool.references(block) for block in range(3)] == [2, 1, 1]
    scheduler.complete(plan, [[8], [9]])
    assert scheduler.plan().copies == [[]]  # once


@BOTH
def test_beams_fork_and_are_dropped(cache):
    """A beam search of two: the better continuation takes both beams, and no block stays behind."""
    world = World(Setup(cache, 2, (20,), token_budget=16))
    scheduler = world.scheduler
    first = scheduler.submit(Request("b", [1, 2, 3], 5))
    plan = scheduler.plan()
    assert {s.tokens[-1] for s in scheduler.complete(plan, [[10, 11]])} == {10, 11}
    plan = scheduler.plan()
    left = scheduler.complete(plan, [[], [12, 13]])  # the first beam lost, the second is continued twice
    assert [s.tokens for s in left] == [[1, 2, 3, 11, 12], [1, 2, 3, 11, 13]]
    assert first.finish_reason == "dropped" and first.tables == []
    plan = scheduler.plan()
    scheduler.complete(plan, [[], []])
    assert not scheduler.requests and scheduler.usage()[0].used == 0


def test_a_stop_token_ends_one_sequence_and_not_its_siblings():
    scheduler = Scheduler(HashChain([BlockPool(8, 4)]), token_budget=16)
    request = Request("r", [1, 2], 3, temperature=1.0, n=2, stop_ids=[9])
    scheduler.submit(request)
    assert len(scheduler.complete(scheduler.plan(), [[9, 5]])) == 2
    first, second = request.sequences
    assert (first.state, first.finish_reason, first.output_ids) == (State.FINISHED, "stop", [9])
    assert second.state is State.RUNNING and not request.finished
    scheduler.complete(scheduler.plan(), [[6]])
    scheduler.complete(scheduler.plan(), [[7]])
    assert second.finish_reason == "length" and request.finished and not scheduler.requests
    assert scheduler.stats.finished == {"stop": 1, "length": 1}


def test_answers_with_stop_tokens_end_where_they_should():
    world = World(Setup("hash", 4, (40,), token_budget=32, max_running=20))
    requests = [world.submit([index, index], 12, stop=[STOP]) for index in range(8)]
    world.drain()
    assert {r.sequences[0].finish_reason for r in requests} == {"stop", "length"}


# cancels and failures


@BOTH
@KINDS
def test_cancel_waiting_running_and_swapped(cache, preemption):
    world = World(Setup(cache, 2, (7,), token_budget=16, max_running=2, preemption=preemption, swap_blocks=9))
    requests = [world.submit([index, 2, 3, 4], 6) for index in range(3)]
    while not world.step().preempted:
        pass
    for request in requests[1:]:  # one was preempted, one never ran
        world.cancel(request)
        world.check()
        assert request.finished and request.sequences[0].finish_reason == "cancelled"
    world.drain()
    assert requests[0].sequences[0].finish_reason == "length"


def test_cancelling_twice_or_what_is_not_there_is_refused():
    world = World(Setup())
    request = world.submit([1, 2, 3], 5)
    world.step()
    world.cancel(request)
    for name in "r0", "nobody":
        with pytest.raises(ValueError, match=f"request {name} is not there: it was never submitted, or is finished"):
            world.scheduler.cancel(name)
    world.check()


def test_a_cancel_within_a_step_takes_effect_at_once_and_what_was_computed_is_not_kept():
    world = World(Setup("hash", 4, (16,), token_budget=16))
    request = world.submit(list(range(9)), 5)
    plan = world.scheduler.plan()
    world.cancel(request)
    assert world.scheduler.complete(plan, [[1]]) == []
    assert world.cache.match(list(range(9)), NOBODY).num_blocks == 0
    world.check()


def test_plans_are_completed_one_by_one():
    scheduler = Scheduler(NoPrefixCache([BlockPool(8, 4)]), token_budget=16)
    scheduler.submit(Request("r", [1, 2], 3))
    plan = scheduler.plan()
    with pytest.raises(ValueError, match="the last plan is still open"):
        scheduler.plan()
    with pytest.raises(ValueError, match="with 1 lists of tokens: got 2"):
        scheduler.complete(plan, [[1], [2]])
    scheduler.complete(plan, [[1]])
    for call in (lambda: scheduler.complete(plan, [[1]]), lambda: scheduler.abandon(plan)):
        with pytest.raises(ValueError, match="last plan"):
            call()


@KINDS
def test_a_step_that_failed_ends_its_own_sequences_only(preemption):
    world = World(Setup("hash", 2, (6,), token_budget=16, max_running=2, preemption=preemption, swap_blocks=9))
    requests = [world.submit([index, 2, 3, 4], 6) for index in range(3)]
    plan = world.scheduler.plan()
    while not plan.preempted:
        world.run(plan)
        world.scheduler.complete(plan, [world.draw(row) for row in plan.samples])
        plan = world.scheduler.plan()
    world.scheduler.abandon(plan)
    world.check()
    assert requests[0].sequences[0].finish_reason == "error"
    # what was to be swapped out is lost with the step; what is recomputed is not
    assert (requests[1].sequences[0].finish_reason == "error") == (preemption == "swap")
    world.drain()
    assert requests[2].sequences[0].finish_reason == "length"


@BOTH
@KINDS
def test_a_sequence_that_failed_ends_alone_and_is_not_found(cache, preemption):
    """Of two answers to one prompt one fails within a step; its sibling and the others go on."""
    world = World(Setup(cache, 2, (14,), token_budget=16, preemption=preemption, swap_blocks=9))
    first, second = world.submit([1, 2, 3], 6, n=2), world.submit([4, 5, 6, 7], 4)
    world.step()
    plan = world.scheduler.plan()
    world.run(plan)
    failed = first.sequences[1]
    known = list(failed.tokens)
    world.scheduler.fail(failed, "logits are not finite")
    assert failed not in world.scheduler.complete(plan, [world.draw(row) for row in plan.samples])
    world.check()
    assert failed.error == "request r0: logits are not finite" and failed.tokens == known
    assert world.cache.match([*known, 0], NOBODY).num_blocks == 1  # the prompt's; the one filled in this step is not
    world.drain()
    assert [s.finish_reason for s in first.sequences] == ["length", "error"] and second.finished
    assert first.sequences[0].output_ids == expected_output(first, 0)
    assert world.scheduler.stats.finished == {"error": 1, "length": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(token_budget=0), "token_budget, max_running are whole numbers >= 1, got 0, 64"),
        (dict(max_running=0), "got 512, 0"),
        (dict(preemption="drop"), "preemption is 'recompute' or 'swap', got 'drop'"),
    ],
)
def test_options(options, words):
    with pytest.raises(ValueError, match=words):
        Scheduler(NoPrefixCache([BlockPool(1, 1)]), **options)


# windows


def test_blocks_behind_a_window_are_given_back_and_full_layers_keep_theirs():
    world = World(Setup("none", 2, (20, 6), (None, 4), token_budget=4))
    world.submit(list(range(8)), 9)
    full, sliding = [], []
    while world.scheduler.requests:
        row = world.step().rows[0]
        full.append(len(row.tables[0]))
        sliding.append([index for index, block in enumerate(row.tables[1]) if block != GONE])
    assert full == [2, 4, 5, 5, 6, 6, 7, 7, 8, 8]
    # the chunk of positions 4 to 7 reads from position 1; the token at position 8 from 5, at 9 from 6
    assert sliding[:5] == [[0, 1], [0, 1, 2, 3], [2, 3, 4], [3, 4], [3, 4, 5]]


def test_a_window_lets_a_long_request_into_a_small_pool():
    """100 tokens of 2 per block are 50 blocks; a window of 6 and steps of 4 never need more than six."""
    world = World(Setup("none", 2, (6,), (6,), token_budget=4))
    assert world.tables.most_blocks(100) == [5]
    request = world.submit(list(range(80)), 20)
    world.drain()
    assert request.finished
    with pytest.raises(RequestRefused, match="need 5 blocks of 2 tokens and can never fit into 4"):
        World(Setup("none", 2, (4,), (6,), token_budget=4)).submit(list(range(80)), 20)


@BOTH
@KINDS
def test_windows_under_pressure(cache, preemption):
    setup = Setup(cache, 3, (16, 8), (None, 4), token_budget=6, preemption=preemption, swap_blocks=30)
    world = World(setup)
    for index in range(6):
        world.submit([*range(12), index], 9, n=1 + index % 2)
    world.drain()
    assert world.scheduler.stats.preemptions > 0


# counters and times


def test_usage_counts_shared_blocks_once_and_names_the_waste():
    world = World(Setup("hash", 16, (10,), token_budget=64))
    first = world.submit(list(range(55)), 9)
    world.step()
    world.submit([*range(48), 99, 99], 9)
    plan = world.scheduler.plan()
    usage = world.scheduler.usage()[0]  # blocks 0 to 3 hold 55 and then 56 tokens; block 4 is taken and empty
    assert (usage.used, usage.cached, usage.free) == (5, 0, 5)
    assert (usage.internal_tokens, usage.reserved_tokens) == (9, 16) and usage.waste == 25 / 80
    world.run(plan)
    world.scheduler.complete(plan, [[1], [1]])
    usage = world.scheduler.usage()[0]
    assert (usage.internal_tokens, usage.reserved_tokens) == (8 + 14, 0)
    world.cancel(first)
    usage = world.scheduler.usage()[0]
    assert (usage.used, usage.cached, usage.free, usage.internal_tokens) == (4, 0, 6, 14)


def test_times_are_taken_from_the_clock():
    times = iter(range(0, 1000, 10))
    scheduler = Scheduler(NoPrefixCache([BlockPool(8, 4)]), token_budget=4, clock=lambda: next(times))
    sequence = scheduler.submit(Request("r", list(range(6)), 3))  # 0
    scheduler.complete(scheduler.plan(), [])  # scheduled at 10
    for token in 1, 2, 3:  # the first at 20, the end at 30: tokens in between need no time
        scheduler.complete(scheduler.plan(), [[token]])
    assert (sequence.queue_s, sequence.ttft_s, sequence.finished_s, sequence.tpot_s) == (10, 20, 30, 5.0)
    assert scheduler.stats.percentiles([50]) == {"ttft_s": {50: 20}, "tpot_s": {50: 5.0}, "queue_s": {50: 10}}
