"""What does a lossy cache cost? Right answers with an interval, and the distance from the exact cache's predictions.

Everything runs one row at a time through the cache, as it would in use, and can be continued after a break (see
Results). Note beside every figure made with `smollm2-135m` that its weights are already 4-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp, sqrt
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from kvlab.cache.base import KVCache
from kvlab.cache.build import build_cache
from kvlab.evaluation.results import Results
from kvlab.evaluation.tasks import Sample, is_right
from kvlab.generate import GOES_ON, check_request, last_logits, prefill
from kvlab.model.tokenizer import Tokenizer
from kvlab.model.transformer import Transformer

MakeCache = Callable[[int], KVCache]  # tokens that it must hold -> an empty cache
Z_95 = 1.959963984540054  # standard deviations that hold 95% of a normal distribution
SPARE_TOKENS = 3  # generated beyond the answer: a space before it, and what shows that its last word has ended


@dataclass(frozen=True)
class Accuracy:
    """How many samples were right, with a 95% interval; `rows` has one dict for each, in the samples' order."""

    right: int
    total: int
    low: float
    high: float
    rows: tuple[dict, ...] = ()

    @property
    def rate(self) -> float:
        """The share that was right."""
        return self.right / self.total

    def of_task(self, task: str) -> Accuracy:
        """The same for the samples of one task. Raises ValueError where there are none."""
        return _counted([row for row in self.rows if row["task"] == task])


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95% Wilson interval of a proportion: sensible for few samples, and inside 0..1 at its ends.

    Raises ValueError unless 0 <= right <= total and total >= 1.
    """
    if not 0 <= right <= total or total < 1:
        raise ValueError(f"{right} right of {total} is not a proportion")
    p, z2 = right / total, Z_95**2
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    # at the ends the exact bounds are 0 and 1, which rounding may miss
    return (0.0 if right == 0 else centre - half), (1.0 if right == total else centre + half)


def accuracy(
    model: Transformer,
    tokenizer: Tokenizer,
    samples: Iterable[Sample],
    make_cache: MakeCache | None = None,
    *,
    results: str | Path | None = None,
    configuration: dict | None = None,
    question_apart: bool = True,
    tick: Callable[[dict], None] = lambda row: None,
) -> Accuracy:
    """Greedy answers to the samples through fresh caches (None: the exact, contiguous one).

    question_apart  store the context before the question is seen, as in a conversation (else all in one prefill)
    results         a file that keeps every row; samples whose id it holds are not run again
    configuration   what the rows depend on (model, dtype, cache, ...): a file of another one is refused
    tick            called with every row, those of the file included: a progress bar

    Raises ValueError for no samples, and for a file whose rows were made from other prompts.
    """
    kept = Results(results, {"measure": "accuracy", "question_apart": question_apart, **(configuration or {})})
    make_cache = make_cache or (lambda capacity: build_cache(model.config))
    rows = []
    for sample in samples:
        row = kept.rows.get(sample.id)
        if row is None:
            text = answer(model, tokenizer, sample, make_cache, question_apart)
            row = {"id": sample.id, "task": sample.task, "depth": sample.depth, "num_tokens": sample.num_tokens,
                   "right": is_right(sample, text), "text": text, "prompt": _digest(sample)}  # fmt: skip
            kept.add(row)
        elif row["prompt"] != _digest(sample):
            raise ValueError(f"{results}: {sample.id} was made from another prompt: give another file")
        rows.append(row)
        tick(row)
    return _counted(rows)


def _digest(sample: Sample) -> str:
    return sha256(f"{sample.prompt}\0{sample.answer}".encode()).hexdigest()[:16]


def _counted(rows: Sequence[dict]) -> Accuracy:
    if not rows:
        raise ValueError("there are no samples to count")
    right = sum(row["right"] for row in rows)
    return Accuracy(right, len(rows), *wilson(right, len(rows)), tuple(rows))


def answer(
    model: Transformer, tokenizer: Tokenizer, sample: Sample, make_cache: MakeCache, question_apart: bool = True
) -> str:
    """The model's greedy completion of one prompt, as many tokens as the answer has and SPARE_TOKENS."""
    ids = tokenizer.encode(sample.prompt)
    count = len(tokenizer.encode(sample.answer, add_bos=False)) + SPARE_TOKENS
    check_request(model, ids, count)
    split = len(tokenizer.encode(sample.context)) if question_apart and sample.context else len(ids)
    cache = make_cache(len(ids) + count)
    logits = prefill(model, ids[:split], cache)
    if split < len(ids):
        logits = prefill(model, ids[split:], cache, start=split)
    chosen = [int(logits.argmax(-1))]
    while len(chosen) < count:
        logits = last_logits(model, chosen[-1:], len(ids) + len(chosen) - 1, cache, GOES_ON)
        chosen.append(int(logits.argmax(-1)))
    return tokenizer.decode(chosen)


