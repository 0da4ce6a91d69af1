"""`kvlab generate`: run a model, and see what its cache costs."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer

from kvlab.commands.options import Json
from kvlab.terminal import amount, print_json, print_table, seconds

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model to run: smollm2-135m, a directory, a hub id.")]
Prompt = Annotated[str, typer.Option("--prompt", help="The text to continue.")]
Cache = Annotated[
    str,
    typer.Option("--cache", help="none (naive), contiguous, static, sliding, int8, kivi2, sinks4-252, h2o-25%, ..."),
]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the decode step; warm-up is reported apart.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")]
OptionalInt = Optional[int]  # noqa: UP045 (older typers cannot read `int | None`)
OptionalFloat = Optional[float]  # noqa: UP045
OptionalText = Optional[str]  # noqa: UP045


def generate(
    model: Model,
    prompt: Prompt,
    cache: Cache = "contiguous",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="At most this many.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[OptionalInt, typer.Option("--top-k", help="Sample from this many.")] = None,
    top_p: Annotated[OptionalFloat, typer.Option("--top-p", help="Sample from this much mass.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampling.")] = 0,
    dtype: Annotated[OptionalText, typer.Option("--dtype", help="fp32, bf16 or fp16 [by capability]")] = None,
    device: Annotated[OptionalText, typer.Option("--device", help="cpu, cuda, ... [by capability]")] = None,
    compile: Compile = False,
    chat: Chat = False,
    json: Json = False,
) -> None:
    """Continue a text with MODEL, and say what time and cache it took."""
    from kvlab.sampling import Sampler

    sampler = Sampler(temperature, top_k, top_p, seed)  # bad options are refused before anything is loaded
    check_options(prompt, cache, max_new_tokens, compile)
    from kvlab import generate as decoding
    from kvlab.model import zoo

    loaded = zoo.load(model, dtype=dtype, device=device)
    print(loaded.words, file=sys.stderr)
    tokenizer = loaded.tokenizer
    text = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else prompt
    if compile:
        print("compiling the decode step", file=sys.stderr)
    live = _Live(tokenizer, quiet=json)
    result = decoding.generate(
        loaded.model, tokenizer.encode(text), cache, max_new_tokens=max_new_tokens, sampler=sampler,
        stop_ids=loaded.stop_ids, compile=compile, on_token=live,
    )  # fmt: skip
    live.end()
    answer = describe(result, tokenizer.decode(token for token in result.token_ids if tokenizer.knows(token)))
    print_json(answer) if json else show(answer)


def check_options(prompt: str, cache: str, max_new_tokens: int, compile: bool) -> None:
    """Raise BadParameter or ValueError naming the first option that no model could serve."""
    from kvlab.cache.build import check_name

    check_name(cache)
    if max_new_tokens < 1:
        raise typer.BadParameter(f"at least 1, got {max_new_tokens}", param_hint="--max-new-tokens")
    if compile and cache not in ("contiguous", "static"):
        raise typer.BadParameter(f"compiled decoding needs the static cache, not {cache}", param_hint="--compile")
    if not prompt:
        raise typer.BadParameter("the prompt is empty: give at least one character", param_hint="--prompt")


class _Live:
    """Print the text while it is generated, whole characters only."""

    def __init__(self, tokenizer, quiet: bool):
        self._tokenizer, self._decoder, self._quiet = tokenizer, tokenizer.stream_decoder(), quiet

    def __call__(self, token) -> None:
        if self._tokenizer.knows(token.id):
            self._print(self._decoder.push(token.id))

    def end(self) -> None:
        self._print(self._decoder.finish() + "\n")

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", flush=True)


def describe(result, text: str) -> dict:
    """The answer of `kvlab generate --json`."""
    counted = result.cache.bytes() if result.cache is not None else None
    return {
        "text": text, "token_ids": result.token_ids, "finished": result.finished,
        "ttft_s": result.ttft_s, "tokens_per_s": result.tokens_per_s, "warmup_s": result.warmup_s,
        "kv_rows_per_layer": result.kv_rows,
        "cache_bytes_allocated": counted.total if counted else 0,
        "cache_bytes_used": counted.payload if counted else 0,
    }  # fmt: skip


def show(answer: dict) -> None:
    """The same for people, below the text."""
    speed = answer["tokens_per_s"]
    lines = [
        ["time to first token", seconds(answer["ttft_s"])],
        ["decoding", f"{speed:.1f} tokens/s" if speed else "only one token"],
        ["K/V rows computed", f"{answer['kv_rows_per_layer']:,} in each layer"],
        ["cache, in use", amount(answer["cache_bytes_used"])],
        ["cache, allocated", amount(answer["cache_bytes_allocated"])],
    ]
    if answer["warmup_s"]:
        lines.insert(0, ["warm-up (compiling)", seconds(answer["warmup_s"])])
    print_table("", ["", ""], lines)
