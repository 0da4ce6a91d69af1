"""Record what chapter 12 shows, right answers against budget: `python -m kvlab.evaluation.evictions`.

Every eviction method at equal bytes, the question known when the cache is compressed or not. Note beside every
figure: the weights of smollm2-135m are already 4-bit, which are dequantised on load.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from tqdm import tqdm

from kvlab.attention import Step
from kvlab.cache.base import KVCache
from kvlab.cache.scores import METHODS
from kvlab.evaluation.forks import branches, forked
from kvlab.evaluation.quality import wilson
from kvlab.evaluation.results import Results, record
from kvlab.evaluation.tasks import Sample, generate_samples
from kvlab.generate import check_request, prefill
from kvlab.model import zoo
from kvlab.model.tokenizer import Tokenizer
from kvlab.model.transformer import Transformer

COMMAND = "python -m kvlab.evaluation.evictions"
TASKS = {"passkey": 1024, "needles": 512}  # tokens of a prompt
BUDGETS = {"passkey": (128, 256, 512), "needles": (128, 256)}
WAYS = (*METHODS, "snapkv-shared", "h2o-shared")  # shared: one kept set for all KV heads of a layer, as TOVA has it
STRIDE = 64  # positions between decisions once the prompt has ended, for all alike
EXACT = "exact"
ASKED = {
    "known": "the prompt is context and question: the cache is compressed where the question ends",
    "unknown": "the prompt is the context: the cache is compressed before anything is asked",
}
NAMED_KEY = re.compile(r"The pass key of (\w+) is (\d+)\.")


@dataclass(frozen=True)
class Conversation:
    """Token ids of a context and of what is asked about it: questions, each with its answer."""

    context: list[int]
    questions: list[tuple[list[int], list[int]]]

    @property
    def length(self) -> int:
        """Tokens of it all."""
        return len(self.context) + sum(len(question) + len(answer) for question, answer in self.questions)


def conversation(sample: Sample, tokenizer: Tokenizer) -> Conversation:
    """A sample as token ids; where somebody else's key stands in the context too, it is asked for afterwards."""
    context, prompt = (len(tokenizer.encode(text)) for text in (sample.context, sample.prompt))
    ids = tokenizer.encode(f"{sample.prompt} {sample.answer}")
    questions = [(ids[context:prompt], ids[prompt:])]
    for name, key in NAMED_KEY.findall(sample.context):
        if name not in sample.question:
            asked = tokenizer.encode(f".\nThe pass key of {name} is", add_bos=False)
            questions.append((asked, tokenizer.encode(f" {key}", add_bos=False)))
    return Conversation(ids[:context], questions)


def cache_name(method: str, budget: int) -> str:
    """What build_cache calls it; the exact cache is a budget of everything, cut like the others."""
    if method == EXACT:
        return f"recent-100%-stride{STRIDE}-prompt"
    return f"{method.removesuffix('-shared')}-{budget}-stride{STRIDE}-prompt{'-shared' * method.endswith('-shared')}"


def budget_rows(
    loaded: zoo.LoadedModel,
    *,
    samples: int = 24,
    seed: int = 1,
    tasks: dict[str, int] = TASKS,
    budgets: dict[str, Sequence[int]] = BUDGETS,
    methods: Sequence[str] = WAYS,
    work: Path | None = None,
    tick: Callable[[dict], None] = lambda row: None,
) -> Iterator[dict]:
    """One row for each task, way to ask, question and cache: right answers with their interval, and bytes held.

    `work` is a folder that keeps the verdicts on each sample; `tick` is called with every sample's.
    """
    for task, tokens in tasks.items():
        pairs = [(EXACT, tokens), *((method, budget) for budget in budgets[task] for method in methods)]
        facts = {"measure": "evictions", "model": loaded.config.name, "dtype": loaded.dtype, "tokens": tokens,
                 "caches": [cache_name(*pair) for pair in pairs]}  # fmt: skip
        kept, rows = Results(work and work / f"{task}.jsonl", facts), []
        for sample in generate_samples(task, loaded.tokenizer, samples, seed=seed, tokens=tokens):
            name = f"{sample.id}-{sha256(sample.prompt.encode()).hexdigest()[:8]}"
            if name not in kept.rows:
                kept.add({"id": name, "depth": sample.depth, **_verdicts(loaded, sample, pairs)})
            rows.append(kept.rows[name])
            tick(rows[-1])
        yield from _counted(task, tokens, pairs, rows)


def _verdicts(loaded: zoo.LoadedModel, sample: Sample, pairs: Sequence[tuple[str, int]]) -> dict:
    talk = conversation(sample, loaded.tokenizer)
    check_request(loaded.model, talk.context, talk.length - len(talk.context))
    return verdicts(loaded.model, talk, [cache_name(*pair) for pair in pairs])


