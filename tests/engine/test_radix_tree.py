"""The tree alone: what is shared, where nodes split, what locks protect, and who is evicted first."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engine.radix_tree import RadixTree


def put(tree, tokens, values, namespace=None):
    """Insert a whole text, as a sequence does that computed all of it, and hold its path."""
    root, _ = tree.match([], namespace)
    node, known = tree.insert(root, tokens, values)
    tree.lock(node)
    return node, known


def picture(tree):
    """Every node as (its tokens, its values, locks), parents first, siblings in order of their tokens."""

    def walk(node):
        for child in sorted(node.children.values(), key=lambda n: n.tokens):
            yield list(child.tokens), list(child.values), child.locks
            yield from walk(child)

    return [row for root in tree._roots.values() for row in walk(root)]


def test_texts_that_part_inside_a_node_split_it():
    tree = RadixTree(2)
    put(tree, [1, 2, 3, 4, 5, 6], "abc")
    assert picture(tree) == [([1, 2, 3, 4, 5, 6], ["a", "b", "c"], 1)]
    _, known = put(tree, [1, 2, 3, 4, 7, 8], "xyd")
    assert known == ["a", "b"]  # what the tree has stays: x and y are not needed
    assert picture(tree) == [([1, 2, 3, 4], ["a", "b"], 2), ([5, 6], ["c"], 1), ([7, 8], ["d"], 1)]
    assert (tree.protected, tree.evictable) == (4, 0)


def test_a_match_is_whole_blocks_and_ends_at_a_node():
    tree = RadixTree(2)
    put(tree, [1, 2, 3, 4, 5, 6], "abc")
    for tokens, values in [([1], ""), ([1, 2, 3], "a"), ([1, 2, 3, 9, 5, 6], "a"), ([1, 2, 3, 4, 5], "ab"), ([9], "")]:
        node, found = tree.match(tokens)
        assert found == list(values)
        assert node.tokens == tuple(tokens[len(values) * 2 - len(node.tokens) : len(values) * 2])
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8])[1] == ["a", "b", "c"]


def test_a_split_keeps_the_paths_of_those_who_read_on():
    """The node that a sequence holds keeps its end, so what it computes next is appended at the right place."""
    tree = RadixTree(1)
    end, _ = put(tree, [1, 2, 3, 4], "abcd")
    tree.match([1, 2, 9])  # splits above it
    assert end.tokens == (3, 4)
    longer, known = tree.insert(end, [5], ["e"])
    assert longer is end and known == []
    assert tree.match([1, 2, 3, 4, 5])[1] == list("abcde")
    tree.unlock(end)
    assert (tree.protected, tree.evictable) == (0, 5)


def test_one_text_stays_one_node_while_nobody_else_reads_it():
    tree = RadixTree(1)
    end, _ = put(tree, [1], "a")
    for token in range(2, 9):
        assert tree.insert(end, [token], [token])[0] is end
    assert len(list(tree.nodes())) == 1 and tree.protected == 8
    tree.lock(end)  # a fork reads it too: now what follows belongs to one of them
    child, _ = tree.insert(end, [9], [9])
    assert child is not end and child.parent is end


def test_locks_protect_the_whole_path():
    tree = RadixTree(1)
    end, _ = put(tree, [1, 2], "ab")
    other, _ = put(tree, [1, 3], "xc")
    tree.unlock(other)
    assert (tree.protected, tree.evictable) == (2, 1)
    assert tree.evict(10) == ["c"]  # a is read through its child
    tree.unlock(end)
    assert (tree.protected, tree.evictable) == (0, 2)
    with pytest.raises(ValueError, match="unlocked twice"):
        tree.unlock(end)
    assert tree.evict(10) == ["b", "a"] and list(tree.nodes()) == []


def test_eviction_takes_ends_of_the_least_recently_used_leaf():
    tree = RadixTree(1)
    for tokens, values in ([1, 2, 3], "abc"), ([1, 4, 5], "ade"), ([6, 7], "fg"):
        tree.unlock(put(tree, tokens, values)[0])
    tree.match([1, 2, 3])  # used again: 4 5 is now the oldest, then 6 7
    assert tree.evict(1) == ["e"]  # only as much as is needed, from the end
    assert tree.match([1, 4, 5])[1] == ["a", "d"]
    assert tree.evict(3) == ["g", "f", "c"]
    assert tree.evict(1) == ["b"]
    assert tree.evict(9) == ["d", "a"]  # a became a leaf when its last child went
    assert (tree.protected, tree.evictable) == (0, 0)


def test_namespaces_share_nothing_and_leave_nothing_behind():
    tree = RadixTree(1)
    ends = [put(tree, [1, 2], values, namespace)[0] for namespace, values in ((None, "ab"), ("x", "cd"))]
    assert tree.match([1, 2], None)[1] == ["a", "b"] and tree.match([1, 2], "x")[1] == ["c", "d"]
    assert tree.match([1, 2], "y")[1] == []
    for end in ends:
        tree.unlock(end)
    assert sorted(tree.evict(9)) == ["a", "b", "c", "d"] and tree._roots == {}


def test_a_locked_root_survives_the_eviction_of_all_it_held():
    tree = RadixTree(1)
    root, _ = tree.match([])
    tree.lock(root)  # a sequence that has not filled a block yet
    tree.unlock(put(tree, [1], "a")[0])
    assert tree.evict(1) == ["a"]
    tree.insert(root, [2], ["b"])
    assert tree.match([2])[1] == ["b"]


def test_values_must_fit_their_tokens():
    tree = RadixTree(2)
    with pytest.raises(ValueError, match="3 tokens are not 1 blocks of 2"):
        tree.insert(tree.match([])[0], [1, 2, 3], ["a"])


@given(seed=st.integers(0, 10**6), size=st.integers(1, 3))
@settings(max_examples=80)
def test_it_answers_like_a_plain_dictionary_of_prefixes(seed, size):
    """Insert, match, lock, unlock, evict at random, beside one dictionary entry per known prefix."""
    rng, tree, known, held, fresh = random.Random(seed), RadixTree(size), {}, [], 0
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(size * rng.randint(0, 5))]
        prefixes = [(tuple(tokens[: (i + 1) * size])) for i in range(len(tokens) // size)]
        longest = [known[p] for p in prefixes if p in known]  # prefixes of a known one are known: it is a tree
        chance = rng.random()
        if chance < 0.4:
            values = [fresh := fresh + 1 for _ in prefixes]
            end, old = put(tree, tokens, values)
            assert old == longest
            known.update({p: known.get(p, v) for p, v in zip(prefixes, values, strict=True)})
            held.append((end, prefixes))
        elif chance < 0.6:
            assert tree.match(tokens)[1] == longest
        elif chance < 0.85 and held:
            tree.unlock(held.pop(rng.randrange(len(held)))[0])
        else:
            protected = {known[p] for _, prefixes in held for p in prefixes}
            gone = tree.evict(rng.randint(0, 4))
            assert not protected & set(gone)
            known = {p: v for p, v in known.items() if v not in gone}
        assert tree.protected == len({p for _, prefixes in held for p in prefixes})
        assert tree.protected + tree.evictable == len(known)
