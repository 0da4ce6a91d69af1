"""A radix tree over token ids: one path per known text, shared as far as the texts agree (Zheng et al. 2024, SGLang).

root                       An edge and the node below it are one `Node`: it holds the tokens of one or
 └ [1 2 3 4]  a b          more blocks, and one value per block. Texts that part inside a node split it.
    ├ [5 6]   c            Here with blocks of two tokens: 1 2 3 4 5 6 has the values a b c,
    └ [7 8]   d            and 1 2 3 4 7 8 has a b d.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """Tokens of whole blocks, their values, and what follows: the first block of a child's tokens leads to it."""

    tokens: tuple[int, ...]
    values: list
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    locks: int = 0  # readers of this node or of one below it
    last_used: int = 0


class RadixTree:
    """Finds the longest known prefix of a text, in whole blocks of `block_size` tokens.

    Whoever reads a path locks its last node, which protects all nodes up to the root. What nobody reads is given
    up from the leaves, the least recently used first. `protected` and `evictable` count the values of both kinds.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.protected = self.evictable = 0
        self._roots: dict[Hashable, Node] = {}  # one per namespace: what they hold is never shared
        self._clock = 0

    def match(self, tokens: Sequence[int], namespace: Hashable = None) -> tuple[Node, list]:
        """Return where the longest known prefix of `tokens` ends, and its values. Splits a node to end there."""
        root = self._roots.setdefault(namespace, Node((), [], None))
        return self._descend(root, tokens)

    def insert(self, node: Node, tokens: Sequence[int], values: Sequence) -> tuple[Node, list]:
        """Add one value per block of `tokens`, continuing the path that ends with `node`, locked by the caller.

        What is known already keeps its values. Returns where the longer path ends, and the values that were known.
        """
        if len(tokens) != len(values) * self.block_size:
            raise ValueError(f"{len(tokens)} tokens are not {len(values)} blocks of {self.block_size}")
        end, known = self._descend(node, tokens)
        if len(known) == len(values):
            return end, known
        tokens, values = tuple(tokens[len(known) * self.block_size :]), list(values[len(known) :])
        if end is node and node.parent and not node.children and node.locks == 1:
            self._extend(node, tokens, values)  # nobody else's path ends here: one text stays one node
            return node, known
        child = Node(tokens, values, parent=end, last_used=self._clock)
        end.children[tokens[: self.block_size]] = child
        self.evictable += len(values)
        return child, known

    def lock(self, node: Node) -> None:
        """Protect a path, from its last node up to the root, once more."""
        while node:
            if not node.locks:
                self.evictable -= len(node.values)
                self.protected += len(node.values)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Take one lock of a path away. Raises ValueError where there is none."""
        if not node.locks:
            raise ValueError("this path is not locked: it was unlocked twice")
        while node:
            node.locks -= 1
            if not node.locks:
                self.protected -= len(node.values)
                self.evictable += len(node.values)
            node = node.parent

    def evict(self, count: int) -> list:
        """Forget up to `count` values, from the ends of the least recently used leaves, and return them."""
        evicted = []
        leaves = [node for node in self.nodes() if not node.children and not node.locks]
        while leaves and len(evicted) < count:
            leaf = min(leaves, key=lambda node: node.last_used)
            evicted += self._cut(leaf, count - len(evicted))
            if not leaf.values:
                leaves.remove(leaf)
                if leaf.parent.parent and not leaf.parent.children and not leaf.parent.locks:
                    leaves.append(leaf.parent)  # without its last child it is a leaf itself
        self._roots = {name: root for name, root in self._roots.items() if root.children or root.locks}
        return evicted

    def nodes(self) -> Iterator[Node]:
        """Walk over all nodes that hold values, parents before children."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _descend(self, node: Node, tokens: Sequence[int]) -> tuple[Node, list]:
        self._clock += 1
        known, place, size = [], 0, self.block_size
        while child := node.children.get(tuple(tokens[place : place + size])):
            same = self._common_blocks(child.tokens, tokens, place)
            node = child if same == len(child.values) else self._split(child, same)
            node.last_used = self._clock
            known += node.values
            place += same * size
        return node, known

    def _common_blocks(self, ours: tuple[int, ...], tokens: Sequence[int], place: int) -> int:
        """Count the blocks on which a node's tokens and `tokens` from `place` on agree."""
        for start in range(0, len(ours), self.block_size):
            stop = start + self.block_size
            if ours[start:stop] != tuple(tokens[place + start : place + stop]):
                return start // self.block_size
        return len(ours) // self.block_size

    def _split(self, node: Node, count: int) -> Node:
        """Move the first `count` blocks into a new parent. The old node keeps the end: paths to it stay valid."""
        place = count * self.block_size
        upper = Node(node.tokens[:place], node.values[:count], node.parent, locks=node.locks)
        upper.parent.children[upper.tokens[: self.block_size]] = upper
        node.tokens, node.values, node.parent = node.tokens[place:], node.values[count:], upper
        upper.children[node.tokens[: self.block_size]] = node
        return upper

    def _extend(self, node: Node, tokens: tuple[int, ...], values: list) -> None:
        node.tokens += tokens
        node.values += values
        node.last_used = self._clock
        self.protected += len(values)

    def _cut(self, leaf: Node, count: int) -> list:
        """Take up to `count` blocks off the end of an unlocked leaf, the last one first; an empty leaf is removed."""
        kept = max(0, len(leaf.values) - count)
        if not kept:
            del leaf.parent.children[leaf.tokens[: self.block_size]]
        taken = leaf.values[kept:]
        leaf.tokens, leaf.values = leaf.tokens[: kept * self.block_size], leaf.values[:kept]
        self.evictable -= len(taken)
        return taken[::-1]
