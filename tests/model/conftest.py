"""The offline model, read once by transformers for all tests that compare with it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvlab.model.zoo import offline_gguf


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    return offline_gguf()


@pytest.fixture(scope="session")
def reference_model(gguf_path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def reference_tokenizer(gguf_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
