"""What is written for llama.cpp is what kvlab reads back from a GGUF file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab.generate import generate
from kvlab.interop.llama_cpp import LlamaCpp, write_gguf
from kvlab.model.checkpoint import open_checkpoint
from kvlab.model.transformer import Transformer
from tests.harness import tiny_config

# llama.cpp's own limits: heads of at least 32, rows of 32
CONFIG = replace(tiny_config(), hidden_size=64, intermediate_size=96, head_dim=32, rope_theta=5000.0)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer(CONFIG).to(torch.bfloat16).eval().requires_grad_(False)


def test_weights_survive_the_round_trip(model, tmp_path):
    checkpoint = open_checkpoint(write_gguf(model, tmp_path / "model.gguf"))
    from kvlab.interop.transformers import unfused

    for name, weight in unfused(model).items():
        assert torch.equal(checkpoint.read(name).to(weight.dtype), weight), name
    assert checkpoint.config.rope_theta == 5000.0 and checkpoint.config.head_dim == 32


def test_other_architectures_are_refused(model, tmp_path):
    model.config, kept = replace(CONFIG, model_type="qwen3"), model.config
    with pytest.raises(ValueError, match="type qwen3: only llama"):
        write_gguf(model, tmp_path / "no.gguf")
    model.config = kept
    assert not (tmp_path / "no.gguf").exists()


def test_llama_cpp_generates_the_same_tokens(model, tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is optional: pip install 'kvlab[llama]'")
    ids, seconds = LlamaCpp(write_gguf(model, tmp_path / "m.gguf"), 64, 1).timed_tokens([1, 2, 3, 4], 6)
    assert ids[:2] == generate(model, [1, 2, 3, 4], max_new_tokens=6).token_ids[:2] and len(seconds) == 6
