"""Questions with right answers, buried in text: does a model still find what its cache should have kept?

Every prompt is a text to be completed, and the model's next words are the answer: small models complete far better
than they answer. The end of a prompt that asks is stored beside it (`question`), so that a cache can be filled and
compressed before it is asked: a method that sees the question first is flattered.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate

from kvlab.evaluation.filler import SHORT, Dice, fill, people, sentence
from kvlab.model.tokenizer import Tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Sample:
    """One question.

    depth       where the answer stands in the text before the question: 0 at its start, 1 at its end
    num_tokens  of the prompt, an opening token included where the tokenizer writes one
    question    the end of the prompt; what stands before it does not say what will be asked
    """

    id: str
    task: str
    prompt: str
    answer: str
    depth: float
    num_tokens: int
    question: str

    @property
    def context(self) -> str:
        """The prompt before its question."""
        return self.prompt.removesuffix(self.question)


@dataclass(frozen=True)
class Draft:
    """A prompt before it has a length: facts with their depths (the first one holds the answer), and what to pad with.

    long, short  the next text to pad with (None when there is no more); texts that close the last gap
    joint        between facts and padding
    """

    opening: str
    facts: tuple[tuple[float, str], ...]
    question: str
    answer: str
    long: Callable[[], str | None]
    short: tuple[str, ...] = SHORT
    joint: str = " "


@dataclass(frozen=True)
class Task:
    """A kind of question.

    words       what it asks
    draft       dice and depth -> Draft
    tokens      the usual length of its prompts
    gate        usable as a gate: SmolLM2-135M-Instruct with an exact cache is right in at least 0.8 of the cases at
                `tokens` (`python -m kvlab.evaluation.calibrate` measures it)
    depths      that its samples take in turn
    """

    words: str
    draft: Callable[[Dice, float], Draft]
    tokens: int
    gate: bool
    depths: tuple[float, ...] = DEPTHS

    def is_gate(self, tokens: int | None = None) -> bool:
        """Whether prompts of this length may judge a cache; None: the usual length. Shorter ones are easier."""
        return self.gate and (tokens is None or tokens <= self.tokens)


def _spread(count: int) -> list[float]:
    return [(i + 0.5) / count for i in range(count)]


def _passkey(dice: Dice, depth: float) -> Draft:
    (key,) = dice.numbers(5, 1)
    return Draft(
        "There is an important pass key hidden in this text. Remember it.\n\n",
        ((depth, f"The pass key is {key}. Remember it."),),
        "\n\nThe pass key is", key, lambda: sentence(dice),
    )  # fmt: skip


def _needles(dice: Dice, depth: float) -> Draft:
    names, keys = people(dice)[:3], dice.numbers(5, 3)
    facts = [f"The pass key of {name} is {key}." for name, key in zip(names, keys, strict=True)]
    return Draft(
        "Remember the pass keys in this text.\n\n",
        tuple(zip([depth, *_spread(2)], facts, strict=True)),
        f"\n\nThe pass keys again:\n{facts[2]}\nThe pass key of {names[0]} is", keys[0], lambda: sentence(dice),
    )  # fmt: skip


def _recall(dice: Dice, depth: float) -> Draft:
    names = people(dice)
    lines = [f"{name}: {key}" for name, key in zip(names, dice.numbers(5, len(names)), strict=True)]
    asked, stock = lines[0], iter(lines[3:])
    return Draft(
        "Numbers in the phone book:\n\n",
        tuple(zip([depth, *_spread(2)], lines[:3], strict=True)),
        f"\n\nLook up again:\n{lines[1]}\n{lines[2]}\n{names[0]}:", asked[-5:],
        lambda: next(stock, None), short=("Eli: none", "..."), joint="\n",
    )  # fmt: skip


EXAMPLES = (
    "The pass key of Tom is 40718. Kate has the pass key of Tom. So the pass key of Kate is 40718.\n"
    "The pass key of Lucy is 93254. Max has the pass key of Lucy. So the pass key of Max is 93254.\n\n"
)


def _variables(dice: Dice, depth: float, others: int = 0) -> Draft:
    first, second, *more = people(dice)[: 2 + others]
    keys = dice.numbers(5, 1 + others, besides=["40718", "93254"])
    distractors = [f"The pass key of {name} is {key}." for name, key in zip(more, keys[1:], strict=True)]
    return Draft(
        EXAMPLES,
        ((depth, f"The pass key of {first} is {keys[0]}."),
         ((1 + depth) / 2, f"{second} has the pass key of {first}."),
         *zip(_spread(others), distractors, strict=True)),
        f"\n\nSo the pass key of {second} is", keys[0], lambda: sentence(dice),
    )  # fmt: skip


def _recency(dice: Dice, depth: float) -> Draft:
    (code,) = dice.numbers(4, 1)
    return Draft(
        "A conversation with a patient assistant.\n\n",
        ((depth, f"User: My new door code is {code}. Please repeat it."),),
        "\nAssistant: Your new door code is", code,
        lambda: f"User: {sentence(dice)}\nAssistant: {dice.pick(REPLIES)}",
        short=("Assistant: Good.", "User: Yes."), joint="\n",
    )  # fmt: skip


REPLIES = ("That sounds lovely.", "I see.", "How nice to hear.", "Thank you for telling me.", "And what came next?")
TASKS = {
    "passkey": Task("one pass key in plain text", _passkey, 1024, True),
    "needles": Task("three pass keys of different people, one of them asked for", _needles, 512, True),
    "recall": Task("a list of names and numbers, one of them asked for", _recall, 128, True),
    "variables": Task("a number, and somebody who has the same: one hop", _variables, 256, True),
    "tracking": Task("the same with another number in between", partial(_variables, others=1), 256, False),
    "recency": Task("a chat whose last turn holds the answer", _recency, 512, True, depths=(1.0,)),
}


def check_tasks(names: Iterable[str]) -> None:
    """Raise ValueError for a task that does not exist, listing those that do."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}; kvlab has {', '.join(TASKS)}")


