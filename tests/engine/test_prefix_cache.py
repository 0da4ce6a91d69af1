"""Prefix caches: what keys say, what may be shared, how much of a prompt may be found, and what windows ask for."""

import struct
import subprocess
import sys

import pytest

from engine.world import CACHES, Setup, World
from kvlab.engine.block_pool import GONE, BlockPool
from kvlab.engine.block_tables import BlockTables
from kvlab.engine.prefix_cache import HashChain, NoPrefixCache, next_key, root_key, sha256
from kvlab.engine.radix_cache import RadixCache
from kvlab.engine.request import NOBODY, Identity, Request, Sequence
from kvlab.engine.scheduler import Scheduler

BOTH = pytest.mark.parametrize("cache", ["hash", "radix"])


# keys


def test_a_key_is_sha256_of_the_parents_key_and_token_ids_of_eight_bytes():
    root = root_key(NOBODY)
    assert root.digest == sha256(b"[null, 0, null]")
    first = next_key(root, [65, 1])
    assert first.digest == sha256(root.digest + struct.pack("<qq", 65, 1))
    second = next_key(first, [2, 3])
    assert second.digest == sha256(first.digest + bytes([2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]))


def test_keys_differ_in_every_token_the_parent_and_the_identity():
    root = root_key(NOBODY)
    keys = [
        next_key(root, [1, 2]), next_key(root, [1, 3]), next_key(root, [2, 2]), next_key(root, [1]),
        next_key(root, [65, 2]), next_key(root, [321, 2]), next_key(root, [65 + 2**32, 2]),
        next_key(next_key(root, [1, 2]), [1, 2]), next_key(next_key(root, [9, 9]), [1, 2]),
        next_key(root_key(Identity("a")), [1, 2]), next_key(root_key(Identity("b")), [1, 2]),
        next_key(root_key(Identity("a", 1)), [1, 2]), next_key(root_key(Identity(tenant="a")), [1, 2]),
    ]  # fmt: skip
    assert len({key.digest for key in keys}) == len(set(keys)) == len(keys)
    assert next_key(root, [1, 2]) == keys[0] and hash(next_key(root, [1, 2])) == hash(keys[0])


