"""How long does a lossy cache write the same text? The first token that differs from the exact cache's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvlab.cache.base import KVCache
from kvlab.cache.build import build_cache
from kvlab.evaluation.quality import teacher_forced
from kvlab.generate import generate
from kvlab.model.zoo import LoadedModel

CACHES = ("contiguous", "q8_0", "int8", "fp8", "kivi4", "int4", "q4_0", "kivi2", "int2-g32")
PROMPTS = (
    "A letter to a friend about a walk along the coast:\n\n",
    "The history of the bicycle begins with",
    "How to bake bread at home. First,",
    "Once upon a time, in a village between two mountains,",
    "The most important thing to know about computers is",
    "Water boils at a lower temperature on a mountain because",
    "def fibonacci(n):\n",
    "Questions and answers about the planets.\n\nQuestion:",
)
STRIDE = 32  # tokens of a step where steps change nothing


def divergence_rows(
    loaded: LoadedModel,
    caches: Sequence[str] = CACHES,
    prompts: Sequence[str] = PROMPTS,
    *,
    tokens: int = 512,
    tick: Callable[[str], None] = lambda words: None,
) -> Iterator[dict]:
    """For each cache, where its greedy text leaves the exact cache's, for each prompt; `tokens` where it never does.

    Up to that place both caches have seen the same tokens. So the lossy one is fed the exact text, and the first
    prediction that differs is the first token that would have.
    """
    model, texts = loaded.model, []
    for prompt in prompts:
        ids = loaded.tokenizer.encode(prompt)
        texts.append((ids, generate(model, ids, max_new_tokens=tokens).token_ids))
        tick("contiguous")
    for name in caches:
        places = []
        for ids, written in texts:
            places.append(first_difference(loaded, ids, written, build_cache(loaded.config, name)))
            tick(name)
        yield {"cache": name, "tokens": tokens, "same": sum(place == tokens for place in places), "places": places}


def first_difference(loaded: LoadedModel, prompt: list[int], written: list[int], cache: KVCache) -> int:
    """How many of the written tokens a cache would have written too before its first other one."""
    stride = STRIDE if cache.chunk_invariant else 1
    at = -len(prompt)  # index into `written` of the token that the next row of predictions is about, less one
    for logs in teacher_forced(loaded.model, prompt + written[:-1], cache, stride):  # (T, vocabulary)
        for best in logs.argmax(-1).tolist():
            at += 1
            if at >= 0 and best != written[at]:
                return at
    return len(written)
