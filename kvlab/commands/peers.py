"""`kvlab peers`: speed beside transformers, llama.cpp and the memory bandwidth, and of caches beside each other."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Optional

import typer

from kvlab.commands.options import Json
from kvlab.commands.peers_engine import measure_engine, show_engine
from kvlab.terminal import print_json, print_table, seconds


def peers(
    model: Annotated[str, typer.Option("--model", help="A model to run.")] = "smollm2-135m",
    contexts: Annotated[str, typer.Option("--contexts", help="Prompt lengths, separated by commas.")] = "64,512,2048",
    repeats: Annotated[int, typer.Option("--repeats", help="Turns of each contestant.")] = 5,
    steps: Annotated[int, typer.Option("--steps", help="Tokens generated in a turn.")] = 24,
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, bf16 or fp16.")] = "bf16",
    device: Annotated[Optional[str], typer.Option("--device", help="[by capability]")] = None,  # noqa: UP045
    compile: Annotated[bool, typer.Option(help="Let the compiled decode step take part.")] = True,
    caches: Annotated[bool, typer.Option(help="Compare int8 and int4 caches with the exact one.")] = True,
    cache_contexts: Annotated[
        str, typer.Option("--cache-contexts", help="Tokens in the compared caches.")
    ] = "1024,2048,8192",
    batches: Annotated[str, typer.Option("--batches", help="Rows in the compared caches.")] = "1,4,16",
    engine: Annotated[bool, typer.Option("--engine", help="Race the engine on many requests instead.")] = False,
    requests: Annotated[int, typer.Option("--requests", help="How many arrive together, with --engine.")] = 32,
    json: Json = False,
) -> None:
    """Race kvlab against transformers and llama.cpp, and caches against each other.

    All run the same weights, in turns; what is printed are ratios. With --engine, many requests are served at once.
    """
    if engine:
        answer = measure_engine(model, dtype, device, requests=requests, repeats=repeats)
        return print_json(answer) if json else show_engine(answer)
    lengths, held = parse_numbers(contexts, "a prompt length"), parse_numbers(cache_contexts, "a cache's length")
    rows = parse_numbers(batches, "a batch")
    if repeats < 1 or steps < 4:
        raise typer.BadParameter(f"at least 1 repeat and 4 steps are needed, got {repeats} and {steps}")
    cells = (held, rows) if caches else None
    answer = {"model": model, "dtype": dtype, "repeats": repeats, "steps": steps}
    answer |= measure(model, dtype, device, lengths, cells, repeats=repeats, steps=steps, compile=compile)
    print_json(answer) if json else show(answer)


def measure(
    model: str, dtype: str, device: str | None, lengths: list[int], cells: tuple[list[int], list[int]] | None, *,
    repeats: int, steps: int, compile: bool,
) -> dict:  # fmt: skip
    """Run the race, and the comparison of caches at `cells` (contexts, batches) unless that is None."""
    import torch
    from tqdm import tqdm

    from kvlab.evaluation.peers import race
    from kvlab.evaluation.peers_caches import check_contexts, compare
    from kvlab.hardware import stamp
    from kvlab.model import zoo

    if cells:
        check_contexts(cells[0], repeats)
    loaded = zoo.load(model, dtype=dtype, device=device)
    say = lambda words: print(words, file=sys.stderr)  # noqa: E731
    say(loaded.words)
    with tqdm(unit="turn", disable=not sys.stderr.isatty()) as bar:
        tick = lambda words: (bar.set_description(words), bar.update())  # noqa: E731
        result = race(loaded.model, lengths, repeats=repeats, steps=steps, compiled=compile, say=say, tick=tick)
        compared = compare(loaded.model, *cells, repeats=repeats, tick=tick) if cells else None
    return {
        "threads": torch.get_num_threads(), "environment": stamp(torch=torch.__version__), **asdict(result),
        "caches": asdict(compared) if compared else None,
    }  # fmt: skip


def parse_numbers(text: str, what: str) -> list[int]:
    """Whole numbers from "64,512"; raises BadParameter naming what is not `what`."""
    numbers = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise typer.BadParameter(f"{word!r} is not {what}: give whole numbers such as 64,512,2048")
        numbers.append(int(word))
    return list(dict.fromkeys(numbers))


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
    if answer["caches"]:
        show_caches(answer["caches"], answer["dtype"])


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"


def show_caches(answer: dict, dtype: str) -> None:
    """Two tables: what one row costs in each cache, and what smaller caches gain as there is more to read."""
    cells: dict[tuple[int, int], list[dict]] = {}
    for row in answer["rows"]:
        cells.setdefault((row["batch"], row["context"]), []).append(row)
    first = answer["rows"][0]["batch"] if answer["rows"] else 1
    columns = ["context", "cache", "step", "speed", "codes or numbers", "scales, positions", "slack", "in use"]
    lines = [
        [f"{row['context']:,}", row["cache"], seconds(row["step_s"]), _times(row["speed"]),
         *(f"{row[name + '_bytes']:,}" for name in ("payload", "metadata", "slack")), f"{row['bytes_ratio']:.2f} x",
         f"{row['transient_peak_bytes']:,}", f"{row['transient_largest_bytes']:,}"]
        for (batch, _), some in cells.items() for row in some if batch == first
    ]  # fmt: skip
    print_table(
        f"Caches of random numbers, {dtype}, batch {first}: a decode step, bytes stored and bytes allocated in passing",
        [*columns, "peak", "largest"], lines, right=(0, 2, 3, 4, 5, 6, 7, 8, 9),
    )  # fmt: skip
    _show_gain(cells)
    print(f"long caches are read by {answer['reader']}")
    for words in answer["skipped"]:
        print(f"left out: {words}")


def _show_gain(cells: dict[tuple[int, int], list[dict]]) -> None:
    names = list(dict.fromkeys(row["cache"] for some in cells.values() for row in some))
    columns = ["batch", "context", "cache is", *names, *(f"{name} gains" for name in names[1:])]
    lines = [
        [f"{batch}", f"{context:,}", f"{some[0]['share']:.0%}", *(seconds(row["step_s"]) for row in some),
         *(f"{row['speed']:.2f} x of {row['bound']:.2f}" for row in some[1:])]
        for (batch, context), some in cells.items()
    ]  # fmt: skip
    title = (
        "Gain against batch x context; cache is: its share of the bytes of an exact step; of: what bytes would allow"
    )
    print_table(title, columns, lines, right=tuple(range(len(columns))))
