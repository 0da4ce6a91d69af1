"""`kvlab peers`: speed beside transformers, llama.cpp and the memory bandwidth, measured in one run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Optional

import typer

from kvlab.commands.options import Json
from kvlab.terminal import print_json, print_table, seconds


def peers(
    model: Annotated[str, typer.Option("--model", help="A model to run.")] = "smollm2-135m",
    contexts: Annotated[str, typer.Option("--contexts", help="Prompt lengths, separated by commas.")] = "64,512,2048",
    repeats: Annotated[int, typer.Option("--repeats", help="Turns of each contestant.")] = 5,
    steps: Annotated[int, typer.Option("--steps", help="Tokens generated in a turn.")] = 24,
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, bf16 or fp16.")] = "bf16",
    device: Annotated[Optional[str], typer.Option("--device", help="[by capability]")] = None,  # noqa: UP045
    compile: Annotated[bool, typer.Option(help="Let the compiled decode step take part.")] = True,
    json: Json = False,
) -> None:
    """Race kvlab against transformers and llama.cpp.

    All run the same weights, in turns; what is printed are ratios.
    """
    lengths = parse_contexts(contexts)
    if repeats < 1 or steps < 4:
        raise typer.BadParameter(f"at least 1 repeat and 4 steps are needed, got {repeats} and {steps}")
    import torch
    from tqdm import tqdm

    from kvlab.evaluation.peers import race
    from kvlab.hardware import stamp
    from kvlab.model import zoo

    loaded = zoo.load(model, dtype=dtype, device=device)
    say = lambda words: print(words, file=sys.stderr)  # noqa: E731
    say(loaded.words)
    with tqdm(unit="turn", disable=not sys.stderr.isatty()) as bar:
        result = race(
            loaded.model, lengths, repeats=repeats, steps=steps, compiled=compile, say=say,
            tick=lambda words: (bar.set_description(words), bar.update()),
        )  # fmt: skip
    answer = {
        "model": model, "dtype": dtype, "threads": torch.get_num_threads(), "repeats": repeats, "steps": steps,
        "environment": stamp(torch=torch.__version__), **asdict(result),
    }  # fmt: skip
    print_json(answer) if json else show(answer)


def parse_contexts(text: str) -> list[int]:
    """Prompt lengths from "64,512"; raises BadParameter naming what is not a positive number."""
    lengths = []
    for word in text.split(","):
        if not word.strip().isdigit() or int(word) < 1:
            raise typer.BadParameter(f"{word!r} is not a prompt length: give whole numbers such as 64,512,2048")
        lengths.append(int(word))
    return list(dict.fromkeys(lengths))


def show(answer: dict) -> None:
    """The same for people."""
    columns = ["context", "contestant", "prefill", "tokens/s", "spread", "of bound", "vs transformers", "prefill"]
    lines = []
    for row in sorted(answer["rows"], key=lambda row: row["context"]):
        spread = f"{row['slowest_per_s']:.1f} - {row['fastest_per_s']:.1f}"
        lines.append([
            f"{row['context']:,}", row["contestant"], seconds(row["prefill_s"]), f"{row['tokens_per_s']:.1f}", spread,
            f"{row['of_bound']:.0%}", _times(row["vs_reference"]), _times(row["prefill_vs_reference"]),
        ])  # fmt: skip
    title = f"{answer['model']} in {answer['dtype']}, batch 1, {answer['threads']} threads, {answer['repeats']} turns"
    print_table(title, columns, lines, right=(0, 2, 3, 4, 5, 6, 7))
    print(f"read bandwidth {answer['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, weights {answer['weights_bytes']:,} bytes")
    if answer["warmup_s"]:
        print(f"compiling took {seconds(answer['warmup_s'])} and is not in the times")
    for name, why in answer["absent"].items():
        print(f"{name} took no part: {why}")


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"
