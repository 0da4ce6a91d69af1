"""Which tasks can the real model do at all? `python -m kvlab.evaluation.calibrate` measures and records it.

A task that the exact cache fails cannot tell a lossy one from it. The bar is 0.8; below it a task is no gate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from kvlab.evaluation.quality import accuracy
from kvlab.evaluation.results import record
from kvlab.evaluation.tasks import TASKS, generate_samples
from kvlab.model import zoo

BAR = 0.8
COMMAND = "python -m kvlab.evaluation.calibrate"


def baseline_rows(
    loaded: zoo.LoadedModel, tasks: Sequence[str], count: int, seed: int, work: Path | None, tick: Callable
) -> Iterator[dict]:
    """For each task, how often the model with the exact cache is right at the task's own length."""
    made_with = {"model": loaded.config.name, "dtype": loaded.dtype, "cache": "contiguous"}
    for task in tasks:
        samples = list(generate_samples(task, loaded.tokenizer, count, seed=seed))
        done = accuracy(
            loaded.model, loaded.tokenizer, samples, results=work and work / f"{task}.jsonl", configuration=made_with,
            tick=tick,
        )  # fmt: skip
        yield {
            "task": task, "tokens": TASKS[task].tokens, "seed": seed, "right": done.right, "total": done.total,
            "low": round(done.low, 4), "high": round(done.high, 4), "gate": done.rate >= BAR,
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every task and write book/results/tasks-baseline.json; a run that broke off continues."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("book/results/tasks-baseline.json"))
    parser.add_argument("--work", type=Path, default=Path("_build/tasks-baseline"), help="rows so far, by task")
    parser.add_argument("--model", default=zoo.OFFLINE)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--samples", type=int, default=40, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    loaded = zoo.load(given.model, dtype=given.dtype)
    given.work.mkdir(parents=True, exist_ok=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=len(TASKS) * given.samples, unit="sample") as bar:
        rows = list(baseline_rows(loaded, list(TASKS), given.samples, given.seed, given.work, lambda row: bar.update()))
    record(
        given.out, COMMAND, rows, model=loaded.config.name, dtype=loaded.dtype, cache="contiguous", bar=BAR,
        note=f"greedy; 95% Wilson intervals; {loaded.words}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
