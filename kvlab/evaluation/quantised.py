"""Record what chapter 07 shows: `python -m kvlab.evaluation.quantised grid | divergence | static`.

Each writes one file of rows under book/results. Note beside every figure: the weights of smollm2-135m are already
4-bit, which are dequantised on load.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from kvlab.evaluation.divergence import divergence_rows
from kvlab.evaluation.kv_grid import grid_rows
from kvlab.evaluation.results import record
from kvlab.evaluation.static_scales import static_rows
from kvlab.model import zoo

COMMAND = "python -m kvlab.evaluation.quantised"
MEASURES = {
    "grid": "accuracy, KL, agreement and perplexity for keys x values",
    "divergence": "the first greedy token that differs from the exact cache's",
    "static": "static against dynamic scales",
}


def rows_of(measure: str, loaded: zoo.LoadedModel, work: Path, samples: int, tick: Callable) -> Iterator[dict]:
    """The rows of one measure; the grid, the long one, keeps what it has in `work`."""
    if measure == "divergence":
        return divergence_rows(loaded, tick=tick)
    if measure == "static":
        return static_rows(loaded, tick=tick)
    work.mkdir(parents=True, exist_ok=True)
    return grid_rows(loaded, samples=samples, work=work, tick=tick)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure SmolLM2 with quantised caches and record the rows; a grid that broke off continues."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("measure", choices=MEASURES, help="; ".join(f"{k}: {v}" for k, v in MEASURES.items()))
    parser.add_argument("--out", type=Path, help="[book/results/quantised-MEASURE.json]")
    parser.add_argument("--work", type=Path, default=Path("_build/quantised"), help="a folder for rows so far")
    parser.add_argument("--model", default=zoo.OFFLINE)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--samples", type=int, default=24, help="of each task, for the grid")
    given = parser.parse_args(arguments)
    out = given.out or Path("book/results") / f"quantised-{given.measure}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    loaded = zoo.load(given.model, dtype=given.dtype)
    with tqdm(unit="piece") as bar:
        rows = list(rows_of(given.measure, loaded, given.work, given.samples, lambda piece: bar.update()))
    record(
        out, f"{COMMAND} {given.measure}", rows, model=loaded.config.name, dtype=loaded.dtype,
        measure=MEASURES[given.measure], note=loaded.words,
    )  # fmt: skip


if __name__ == "__main__":
    main()