def test_another_process_makes_the_same_keys():
    """Python's own hash of a string does not have this property: it depends on PYTHONHASHSEED."""
    code = (
        "from kvlab.engine.prefix_cache import *; from kvlab.engine.request import Identity\n"
        "print(next_key(next_key(root_key(Identity('a', 1, 'salt')), [1, 2]), [3]).digest.hex(), hash('a'))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]  # fmt: skip
    key = next_key(next_key(root_key(Identity("a", 1, "salt")), [1, 2]), [3])
    assert runs[0][0] == runs[1][0] == key.digest.hex() and runs[0][1] != runs[1][1]


def test_keys_that_collide_are_equal_only_where_all_tokens_are():
    def stub(data):
        return b"the same for all"

    root = root_key(NOBODY, stub)
    a, b = next_key(root, [1], stub), next_key(root, [2], stub)
    assert a.digest == b.digest and hash(a) == hash(b) and a != b
    assert next_key(a, [5], stub) != next_key(b, [5], stub)  # the same block after another parent
    assert next_key(a, [5], stub) == next_key(next_key(root, [1], stub), [5], stub)
    assert next_key(root_key(Identity("x"), stub), [1], stub) != a
    assert a != "the same for all"


def test_a_chain_of_many_blocks_is_compared_printed_and_dropped():
    chains = []
    for _ in range(2):
        key = root_key(NOBODY)
        for token in range(20_000):
            key = next_key(key, [token])
        chains.append(key)
    assert chains[0] == chains[1] and len(repr(chains[0])) < 200


def test_collisions_miss():
    """With a hash that says nothing, everything collides: what is served must still be right, and equal text found."""
    pools = [BlockPool(40, 2)]
    world = World(Setup(block_size=2, blocks=(40,), token_budget=64))
    world.cache = HashChain(pools, (None,), digest=lambda data: b"")
    world.scheduler = Scheduler(world.cache, token_budget=64)
    world.tables = world.scheduler.tables
    for prompt in [1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [3, 4, 1, 2, 5], [7, 7, 3, 4, 5]:
        world.submit(prompt, 3)
        world.drain()
    world.submit([1, 2, 3, 4, 5], 3)
    before = world.scheduler.stats.hit_tokens
    world.drain()  # reads back every token of every hit
    assert (before, world.scheduler.stats.hit_tokens) == (2, 6)


# what may be shared


@BOTH
def test_identities_never_share_a_block(cache):
    """No adapter, A, B, A loaded again, and two tenants: six disjoint sets of blocks, each found by its own only."""
    identities = [
        Identity(), Identity("A"), Identity("B"), Identity("A", 1), Identity(tenant="t"), Identity("A", tenant="t"),
    ]  # fmt: skip
    world = World(Setup(cache, 4, (64,), token_budget=64))
    prompt, tables = list(range(13)), []
    for identity in identities:
        world.submit(prompt, 1, identity=identity)
        plan = world.step()
        assert plan.rows[0].start == 0
        tables.append(set(plan.rows[0].tables[0][:3]))
    assert len(set.union(*tables)) == 3 * len(identities)
    for identity, blocks in zip(identities, tables, strict=True):
        world.submit(prompt, 1, identity=identity)
        row = world.step().rows[0]
        assert row.start == 12 and set(row.tables[0][:3]) == blocks


@BOTH
@pytest.mark.parametrize(("length", "found"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_a_known_prompt_still_computes_its_last_token(cache, length, found):
    """The logits of the last token are needed, so at most length − 1 tokens are found, in whole blocks of 16."""
    world = World(Setup(cache, 16, (12,), token_budget=64))
    for hit in 0, found, found:  # the block computed again can be found again
        world.submit(list(range(length)), 1)
        plan = world.step()
        assert (plan.rows[0].start, plan.rows[0].count) == (hit, length - hit)
    assert world.scheduler.stats.hit_tokens == 2 * found and world.scheduler.stats.recovered_tokens == 0


@BOTH
def test_a_block_is_found_only_after_its_step(cache):
    """Two equal prompts in one step: the second must not read what is not there yet. A third one may."""
    world = World(Setup(cache, 4, (32,), token_budget=64))
    prompt = list(range(9))
    for _ in range(2):
        world.submit(prompt, 2)
    plan = world.step()
    assert [row.start for row in plan.rows] == [0, 0]
    world.submit(prompt, 2)
    assert world.step().rows[-1].start == 8


@BOTH
def test_chunks_of_a_running_prompt_are_found_by_others(cache):
    world = World(Setup(cache, 4, (32,), token_budget=8))
    world.submit(list(range(30)), 1)
    world.step()
    assert world.cache.match(list(range(30)), NOBODY).num_blocks == 2
    world.step()
    assert world.cache.match(list(range(30)), NOBODY).num_blocks == 4
    assert world.cache.match([*range(5), 99, 99, 99, 99, 99], NOBODY).num_blocks == 1


@BOTH
def test_a_block_that_only_drafts_fill_is_not_found_and_is_written_again(cache):
    """A step may store tokens that are not verified yet: what is known of them is what `stored` says afterwards."""
    tables = BlockTables(CACHES[cache]([BlockPool(8, 4)]), longest_step=8)
    sequence = Sequence(Request("r", range(6)), 0, (0, 0), list(range(6)))

    def verify(*tokens):
        sequence.tokens += tokens
        sequence.stored = len(sequence.tokens)
        tables.register(sequence)

    tables.attach_prefix(sequence)
    tables.extend(sequence, 6)
    verify()
    assert tables.extend(sequence, 4) == [[]]  # one token and three drafts, in slots 6 to 9
    blocks = list(sequence.tables[0])
    assert len(blocks) == 3
    verify(6)  # the drafts 7, 8, 9 are wrong
    assert tables.cache.match(range(10), NOBODY).num_blocks == 1
    assert tables.extend(sequence, 1) == [[]] and sequence.tables == [blocks]
    verify(70)
    assert tables.cache.match(range(10), NOBODY).num_blocks == 1
    assert tables.cache.match([*range(7), 70, 0], NOBODY).tables == [blocks[:2]]
    tables.release(sequence)
    assert tables.pools[0].used_count == (2 if cache == "radix" else 0)  # the tree's own


def test_equal_blocks_computed_at_once_stay_two_in_a_chain_and_become_one_in_a_tree():
    used = {}
    for cache in "hash", "radix":
        world = World(Setup(cache, 4, (32,), token_budget=64))
        for _ in range(2):
            world.submit(list(range(9)), 3)
        world.step()
        used[cache] = world.scheduler.usage()[0].used
        world.drain()
    assert used == {"hash": 6, "radix": 4}


def test_without_a_prefix_cache_nothing_is_found():
    world = World(Setup("none", 4, (32,), token_budget=64))
    for _ in range(2):
        world.submit(list(range(9)), 2)
        world.drain()
    assert world.scheduler.stats.hit_tokens == 0 and world.cache.cached_count(0) == 0


@BOTH
def test_an_answer_is_found_by_the_next_turn_of_its_conversation(cache):
    """All but the last sampled token has keys and values; full blocks of the answer are prefix of the next prompt."""
    world = World(Setup(cache, 4, (32,), token_budget=64))
    first = world.submit(list(range(6)), 7)
    world.drain()
    tokens = first.sequences[0].tokens
    assert len(tokens) == 13  # 12 are stored: three full blocks
    world.submit([*tokens, 5, 5], 1)
    assert world.step().rows[0].start == 12


# who is given up


@BOTH
def test_the_least_recently_used_text_is_given_up_from_its_end(cache):
    world = World(Setup(cache, 2, (8,), token_budget=64))
    old, new = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    for prompt in old, new, old:
        world.submit(prompt, 1)
        world.drain()
    world.submit([9] * 14, 1)  # seven of eight blocks, and four of them are known: all goes but the head of `old`
    world.drain()
    assert [world.cache.match(prompt, NOBODY).num_blocks for prompt in (old, new)] == [1, 0]


@BOTH
def test_blocks_in_use_are_never_given_up(cache):
    world = World(Setup(cache, 2, (6,), token_budget=64))
    world.submit([1, 1, 1, 1, 1], 4)
    world.step()
    world.submit([1, 1, 1, 1, 2, 2, 2, 2], 2)
    world.step()
    assert world.scheduler.running[1].tables[0][:2] == world.scheduler.running[0].tables[0][:2]
    world.drain()


@BOTH
def test_a_hit_counts_among_the_blocks_that_its_request_needs(cache):
    """Four blocks: a prompt of four finds two of them cached, and must not get them again as fresh ones."""
    world = World(Setup(cache, 2, (4,), token_budget=64))
    world.submit([1, 1, 1, 1, 1], 1)
    world.drain()
    world.submit([1, 1, 1, 1, 5, 5, 5, 5], 1)
    row = world.step().rows[0]
    assert row.start == 4 and len(set(row.tables[0])) == 4


# windows


def test_groups_agree_on_the_longest_prefix_that_each_can_continue():
    cache = NoPrefixCache([BlockPool(9, 2)] * 3, (None, 4, 1))
    full = [0, 1, 2, 3, 4]
    # window 4 in blocks of 2: the last two blocks are read; window 1: none
    assert cache.agree([full, full, full]) == 5
    assert cache.agree([full, [GONE, GONE, GONE, 3, 4], [GONE] * 5]) == 5
    assert cache.agree([full, [GONE, 1, 2, GONE, 4], [GONE] * 5]) == 3
    assert cache.agree([full, [GONE, 1, GONE, 3, GONE], [GONE] * 5]) == 0
    assert cache.agree([[0, 1, GONE, 3, 4], [GONE, GONE, 2, 3, 4], full]) == 0
    assert cache.agree([[0, 1, GONE, 3, 4], [0, GONE, 2, 3, 4], full]) == 1
    assert cache.agree([[], [], []]) == 0


@BOTH
def test_a_hit_names_only_the_blocks_that_a_window_still_reads(cache):
    world = World(Setup(cache, 2, (20, 20), (None, 3), token_budget=64))
    world.submit(list(range(9)), 1)
    world.drain()
    hit = world.cache.match(list(range(9)), NOBODY)
    assert hit.num_blocks == 4
    assert hit.tables[0] == [0, 1, 2, 3] and hit.tables[1] == [GONE, GONE, GONE, 3]
    world.submit(list(range(9)), 3)
    assert world.step().rows[0].start == 8
    world.drain()


@BOTH
def test_a_window_that_lost_its_blocks_shortens_the_hit_for_all_groups(cache):
    world = World(Setup(cache, 2, (40, 7), (None, 5), token_budget=4))
    world.submit(list(range(20)), 1)
    world.drain()
    longest = world.cache.match(list(range(20)), NOBODY).num_blocks
    assert longest == 9
    other = world.submit([50 + i for i in range(20)], 1)  # takes the group's blocks of the first text
    world.drain()
    assert other.finished and world.cache.match(list(range(20)), NOBODY).num_blocks < longest
    world.submit(list(range(20)), 2)
    world.drain()


def test_a_cache_needs_one_pool_per_group_and_one_block_size():
    for kind in CACHES.values():
        for pools, windows in ([], ()), ([BlockPool(1, 2)], (None, 4)), ([BlockPool(1, 2), BlockPool(1, 3)], (None, 4)):
            with pytest.raises(ValueError, match="one pool per layer group, of one block size"):
                kind(pools, windows)


def test_a_radix_cache_gives_nothing_up_for_what_can_not_be_had():
    pool = BlockPool(4, 1)
    cache = RadixCache([pool])
    scheduler = Scheduler(cache, token_budget=8)
    scheduler.submit(Request("a", [1, 2, 3], 1))
    scheduler.complete(scheduler.plan(), [[7]])
    assert cache.cached_count(0) == 3 and pool.free_count == 1
    with pytest.raises(ValueError, match="5 blocks asked for, 1 of 4 available"):
        cache.allocate(0, 5)
    assert cache.cached_count(0) == 3
