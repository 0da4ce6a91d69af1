"""Small models in float64 served by an engine, and what each request would get by itself."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache as memoize

import torch

from kvlab.cache.base import KVCache
from kvlab.cache.build import paged_cache
from kvlab.engine.engine import Engine
from kvlab.engine.request import Identity, Request
from kvlab.generate import generate
from kvlab.model.transformer import Transformer
from kvlab.sampling import Sampler
from tests.harness import tiny_config, tiny_model

WINDOW = 5


@memoize
def hybrid() -> Transformer:
    """One layer that sees everything and one that sees five tokens: two layer groups."""
    torch.manual_seed(1)
    config = replace(tiny_config(), layer_types=("full_attention", "sliding_attention"), sliding_window=WINDOW)
    model = Transformer(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model.double()


MODELS = {
    "mha": lambda: tiny_model("mha"), "gqa": lambda: tiny_model("gqa"), "mqa": lambda: tiny_model("mqa"),
    "mla": lambda: tiny_model("mla"), "window": lambda: tiny_model("gqa", window=WINDOW), "hybrid": hybrid,
}  # fmt: skip


def alone(
    model: Transformer, request: Request, index: int = 0, kv_dtype: str | None = None, cache: KVCache | None = None
) -> list[int]:
    """What one request gets by itself from a contiguous cache, one of another dtype that is all its own, or `cache`."""
    sampler = Sampler(request.temperature, request.top_k, request.top_p, request.seed)
    ids, new = list(request.prompt_ids), request.max_new_tokens
    if cache is None:
        cache = paged_cache(model.config, len(ids) + new, 16, kv_dtype) if kv_dtype else "contiguous"
    out = generate(model, ids, cache, max_new_tokens=new, sampler=Fixed(sampler, index), stop_ids=request.stop_ids)
    return out.token_ids


class Fixed:
    """A sampler whose random numbers are those of one sequence of a request."""

    def __init__(self, sampler: Sampler, index: int):
        self.sampler, self.index = sampler, index

    def generator(self):
        return self.sampler.generator(self.index)

    def pick(self, logits, generators):
        return self.sampler.pick(logits, generators)


def some_requests(seed: int, count: int, longest: int = 14) -> list[Request]:
    """Prompts that share beginnings, answers of all kinds."""
    dice = random.Random(seed)
    shared = [dice.randrange(61) for _ in range(longest)]
    requests = []
    for number in range(count):
        own = [dice.randrange(61) for _ in range(dice.randrange(1, 6))]
        sampled = dice.random() < 0.7
        requests.append(Request(
            f"{number}", (*shared[: dice.randrange(longest - 5)], *own), max_new_tokens=dice.randrange(1, 16),
            temperature=0.9 if sampled else 0.0, top_k=dice.choice([None, 8]), top_p=dice.choice([None, 0.9]),
            seed=number, stop_ids=frozenset(dice.sample(range(61), dice.choice([0, 0, 4]))),
            n=dice.choice([1, 1, 2, 3]) if sampled else 1,
            identity=Identity(tenant=dice.choice([None, None, None, "other"])),
        ))  # fmt: skip
    return requests


def check_answers(model: Transformer, requests: list[Request], kv_dtype: str | None = None) -> None:
    for request in requests:
        for sequence in request.sequences:
            if sequence.finish_reason in ("stop", "length"):
                assert sequence.output_ids == alone(model, request, sequence.index, kv_dtype), request.id


def check_nothing_is_lost(engine: Engine) -> None:
    for pool, usage in zip(engine.scheduler.cache.pools, engine.usage(), strict=True):
        pool.check()
        assert usage.used == 0 and usage.free + usage.cached == pool.num_blocks
    assert all(pool.used_count == 0 for pool in engine.scheduler.tables.swap_pools)
    assert not engine.busy and not engine.mover._tickets and not engine.mover._loaded and not engine._draws.streams


class Failing(torch.nn.Module):
    """A layer that raises when it is told to, after the one before it has stored its keys and values."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.armed = layer, False

    def forward(self, *given):
        if self.armed:
            raise RuntimeError("the device is gone")
        return self.layer(*given)
