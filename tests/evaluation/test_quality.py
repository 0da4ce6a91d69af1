"""Accuracy, its interval and the distance from the exact cache, on a tiny random model and once on the real one."""

from __future__ import annotations

import json
import os
from math import isclose, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache.build import build_cache
from kvlab.cache.contiguous import ContiguousCache
from kvlab.evaluation import quality
from kvlab.evaluation.quality import accuracy, answer, compare_distributions, held_out_text, teacher_forced, wilson
from kvlab.evaluation.results import Results, record, recorded, write_whole
from kvlab.evaluation.tasks import Sample, generate_samples
from kvlab.generate import generate
from kvlab.model import zoo
from tests.harness import KVCache, naive, tiny_config, tiny_model, tokens

MODEL = tiny_model("gqa", torch.float32)
IDS = tokens(1, 40)[0].tolist()


class Letters:
    """A tokenizer for the tiny model: one token for each character."""

    def encode(self, text, *, add_bos=None):
        return [ord(letter) - 64 for letter in text]

    def decode(self, ids):
        return "".join(chr(64 + i) for i in ids)


class Blurred(ContiguousCache):
    """Lossy: what it stores is rounded."""

    exact = False

    def update(self, keys, values, step):
        return super().update((keys * 2).round() / 2, (values * 2).round() / 2, step)


def blurred(capacity: int) -> KVCache:
    return KVCache([Blurred() for _ in range(2)])


def sample(name: str, prompt: str, answer: str, question: str = "", task: str = "t") -> Sample:
    return Sample(name, task, prompt, answer, 0.5, len(prompt), question)


def greedy(prompt: str, count: int) -> str:
    return Letters().decode(generate(MODEL, Letters().encode(prompt), max_new_tokens=count).token_ids)


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (45, 50, 0.7864, 0.9565)],
)
def test_wilson_at_known_values(right, total, low, high):
    assert wilson(right, total) == pytest.approx((low, high), abs=6e-5)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_stays_a_share(counts):
    right, total = counts
    low, high = wilson(right, total)
    assert 0 <= low <= right / total <= high <= 1 and low < high
    assert (low == 0) == (right == 0) and (high == 1) == (right == total)


