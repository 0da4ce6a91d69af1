"""Which requests can never be served, and what to do about them."""

from __future__ import annotations

from kvlab.engine.block_tables import BlockTables
from kvlab.engine.request import Request


class RequestRefused(ValueError):
    """A request that could never be served here; nothing was changed."""


def check_servable(request: Request, tables: BlockTables, max_running: int, max_length: int | None) -> None:
    """Raise RequestRefused for a request that no pool of `tables`, or no step of `max_running` sequences, can hold.

    `max_length` is the most tokens of a sequence, prompt and output; None: any.
    """
    if request.n > max_running:
        raise RequestRefused(f"request {request.id}: n={request.n}, but only {max_running} sequences can run")
    prompt, new = len(request.prompt_ids), request.max_new_tokens
    lengths = f"request {request.id}: {prompt} prompt tokens and {new} new ones"
    if max_length is not None and prompt + new > max_length:
        raise RequestRefused(f"{lengths} exceed the model's {max_length}: shorten one of them")
    for pool, most in zip(tables.pools, tables.most_blocks(prompt + new - 1), strict=True):
        if most > pool.num_blocks:
            raise RequestRefused(
                f"{lengths} need {most} blocks of {pool.block_size} tokens and can never fit into "
                f"{pool.num_blocks}: shorten one of them, or make the pool larger"
            )