def verdicts(model: Transformer, talk: Conversation, names: Sequence[str]) -> dict[str, dict[str, dict]]:
    """For each way to ask and each cache: which questions were answered rightly, and the bytes held at the end."""
    question, length = talk.questions[0][0], len(talk.context)
    unseen = forked(model.config, names)
    with torch.no_grad():
        for ids, step in _steps(talk.context[:-1], unseen, 0):
            model.hidden_states(ids, step, unseen)
    seen = deepcopy(unseen)
    logits = prefill(model, talk.context[-1:] + question, seen, start=length - 1)
    before = prefill(model, talk.context[-1:], unseen, start=length - 1)
    answer = {"known": {}, "unknown": {}}
    for name, known, unknown in zip(names, branches(seen), branches(unseen), strict=True):
        answer["known"][name] = _answered(model, known, talk, logits, length + len(question))
        answer["unknown"][name] = _answered(model, unknown, talk, before, length)
    return answer


def _answered(model: Transformer, cache: KVCache, talk: Conversation, logits: torch.Tensor, start: int) -> dict:
    """Go through the questions that are not stored yet, and all answers; `logits` follow the token at start - 1."""
    text, places = [], []
    for index, (question, answer) in enumerate(talk.questions):
        text += question if index or start == len(talk.context) else []
        places.append(slice(len(text), len(text) + len(answer)))
        text += answer
    chosen, held = likeliest(model, cache, logits, text, start), cache.bytes()
    right = [chosen[place] == text[place] for place in places]
    return {"right": right, "payload_bytes": held.payload, "total_bytes": held.total}


@torch.no_grad()
def likeliest(model: Transformer, cache: KVCache, logits: torch.Tensor, ids: Sequence[int], start: int) -> list[int]:
    """The likeliest token in the place of each of these, after those before it; all are stored.

    Greedy decoding writes a text exactly when each of its tokens is the likeliest: one pass judges a right answer,
    and questions after it. logits (1, vocabulary) follow the token at start - 1.
    """
    after = [model(some, step, cache)[0] for some, step in _steps(ids, cache, start)]  # (T, vocabulary)
    return torch.cat([logits, *after])[:-1].argmax(-1).tolist()


def _steps(ids: Sequence[int], cache: KVCache, start: int, chunk: int = 256) -> Iterator[tuple[torch.Tensor, Step]]:
    """Token ids (1, T) and plans of steps in which no prompt ends."""
    at = torch.arange(start, start + len(ids), dtype=torch.int32)[None]  # (1, T)
    sizes = cache.cut(at, chunk)
    for some, where in zip(torch.tensor([ids]).split(sizes, 1), at.split(sizes, 1), strict=True):
        yield some, cache.begin(where, torch.tensor([False]))


def _counted(task: str, tokens: int, pairs: Sequence[tuple[str, int]], rows: list[dict]) -> Iterator[dict]:
    for asked in ASKED:
        for method, budget in pairs:
            found = [row[asked][cache_name(method, budget)] for row in rows]
            held = {key: max(one[key] for one in found) for key in ("payload_bytes", "total_bytes")}
            for index in range(len(found[0]["right"])):
                right = [one["right"][index] for one in found]
                low, high = wilson(sum(right), len(right))
                yield {"task": task, "tokens": tokens, "asked": asked, "question": index + 1, "method": method,
                       "budget": budget, "right": sum(right), "total": len(right), "low": round(low, 4),
                       "high": round(high, 4), "by_depth": _by_depth(rows, right), **held}  # fmt: skip


def _by_depth(rows: list[dict], right: list[bool]) -> dict[str, list[int]]:
    """For each depth: right, total."""
    found = {str(depth): [0, 0] for depth in sorted({row["depth"] for row in rows})}
    for row, is_right in zip(rows, right, strict=True):
        count = found[str(row["depth"])]
        count[0], count[1] = count[0] + is_right, count[1] + 1
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask SmolLM2 through caches that evict, and record the rows; a run that broke off continues."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("book/results/evictions.json"))
    parser.add_argument("--work", type=Path, default=Path("_build/evictions"), help="a folder for verdicts so far")
    parser.add_argument("--model", default=zoo.OFFLINE)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--samples", type=int, default=24, help="of each task")
    given = parser.parse_args(arguments)
    for folder in (given.work, given.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    loaded = zoo.load(given.model, dtype=given.dtype)
    with tqdm(total=len(TASKS) * given.samples, unit="sample") as bar:
        rows = list(budget_rows(loaded, samples=given.samples, work=given.work, tick=lambda row: bar.update()))
    record(
        given.out, COMMAND, rows, model=loaded.config.name, dtype=loaded.dtype, asked=ASKED, note=loaded.words
    )  # fmt: skip


if __name__ == "__main__":
    main()
