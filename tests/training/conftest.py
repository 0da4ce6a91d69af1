"""A toy text and a shrunken model, so that a training run takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvlab.config import ModelConfig
from kvlab.model.tiny import hugging_face_config
from kvlab.training.recipe import Recipe
from kvlab.training.text import Corpus
from kvlab.training.train import Run

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "first_k_dense_replace": 2}
RECIPE = Recipe(steps=6, batch=4, context=32, warmup=2, evaluations=2)


def small(attention: str = "gqa") -> ModelConfig:
    return ModelConfig.from_dict({**hugging_face_config(attention), **SMALL}, name=f"small-{attention}")


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads that wait for each other on a busy machine took thirty times as long over such small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    words = ["the", "cache", "keeps", "keys", "and", "values", "so", "that", "no", "token", "is", "read", "twice"]
    train = " ".join(words[(i * i + i // 7) % len(words)] for i in range(800))
    return Corpus.of(train, "the keys and the values so that the cache is read twice " * 3, {"sha256": "toy"})


@pytest.fixture
def start(corpus: Corpus, tmp_path: Path):
    """Begin a run in a directory of its own."""

    def start(name: str = "run", attention: str = "gqa", seed: int = 0, recipe: Recipe = RECIPE, resume=False) -> Run:
        return Run(small(attention), corpus, recipe, seed, tmp_path / name / "state.safetensors", resume)

    return start
