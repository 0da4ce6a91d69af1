"""Samples: the same bytes everywhere, never too long, the answer once and where it was asked for."""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlab.evaluation.filler import SHORT, Dice, fill, sentence
from kvlab.evaluation.tasks import TASKS, Sample, check_tasks, from_line, generate_samples, is_right, to_line
from kvlab.model import zoo
from kvlab.model.tokenizer import Tokenizer

TASK = st.sampled_from(list(TASKS))
LENGTH, SEED = st.integers(160, 700), st.integers(0, 10**6)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(zoo.offline_gguf())


def samples(task="passkey", count=1, **options) -> list[Sample]:
    return list(generate_samples(task, tokenizer(), count, **options))


class Words:
    """A tokenizer that counts words: no file, and costs that do not depend on the neighbours."""

    def encode(self, text, *, add_bos=None):
        return text.split()


class Merging(Words):
    """Costs do not add up: two texts together cost a token more than apart."""

    def encode(self, text, *, add_bos=None):
        return text.split() + ["joint"] * (len(text) // 40)


def test_the_same_bytes_on_every_platform_and_version():
    lines = "".join(to_line(s) for task in TASKS for s in generate_samples(task, Words(), 6, seed=3, tokens=150))
    assert sha256(lines.encode()).hexdigest()[:16] == "040ea25bbdf65849"


def test_dice_use_nothing_but_random():
    """Python promises the sequence of random.random() for a seed, and of nothing else."""
    dice = Dice("a seed")
    assert [dice.below(1000) for _ in range(5)] == [397, 37, 765, 400, 873]
    assert sorted(dice.shuffled(range(20))) == list(range(20))
    assert len(set(dice.numbers(1, 8, besides=["4"])) - {"4"}) == 8


@given(task=TASK, tokens=LENGTH, seed=SEED, depth=st.floats(0, 1))
@example(task="needles", tokens=694, seed=131, depth=1.0)  # its parts cost a token less than the whole
def test_never_longer_than_asked_and_at_most_four_tokens_shorter(task, tokens, seed, depth):
    (sample,) = samples(task, seed=seed, tokens=tokens, depth=depth)
    assert len(tokenizer().encode(sample.prompt)) == sample.num_tokens
    assert tokens - 4 <= sample.num_tokens <= tokens


@given(task=TASK, tokens=LENGTH, seed=SEED)
def test_never_longer_where_costs_do_not_add_up(task, tokens, seed):
    (sample,) = generate_samples(task, Merging(), 1, seed=seed, tokens=tokens)
    assert sample.num_tokens <= tokens


@given(task=TASK, tokens=LENGTH, seed=SEED, depth=st.floats(0, 1))
def test_the_answer_stands_in_the_prompt_once_and_not_in_the_question(task, tokens, seed, depth):
    (sample,) = samples(task, seed=seed, tokens=tokens, depth=depth)
    assert sample.prompt.count(sample.answer) == 1 and sample.answer in sample.context
    assert sample.context + sample.question == sample.prompt


@given(tokens=st.integers(400, 900), seed=SEED, depth=st.floats(0, 1), task=TASK)
def test_the_answer_stands_at_its_depth(tokens, seed, depth, task):
    (sample,) = samples(task, seed=seed, tokens=tokens, depth=depth)
    before, text = sample.context.split("\n\n")[0], sample.context
    start, end = len(before), len(text)
    found = (text.index(sample.answer) - start) / (end - start)
    assert abs(found - depth) < 0.17 * 400 / tokens + 0.05  # a sentence, and the facts that stand around


@pytest.mark.parametrize("task", ["needles", "recall", "variables", "tracking"])
def test_names_and_numbers_of_one_prompt_differ(task):
    for index, sample in enumerate(samples(task, 30, tokens=500, depth=0.5)):
        facts = [fact for _, fact in TASKS[task].draft(Dice(f"{task}/0/{index}"), 0.5).facts]
        words = [word.strip(".:") for fact in facts for word in fact.split()]
        numbers = [word for word in words if word.isdigit()]
        assert len(set(facts)) == len(facts) and len(set(numbers)) == len(numbers)
        assert all(sample.context.count(fact) == 1 for fact in facts) and numbers[0] == sample.answer


@pytest.mark.parametrize("task", TASKS)
def test_keys_avoid_the_numbers_of_the_examples(task):
    """A key that an example shows too is rare, and would make an answer right that was only copied."""

    class Watched(Dice):
        def numbers(self, digits, count, besides=()):
            self.avoided = set(besides)
            return super().numbers(digits, count, besides)

    dice = Watched("x")
    opening = TASKS[task].draft(dice, 0.5).opening
    assert {word.strip(".") for word in opening.split() if word.strip(".").isdigit()} == dice.avoided


def test_ids_are_unique_and_stable():
    many = [s.id for task in TASKS for length in (150, 200) for s in samples(task, 7, tokens=length)]
    assert len(set(many)) == len(many) == 2 * 7 * len(TASKS)
    assert many[1] == "passkey-150t-d025-s0-0001"
    assert [s.id for s in samples(count=3)] == [s.id for s in samples(count=9)][:3]


def test_facts_do_not_depend_on_the_length():
    short, long = samples("needles", tokens=150), samples("needles", tokens=400)
    assert (short[0].answer, short[0].question) == (long[0].answer, long[0].question)


def test_seeds_differ():
    assert samples(seed=1)[0].answer != samples(seed=2)[0].answer


def test_the_text_varies():
    text = samples(tokens=1400)[0].context
    lines = [line for line in text.split(". ") if len(line) > 30]
    assert len(set(lines)) == len(lines) > 60


def test_filler_has_no_numbers():
    dice = Dice("filler")
    assert not any(letter.isdigit() for _ in range(500) for letter in sentence(dice))


@given(room=st.integers(0, 200), seed=SEED)
def test_filling_leaves_no_room_for_a_short_text(room, seed):
    def cost(text):
        return len(text.split())

    dice = Dice(str(seed))
    chosen = fill(room, lambda: sentence(dice), SHORT, cost)
    assert 0 <= room - sum(map(cost, chosen)) < min(map(cost, SHORT))


def test_depths_in_turn():
    assert [s.depth for s in samples(count=7)] == [0.0, 0.25, 0.5, 0.75, 1.0, 0.0, 0.25]
    assert {s.depth for s in samples("recency", 5)} == {1.0}
    assert {s.depth for s in samples(count=3, depth=0.4)} == {0.4}


@pytest.mark.parametrize("task", TASKS)
def test_the_question_begins_a_token(task):
    """The cache is filled with the context alone: cutting there must not change the prompt's tokens."""
    for sample in samples(task, 5):
        assert tokenizer().encode(sample.prompt) == tokenizer().encode(sample.context) + tokenizer().encode(
            sample.question, add_bos=False
        )


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 4821", True), ("4821", True), (" 4821.", True), ("\n**4821**", True), (" “4821” and", True),
        (" 48215", False), (" 482", False), (" is 4821", False), ("", False), (" 4821a", False),
    ],
)  # fmt: skip
def test_the_rule_of_what_is_right(text, right):
    assert is_right(Sample("id", "passkey", "p", "4821", 0.0, 1, ""), text) is right


