"""GGUF files: equal to what transformers reads, and never trusted."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.model.checkpoint import open_checkpoint
from kvlab.model.gguf_file import GGUFFile
from kvlab.model.weights import CheckpointError
from kvlab.rope import inverse_frequencies
from tests.model.factory import FAMILIES, LLAMA3, write_checkpoint, write_gguf


def test_the_offline_model_equals_transformers_reading_the_same_file(gguf_path, reference_model):
    checkpoint = open_checkpoint(gguf_path)
    expected = reference_model.state_dict()
    assert set(checkpoint.shapes) == set(expected) - {"lm_head.weight"}
    for name in checkpoint.shapes:
        assert torch.equal(checkpoint.read(name), expected[name]), name
    theirs, ours = reference_model.config, checkpoint.config
    for field in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size",
                  "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):  # fmt: skip
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("deepseek")])
def test_every_family_comes_back_in_hugging_face_order(family, tmp_path):
    model = write_checkpoint(tmp_path, family)
    write_gguf(tmp_path / "model.gguf", model)
    tensors, expected = open_checkpoint(tmp_path / "model.gguf").tensors(), model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert set(expected) - set(tensors) <= {"lm_head.weight"}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_storage_types(kind, tmp_path):
    model = write_checkpoint(tmp_path, "qwen2", hidden_size=96, intermediate_size=64, num_hidden_layers=1)
    write_gguf(tmp_path / "model.gguf", model, kind)
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight").detach().numpy()
    stored = dequantize(quantize(weight, GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
    read = open_checkpoint(tmp_path / "model.gguf").read("model.layers.0.mlp.up_proj.weight")
    assert read.dtype == torch.float32 and np.array_equal(read.numpy(), stored)
    assert not np.array_equal(stored, weight)  # it really was stored in fewer bits


def test_what_is_read_can_be_written_to_and_leaves_the_file_alone(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, write_checkpoint(tmp_path, "qwen3"))
    before = path.read_bytes()
    GGUFFile(path).read("output_norm.weight").fill_(3.0)
    assert path.read_bytes() == before


def test_windows_and_rope_scalings_are_read(tmp_path):
    mistral = write_checkpoint(tmp_path, "mistral")
    write_gguf(tmp_path / "w.gguf", mistral, llama__attention__sliding_window=7)
    assert open_checkpoint(tmp_path / "w.gguf").config.window(0) == 7
    scaling = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
               "llama__rope__scaling__original_context_length": 32}  # fmt: skip
    write_gguf(tmp_path / "y.gguf", mistral, **scaling)
    assert open_checkpoint(tmp_path / "y.gguf").config.rope_scaling == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize("factor", [8.0, 32.0, 5.0])
def test_llama_3_scaling_is_recognised_by_its_divisors(factor, tmp_path, monkeypatch):
    model = write_checkpoint(tmp_path, "llama", head_dim=64, num_attention_heads=2, num_key_value_heads=2)
    write_gguf(tmp_path / "model.gguf", model)
    scaling = LLAMA3 | {"factor": factor, "original_max_position_embeddings": 8192}
    plain, _ = inverse_frequencies(64, 10_000.0, None, None)
    divisors = plain / inverse_frequencies(64, 10_000.0, scaling, None)[0]
    original = GGUFFile._read_table

    def with_divisors(self, cursor, count):
        tensors = original(self, cursor, count)
        return tensors | {"rope_freqs.weight": tensors["output_norm.weight"]}

    monkeypatch.setattr(GGUFFile, "_read_table", with_divisors)
    monkeypatch.setattr(GGUFFile, "read", lambda self, name: divisors)
    if factor == 5.0:
        with pytest.raises(CheckpointError, match="not Llama 3's"):
            open_checkpoint(tmp_path / "model.gguf")
    else:
        found = open_checkpoint(tmp_path / "model.gguf").config.rope_scaling
        assert found["rope_type"] == "llama3" and found["factor"] == factor


@pytest.mark.parametrize(("change", "words"), [
    ({"llama__block_count": None}, "llama.block_count is missing"),
    ({"llama__block_count": 2**31}, "2147483648 blocks"),
    ({"llama__expert_count": 8}, "mixture of 8 experts"),
    ({"llama__rope__dimension_count": 4}, "RoPE 4"),
    ({"llama__attention__value_length": 4}, "values 4"),
    ({"general__architecture": "mamba"}, "'mamba' cannot be run"),
    ({"llama__feed_forward_length": 90}, "belong to different models"),
    ({"leave_out": "model.layers.1.mlp.up_proj.weight"}, "model.layers.1.mlp.up_proj.weight is missing"),
])  # fmt: skip
def test_metadata_that_cannot_be_run_is_refused(change, words, tmp_path):
    path = tmp_path / "model.gguf"
    model = write_checkpoint(tmp_path, "llama")
    change = dict(change)
    renamed = change.pop("general__architecture", None)
    write_gguf(path, model, **change)
    if renamed:
        path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    model = write_checkpoint(directory, "llama", num_hidden_layers=1, vocab_size=258)
    write_gguf(directory / "small.gguf", model, tokenizer__ggml__tokens=["a", "b"])
    return directory / "small.gguf"


@settings(max_examples=150)
@given(share=st.floats(0, 1))
def test_a_truncated_file_is_refused_wherever_it_ends(small, share):
    whole = small.read_bytes()
    cut = small.with_name("cut.gguf")
    cut.write_bytes(whole[: int(share * (len(whole) - 1))])
    with pytest.raises(CheckpointError, match=r"truncated|cannot be read|not a GGUF") as caught:
        open_checkpoint(cut)
    assert str(cut) in str(caught.value)


@settings(max_examples=300)
@given(place=st.integers(0, 1500), byte=st.integers(0, 255))
def test_a_corrupt_header_is_refused_or_harmless(small, place, byte):
    whole = bytearray(small.read_bytes())
    whole[place] = byte
    broken = small.with_name("broken.gguf")
    broken.write_bytes(whole)
    try:
        open_checkpoint(broken).tensors()
    except ValueError as error:  # CheckpointError or ConfigError: nothing else, and one line
        assert "\n" not in str(error)


@pytest.mark.parametrize(("patch", "words"), [
    ((4, struct.pack(">I", 3)), "big-endian"),
    ((4, struct.pack("<I", 1)), "version 1"),
    ((0, b"GGML"), "not a GGUF file"),
    ((8, struct.pack("<Q", 2**60)), "truncated or corrupt"),
    ((16, struct.pack("<Q", 2**60)), "truncated or corrupt|corrupt near"),
    ((24, struct.pack("<Q", 2**63)), "truncated or corrupt"),
])  # fmt: skip
def test_broken_beginnings(small, patch, words):
    whole = bytearray(small.read_bytes())
    whole[patch[0] : patch[0] + len(patch[1])] = patch[1]
    broken = small.with_name("beginning.gguf")
    broken.write_bytes(whole)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(broken)
