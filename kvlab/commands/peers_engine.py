"""The engine's part of `kvlab peers`: many requests at once, prefix hits, and one request alone."""

from __future__ import annotations

import sys
from dataclasses import asdict

import typer

from kvlab.terminal import print_table, seconds


def measure_engine(model: str, dtype: str, device: str | None, *, requests: int, repeats: int) -> dict:
    """Race the engine; raises BadParameter for counts below one before anything is loaded."""
    if requests < 1 or repeats < 1:
        raise typer.BadParameter(f"at least 1 request and 1 repeat are needed, got {requests} and {repeats}")
    import torch
    from tqdm import tqdm

    from kvlab.evaluation.peers_engine import measure
    from kvlab.hardware import stamp
    from kvlab.model import zoo

    loaded = zoo.load(model, dtype=dtype, device=device)
    say = lambda words: print(words, file=sys.stderr)  # noqa: E731
    say(loaded.words)
    with tqdm(unit="turn", disable=not sys.stderr.isatty()) as bar:
        tick = lambda words: (bar.set_description(words), bar.update())  # noqa: E731
        result = measure(loaded.model, requests, repeats=repeats, say=say, tick=tick)
    facts = {"threads": torch.get_num_threads(), "environment": stamp(torch=torch.__version__)}
    return {"model": model, "dtype": dtype, "requests": requests, "repeats": repeats, **facts, **asdict(result)}


def show_engine(answer: dict) -> None:
    """Three tables for people."""
    for name, race in answer["mixes"].items():
        _show_race(name, race, f"{answer['model']} in {answer['dtype']}, {answer['threads']} threads")
    lines = [
        [f"{hit['prompt_tokens']:,}", f"{hit['hit_tokens']:,}", seconds(hit["ttft_s"]), seconds(hit["missing_s"]),
         f"{hit['ratio']:.2f} x"]
        for hit in answer["prefix_hits"]
    ]  # fmt: skip
    print_table(
        "Prefix hits: time to first token, and of computing the missing tokens alone",
        ["prompt", "found", "first token", "missing alone", "ratio"], lines, right=(0, 1, 2, 3, 4),
    )  # fmt: skip
    lines = [
        [row["contestant"], seconds(row["token_s"]), f"{row['vs_contiguous']:.2f} x"] for row in answer["decoding"]
    ]
    context = answer["decoding"][0]["context"]
    print_table(f"One request behind {context:,} tokens", ["", "a token", "speed"], lines, right=(1, 2))


def _show_race(name: str, race: dict, what: str) -> None:
    lines = [
        [row["contestant"], f"{row['tokens_per_s']:.1f}", f"{row['slowest_per_s']:.1f} - {row['fastest_per_s']:.1f}",
         f"{row['engine_ratio']:.2f} x", f"{row['engine_cpu_ratio']:.2f} x", f"{row['cache_bytes'] / 2**20:,.0f} MiB"]
        for row in race["rows"]
    ]  # fmt: skip
    lengths = f"{race['requests']} requests, {race['prompt_tokens']:,} prompt and {race['useful_tokens']:,} new tokens"
    columns = ["contestant", "tokens/s", "spread", "engine's gain", "by CPU time", "K/V memory"]
    print_table(f"{name}: {lengths}; {what}", columns, lines, right=(1, 2, 3, 4, 5))
    service = race["service"]
    for measure, percentiles in service["percentiles"].items():
        words = ", ".join(f"{value:.3g} s at {percent}%" for percent, value in percentiles.items() if value is not None)
        print(f"engine's {measure.removesuffix('_s')}: {words}")
    print(
        f"of its slots {service['waste']:.1%} held no token; scheduling took {service['scheduling_share']:.1%} of "
        f"{service['steps']:,} steps; {service['preemptions']} preemptions"
    )
    for absent, why in race["absent"].items():
        print(f"{absent} took no part: {why}")
