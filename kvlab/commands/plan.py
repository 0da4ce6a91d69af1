"""`kvlab plan`: what fits in a memory, and the line that launches an engine so."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from kvlab.commands.options import Batch, Dtype, Json, MlaLayout, Model
from kvlab.terminal import amount, print_json, print_table, warn, warn_about

Memory = Annotated[float, typer.Option("--memory-gib", help="Memory for weights and cache together, in GiB.")]
Context = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--context", help="Tokens in each request. [the trained positions]"),
]
Engine = Annotated[str, typer.Option("--engine", help="vllm, sglang, llama.cpp or transformers.")]
Weights = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--weights-gib", help="The weights' size, where it is not the published one."),
]
Reserve = Annotated[float, typer.Option("--reserve-gib", help="Kept free for activations and runtime, in GiB.")]


def plan(
    model: Model,
    memory_gib: Memory,
    context: Context = None,
    batch: Batch = 1,
    dtype: Dtype = None,
    engine: Engine = "vllm",
    weights_gib: Weights = None,
    reserve_gib: Reserve = 0.0,
    mla_layout: MlaLayout = "latent",
    json: Json = False,
) -> None:
    """Divide a memory into weights and KV cache.

    Says the largest batch, the longest context, and the line that launches an engine so.
    """
    from kvlab.config import resolve
    from kvlab.planning import make_plan

    config = resolve(model)
    context = config.max_position_embeddings or 4096 if context is None else context
    memory, reserve = (
        to_bytes("--memory-gib", memory_gib),
        to_bytes("--reserve-gib", reserve_gib, may_be_0=True),
    )
    weights = None if weights_gib is None else to_bytes("--weights-gib", weights_gib)
    answer = make_plan(config, memory, context, batch, dtype, engine, weights, reserve, mla_layout)
    warn_about(config, context)
    if not answer.fits:
        room = amount(answer.cache_budget_bytes)
        what = f"{batch} x {context:,} tokens do not fit in {room}"
        warn(f"{what}: the launch line is for {answer.max_context:,} tokens")
    if json:
        print_json(answer.as_dict())
    else:
        show(answer, config.max_position_embeddings)


def to_bytes(option: str, gib: float, may_be_0: bool = False) -> int:
    """GiB as bytes; raises ValueError unless it is a positive number (or 0 where it may be) below 10^15."""
    if not (0 < gib < 1e15 or (may_be_0 and gib == 0)):
        raise ValueError(f"{option} must be a positive number of GiB, not {gib}")
    return int(gib * 2**30)


def show(answer, trained: int | None = None) -> None:
    """The plan for people."""
    longest = "no limit" if answer.max_context is None else f"{answer.max_context:,} tokens"
    if answer.context_limited_by == "model":
        longest += " (the model's own limit: every layer slides, memory sets none)"
    elif trained is not None and answer.max_context > trained:
        longest += f" (memory's limit: the model was trained on {trained:,})"
    lines = [
        ["memory", amount(answer.memory_bytes)],
        ["weights", amount(answer.weights_bytes)],
        ["reserve", amount(answer.reserve_bytes)],
        ["left for the cache", amount(answer.cache_budget_bytes)],
        [f"largest batch at {answer.context:,} tokens", f"{answer.max_batch:,}"],
        [f"longest context at batch {answer.batch}", longest],
        [f"launch {answer.engine}", answer.command],
    ]
    print_table(f"{answer.model}: what fits, the cache in {answer.dtype}", ["", ""], lines)
