"""`kvlab stream`: what a step costs at both ends of a stream that is far longer than the cache's budget."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from kvlab.commands.options import Json
from kvlab.terminal import print_json, print_table, seconds


def stream(
    caches: Annotated[list[str], typer.Argument(metavar="CACHE...", help="Such as sinks4-508, h2o-512, contiguous.")],
    shape: Annotated[
        str, typer.Option("--shape", help="The model whose first layer is built, at random.")
    ] = "smollm2-135m",
    tokens: Annotated[int, typer.Option("--tokens", help="Length of the stream.")] = 20_000,
    stretch: Annotated[int, typer.Option("--stretch", help="Steps that one row of the answer sums up.")] = 1000,
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, bf16 or fp16.")] = "bf16",
    json: Json = False,
) -> None:
    """Decode a long stream of random tokens through one random layer, with each CACHE."""
    for name in caches:
        check_cache(name)
    if tokens < 1 or stretch < 1:
        raise typer.BadParameter(f"a stream and a stretch hold at least one token, got {tokens} and {stretch}")
    import torch
    from tqdm import tqdm

    from kvlab.cache.build import build_cache
    from kvlab.config import resolve
    from kvlab.evaluation.streaming import one_layer, stream_through
    from kvlab.hardware import stamp
    from kvlab.model.zoo import DTYPES

    if dtype not in DTYPES:
        raise typer.BadParameter(f"give {', '.join(DTYPES)}, not {dtype}", param_hint="--dtype")
    model = one_layer(resolve(shape), DTYPES[dtype])
    for name in caches:
        build_cache(model.config, name, tokens)  # what this shape cannot have is refused before anything streams
    rows = {}
    for name in caches:
        with tqdm(total=tokens, desc=name, disable=not sys.stderr.isatty()) as bar:
            cache = build_cache(model.config, name, tokens)
            rows[name] = stream_through(model, cache, tokens, stretch, tick=lambda part: bar.update(part.end - bar.n))
    answer = {
        "shape": shape, "dtype": dtype, "tokens": tokens, "threads": torch.get_num_threads(),
        "environment": stamp(torch=torch.__version__),
        "caches": {name: [asdict(part) for part in parts] for name, parts in rows.items()},
    }  # fmt: skip
    print_json(answer) if json else show(answer)


def check_cache(name: str) -> None:
    """Raise ValueError or BadParameter for a cache that does not exist, or that a stream cannot fill."""
    from kvlab.cache.build import check_name
    from kvlab.cache.plans import ScoredPlan, parse

    check_name(name)
    if name == "none":
        raise typer.BadParameter("none stores nothing, so no step sees the stream before it: name a cache that stores")
    plan = parse(name)
    if isinstance(plan, ScoredPlan) and plan.whole_prompt:
        raise typer.BadParameter(f"{name} decides where a prompt ends, and a stream has none: leave out -prompt")


def show(answer: dict) -> None:
    """The same for people: both ends of each stream."""
    lines = []
    for name, parts in answer["caches"].items():
        for part in (parts[0], parts[-1]) if len(parts) > 1 else parts:
            times = [seconds(part[key]) for key in ("median_s", "mean_s", "slowest_s")]
            lines.append([name, f"{part['end']:,}", *times, f"{part['bytes_total']:,}"])
    title = f"one random layer of {answer['shape']} in {answer['dtype']}, {answer['threads']} threads"
    print_table(
        title, ["cache", "up to token", "median step", "mean", "slowest", "bytes"], lines, right=(1, 2, 3, 4, 5)
    )