def test_case_does_not_matter_and_answers_are_not_patterns():
    assert is_right(Sample("id", "x", "p", "Oslo", 0.0, 1, ""), " oslo,")
    assert not is_right(Sample("id", "x", "p", "a.c", 0.0, 1, ""), " abc")


def test_lines_come_back_as_they_were():
    (sample,) = samples()
    assert from_line(to_line(sample)) == sample
    keys = ["id", "task", "prompt", "answer", "depth", "num_tokens"]
    fields = json.loads(to_line(sample))
    assert list(fields)[:6] == keys and "\n" not in to_line(sample)[:-1]
    del fields["question"]  # files of other tools have none
    assert from_line(json.dumps(fields)).context == sample.prompt


@pytest.mark.parametrize("line", ['{"id": "x"}', '{"id": 1, "task": "t"}', "[]", "3"])
def test_other_lines_are_refused(line):
    with pytest.raises(ValueError, match="a sample needs"):
        from_line(line)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("pass-key", {}, "unknown task 'pass-key'; kvlab has passkey, needles, recall, variables, tracking, recency"),
        ("passkey", {"count": 0}, "at least one sample is needed, got 0"),
        ("passkey", {"tokens": 20}, "passkey needs at least 36 tokens for its facts and its question, got 20"),
        ("passkey", {"tokens": -1}, "passkey needs at least"),
        ("passkey", {"depth": 1.5}, "got 1.5"),
        ("passkey", {"depth": float("nan")}, "got nan"),
    ],
)
def test_bad_requests_say_why(task, options, message):
    with pytest.raises(ValueError) as error:
        samples(task, **options)
    assert message in str(error.value)


def test_checking_names():
    check_tasks(TASKS)


def test_longer_prompts_than_calibrated_are_no_gate(root):
    for task in TASKS.values():
        assert task.is_gate() == task.is_gate(task.tokens) == task.gate and not task.is_gate(task.tokens + 1)
