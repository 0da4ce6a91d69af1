"""One process that serves one prompt over a directory of blocks: `python -m kvlab.evaluation.restart DIRECTORY`.

Run it twice: the second process finds what the first one kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import perf_counter

from kvlab.cache.block_files import BlockFiles
from kvlab.cache.tiers import TieredStore
from kvlab.engine.block_pool import blocks_for
from kvlab.engine.engine import Engine
from kvlab.engine.request import Request
from kvlab.model import zoo

BLOCK_SIZE, BUDGET = 16, 4 * 2**30
PREFIX, QUESTION, ANSWER = 1504, 8, 8  # tokens; the prefix is whole blocks


def serve(directory: Path, model: str, dtype: str, prefix: int, question: int) -> dict:
    """Serve a prefix that is always the same, and a question by its number; seconds, tokens found, and the answer."""
    began = perf_counter()
    loaded = zoo.load(model, dtype=dtype)
    loaded_s = perf_counter() - began
    prompt = tokens(loaded.config.vocab_size, prefix, 0) + tokens(loaded.config.vocab_size, QUESTION, 1 + question)
    count = len(prompt) + ANSWER
    store = TieredStore(files=BlockFiles(directory, BUDGET))
    engine = Engine(
        loaded.model, num_blocks=blocks_for(count, BLOCK_SIZE), block_size=BLOCK_SIZE, token_budget=count, store=store
    )
    ready_s = perf_counter() - began
    request = engine.submit(Request("r", prompt, max_new_tokens=ANSWER))
    answer = [output.token_id for output in engine.run()]
    engine.close()
    return {
        "ttft_s": request.sequences[0].ttft_s, "loaded_s": loaded_s, "ready_s": ready_s,
        "restored_tokens": engine.stats.restored_tokens, "restoring_s": engine.stats.restoring_s, "answer": answer,
    }  # fmt: skip


def tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    """Random token ids, the same for every caller with this seed."""
    random = Random(seed)
    return [random.randrange(vocabulary) for _ in range(count)]


def in_a_new_process(directory: Path, model: str, dtype: str, prefix: int, question: int) -> dict:
    """What `serve` returns in a process of its own. Raises CalledProcessError if that fails."""
    command = [sys.executable, "-m", "kvlab.evaluation.restart", str(directory), "--model", model, "--dtype", dtype]
    command += ["--prefix", str(prefix), "--question", str(question)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def forget_pages(directory: Path) -> None:
    """Ask the operating system to drop the files of a directory from memory, so that they are read from the disk."""
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Load a model, serve one prompt over a directory of blocks, and print what it took as JSON."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.evaluation.restart", description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default=zoo.OFFLINE)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--prefix", type=int, default=PREFIX, help="tokens [%(default)s]")
    parser.add_argument("--question", type=int, default=0, help="the number of a question [%(default)s]")
    given = parser.parse_args(arguments)
    print(json.dumps(serve(given.directory, given.model, given.dtype, given.prefix, given.question)))


if __name__ == "__main__":
    main()
