"""The pool alone: exact orders, refusals that change nothing, and books that agree after any operations."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engine.block_pool import BlockPool, OutOfBlocks, blocks_for, first_needed


def counts(pool):
    return pool.free_count, pool.cached_count, pool.used_count


def test_blocks_are_handed_out_from_zero_and_come_back_in_reverse():
    pool = BlockPool(6, 16)
    first, second = pool.allocate(3), pool.allocate(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    pool.free(first)
    assert pool.waiting() == [5, 2, 1, 0]  # the tail of a table goes first, its head last
    pool.free(second)
    assert pool.allocate(6) == [5, 2, 1, 0, 4, 3]
    pool.check()


def test_a_block_is_used_cached_or_free():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.register(blocks[0], "text")
    assert counts(pool) == (2, 0, 2)
    pool.free(blocks)
    assert counts(pool) == (3, 1, 0)  # nobody holds block 0, and it can still be found
    assert pool.find("text") == 0 and pool.key_of(0) == "text" and pool.references(0) == 0
    pool.share([0])
    assert counts(pool) == (3, 0, 1) and pool.references(0) == 1
    assert pool.waiting() == [2, 3, 1]  # it left from the middle of the queue
    pool.check()


def test_a_key_is_forgotten_when_its_block_is_used_again_and_not_before():
    pool = BlockPool(2, 16)
    a, b = pool.allocate(2)
    pool.register(a, "a"), pool.register(b, "b")
    pool.free([a, b])
    assert (pool.find("a"), pool.find("b")) == (0, 1)
    assert pool.allocate(1) == [1]  # let go first
    assert (pool.find("a"), pool.find("b")) == (0, None) and pool.key_of(1) is None
    pool.register(1, "c")
    assert pool.find("c") == 1
    pool.check()


def test_a_shared_block_outlives_its_first_owner():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert pool.references(block) == 1 and pool.used_count == 1
    pool.free([block])
    assert counts(pool) == (2, 0, 0)


def test_two_blocks_with_equal_content_are_found_one_after_the_other():
    pool = BlockPool(3, 16)
    a, b = pool.allocate(2)
    pool.register(a, "same"), pool.register(b, "same")
    assert pool.find("same") == a
    pool.free([a])
    assert pool.allocate(2) == [2, a]  # a holds something else now
    assert pool.find("same") == b
    pool.check()


def test_touching_a_block_moves_it_to_the_end_of_the_queue():
    pool = BlockPool(3, 16)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, block)
    pool.free(blocks)
    assert pool.waiting() == [2, 1, 0]
    pool.share([2])
    pool.free([2])
    assert pool.waiting() == [1, 0, 2]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pool: pool.allocate(4), "4 blocks asked for, 3 of 5 available"),
        (lambda pool: pool.allocate(-1), "must be >= 0"),
        (lambda pool: pool.free([0, 0]), "block 0 freed 2 times with 1 references"),
        (lambda pool: pool.free([1, 2, 0]), "block 2 freed 1 times with 0 references"),
        (lambda pool: pool.free([5]), "no block 5: the pool has blocks 0 to 4"),
        (lambda pool: pool.free([-1]), "no block -1"),
        (lambda pool: pool.share([0, 3]), "block 3 is free and holds nothing"),
        (lambda pool: pool.register(4, "key"), "block 4 is not in use"),
        (lambda pool: pool.register(1, "other"), "block 1 is registered under another key"),
        (lambda pool: pool.references(9), "no block 9"),
    ],
)
def test_refusals_change_nothing(call, words):
    pool = BlockPool(5, 16)
    pool.allocate(2)
    pool.register(1, "key")
    before = pool.waiting(), counts(pool), [pool.references(b) for b in range(5)], pool.find("key")
    with pytest.raises(ValueError, match=words):
        call(pool)
    assert before == (pool.waiting(), counts(pool), [pool.references(b) for b in range(5)], pool.find("key"))
    assert pool.find("other") is None
    pool.check()


def test_out_of_blocks_has_a_name_of_its_own():
    with pytest.raises(OutOfBlocks):
        BlockPool(0, 1).allocate(1)
    assert BlockPool(0, 1).allocate(0) == []


def test_a_pool_needs_sizes():
    for sizes in (-1, 16), (4, 0):
        with pytest.raises(ValueError, match="num_blocks >= 0 and block_size >= 1"):
            BlockPool(*sizes)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (55, 4)])
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens, 16) == blocks


def test_first_needed_block_of_a_window():
    # window 4, blocks of 2: the query at position 6 sees positions 3 to 6, of which 3 lies in block 1
    assert [first_needed(position, 4, 2) for position in range(9)] == [0, 0, 0, 0, 0, 1, 1, 2, 2]
    assert first_needed(1000, None, 2) == 0
    assert [first_needed(position, 1, 1) for position in range(3)] == [0, 1, 2]


@given(seed=st.integers(0, 10**6), size=st.integers(1, 12))
@settings(max_examples=60)
def test_books_agree_after_any_operations(seed, size):
    """allocate, share, register and free at random, beside a plain list of who owns what."""
    rng, pool, owned, names = random.Random(seed), BlockPool(size, 4), [], 0
    for _ in range(80):
        chance = rng.random()
        if chance < 0.35:
            count = rng.randint(0, size)
            if count > size - len(set(owned)):
                with pytest.raises(OutOfBlocks):
                    pool.allocate(count)
            else:
                owned += pool.allocate(count)
        elif chance < 0.55 and owned:
            pool.share([rng.choice(owned)])
            owned.append(next(b for b in range(size) if pool.references(b) != owned.count(b)))
        elif chance < 0.7 and owned:
            block = rng.choice(owned)
            if pool.key_of(block) is None:
                pool.register(block, names := names + 1)
        else:
            some = [owned.pop(rng.randrange(len(owned))) for _ in range(rng.randint(0, len(owned)))]
            pool.free(some)
        assert [pool.references(b) for b in range(size)] == [owned.count(b) for b in range(size)]
        assert pool.free_count + pool.cached_count + pool.used_count == size
        pool.check()
