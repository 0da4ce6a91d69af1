"""Logits and text equal transformers', on small random models of every family and on the offline model."""

import pytest
import torch
from transformers import PreTrainedModel

from kvlab.attention import Step
from kvlab.generate import generate
from kvlab.model import zoo
from kvlab.model.transformer import Transformer
from tests.model.factory import FAMILIES, write_checkpoint

TOLERANCE = 1e-5  # x the largest |logit|: fp32 rounding over a few layers of sums in another order
PROMPTS = [
    "What is the capital of France?",
    "Explain what a cache is to a child.",
    "Write a Python function that adds two numbers.",
    "List three fruits and their colours.",
    "Tell me a short story about a lighthouse keeper and a storm.",
]


def check_logits(ours: Transformer, theirs: PreTrainedModel, ids: torch.Tensor) -> None:
    positions = torch.arange(ids.shape[1], dtype=torch.int32).expand(ids.shape)
    with torch.no_grad():
        actual, expected = ours(ids, Step.plan(positions)), theirs(ids, use_cache=False).logits
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path):
    theirs = write_checkpoint(tmp_path, family)
    ours = zoo.load(tmp_path, device="cpu").model
    ids = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(1))
    check_logits(ours, theirs, ids)


def greedy(theirs: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """What transformers generates. Without a mask of its own it would take end-of-turn tokens for padding."""
    prompt = torch.tensor([ids])
    out = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", ["llama-llama3", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(family, tmp_path):
    theirs = write_checkpoint(tmp_path, family)
    ours = zoo.load(tmp_path, device="cpu").model
    ids = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = greedy(theirs, ids, 40)
    for cache in ("contiguous", None):
        assert generate(ours, ids, cache, max_new_tokens=40).token_ids == expected


@pytest.fixture(scope="module")
def offline() -> zoo.LoadedModel:
    return zoo.load(device="cpu")


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_the_offline_models_logits_equal_transformers(offline, reference_model, prompt):
    ids = offline.tokenizer.encode(offline.tokenizer.chat([{"role": "user", "content": prompt}]))
    check_logits(offline.model, reference_model, torch.tensor([ids]))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_offline_models_text_equals_transformers(offline, reference_model, reference_tokenizer, prompt):
    messages = [{"role": "user", "content": prompt}]
    text = reference_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    theirs = greedy(reference_model, reference_tokenizer(text).input_ids, 40)
    ours = generate(offline.model, offline.tokenizer.encode(offline.tokenizer.chat(messages)), max_new_tokens=40)
    assert ours.token_ids == theirs
    assert offline.tokenizer.decode(ours.token_ids) == reference_tokenizer.decode(theirs)
