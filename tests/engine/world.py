"""A model of the model: what a real step would write and read through block tables, checked against the truth.

The keys and values of a token depend on every token before it and on the identity. So the fake model stores one
number per slot, a fingerprint of identity and tokens up to there. Every row reads back all that its queries see; a
stale, foreign, unwritten or shifted block shows as a wrong number. The next token is a function of the fingerprint.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, replace

from kvlab.engine.block_pool import GONE, BlockPool, blocks_for
from kvlab.engine.prefix_cache import HashChain, Key, NoPrefixCache, PrefixCache
from kvlab.engine.radix_cache import RadixCache
from kvlab.engine.request import Identity, Request, Sequence, State
from kvlab.engine.scheduler import Plan, RequestRefused, Scheduler
from kvlab.engine.shelf import Shelf

CACHES = {"none": NoPrefixCache, "hash": HashChain, "radix": RadixCache}
VOCABULARY, STOP = 23, 22


@dataclass(frozen=True)
class Setup:
    """One way to run an engine; `blocks` per layer group."""

    cache: str = "hash"
    block_size: int = 4
    blocks: tuple[int, ...] = (16,)
    windows: tuple[int | None, ...] = (None,)
    token_budget: int = 8
    max_running: int = 6
    preemption: str = "recompute"
    swap_blocks: int = 0
    max_length: int | None = None
    store: str = "none"  # "sure": keeps all full blocks; "flaky": loses some, swapped ones too, when they are wanted

    def build(self, shelf: Shelf) -> Scheduler:
        pools = [BlockPool(count, self.block_size) for count in self.blocks]
        cache: PrefixCache = CACHES[self.cache](pools, self.windows)
        return Scheduler(
            cache, token_budget=self.token_budget, max_running=self.max_running, max_length=self.max_length,
            preemption=self.preemption, swap_blocks=self.swap_blocks, shelf=shelf, clock=Clock(),
        )  # fmt: skip


class FakeShelf(Shelf):
    """Full blocks by layer group and key, and what was loaded for the next plan."""

    def __init__(self, setup: Setup, seed: int):
        self.keeps_prefixes, self.flaky = setup.store != "none", setup.store == "flaky"
        self.random, self.lost = random.Random(seed), 0
        self.blocks: dict[tuple[int, Key], list] = {}
        self.loaded: dict[tuple[int, Key | int], list | None] = {}

    def has(self, group, key):
        return (group, key) in self.blocks

    def load(self, group, name):
        if self.flaky and self.random.random() < 0.2:
            self.blocks.pop((group, name), None)
            self.lost += 1
            return False
        if isinstance(name, Key) and not self.has(group, name):
            return False
        self.loaded[group, name] = self.blocks.get((group, name))
        return True


class Clock:
    """Time that moves by one second whenever somebody looks."""

    def __init__(self):
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def fingerprints(identity: Identity, tokens: list[int], known: list[int] | None = None) -> list[int]:
    """One number per token: equal where identity and all tokens so far are equal. Extends what is known."""
    known = known if known is not None else []
    last = known[-1] if known else zlib.crc32(identity.encoded())
    for token in tokens[len(known) :]:
        last = hash((last, token))
        known.append(last)
    return known


def next_token(fingerprint: int, index: int) -> int:
    return hash((fingerprint, index)) % VOCABULARY


def expected_output(request: Request, index: int) -> list[int]:
    """What sequence `index` of a request answers when nothing else is served."""
    tokens = list(request.prompt_ids)
    known = fingerprints(request.identity, tokens)
    while len(tokens) < len(request.prompt_ids) + request.max_new_tokens:
        tokens.append(next_token(known[-1], index))
        if tokens[-1] in request.stop_ids:
            break
        fingerprints(request.identity, tokens, known)
    return tokens[len(request.prompt_ids) :]


class World:
    """A scheduler, the memory that its plans talk about, and everything that must be true after each step."""

    def __init__(self, setup: Setup, seed: int = 0):
        self.setup, self.random, self.shelf = setup, random.Random(seed), FakeShelf(setup, seed)
        self.scheduler = setup.build(self.shelf)
        self.tables = self.scheduler.tables
        self.cache = self.scheduler.cache
        size = setup.block_size
        self.memory = [[[None] * size for _ in range(count)] for count in setup.blocks]
        self.cpu = [[[None] * size for _ in range(setup.swap_blocks)] for _ in setup.blocks]
        self.requests: list[Request] = []
        self.beams: set[str] = set()  # requests whose sequences fork and are dropped at random
        self.known: dict[Sequence, list[int]] = {}
        self.inherited = 0  # tokens that forks took over
        self.steps = self.refused = self.copies = self.given_back = 0
        self.first_tokens: list[Request] = []
        self.last_plan: Plan | None = None

    # what clients do

    def submit(self, prompt, max_new_tokens=4, n=1, identity=Identity(), beam=False, stop=()) -> Request:
        request = Request(
            f"r{len(self.requests)}", prompt, max_new_tokens, temperature=1.0, n=n, identity=identity, stop_ids=stop
        )
        self.scheduler.submit(request)
        self.requests.append(request)
        if beam:
            self.beams.add(request.id)
        return request

    def cancel(self, request: Request) -> None:
        self.scheduler.cancel(request.id)

    def random_submit(self) -> None:
        """A prompt that often begins as others do, ends near a block boundary, or goes on with an answer."""
        rng = self.random
        size, known = self.setup.block_size, [s.tokens for r in self.requests[-6:] for s in r.sequences]
        base = random.Random(rng.randrange(2)).choices(range(3), k=60)
        if known and rng.random() < 0.3:
            base = rng.choice(known)
        length = rng.choice([1, 2, rng.randint(1, 12), size * rng.randint(1, 3) + rng.randint(-1, 1), 60])
        prompt = base[: max(1, length)] + rng.choices(range(3), k=rng.choice([0, 0, 1, 5]))
        identity = rng.choice([Identity()] * 4 + [Identity(adapter="a"), Identity(tenant="t")])
        before = self.state()
        try:
            self.submit(
                prompt, rng.randint(1, 12), n=rng.choice([1, 1, 1, 2, 3]), identity=identity,
                beam=rng.random() < 0.15, stop=rng.choice([(), (STOP,)]),
            )  # fmt: skip
        except RequestRefused:
            self.refused += 1
            assert self.state() == before
        self.check()

    def live(self, moments: int) -> None:
        """Submit, cancel and step at random for a while, then serve everybody who is still there."""
        for _ in range(moments):
            chance = self.random.random()
            if chance < 0.4:
                self.random_submit()
            elif chance < 0.43:
                self.random_cancel()
                self.check()
            else:
                self.step(cancel_within=chance > 0.98)
        self.drain()

    def seen(self) -> dict[str, int]:
        """What happened, to tell a walk that went somewhere from one that did not."""
        names = "swap_preemptions recompute_preemptions hit_tokens recovered_tokens recomputed_tokens copied_blocks"
        names += " restored_tokens lost_swaps" * (self.setup.store == "flaky")
        counted = {name: getattr(self.scheduler.stats, name) for name in names.split()}
        reasons = {name: self.scheduler.stats.finished.get(name, 0) for name in ("stop", "cancelled", "dropped")}
        return counted | reasons | dict(steps=self.steps, refused=self.refused, given_back=self.given_back)

    def random_cancel(self) -> None:
        alive = list(self.scheduler.requests.values())
        if alive:
            self.cancel(self.random.choice(alive))

    # what a model runner does

    def step(self, cancel_within: bool = False) -> Plan:
        plan = self.last_plan = self.scheduler.plan()
        self.run(plan)
        assert plan.rows or not self.scheduler.requests, "somebody waits and nothing is done"
        assert plan.num_tokens <= self.setup.token_budget
        samples, drawn = plan.samples, [self.draw(row) for row in plan.samples]
        if cancel_within:
            self.random_cancel()
        children = {s for r in self.requests for s in r.sequences}
        continued = self.scheduler.complete(plan, drawn)
        self.keep()
        for row, tokens in zip(samples, drawn, strict=True):
            if tokens and row.sequence.finish_reason != "cancelled":
                assert row.sequence in continued and row.sequence.tokens[-1] == tokens[0]
        for request in {s.request.id: s.request for s in continued}.values():
            for sequence in request.sequences:
                if sequence not in children:
                    self.inherited += len(sequence.tokens) - 1
            if request not in self.first_tokens:
                self.first_tokens.append(request)
        self.steps += 1
        self.check()
        return plan

    def run(self, plan: Plan) -> None:
        """Do what a plan says, in its order."""
        for group, memory in enumerate(self.memory):
            for block, slot in plan.swap_out[group]:
                self.cpu[group][slot] = list(memory[block])
            for slot, block in plan.swap_in[group]:
                assert (group, slot) in self.shelf.loaded
                memory[block] = list(self.cpu[group][slot])
            for key, block in plan.restore[group]:
                memory[block] = list(self.shelf.loaded[group, key])
            for source, target in plan.copies[group]:
                memory[target] = list(memory[source])
                self.copies += 1
            for row in plan.rows:
                self.write(row, group, memory)
            for row in plan.rows:
                self.read(row, group, memory)

    def keep(self) -> None:
        """What the engine does after a step: full blocks go to the store, what was loaded is let go."""
        for group, filled in enumerate(self.tables.take_filled()):
            assert self.shelf.keeps_prefixes or not filled
            for key, block in filled:
                assert self.memory[group][block] == self.names_of(key)[-self.setup.block_size :]
                self.shelf.blocks[group, key] = list(self.memory[group][block])
        self.shelf.loaded.clear()

    def truth(self, sequence: Sequence) -> list[int]:
        known = self.known.setdefault(sequence, [])
        return fingerprints(sequence.request.identity, sequence.tokens, known)

    def write(self, row, group, memory) -> None:
        assert row.count >= 1 and row.start + row.count <= len(row.sequence.tokens)
        assert len(row.tables[group]) == blocks_for(row.start + row.count, self.setup.block_size)
        known = self.truth(row.sequence)
        assert row.token_ids == row.sequence.tokens[row.start :][: row.count]
        for position in range(row.start, row.start + row.count):
            block, offset = divmod(position, self.setup.block_size)
            memory[row.tables[group][block]][offset] = known[position]

    def read(self, row, group, memory) -> None:
        known, size, window = self.truth(row.sequence), self.setup.block_size, self.setup.windows[group]
        first = 0 if window is None else max(0, row.start - window + 1)
        self.given_back += row.tables[group].count(GONE)
        for position in range(first, row.start + row.count):
            block = row.tables[group][position // size]
            assert block != GONE, f"{row.sequence.request.id}: position {position} was given back too early"
            assert memory[block][position % size] == known[position], (
                f"{row.sequence.request.id} reads another text at position {position}"
            )

    def draw(self, row) -> list[int]:
        last = self.truth(row.sequence)[row.start + row.count - 1]
        if row.sequence.request.id in self.beams and row.draws == 1 and len(self.scheduler.running) < 12:
            return [next_token(last, index) for index in range(self.random.choice([0, 1, 1, 2]))]
        first = row.sequence.index
        return [next_token(last, index) for index in range(first, first + row.draws)]

    def drain(self, limit: int = 3000) -> None:
        """Run until everybody is served: nothing is lost, and nobody waits for ever."""
        for _ in range(limit):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests and not self.scheduler.running and not self.scheduler.waiting
        self.check()
        for usage in self.scheduler.usage():
            assert usage.used == 0
        for pool in self.tables.swap_pools:
            assert pool.free_count == pool.num_blocks
        for request in self.requests:
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        assert request.finished
        reasons = {sequence.finish_reason for sequence in request.sequences}
        if request.id in self.beams or reasons & {"cancelled", "error"}:
            return
        assert len(request.sequences) == request.n and reasons <= {"stop", "length"}
        for index, sequence in enumerate(request.sequences):
            assert sequence.output_ids == expected_output(request, index)

    # what must be true

    def state(self):
        """Everything that a refused call must leave as it was."""
        scheduler = self.scheduler
        pools = [(pool.waiting(), list(pool._references), dict(pool._keys)) for pool in self.cache.pools]
        tables = [(s.order, s.stored, [list(t) for t in s.tables]) for s in scheduler.running]
        return pools, tables, [s.order for s in scheduler.waiting], sorted(scheduler.requests), replace(scheduler.stats)

    def check(self) -> None:
        self.check_order()
        for group, pool in enumerate(self.cache.pools):
            self.check_pool(group, pool)
        for group, pool in enumerate(self.tables.swap_pools):
            pool.check()
            named = Counter(b for s in self.scheduler.waiting for b in held(s.swapped, group))
            assert all(pool.references(block) == named[block] for block in range(pool.num_blocks))
        if isinstance(self.cache, RadixCache):
            self.check_tree()
        self.check_findable()
        stats = self.scheduler.stats
        peaks = sum(s.peak for request in self.requests for s in request.sequences)
        assert stats.hit_tokens + stats.computed_tokens == peaks - self.inherited
        assert stats.copied_blocks == self.copies

    def check_order(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        arrivals = [s.order[0] for s in running + waiting]  # siblings may pass each other, requests may not
        assert arrivals == sorted(arrivals), "somebody jumped the queue"
        assert all(s.state is State.RUNNING for s in running)
        assert all(s.state in (State.WAITING, State.SWAPPED) and not s.tables for s in waiting)
        assert all(bool(s.swapped) == (s.state is State.SWAPPED) for s in waiting)
        alive = {s for r in self.scheduler.requests.values() for s in r.sequences if s.state is not State.FINISHED}
        assert alive == set(running + waiting)
        served = [r.sequences[0].order for r in self.first_tokens]
        assert served == sorted(served), "a newer request got its first token before an older one"

    def check_pool(self, group: int, pool: BlockPool) -> None:
        pool.check()
        tables = [held(s.tables, group) for s in self.scheduler.running]
        assert all(len(set(table)) == len(table) for table in tables)
        named = Counter(block for table in tables for block in table)
        if isinstance(self.cache, RadixCache):
            in_tree = Counter(v[group] for n in self.cache.tree.nodes() for v in n.values if v[group] != GONE)
            assert not in_tree or max(in_tree.values()) == 1
            named += in_tree
        assert all(pool.references(block) == named[block] for block in range(pool.num_blocks))
        usage = self.scheduler.usage()[group]
        assert usage.free + usage.cached + usage.used == pool.num_blocks
        for sequence in self.scheduler.running:
            assert len(sequence.tables[group]) == blocks_for(sequence.stored, pool.block_size)

    def check_tree(self) -> None:
        """Counters and locks are what the sequences that run say."""
        tree, locks = self.cache.tree, Counter()
        for sequence in self.scheduler.running:
            node, blocks = sequence.path, 0
            while node:
                locks[id(node)] += 1
                blocks += len(node.values)
                node = node.parent
            assert blocks == sequence.registered
        protected = evictable = 0
        for node in tree.nodes():
            assert node.values and len(node.tokens) == len(node.values) * tree.block_size
            assert node.locks == locks[id(node)]
            assert all(first == child.tokens[: tree.block_size] for first, child in node.children.items())
            assert all(child.parent is node for child in node.children.values())
            protected += len(node.values) * bool(node.locks)
            evictable += len(node.values) * (not node.locks)
        assert (tree.protected, tree.evictable) == (protected, evictable)

    def check_findable(self) -> None:
        """What can be found holds what its name says."""
        for group, memory in enumerate(self.memory):
            for block, names in self.findable(group):
                assert memory[block] == names, f"block {block} can be found and holds something else"

    def findable(self, group: int):
        size = self.setup.block_size
        if isinstance(self.cache, HashChain):
            for block, key in self.cache.pools[group]._keys.items():
                yield block, self.names_of(key)[-size:]
        elif isinstance(self.cache, RadixCache):
            for namespace, root in self.cache.tree._roots.items():
                waiting = [(child, []) for child in root.children.values()]
                while waiting:
                    node, before = waiting.pop()
                    names = fingerprints(namespace, [*before, *node.tokens])
                    for index, value in enumerate(node.values):
                        if value[group] != GONE:
                            start = len(before) + index * size
                            yield value[group], names[start : start + size]
                    waiting += [(child, [*before, *node.tokens]) for child in node.children.values()]

    def names_of(self, key: Key) -> list[int]:
        chain = []
        while key.parent is not None:
            chain.append(key.content)
            key = key.parent
        return fingerprints(key.content, [token for content in reversed(chain) for token in content])


def held(tables, group: int) -> list[int]:
    return [block for block in tables[group] if block != GONE] if tables else []
