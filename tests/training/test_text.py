"""The text of the tiny models: a fixed split that shares nothing, and says which Python it came from."""

from __future__ import annotations

import platform

import torch

from kvlab.training.text import SHARED, Corpus, last_that_fit, python_topics, windows, without_shared


def paragraphs(data: torch.Tensor) -> list[str]:
    return bytes(data.tolist()).decode().split("\n\n")


def test_training_and_held_out_share_no_run_of_sixty_characters():
    corpus = python_topics()
    held_out = {piece for paragraph in paragraphs(corpus.held_out) for piece in windows(paragraph)}
    assert held_out and all(held_out.isdisjoint(windows(paragraph)) for paragraph in paragraphs(corpus.train))


def test_the_corpus_says_what_it_is():
    corpus = python_topics()
    about = corpus.about
    assert about["python"] == platform.python_version() and len(about["sha256"]) == 64
    assert (about["train_bytes"], about["held_out_bytes"]) == (len(corpus.train), len(corpus.held_out))
    assert 0.02 < about["held_out_bytes"] / about["bytes"] <= 0.1
    assert about["train_bytes"] > 0.8 * about["bytes"] and corpus.train.max() < 256
    assert python_topics().about == about and torch.equal(python_topics().train, corpus.train)


def test_copies_are_left_out_however_they_are_wrapped():
    sentence = "This sentence is written in both parts and has well over sixty characters in all of it."
    train = [f"first\n\n{sentence.replace(' is ', chr(10) + '   is ')} And more.\n\nlast"]
    assert without_shared(train, [f"held out\n\n{sentence}"]) == ["first\n\nlast"]
    assert without_shared(train, ["something else\n\nlast"]) == train  # short phrases are just English


def test_windows_count_characters_without_line_breaks():
    assert windows("a" * (SHARED - 1)) == [] and windows("a  b\n" * 20)[0] == "a b " * (SHARED // 4)


def test_how_many_texts_fit():
    assert last_that_fit(["a" * 80, "b" * 6, "c" * 5], 0.1) == 1
    assert last_that_fit(["a" * 89, "b" * 5, "c" * 5], 0.11) == 2
    assert last_that_fit(["a", "b" * 90], 0.1) == 1  # at least one


def test_bytes_are_utf8():
    corpus = Corpus.of("é", "ab", {"source": "here"})
    assert corpus.train.tolist() == [0xC3, 0xA9] and corpus.train.dtype == torch.int64
    assert corpus.about == {"source": "here", "train_bytes": 2, "held_out_bytes": 2}
