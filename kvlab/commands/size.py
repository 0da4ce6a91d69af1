"""`kvlab size`: how many bytes the cache of one model takes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlab.commands.options import Batch, Dtype, Json, MlaLayout, Model
from kvlab.terminal import amount, print_json, print_table, warn_about

Context = Annotated[int, typer.Option("--context", help="Tokens in each request.")]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens in a block of the engine.")]


def size(
    model: Model,
    context: Context,
    batch: Batch = 1,
    dtype: Dtype = None,
    block_size: BlockSize = 1,
    mla_layout: MlaLayout = "latent",
    json: Json = False,
) -> None:
    """Say how many bytes the KV cache of MODEL takes."""
    from kvlab.config import resolve

    config = resolve(model)
    answer = describe(config, context, batch, dtype, block_size, mla_layout)
    warn_about(config, context)
    if json:
        print_json(answer)
    else:
        show(answer)


def describe(config, context: int, batch: int, dtype: str | None, block_size: int, mla_layout: str) -> dict:
    """The answer of `kvlab size --json`."""
    from kvlab import schemes, sizing

    scheme = schemes.parse(config.dtype if dtype is None else dtype)
    arguments = (config, context, batch, scheme.name)
    ideal = sizing.bytes_ideal(*arguments, mla_layout)
    allocated = sizing.bytes_allocated(*arguments, block_size, mla_layout)
    return {
        "model": config.name, "dtype": scheme.name, "counts": scheme.words, "context": context,
        "batch": batch, "block_size": block_size, "layout": sizing.layout(config, mla_layout),
        "bytes_per_token": sizing.bytes_per_token(config, scheme.name, mla_layout),
        "bytes_ideal": ideal, "bytes_allocated": allocated,
        "gib_ideal": ideal / sizing.GIB, "gib_allocated": allocated / sizing.GIB,
        "terms": sizing.terms(*arguments, mla_layout),
        "max_position_embeddings": config.max_position_embeddings, "cannot_run": config.cannot_run,
        "source": config.source,
    }  # fmt: skip


def show(answer: dict) -> None:
    """The same for people."""
    allocated = f"{amount(answer['bytes_allocated'])} with full length for every layer"
    lines = [
        ["layout", answer["layout"]],
        *[["formula" if i == 0 else "  +", formula(term)] for i, term in enumerate(answer["terms"])],
        ["per token", f"{answer['bytes_per_token']:,} bytes while every layer keeps it"],
        ["ideal", amount(answer["bytes_ideal"])],
        ["allocated", f"{allocated}, block size {answer['block_size']}"],
        ["counted", answer["counts"]],
        ["source", answer["source"]],
    ]
    if answer["cannot_run"]:
        lines.append(["note", f"can be sized, not run: {answer['cannot_run']}"])
    what = f"{answer['batch']} x {answer['context']:,} tokens"
    print_table(f"{answer['model']}: KV cache of {what}", ["", ""], lines)


def formula(term: dict) -> str:
    """One summand as a reader would write it."""
    words = {"keys_and_values": "(K and V)"}
    factors = [
        f"{value:,} {words.get(name, f'({name})' if ' + ' in name else name)}"
        for name, value in term["factors"].items()
    ]
    return " x ".join(factors) + f" = {term['bytes']:,}"
