"""Planted faults: each breaks one line of the package in a copy, and some test must notice.

    python scripts/mutations.py            all of them
    python scripts/mutations.py "key"      those whose name contains a word

Exits 1 when a fault goes unnoticed, or when the line to break is no longer there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEARCH_STEPS = "400"  # of random serving, after the directed tests
SECONDS = 600  # a fault that makes the tests hang is noticed too; a busy machine is no fault


@dataclass(frozen=True)
class Mutation:
    """Replace `source`, which occurs once in `file`, and run `tests`.

    Files are named from the root of the repository on, those of the engine by their bare names.
    """

    name: str
    file: str
    source: str
    replacement: str
    tests: tuple[str, ...] = ("test_scheduler.py", "test_prefix_cache.py", "test_random_serving.py")

    def apply(self, copy: Path) -> None:
        """Break the copy. Raises ValueError where the source is not there exactly once."""
        path = copy / located(self.file, "kvlab/engine")
        text = path.read_text(encoding="utf-8")
        if text.count(self.source) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.source)} times, not once: {self.source!r}")
        path.write_text(text.replace(self.source, self.replacement), encoding="utf-8")


def located(name: str, folder: str) -> str:
    return name if "/" in name else f"{folder}/{name}"


POOL, TREE, KEYS = ("test_block_pool.py",), ("test_radix_tree.py",), ("test_prefix_cache.py",)
# what runs the model; each test is named, for importing torch takes longer than all tests of a pool
FORKS = ("test_engine.py::test_parallel_samples_are_those_of_separate_requests",)
CHUNKS = ("test_engine.py::test_the_size_of_chunks_changes_nothing[hybrid]",)
SWAPS = ("test_engine.py::test_preemption_changes_no_token[gqa-swap]",)
FAILURES = ("test_engine_failures.py::test_a_sequence_that_is_no_number_ends_alone_and_is_never_found[0-hash]",)
BEAMS = ("tests/test_beam.py::test_beams_share_blocks_and_copy_only_what_they_write[3]",)
WINDOWS = ("test_imposed_windows.py::test_what_lies_between_sinks_and_window_is_given_back[4]",)
MUTATIONS = [
    Mutation(
        "a stale key is not cleared", "block_pool.py",
        "                self._cached -= 1\n                self._forget_key(block)\n",
        "                self._cached -= 1\n", POOL,
    ),
    Mutation(
        "a double free is not noticed", "block_pool.py",
        "if times > self._references[block]:", "if not self._references[block]:", POOL,
    ),
    Mutation("heads are freed before tails", "block_pool.py", "in reversed(blocks):", "in blocks:", POOL),
    Mutation(
        "a shared block stays in the queue", "block_pool.py",
        "                del self._queue[block]\n", "", POOL,
    ),
    Mutation(
        "a window gives back one token too early", "block_pool.py",
        "max(0, position - window + 1)", "max(0, position - window + 2)",
    ),
    Mutation(
        "the last token is missing from the key", "prefix_cache.py",
        "content = tuple(tokens)\n", "content = tuple(tokens[:-1])\n", KEYS,
    ),
    Mutation(
        "token ids are cut to eight bits", "prefix_cache.py",
        "*content)", "*(token & 255 for token in content))", KEYS,
    ),
    Mutation("the parent is missing from the key", "prefix_cache.py", "data = parent.digest + ", "data = ", KEYS),
    Mutation(
        "the identity is missing from the key", "prefix_cache.py",
        "Key(digest(identity.encoded()), None, identity)", 'Key(digest(b""), None, ())', KEYS,
    ),
    Mutation(
        "a hash that collides is believed", "prefix_cache.py",
        "while ours is not theirs:", "while ours.digest != theirs.digest:", KEYS,
    ),
    Mutation(
        "a prompt may be found to its last token", "prefix_cache.py",
        "range((len(tokens) - 1) // self.block_size)", "range(len(tokens) // self.block_size)", KEYS,
    ),
    Mutation(
        "one layer group decides about a hit", "prefix_cache.py",
        "            if all(\n", "            if any(\n", KEYS,
    ),
    Mutation(
        "a block is found before it is computed", "scheduler.py",
        "        plan.rows.append(",
        "        sequence.stored += count\n        self.tables.register(sequence)\n        sequence.stored -= count\n"
        "        plan.rows.append(",
        KEYS,
    ),
    Mutation(
        "a block is found one token before it is full", "block_tables.py",
        "full = sequence.stored // self.block_size", "full = (sequence.stored + 1) // self.block_size",
    ),
    Mutation(
        "a hit takes no reference", "block_tables.py",
        "hit.tables, strict=True):\n            pool.share(held(table))",
        "hit.tables, strict=True):\n            held(table)",
    ),
    Mutation(
        "a fork takes no reference", "block_tables.py",
        "(self.pools, tables, strict=True):\n            pool.share(held(table))",
        "(self.pools, tables, strict=True):\n            held(table)",
    ),
    Mutation(
        "blocks are freed twice", "block_tables.py",
        "            self.pools[group].free(held(table))\n        for",
        "            self.pools[group].free(held(table))\n            self.pools[group].free(held(table))\n        for",
    ),
    Mutation(
        "a shared block is written", "block_tables.py",
        "self.pools[group].references(last) > 1", "self.pools[group].references(last) > 2",
    ),
    Mutation(
        "a copied block keeps its old reference", "block_tables.py",
        "                self.pools[group].free([shared])\n", "",
    ),
    Mutation(
        "a finished sequence leaves its path locked", "block_tables.py",
        "            self.cache.unlock(sequence.path)\n", "            pass\n",
    ),
    Mutation(
        "CPU blocks are not freed after swapping in", "scheduler.py",
        "self.stats.steps += 1\n        self.tables.swapped_in(plan.swap_in)\n", "self.stats.steps += 1\n",
    ),
    Mutation(
        "locked leaves are evicted", "radix_tree.py",
        "if not node.children and not node.locks]", "if not node.children]", TREE,
    ),
    Mutation("a split forgets who reads", "radix_tree.py", ", node.parent, locks=node.locks)", ", node.parent)", TREE),
    Mutation(
        "a path is extended under another reader", "radix_tree.py",
        " and not node.children and node.locks == 1:", " and not node.children:", TREE,
    ),
    Mutation("the most recently used leaf goes first", "radix_tree.py", "leaf = min(leaves", "leaf = max(leaves", TREE),
    Mutation(
        "a table keeps a block that the tree replaced", "radix_cache.py",
        "                table[block] = ours\n", "", KEYS,
    ),
    Mutation("the oldest gives way", "scheduler.py", "victim = self.running[-1]", "victim = self.running[0]"),
    Mutation(
        "who was preempted waits behind", "scheduler.py",
        "self.waiting.appendleft(sequence)", "self.waiting.append(sequence)",
    ),
    Mutation(
        "only the first chunk is looked at before admission", "scheduler.py",
        "if not self.tables.fits_whole(sequence):",
        "if not self.tables.fits_step(sequence, min(self.token_budget, sequence.remaining)):",
    ),
    Mutation(
        "what is found again after preemption is a hit", "stats.py",
        "new = max(0, tokens - sequence.peak)", "new = tokens",
    ),
    Mutation(
        "a shared block is not copied before it is written", "block_mover.py",
        "                layer.copy_blocks(plan.copies[group])\n", "                pass\n", FORKS,
    ),
    Mutation(
        "scales stay behind when a block is copied", "kvlab/cache/paged.py",
        "for x in self.tensors:\n                x[targets]",
        "for x in (x for x in self.tensors if x.shape[-1] > 1):\n                x[targets]", FORKS,
    ),
    Mutation(
        "a request's answers share their random numbers", "draws.py",
        "key = (request, index)", "key = (request, 0)", FORKS,
    ),
    Mutation(
        "swapped blocks come back in another's place", "block_mover.py",
        "layer.write_blocks(blocks,", "layer.write_blocks([block - 1 for block in blocks],", SWAPS,
    ),
    Mutation(
        "tokens are stored beside their slots", "kvlab/rows.py",
        "block_size + offset).to(device)", "block_size + (offset + 1) % block_size).to(device)", CHUNKS,
    ),
    Mutation(
        "a chunk's first tokens lose their window", "kvlab/rows.py",
        "first_needed(length - T, window, size)", "first_needed(length, window, size)", CHUNKS,
    ),
    Mutation(
        "a window's blocks are read as if from the beginning", "kvlab/rows.py",
        "(index[..., None] * size", "((index - index[:, :1])[..., None] * size", CHUNKS,
    ),
    Mutation(
        "scales are read from another row's blocks", "kvlab/attention_paged.py",
        "codes, scales = (_gather(x, blocks, count) for x in (pool.codes, pool.scales))",
        "codes, scales = _gather(pool.codes, blocks, count), _gather(pool.scales, blocks.flip(0), count)", FORKS,
    ),
    Mutation(
        "what is no number stays in its blocks", "engine.py",
        "        self.mover.clear(failed)\n", "", FAILURES,
    ),
    Mutation(
        "only what tokens are drawn from is looked at", "engine.py",
        "        if chunks:\n", "        if False:\n", FAILURES,
    ),
    Mutation(
        "the blocks of sinks are given back", "block_tables.py",
        "while first > self.cache.sink_blocks and", "while first > 0 and", WINDOWS,
    ),
    Mutation(
        "a beam writes to a block that others read", "kvlab/cache/paged_rows.py",
        "self.pool.references(table[-1]) > 1", "self.pool.references(table[-1]) > 2", BEAMS,
    ),
]  # fmt: skip


def run_tests(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess | None:
    """Run tests in the copy until one fails; None when they hang."""
    files = [located(name, "tests/engine") for name in tests]
    environment = {
        **os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "KVLAB_ENGINE_STEPS": SEARCH_STEPS, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *files]
    try:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None


def make_copy(folder: Path) -> Path:
    """Copy the package and the tests that are run."""
    for name in ("kvlab", "tests/engine"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "conftest.py", "harness.py", "slow_reference.py", "test_beam.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def notice(mutation: Mutation) -> str | None:
    """Return which test noticed a fault, None when none did. Raises ValueError when the tests did not run."""
    with tempfile.TemporaryDirectory() as folder:
        copy = make_copy(Path(folder))
        mutation.apply(copy)
        done = run_tests(copy, mutation.tests)
    if done is None:
        return f"the tests did not end within {SECONDS} s"
    if done.returncode not in (0, 1):  # a copy that cannot be imported proves nothing
        raise ValueError(f"{mutation.name}: the tests did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].removeprefix("FAILED tests/").removeprefix("engine/") if failed else None


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if all(word in m.name for word in words)]
    if not chosen:
        print(f"no planted fault has {' and '.join(words)} in its name", file=sys.stderr)
        return 2
    start, unnoticed = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        tests = tuple(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
        done = run_tests(make_copy(Path(folder)), tests)
    if done is None or done.returncode:
        print(f"the tests fail without any fault:\n{done.stdout[-2000:] if done else 'they hang'}", file=sys.stderr)
        return 1
    for mutation in chosen:
        by = notice(mutation)
        print(f"{'noticed  ' if by else 'UNNOTICED'}  {mutation.name:<52} {by or ''}", flush=True)
        unnoticed += [] if by else [mutation.name]
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} faults noticed in {time.perf_counter() - start:.0f} s")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
