"""What do bits cost? Keys and values at every pair of widths, judged by right answers, by distance, by perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvlab.cache.base import KVCache
from kvlab.cache.quantized import QuantizedCache
from kvlab.codecs import Codec
from kvlab.config import ModelConfig
from kvlab.evaluation.quality import Accuracy, accuracy, compare_distributions, held_out_text
from kvlab.evaluation.tasks import Sample, generate_samples
from kvlab.model.zoo import LoadedModel
from kvlab.quantization import quantize

GROUP, RESIDUAL = 32, 32
TASKS = {"passkey": 384, "recall": 128}  # tokens of a prompt
WINDOW, STRIDE = 512, 16  # tokens of a window of text, and of a step through it
LONG_STRIDE = 128  # where steps change nothing


@dataclass(frozen=True)
class Widths:
    """Bits of keys and of values: "full" (as they came), "8", "4", "2" (affine, groups of 32) or "fp8" (e4m3).

    keys_along  "tokens": a scale for each channel of 32 tokens, as KIVI has; it needs a residual
    residual    newest tokens that stay as they came
    """

    keys: str
    values: str
    keys_along: str = "channels"
    residual: int = 0

    @property
    def name(self) -> str:
        """Such as "K4 V2" or "K2 per channel V16, residual 32"."""
        along = " per channel" if self.keys_along == "tokens" else ""
        rest = f", residual {self.residual}" if self.residual else ""
        return f"K{self.keys}{along} V{self.values}{rest}"

    def codecs(self, head_dim: int) -> tuple[Codec | None, Codec | None]:
        """The keys' and the values' codec; None keeps them as they came."""
        row = math.gcd(GROUP, head_dim)  # narrower heads have smaller groups
        keys = codec(self.keys, GROUP if self.keys_along == "tokens" else row, self.keys_along)
        return keys, codec(self.values, row)

    def make_cache(self, config: ModelConfig) -> KVCache:
        """An empty cache for a model."""
        codecs = self.codecs(config.head_dim)
        return KVCache([QuantizedCache(*codecs, self.residual) for _ in range(config.num_hidden_layers)])


def codec(bits: str, group_size: int = GROUP, along: str = "channels") -> Codec | None:
    """The codec that "8", "4", "2" or "fp8" stands for; None for "full"."""
    if bits == "full":
        return None
    return Codec("e4m3", 8, group_size, along) if bits == "fp8" else Codec("affine", int(bits), group_size, along)


def stored_bits(codec: Codec | None) -> float:
    """Bits that a stored number takes, its share of scale and minimum counted; 16 without a codec."""
    return 16.0 if codec is None else quantize(torch.zeros(1, 1, GROUP, GROUP), codec).bits_per_number


BITS = ("full", "8", "4", "2")
GRID = tuple(Widths(keys, values) for keys in BITS for values in BITS)
FP8 = (Widths("fp8", "full"), Widths("full", "fp8"), Widths("fp8", "fp8"))
# the same keys twice, with a scale for 32 numbers of a token and with one for 32 tokens of a channel
REPAIR = tuple(
    Widths(keys, values, along, RESIDUAL)
    for keys, values in (("4", "full"), ("2", "full"), ("2", "4"), ("2", "2")) for along in ("channels", "tokens")
)  # fmt: skip


def grid_rows(
    loaded: LoadedModel,
    widths: Sequence[Widths] = GRID + FP8 + REPAIR,
    *,
    samples: int = 24,
    seed: int = 1,
    tasks: dict[str, int] = TASKS,
    text: str | None = None,
    work: Path | None = None,
    tick: Callable[[dict], None] = lambda row: None,
) -> Iterator[dict]:
    """One row for each pair of widths: bits stored, right answers with intervals, KL, agreement and perplexity.

    `tasks` gives each task's length in tokens, `text` what is predicted (None: kvlab's held-out text).
    `work` is a folder that keeps what was measured so far; `tick` is called for every sample and window.
    """
    questions = {task: list(generate_samples(task, loaded.tokenizer, samples, seed=seed, tokens=tokens))
                 for task, tokens in tasks.items()}  # fmt: skip
    ids = loaded.tokenizer.encode(held_out_text() if text is None else text)
    for pair in widths:
        place = None if work is None else work / pair.name.replace(" ", "-")
        facts = {"model": loaded.config.name, "dtype": loaded.dtype, **asdict(pair)}

        def make_cache(capacity: int, pair: Widths = pair) -> KVCache:
            return pair.make_cache(loaded.config)

        answers = {task: _accuracy(loaded, rows, make_cache, place, task, facts, tick)
                   for task, rows in questions.items()}  # fmt: skip
        distance = compare_distributions(
            loaded.model, ids, make_cache, window=WINDOW, stride=STRIDE if pair.residual else LONG_STRIDE,
            results=place and place.with_suffix(".text.jsonl"), configuration=facts, tick=tick,
        )  # fmt: skip
        keys, values = pair.codecs(loaded.config.head_dim)
        bits = {"key_bits": stored_bits(keys), "value_bits": stored_bits(values)}
        yield {"name": pair.name, **asdict(pair), **bits, **answers, **_rounded(asdict(distance))}


def _accuracy(loaded, samples: list[Sample], make_cache, place, task: str, facts: dict, tick) -> dict:
    done: Accuracy = accuracy(
        loaded.model, loaded.tokenizer, samples, make_cache, configuration=facts, tick=tick,
        results=place and place.with_suffix(f".{task}.jsonl"),
    )  # fmt: skip
    return _rounded({"right": done.right, "total": done.total, "low": done.low, "high": done.high})


def _rounded(facts: dict) -> dict:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in facts.items()}