@dataclass(frozen=True)
class Comparison:
    """A cache's predictions beside the exact cache's, over `tokens` predictions of held-out text.

    kl                  mean KL(exact || variant) in nats: 0 where nothing was lost
    top1_agreement      share of predictions whose most likely token is the same
    perplexity_exact, perplexity_variant  exp of the mean negative log-likelihood of the text's own next token
    """

    tokens: int
    kl: float
    top1_agreement: float
    perplexity_exact: float
    perplexity_variant: float


def compare_distributions(
    model: Transformer,
    token_ids: Sequence[int],
    make_cache: MakeCache,
    *,
    window: int = 512,
    stride: int = 1,
    results: str | Path | None = None,
    configuration: dict | None = None,
    tick: Callable[[dict], None] = lambda row: None,
) -> Comparison:
    """Feed a text to an exact and to another cache, `stride` tokens a step, and compare what they predict.

    Lossy caches act on what earlier steps stored: stride 1 is what decoding does, larger ones are faster and kinder.
    The text is cut into windows of `window` tokens, each with fresh caches and a row of its own in `results` (see
    accuracy). Raises ValueError for a text of less than two tokens, and sizes below 2 (window) and 1 (stride).
    """
    if window < 2 or stride < 1 or len(token_ids) < 2:
        raise ValueError(
            f"{len(token_ids)} tokens in windows of {window} and steps of {stride}: a text and a window need at least "
            "2 tokens, a step at least 1"
        )
    text = sha256(repr(list(token_ids)).encode()).hexdigest()[:16]
    facts = {"measure": "distributions", "text": text, "window": window, "stride": stride}
    kept = Results(results, {**facts, **(configuration or {})})
    rows = []
    for start in range(0, len(token_ids) - 1, window):
        piece, name = list(token_ids[start : start + window + 1]), f"window-{start:06d}"
        if name not in kept.rows:
            kept.add({"id": name, **_sums(model, piece, make_cache, stride)})
        rows.append(kept.rows[name])
        tick(rows[-1])
    total = {key: sum(row[key] for row in rows) for key in rows[0] if key != "id"}
    n = total["tokens"]
    # rounding may leave the mean of zeros a hair below 0
    return Comparison(n, max(0.0, total["kl"] / n), total["agree"] / n, exp(total["nll_exact"] / n),
                      exp(total["nll_variant"] / n))  # fmt: skip


def _sums(model: Transformer, ids: list[int], make_cache: MakeCache, stride: int) -> dict:
    """Sums over one window: the last of its ids is predicted and never fed."""
    exact = teacher_forced(model, ids[:-1], build_cache(model.config), stride)
    variant = teacher_forced(model, ids[:-1], make_cache(len(ids)), stride)
    sums, seen = {"tokens": len(ids) - 1, "kl": 0.0, "agree": 0, "nll_exact": 0.0, "nll_variant": 0.0}, 0
    for p, q in zip(exact, variant, strict=True):  # (T, vocabulary) log-probabilities
        targets = torch.tensor(ids[seen + 1 : seen + 1 + len(p)], device=p.device)[:, None]  # (T, 1)
        sums["kl"] += float(kl_div(q, p, log_target=True, reduction="sum"))
        sums["agree"] += int((p.argmax(-1) == q.argmax(-1)).sum())
        sums["nll_exact"] -= float(p.gather(1, targets).sum())
        sums["nll_variant"] -= float(q.gather(1, targets).sum())
        seen += len(p)
    return sums


@torch.no_grad()
def teacher_forced(model: Transformer, ids: Sequence[int], cache: KVCache, stride: int = 1) -> Iterator[Tensor]:
    """Yield the log-probabilities (T, vocabulary) after each token of a text, in fp32, `stride` tokens a step."""
    device = model.model.embed_tokens.weight.device
    for start in range(0, len(ids), stride):
        step_ids = torch.tensor([ids[start : start + stride]], device=device)  # (1, T)
        positions = torch.arange(start, start + step_ids.shape[1], dtype=torch.int32, device=device)[None]  # (1, T)
        pieces = cache.cut(positions)
        steps = zip(step_ids.split(pieces, 1), positions.split(pieces, 1), strict=True)
        logits = torch.cat([model(ids_now, cache.begin(at), cache)[0] for ids_now, at in steps])  # (T, vocabulary)
        yield logits.float().log_softmax(-1)


def held_out_text() -> str:
    """About 5 kB of plain English, written for this course: no model was trained on it before it was published."""
    return (Path(__file__).parent.parent / "data" / "held_out.txt").read_text(encoding="utf-8")
