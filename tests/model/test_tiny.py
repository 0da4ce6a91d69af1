"""Four models alike but for attention: equal parameters, and what each stores for a token, counted in a cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvlab.attention import Step
from kvlab.cache.build import build_cache
from kvlab.config import resolve
from kvlab.configs.presets import shipped
from kvlab.model import saving, tiny, zoo
from kvlab.model.transformer import Transformer
from kvlab.sizing import bytes_per_token
from kvlab.training.recipe import bits_per_byte
from kvlab.training.table import read_rows
from kvlab.training.text import python_topics
from tests.harness import positions_of

ROWS = Path(__file__).parents[2] / "book" / "results" / "tiny-training.jsonl"
STORED = {"mha": 2 * 8 * 16, "gqa": 2 * 2 * 16, "mqa": 2 * 1 * 16, "mla": 40 + 8}


def model_of(attention: str) -> Transformer:
    torch.manual_seed(0)
    return Transformer(tiny.tiny_config(attention)).eval().requires_grad_(False)


def test_parameters_are_matched_within_one_percent():
    counts = [sum(weight.numel() for weight in model_of(attention).parameters()) for attention in tiny.ATTENTIONS]
    assert max(counts) / min(counts) < 1.01 and 900_000 < min(counts)
    assert counts == [tiny.tiny_config(attention).num_parameters for attention in tiny.ATTENTIONS]


def test_only_attention_and_the_width_of_the_mlp_differ():
    own = {"model_type", "architectures", "num_key_value_heads", "intermediate_size", "head_dim", "q_lora_rank",
           "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "first_k_dense_replace"}  # fmt: skip
    shared = [{k: v for k, v in tiny.hugging_face_config(a).items() if k not in own} for a in tiny.ATTENTIONS]
    assert all(config == shared[0] for config in shared) and shared[0]["num_attention_heads"] == 8


@pytest.mark.parametrize("attention", tiny.ATTENTIONS)
def test_numbers_stored_for_a_token(attention):
    """From a real cache: 2·H_kv·D, or R + D_r. Keys repeated for all query heads before storing would be 256."""
    model = model_of(attention)
    cache, ids = build_cache(model.config), torch.arange(65, 77)[None]
    model(ids, cache.begin(positions_of(ids)), cache)
    assert cache.bytes().payload == 12 * 4 * STORED[attention] * 4  # tokens, layers, numbers, fp32
    assert bytes_per_token(model.config, "fp16") == 4 * STORED[attention] * 2


def test_the_latent_lies_between_mqa_and_gqa():
    assert STORED["mqa"] < STORED["mla"] < STORED["gqa"] < STORED["mha"]


class TestShipped:
    """What lies in the package: one trained model for each attention, of seed 0."""

    def test_there_is_one_for_each_attention(self):
        assert set(shipped()) == set(tiny.NAMES)

    @pytest.mark.parametrize("attention", tiny.ATTENTIONS)
    def test_it_is_small_and_has_the_shape_that_is_trained(self, attention):
        folder = shipped()[f"tiny-{attention}"]
        assert json.loads((folder / "config.json").read_text()) == tiny.hugging_face_config(attention)
        assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
        assert resolve(f"tiny-{attention}").num_parameters == tiny.tiny_config(attention).num_parameters

    @pytest.mark.parametrize("attention", tiny.ATTENTIONS)
    def test_it_is_as_good_as_its_recorded_row(self, attention):
        """On another Python the held-out text is another one: then it is only known to be English of this kind."""
        loaded, corpus = zoo.load(f"tiny-{attention}", dtype="fp32", device="cpu"), python_topics()
        assert "seed 0" in loaded.words and loaded.config.name == f"tiny-{attention}"
        bits = bits_per_byte(loaded.model, corpus.held_out[:8_192], 256)
        rows = [row for row in read_rows(ROWS) if (row["model"], row["seed"]) == (loaded.config.name, 0)]
        (last,) = [row for row in rows if row["step"] == row["steps"]]
        same_text = last["text"]["sha256"] == corpus.about["sha256"]
        assert abs(bits - last["held_out_bits_per_byte"]) < (0.1 if same_text else 0.5)


@pytest.mark.parametrize("text", ["plain text", "  two  blanks\n\ttab", "é ’ π 🙂", "<s></s>\x00\x7f\r\n", ""])
def test_a_token_is_a_byte(text):
    tokenizer = tiny.byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(text.encode()) == text
    stream = tokenizer.stream_decoder()
    assert "".join(stream.push(byte) for byte in text.encode()) + stream.finish() == text


def test_the_tokenizer_has_256_tokens_and_no_special_one():
    tokenizer = tiny.byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (256, None, None)


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="unknown attention 'mqq': one of mha, gqa, mqa, mla"):
        tiny.tiny_config("mqq")


@pytest.mark.parametrize("attention", tiny.ATTENTIONS)
def test_a_written_directory_gives_the_same_model_back(attention, tmp_path):
    model = model_of(attention)
    raw, tokenizer = tiny.hugging_face_config(attention), tiny.byte_tokenizer()
    saving.write_directory(tmp_path, model, raw, tokenizer, torch.float32)
    loaded = zoo.load(tmp_path, dtype="fp32", device="cpu")
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), loaded.model.parameters(), strict=True)
    )
    assert loaded.tokenizer.encode("é") == [0xC3, 0xA9] and loaded.stop_ids == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_transformers_reads_the_directory_and_computes_the_same(attention, tmp_path):
    from transformers import AutoModelForCausalLM

    model = model_of(attention)
    saving.write_directory(tmp_path, model, tiny.hugging_face_config(attention), tiny.byte_tokenizer(), torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(65, 95)[None]
    with torch.no_grad():
        expected = theirs(ids).logits
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(model(ids, Step.plan(positions_of(ids))), expected, rtol=0, atol=bound)


def test_weights_that_fp16_cannot_hold_are_refused(tmp_path):
    model = model_of("mqa")
    model.model.norm.weight[3] = 70_000.0
    with pytest.raises(ValueError, match=r"tensor model.norm.weight holds values that torch.float16 cannot"):
        saving.write_directory(tmp_path, model, tiny.hugging_face_config("mqa"), tiny.byte_tokenizer())
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    saving.replace_file(path, b"old")
    monkeypatch.setattr(saving.os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        saving.replace_file(path, b"new, and never finished")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_two_processes_that_replace_one_file_do_not_mix(tmp_path, monkeypatch):
    """The other one writes all of its file while this one is about to rename its own."""
    path, replace = tmp_path / "file", os.replace

    def late(*paths):
        monkeypatch.setattr(saving.os, "replace", replace)
        saving.replace_file(path, b"theirs")
        replace(*paths)

    monkeypatch.setattr(saving.os, "replace", late)
    saving.replace_file(path, b"mine")
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to("file")
    saving.replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"new"