@pytest.mark.parametrize("counts", [(1, 0), (0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_proportion(counts):
    with pytest.raises(ValueError, match="is not a proportion"):
        wilson(*counts)


@pytest.mark.parametrize("question", ["", "FG", "ABCDEFG"])
def test_answers_are_the_greedy_continuation_however_the_prompt_is_cut(question):
    said = answer(MODEL, Letters(), sample("a", "ABCDEFG", "XY", question), lambda n: build_cache(MODEL.config))
    assert said == greedy("ABCDEFG", 2 + quality.SPARE_TOKENS)


def test_the_context_is_stored_before_the_question_is_seen():
    chunks = []

    class Watching(ContiguousCache):
        def update(self, keys, values, step):
            chunks.append(step.positions.tolist()[0])
            return super().update(keys, values, step)

    def make(capacity):
        assert capacity == 7 + 1 + quality.SPARE_TOKENS
        return KVCache([Watching() for _ in range(2)])

    answer(MODEL, Letters(), sample("a", "ABCDEFG", "X", "FG"), make)
    assert chunks[::2][:3] == [[0, 1, 2, 3, 4], [5, 6], [7]]
    chunks.clear()
    answer(MODEL, Letters(), sample("a", "ABCDEFG", "X", "FG"), make, question_apart=False)
    assert chunks[::2][:2] == [[0, 1, 2, 3, 4, 5, 6], [7]]


@pytest.fixture
def quiz(monkeypatch) -> list[Sample]:
    """Four prompts of which the model is right in three."""
    # the tiny model writes no spaces, so its words never end: compare beginnings
    monkeypatch.setattr(quality, "is_right", lambda sample, text: text.startswith(sample.answer))
    prompts = ["ABCDE", "BCDEF", "CDEFG", "DEFGH"]
    return [sample(f"s{i}", p, greedy(p, 4) if i != 2 else "@@@@", task="ab"[i % 2]) for i, p in enumerate(prompts)]


def test_accuracy_counts_and_gives_an_interval(quiz):
    seen = []
    done = accuracy(MODEL, Letters(), quiz, tick=lambda row: seen.append(row["id"]))
    assert (done.right, done.total, done.rate) == (3, 4, 0.75) and (done.low, done.high) == wilson(3, 4)
    assert seen == ["s0", "s1", "s2", "s3"] and [row["right"] for row in done.rows] == [True, True, False, True]
    assert done.rows[0]["text"] == greedy("ABCDE", 4 + quality.SPARE_TOKENS)
    assert (done.of_task("a").right, done.of_task("b").right) == (1, 2)
    with pytest.raises(ValueError, match="no samples"):
        done.of_task("c")
    with pytest.raises(ValueError, match="no samples"):
        accuracy(MODEL, Letters(), [])


def test_a_run_that_broke_off_continues(quiz, tmp_path, monkeypatch):
    file, runs = tmp_path / "rows.jsonl", []
    real = quality.answer
    monkeypatch.setattr(quality, "answer", lambda *args: (runs.append(args[2].id), real(*args))[1])
    accuracy(MODEL, Letters(), quiz[:2], results=file)
    half = file.read_bytes() + b'{"id": "s2", "ri'  # killed while writing
    file.write_bytes(half)
    done = accuracy(MODEL, Letters(), quiz, results=file)
    assert runs == ["s0", "s1", "s2", "s3"] and done.right == 3
    again = accuracy(MODEL, Letters(), quiz, results=file)
    assert len(runs) == 4 and again == done
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("id") for line in lines] == [None, "s0", "s1", "s2", "s3"]


def test_rows_of_something_else_are_refused(quiz, tmp_path):
    file = tmp_path / "rows.jsonl"
    accuracy(MODEL, Letters(), quiz[:1], results=file, configuration={"cache": "contiguous", "sizes": (1, 2)})
    before = file.read_bytes()
    accuracy(MODEL, Letters(), quiz[:1], results=file, configuration={"cache": "contiguous", "sizes": (1, 2)})
    with pytest.raises(ValueError, match=r"holds results of .*contiguous.*, not of .*static"):
        accuracy(MODEL, Letters(), quiz[:1], results=file, configuration={"cache": "static", "sizes": (1, 2)})
    changed = sample("s0", "ABCDF", quiz[0].answer, task="a")
    with pytest.raises(ValueError, match="s0 was made from another prompt"):
        accuracy(MODEL, Letters(), [changed], results=file, configuration={"cache": "contiguous", "sizes": (1, 2)})
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", ["hello\n", '{"id": "s0"}\n', '{"configuration": {}}\nx\n{"id": "s"}\n', "[1]\n"])
def test_other_files_are_refused_and_left_alone(content, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"line \d: not a file of results"):
        Results(file, {})
    assert file.read_text() == content


def test_a_file_without_a_whole_line_begins_anew(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"configur')
    Results(file, {"a": 1}).add({"id": "x"})
    assert Results(file, {"a": 1}).rows == {"x": {"id": "x"}}


@pytest.mark.parametrize("stride", [1, 3, 100])
@pytest.mark.parametrize("window", [7, 512])
def test_the_exact_cache_is_at_no_distance(stride, window):
    done = compare_distributions(MODEL, IDS, lambda n: build_cache(MODEL.config), window=window, stride=stride)
    assert (done.tokens, done.kl, done.top1_agreement) == (39, 0.0, 1.0)
    assert done.perplexity_exact == done.perplexity_variant > 1


def test_another_exact_cache_is_within_rounding():
    done = compare_distributions(MODEL, IDS, lambda n: build_cache(MODEL.config, "static", n), stride=2)
    assert done.kl < 1e-6 and done.top1_agreement == 1.0


def test_a_lossy_cache_is_at_a_distance():
    done = compare_distributions(MODEL, IDS, blurred)
    assert done.kl > 1e-4 and done.top1_agreement < 1.0
    assert done.perplexity_exact != done.perplexity_variant


def test_the_numbers_are_those_of_the_definition():
    ids, window = IDS[:9], 4
    done = compare_distributions(MODEL, ids, blurred, window=window)
    kl = nll = 0.0
    for start in (0, 4):
        piece = torch.tensor([ids[start : start + window]])
        p = naive(MODEL, piece)[0].double().softmax(-1)
        q = torch.cat(list(teacher_forced(MODEL, piece[0].tolist(), blurred(0)))).double().exp()
        kl += float((p * (p / q).log()).sum())
        nll -= sum(log(p[i, ids[start + i + 1]]) for i in range(window))
    assert done.tokens == 8 and done.kl == pytest.approx(kl / 8, rel=1e-3)
    assert log(done.perplexity_exact) == pytest.approx(nll / 8, rel=1e-4)


def test_every_token_but_the_first_is_predicted_once():
    whole = compare_distributions(MODEL, IDS, blurred, window=39)
    for window, count in ((2, 20), (13, 3), (38, 2), (40, 1)):
        rows = []
        done = compare_distributions(MODEL, IDS, blurred, window=window, tick=rows.append)
        assert done.tokens == whole.tokens == 39 and len(rows) == count


def test_the_exact_numbers_do_not_depend_on_the_stride():
    one, three = (compare_distributions(MODEL, IDS, blurred, stride=stride) for stride in (1, 3))
    assert three.perplexity_exact == pytest.approx(one.perplexity_exact, rel=1e-5)


def test_windows_are_kept_and_not_run_again(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    first = compare_distributions(MODEL, IDS, blurred, window=10, results=file)
    monkeypatch.setattr(quality, "_sums", None)  # calling it would raise
    assert compare_distributions(MODEL, IDS, blurred, window=10, results=file) == first
    with pytest.raises(ValueError, match="holds results of"):
        compare_distributions(MODEL, IDS[1:], blurred, window=10, results=file)


@pytest.mark.parametrize("options", [{"window": 1}, {"stride": 0}, {"token_ids": [1]}])
def test_sizes_that_compare_nothing_are_refused(options):
    with pytest.raises(ValueError, match="a text and a window need at least 2 tokens"):
        compare_distributions(MODEL, **{"token_ids": IDS, "make_cache": blurred, **options})


def test_log_probabilities_are_fp32_whatever_the_model_runs_in():
    model = tiny_model("gqa", torch.bfloat16)
    for part in teacher_forced(model, IDS[:5], build_cache(tiny_config()), 2):
        assert part.dtype == torch.float32
        assert all(isclose(total, 1.0, abs_tol=1e-5) for total in part.exp().sum(-1).tolist())


def test_whole_files_or_none(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    write_whole(file, b"old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError, match="is a directory"):
        write_whole(tmp_path, b"")
    with pytest.raises(OSError, match="nowhere/x cannot be written: No such file"):
        write_whole(tmp_path / "nowhere" / "x", b"")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is a pipe or a device"):
        write_whole(tmp_path / "pipe", b"")


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"x\.json cannot be written: No space left on device"):
        write_whole(tmp_path / "x.json", b"new")
    assert not list(tmp_path.iterdir())


def test_results_never_wipe_a_file_of_somebody_else(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_bytes(b"one line, without an end")
    with pytest.raises(ValueError, match=r"mine\.txt, line 1: not a file of results"):
        Results(file, {"model": "m"})
    assert file.read_bytes() == b"one line, without an end"
    file.write_bytes(b'{"configuration": {"mod')  # what a run leaves that is killed at once
    Results(file, {"model": "m"})
    assert file.read_bytes() == b'{"configuration": {"model": "m"}}\n'


def test_recorded_results_are_found_by_name():
    baseline = recorded("tasks-baseline.json")
    assert baseline["command"].startswith("python -m") and {"task", "right", "total"} <= set(baseline["rows"][0])
    with pytest.raises(FileNotFoundError, match=r"'grid': there are .*tasks-baseline.json"):
        recorded("grid")


def test_recorded_rows_say_where_they_were_measured(tmp_path):
    record(tmp_path / "x.json", "kvlab something", [{"a": 1}], model="m")
    answer = json.loads((tmp_path / "x.json").read_text())
    assert answer["command"] == "kvlab something" and answer["rows"] == [{"a": 1}] and answer["model"] == "m"
    assert answer["environment"]["torch"] == torch.__version__ and answer["environment"]["cores"] >= 1


def test_the_held_out_text_is_plain_and_long_enough():
    text = held_out_text()
    assert text.isascii() and 4000 < len(text) < 7000


def test_the_real_model_finds_a_pass_key_through_the_exact_cache():
    loaded = zoo.load(dtype="fp32")
    one = list(generate_samples("passkey", loaded.tokenizer, 1, tokens=96))
    done = accuracy(loaded.model, loaded.tokenizer, one)
    assert done.right == 1 and one[0].answer in done.rows[0]["text"]


def test_steps_are_cut_where_a_cache_decides_and_yielded_whole():
    by_stride = {
        stride: list(teacher_forced(MODEL, IDS[:23], build_cache(MODEL.config, "h2o-8-stride4"), stride))
        for stride in (1, 7)
    }
    assert [len(part) for part in by_stride[7]] == [7, 7, 7, 2]
    torch.testing.assert_close(torch.cat(by_stride[7]), torch.cat(by_stride[1]), atol=1e-5, rtol=1e-5)
