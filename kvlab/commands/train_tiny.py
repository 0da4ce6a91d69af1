"""`kvlab train-tiny`: train the four tiny models, and see what their attention costs and saves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from kvlab.commands.options import Json
from kvlab.terminal import print_json, print_table

OptionalInt = Optional[int]  # noqa: UP045 (older typers cannot read `int | None`)
OptionalPath = Optional[Path]  # noqa: UP045
Attention = Annotated[str, typer.Option("--attention", help="mha, gqa, mqa, mla, or all four in turn.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the first weights and the order of the data.")]
Steps = Annotated[OptionalInt, typer.Option("--steps", help="Of 2,048 bytes each [1000, as shipped]")]
Out = Annotated[Path, typer.Option("--out", help="A directory; each model gets one of its own in it.")]
Rows = Annotated[OptionalPath, typer.Option("--rows", help="JSON Lines to add results to [OUT/rows.jsonl]")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with runs that were interrupted.")]
Table = Annotated[bool, typer.Option("--table", help="Train nothing: print what the rows say.")]


def train_tiny(
    attention: Attention = "all",
    seed: Seed = 0,
    steps: Steps = None,
    out: Out = Path("tiny-models"),
    rows: Rows = None,
    resume: Resume = False,
    table: Table = False,
    json: Json = False,
) -> None:
    """Train byte-level models of a million parameters on Python's own help texts, alike but for attention."""
    rows = rows or out / "rows.jsonl"
    if not 0 <= seed < 2**40:  # a million times a seed must fit into 64 bits
        raise typer.BadParameter(f"a seed is a whole number from 0 to 2^40, not {seed}", param_hint="--seed")
    if table and not rows.is_file():
        raise typer.BadParameter(f"{rows}: no such file: train first, or name it with --rows")
    if not table:
        train(attention, seed, steps, out, rows, resume)
    report(rows, json)


def train(attention: str, seed: int, steps: int | None, out: Path, rows: Path, resume: bool) -> None:
    """Train one model or all four; `load` reads OUT/tiny-NAME-seedS afterwards."""
    from kvlab.model import tiny
    from kvlab.training.recipe import Recipe
    from kvlab.training.text import python_topics

    chosen = tiny.ATTENTIONS if attention == "all" else (attention,)
    configs = {name: tiny.tiny_config(name) for name in chosen}  # an unknown name is refused before any work
    recipe = Recipe() if steps is None else Recipe(steps=steps)
    make_directories(out, rows)
    corpus = python_topics()
    for name, config in configs.items():
        train_one(name, config, corpus, recipe, seed, out / f"{config.name}-seed{seed}", rows, resume)


def make_directories(out: Path, rows: Path) -> None:
    """Make what is written into; raises BadParameter before any work where that cannot be."""
    if rows.is_dir():
        raise typer.BadParameter(f"{rows} is a directory: give the name of a file", param_hint="--rows")
    for option, place in (("--out", out), ("--rows", rows.parent)):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"{place} cannot be made a directory ({error.strerror}): name another"
            raise typer.BadParameter(why, param_hint=option) from None
        if not os.access(place, os.W_OK):
            raise typer.BadParameter(f"{place} cannot be written: name another directory", param_hint=option)


def train_one(name: str, config, corpus, recipe, seed: int, directory: Path, rows: Path, resume: bool) -> None:
    """Train one model with a progress bar, adding its rows, and write its directory."""
    from tqdm import tqdm

    from kvlab.model import saving, tiny
    from kvlab.training.table import append_row
    from kvlab.training.train import STATE, Run

    run = Run(config, corpus, recipe, seed, directory / STATE, resume)
    title = f"{config.name}, seed {seed}"

    def on_row(row: dict) -> None:
        append_row(rows, row)
        words = f"held out {row['held_out_bits_per_byte']:.3f} bits per byte, training {row['train_bits_per_byte']:.3f}"
        tqdm.write(f"{title}, step {row['step']}: {words}, {row['seconds']:.0f} s", file=sys.stderr)

    with tqdm(total=recipe.steps, initial=run.step, desc=title, unit="step", disable=not sys.stderr.isatty()) as bar:
        run.finish(on_row, lambda bits: (bar.set_postfix_str(f"{bits:.2f} bits", refresh=False), bar.update()))
    saving.write_directory(directory, run.model, tiny.hugging_face_config(name), tiny.byte_tokenizer())
    print(f"{title}: weights in {directory}", file=sys.stderr)


def report(rows: Path, json: bool) -> None:
    """Print what the rows say about all models with a finished run."""
    from dataclasses import asdict

    from kvlab.training.table import COLUMNS, difference, lines, read_rows, summarise

    summaries = summarise(read_rows(rows))
    if json:
        compared = [
            {"mean": s.mean, "compared_with_first": difference(s, summaries[0]) if i else None}
            for i, s in enumerate(summaries)
        ]
        print_json([asdict(s) | more for s, more in zip(summaries, compared, strict=True)])
    else:
        title = "Held-out bits per byte after the last step, mean and spread over seeds"
        print_table(title, COLUMNS, lines(summaries), right=(1, 2, 3, 4, 5))
