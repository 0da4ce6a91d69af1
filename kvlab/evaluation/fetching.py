"""Fetching a known prefix against computing it again: predicted from what the machine does per second, and measured."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from kvlab.cache.block_files import BlockFiles
from kvlab.cache.tiers import TieredStore
from kvlab.config import ModelConfig
from kvlab.engine.block_pool import blocks_for
from kvlab.engine.engine import Engine
from kvlab.engine.request import Request
from kvlab.evaluation.restart import BLOCK_SIZE, BUDGET, PREFIX, forget_pages, tokens
from kvlab.model.transformer import Transformer
from kvlab.roofline import attention_flops

LENGTHS = (128, 256, 512, 1024, PREFIX)
SAMPLE = 32 * 2**20  # bytes with which rates are measured
COPIES = 2  # of every byte between a store in memory and the pools: blocks together, then into place
REPEATS = 5  # of a rate; the best counts


@dataclass(frozen=True)
class Rates:
    """What this machine does per second: bytes copied, read from the disk, hashed; operations of matrix products."""

    memory: float
    disk: float
    hashing: float
    flops: float

    def memory_s(self, count: int) -> float:
        """Seconds to bring bytes from a store in memory into the pools."""
        return COPIES * count / self.memory

    def disk_s(self, count: int) -> float:
        """Seconds to read bytes, check them, and bring them into the pools."""
        return count / self.disk + count / self.hashing + (1 + COPIES) * count / self.memory

    def compute_s(self, model: Transformer, count: int) -> float:
        """Seconds to compute the keys and values of a prefix: products with weights, and causal attention."""
        weights = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
        return (2 * weights * count + attention_flops(model.config, count, count)) / self.flops


@dataclass(frozen=True)
class Fetch:
    """Seconds until the keys and values of a known prefix are in the pools: medians.

    disk_s                  with files that the operating system had dropped from memory; page_cache_s: it had not
    break_even_bytes_per_s  a store that is slower than this loses against computing
    """

    prefix_tokens: int
    bytes: int
    memory_s: float
    page_cache_s: float
    disk_s: float
    recompute_s: float
    predicted_memory_s: float
    predicted_disk_s: float
    predicted_recompute_s: float
    break_even_bytes_per_s: float


def measure_rates(directory: Path, config: ModelConfig, dtype: torch.dtype, file_bytes: int) -> Rates:
    """Measure each rate by itself: the disk with files of `file_bytes`, as blocks are; products as in a prefill."""
    source, target = torch.ones(SAMPLE, dtype=torch.uint8), torch.zeros(SAMPLE, dtype=torch.uint8)
    hidden = torch.randn(512, config.hidden_size).to(dtype)
    weights = torch.randn(2 * config.intermediate_size, config.hidden_size).to(dtype)
    products_s = _best(lambda: torch.nn.functional.linear(hidden, weights))
    return Rates(
        memory=SAMPLE / _best(lambda: target.copy_(source)), disk=_disk_rate(directory, file_bytes),
        hashing=SAMPLE / _best(lambda: hashlib.sha256(source.numpy()).digest()),
        flops=2 * hidden.shape[0] * weights.numel() / products_s,
    )  # fmt: skip


def _disk_rate(directory: Path, file_bytes: int) -> float:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        paths = [Path(folder) / f"{index}" for index in range(-(-SAMPLE // file_bytes))]
        for path in paths:
            with open(path, "wb") as file:
                file.write(bytes(file_bytes))
                file.flush()
                os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped from memory
        seconds = _best(lambda: [path.read_bytes() for path in paths], lambda: forget_pages(Path(folder)))
        return len(paths) * file_bytes / seconds


def _best(do: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    seconds = []
    for _ in range(REPEATS):
        before()
        began = perf_counter()
        do()
        seconds.append(perf_counter() - began)
    return min(seconds)


def fetches(
    model: Transformer, directory: Path, lengths: Sequence[int] = LENGTHS, *, repeats: int = 3, seed: int = 0
) -> tuple[Rates, list[Fetch]]:
    """Store the longest prefix, then bring each length back from memory and disk, and compute it; all take turns.

    Raises ValueError for lengths that are not whole blocks.
    """
    wrong = [length for length in lengths if length < 1 or length % BLOCK_SIZE]
    if wrong:
        raise ValueError(f"a prefix is whole blocks of {BLOCK_SIZE} tokens, got {wrong[0]}")
    prompt = tokens(model.config.vocab_size, max(lengths) + 1, seed)
    memory, files = TieredStore(), BlockFiles(directory / "blocks", BUDGET)
    for store in (memory, TieredStore(0, files)):
        _compute(model, prompt, store)
    block_bytes = memory.used_bytes // (max(lengths) // BLOCK_SIZE)
    dtype = model.model.embed_tokens.weight.dtype
    rates = measure_rates(directory, model.config, dtype, files.used_bytes() // (max(lengths) // BLOCK_SIZE))
    times: dict[int, list[tuple[float, ...]]] = {length: [] for length in lengths}
    for _ in range(repeats):
        for length in lengths:
            known = prompt[: length + 1]
            warm = _fetch(model, known, TieredStore(0, files))
            forget_pages(files.directory)
            cold = _fetch(model, known, TieredStore(0, files))
            times[length].append((_fetch(model, known, memory), warm, cold, _compute(model, known, None)))
    return rates, [_row(model, rates, block_bytes, *item) for item in times.items()]


def _engine(model: Transformer, prompt: Sequence[int], store: TieredStore | None) -> Engine:
    count = len(prompt) + 1
    return Engine(
        model, num_blocks=blocks_for(count, BLOCK_SIZE), block_size=BLOCK_SIZE, token_budget=count, store=store
    )


def _compute(model: Transformer, prompt: Sequence[int], store: TieredStore | None) -> float:
    """Seconds to the first token in one chunk, by an engine that knows nothing yet."""
    engine = _engine(model, prompt, store)
    request = engine.submit(Request("r", prompt, max_new_tokens=1))
    for _ in engine.run():
        pass
    engine.close()
    return request.sequences[0].ttft_s


def _fetch(model: Transformer, prompt: Sequence[int], store: TieredStore) -> float:
    """Seconds until a new engine has the prefix in its pools, ready to compute the last token."""
    engine = _engine(model, prompt, store)
    engine.submit(Request("r", prompt, max_new_tokens=1))
    began = perf_counter()
    plan = engine.scheduler.plan()
    engine.mover.move(plan)
    seconds = perf_counter() - began
    if engine.stats.restored_tokens != len(prompt) - 1:
        raise RuntimeError(f"of {len(prompt) - 1} stored tokens only {engine.stats.restored_tokens} came back")
    engine.scheduler.abandon(plan)
    return seconds


def _row(model: Transformer, rates: Rates, block_bytes: int, length: int, turns: Sequence[tuple[float, ...]]) -> Fetch:
    memory_s, page_cache_s, disk_s, recompute_s = (median(column) for column in zip(*turns, strict=True))
    count = length // BLOCK_SIZE * block_bytes
    return Fetch(
        length, count, memory_s, page_cache_s, disk_s, recompute_s, rates.memory_s(count), rates.disk_s(count),
        rates.compute_s(model, length), count / recompute_s,
    )  # fmt: skip
