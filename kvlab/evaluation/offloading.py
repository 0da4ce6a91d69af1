"""Record what chapter 13 shows: `python -m kvlab.evaluation.offloading --out FILE`.

Fetching against computing, the first token after a restart, and prompts that fit a budget only with offloading.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from kvlab.cache.base import CacheFull
from kvlab.cache.build import build_cache
from kvlab.cache.offloaded import contents
from kvlab.evaluation.fetching import LENGTHS, fetches
from kvlab.evaluation.restart import PREFIX, forget_pages, in_a_new_process, tokens
from kvlab.evaluation.results import record
from kvlab.generate import prefill
from kvlab.model import zoo
from kvlab.model.transformer import Transformer

CONTEXTS = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Restart:
    """A prompt whose prefix an earlier process kept: times to first token in new processes, medians.

    speedup  computed_s / disk_s
    """

    prefix_tokens: int
    restored_tokens: int
    computed_s: float
    disk_s: float
    page_cache_s: float
    speedup: float
    same_answers: bool


@dataclass(frozen=True)
class Fit:
    """A prompt, and the bytes of keys and values that lie beside the weights.

    refused  what a cache of `budget_tokens` slots in each layer says; None where it serves the prompt
    resident_bytes, offloaded_bytes  all layers; the two that are there at once when layers are offloaded
    """

    context: int
    budget_tokens: int
    budget_bytes: int
    refused: str | None
    resident_bytes: int
    offloaded_bytes: int
    same_token: bool


def restarts(
    model: str, dtype: str, *, prefix: int = PREFIX, repeats: int = 3, say: Callable[[str], None] = lambda words: None
) -> Restart:
    """One process keeps a prefix; later ones are asked another question behind it, and others compute it all."""
    with tempfile.TemporaryDirectory() as kept:
        in_a_new_process(Path(kept), model, dtype, prefix, question=0)
        turns = []
        for turn in range(1, repeats + 1):
            with tempfile.TemporaryDirectory() as empty:
                computed = in_a_new_process(Path(empty), model, dtype, prefix, turn)
            forget_pages(Path(kept))
            cold, warm = (in_a_new_process(Path(kept), model, dtype, prefix, turn) for _ in range(2))
            say(f"first token: computed {computed['ttft_s']:.2f} s, from the disk {cold['ttft_s']:.2f} s")
            turns.append((computed, cold, warm))
    computed_s, disk_s, warm_s = (median(run["ttft_s"] for run in runs) for runs in zip(*turns, strict=True))
    restored = min(cold["restored_tokens"] for _, cold, _ in turns)
    same = all(computed["answer"] == cold["answer"] for computed, cold, _ in turns)
    return Restart(prefix, restored, computed_s, disk_s, warm_s, computed_s / disk_s, same)


def fits(
    model: Transformer, contexts: Sequence[int] = CONTEXTS, budget_tokens: int = 1024, *, seed: int = 0
) -> list[Fit]:
    """Prefill prompts beside a budget: one that all layers must fit, and with layers offloaded."""
    found = []
    for context in contexts:
        prompt = tokens(model.config.vocab_size, context, seed)
        plain, moved = build_cache(model.config), build_cache(model.config, "offloaded")
        answers = [int(prefill(model, prompt, cache).argmax()) for cache in (plain, moved)]
        refused = _refusal(model, prompt, budget_tokens)
        payload = plain.bytes().payload
        layers = [sum(x[:, :, :used].nbytes for x, used in contents(layer.inner)) for layer in moved.layers]
        two = max(sum(pair) for pair in pairwise(layers))
        budget = payload // context * budget_tokens
        found.append(Fit(context, budget_tokens, budget, refused, payload, two, answers[0] == answers[1]))
    return found


def _refusal(model: Transformer, prompt: Sequence[int], budget_tokens: int) -> str | None:
    try:
        prefill(model, prompt, build_cache(model.config, "static", budget_tokens))
    except CacheFull as error:
        return str(error)
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure fetching, restarts and fits, and record their rows."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.evaluation.offloading", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--model", default=zoo.OFFLINE, help="a model to run [%(default)s]")
    parser.add_argument("--dtype", default="bf16", help="fp32, bf16 or fp16 [%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each contestant [%(default)s]")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"at least 1 turn is needed, got {options.repeats}")
    say = lambda words: print(words, file=sys.stderr, flush=True)  # noqa: E731
    restart = restarts(options.model, options.dtype, repeats=options.repeats, say=say)
    loaded = zoo.load(options.model, dtype=options.dtype)
    say(loaded.words)
    with tempfile.TemporaryDirectory() as directory:
        rates, fetched = fetches(loaded.model, Path(directory), LENGTHS, repeats=options.repeats)
    rows = [{"measured": "restart", **asdict(restart)}]
    rows += [{"measured": "fetch", **asdict(row)} for row in fetched]
    rows += [{"measured": "fit", **asdict(row)} for row in fits(loaded.model)]
    command = f"python -m kvlab.evaluation.offloading --out {options.out.name} --model {options.model}"
    command += f" --dtype {options.dtype} --repeats {options.repeats}"
    record(
        options.out, command, rows, threads=torch.get_num_threads(), model=loaded.config.name, dtype=loaded.dtype,
        rates=asdict(rates), note=loaded.words,
    )  # fmt: skip


if __name__ == "__main__":
    main()