def generate_samples(
    task: str, tokenizer: Tokenizer, count: int, *, seed: int = 0, tokens: int | None = None, depth: float | None = None
) -> Iterator[Sample]:
    """Yield `count` samples of at most `tokens` tokens each; the same arguments give the same samples everywhere.

    `tokens` None: the task's own length; `depth` None: the task's depths in turn. Facts do not depend on the length.
    Raises ValueError for an unknown task, no samples, a depth outside 0..1, and a length that the facts alone exceed.
    """
    check_tasks([task])
    if count < 1:
        raise ValueError(f"at least one sample is needed, got {count}")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"a depth lies between 0 (start of the text) and 1 (its end), got {depth}")
    kind = TASKS[task]
    tokens = kind.tokens if tokens is None else tokens
    for index in range(count):
        at = kind.depths[index % len(kind.depths)] if depth is None else depth
        name = f"{task}-{tokens}t-d{round(100 * at):03d}-s{seed}-{index:04d}"
        draft = kind.draft(Dice(f"{task}/{seed}/{index}"), at)
        prompt = _write(draft, tokens, tokenizer, task)
        yield Sample(name, task, prompt, draft.answer, at, len(tokenizer.encode(prompt)), draft.question)


def _write(draft: Draft, tokens: int, tokenizer: Tokenizer, task: str) -> str:
    """The draft as one text, padded up to `tokens`."""
    needed = len(tokenizer.encode(_assemble(draft, [], _no_cost)))
    if needed > tokens:
        raise ValueError(f"{task} needs at least {needed} tokens for its facts and its question, got {tokens}")

    def cost(text: str) -> int:
        return len(tokenizer.encode(draft.joint + text, add_bos=False))

    def size(padding: list[str]) -> int:
        return len(tokenizer.encode(_assemble(draft, padding, cost)))

    padding = fill(tokens - needed, draft.long, draft.short, cost)
    over = size(padding) - tokens
    if over > 0:  # costs do not always add up: try short texts where the last one does not fit
        room = cost(padding.pop()) - over
        padding += fill(room, lambda: None, draft.short, cost)
    while size(padding) > tokens:
        padding.pop()
    return _assemble(draft, padding, cost)


def _no_cost(text: str) -> int:
    return 0


def _assemble(draft: Draft, padding: list[str], cost: Callable[[str], int]) -> str:
    """Opening, padding with each fact at its depth (a share of the padding's tokens), question."""
    ends = [0, *accumulate(map(cost, padding))]
    pieces = list(padding)
    for depth, fact in sorted(draft.facts, key=lambda fact: fact[0], reverse=True):
        pieces.insert(bisect_left(ends, depth * ends[-1]), fact)
    return draft.opening + draft.joint.join(pieces) + draft.question


def is_right(sample: Sample, text: str) -> bool:
    """THE rule: after spaces and punctuation, what was generated begins with the answer as a word of its own."""
    return re.match(rf"\W*{re.escape(sample.answer)}(?!\w)", text, re.IGNORECASE) is not None


def to_line(sample: Sample) -> str:
    """A sample as a line of JSON Lines."""
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


def from_line(line: str) -> Sample:
    """The sample of such a line; raises ValueError naming what is missing or has the wrong type."""
    fields = json.loads(line)
    wanted = {name: kind for name, kind in Sample.__annotations__.items() if name != "question"}
    kinds = {"str": str, "int": int, "float": (int, float)}
    for name, kind in wanted.items():
        if not isinstance(fields, dict) or not isinstance(fields.get(name), kinds[kind]):
            raise ValueError(f"a sample needs {name!r} ({kind}): {line.strip()[:80]}")
    return Sample(**{name: fields[name] for name in wanted}, question=fields.get("question", ""))
