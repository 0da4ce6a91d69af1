"""Beam search: keep the `width` likeliest continuations, and let them share what they have in common.

After each step the survivors may all come from one row. `reorder` says so to the cache: dense caches copy rows, a
paged one names the same blocks twice and copies a block only when somebody writes to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.base import KVCache
from kvlab.generate import check_request, prefill, stores_nothing
from kvlab.model.transformer import Transformer
from kvlab.sampling import check_logits


@dataclass(frozen=True)
class Beam:
    """One continuation and its log-probability, the sum over its tokens."""

    token_ids: tuple[int, ...]
    log_probability: float


@torch.no_grad()
def beam_search(
    model: Transformer,
    prompt_ids: Sequence[int],
    cache: KVCache,
    width: int,
    *,
    max_new_tokens: int = 32,
    stop_ids: Collection[int] = (),
) -> list[Beam]:
    """The `width` best continuations that the search finds, likeliest first; `cache` must be empty.

    A beam that ends with a stop token keeps its place while others go on. A cache of fixed capacity needs room for
    `width` rows. Raises ValueError for requests that cannot be served, for a width below 1 or above the vocabulary,
    and for logits that are not finite.
    """
    check_request(model, prompt_ids, max_new_tokens)
    if type(width) is not int or not 1 <= width <= model.config.vocab_size:
        raise ValueError(f"a beam is 1 to {model.config.vocab_size} continuations wide, got {width!r}")
    if stores_nothing(cache):
        raise ValueError("beam search goes on from what is stored: give a cache that stores, such as contiguous")
    logits = prefill(model, prompt_ids, cache)  # (1, vocabulary)
    scores, tokens = _log_probabilities(logits)[0].topk(width)
    cache.reorder(torch.zeros(width, dtype=torch.int64))
    beams = [Beam((token,), score) for token, score in zip(tokens.tolist(), scores.tolist(), strict=True)]
    for position in range(len(prompt_ids), len(prompt_ids) + max_new_tokens - 1):
        if all(beam.token_ids[-1] in stop_ids for beam in beams):
            break
        logits = _advance(model, beams, position, cache)  # (width, vocabulary)
        beams, rows = _best(beams, _log_probabilities(logits), stop_ids)
        cache.reorder(torch.tensor(rows))
    return beams


def _log_probabilities(logits: Tensor) -> Tensor:
    check_logits(logits)
    return logits.double().log_softmax(-1)  # sums over long texts should not lose what tells beams apart


def _advance(model: Transformer, beams: list[Beam], position: int, cache: KVCache) -> Tensor:
    device = model.model.embed_tokens.weight.device
    ids = torch.tensor([[beam.token_ids[-1]] for beam in beams], device=device)  # (width, 1)
    positions = torch.full(ids.shape, position, dtype=torch.int32, device=device)
    step = cache.begin(positions, torch.zeros(len(beams), dtype=torch.bool))  # no prompt ends in it
    return model.unembed(model.hidden_states(ids, step, cache)[:, -1])


def _best(beams: list[Beam], logs: Tensor, stop_ids: Collection[int]) -> tuple[list[Beam], list[int]]:
    """The best continuations of all beams, and the row that each continues; ended beams compete as they are."""
    candidates = []
    scores, tokens = logs.topk(min(len(beams), logs.shape[1]))  # (width, width)
    for row, beam in enumerate(beams):
        if beam.token_ids[-1] in stop_ids:
            candidates.append((beam.log_probability, row, beam))
            continue
        for score, token in zip(scores[row].tolist(), tokens[row].tolist(), strict=True):
            longer = Beam((*beam.token_ids, token), beam.log_probability + score)
            candidates.append((longer.log_probability, row, longer))
    best = sorted(candidates, key=lambda found: -found[0])[: len(beams)]
    return [beam for _, _, beam in best], [row for _, row, _ in best]
