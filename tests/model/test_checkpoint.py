"""Checkpoints are read as they were written, and what cannot be read is refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kvlab.config import ConfigError
from kvlab.model.checkpoint import fill, open_checkpoint
from kvlab.model.transformer import Transformer
from kvlab.model.weights import CheckpointError, expected_shapes, parts_of
from tests.model.factory import FAMILIES, write_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    return tmp_path


def refusal(source: Path | str) -> str:
    """The message with which a checkpoint is refused: one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_tensors(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def change_config(directory: Path, **fields) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_it_was_written(family, tmp_path):
    written = write_checkpoint(tmp_path, family).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    tensors = checkpoint.tensors()
    assert tensors.keys() >= expected_shapes(checkpoint.config).keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in tensors.items())
    assert checkpoint.config.name == tmp_path.name and checkpoint.source == tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shards_and_dtypes(dtype, tmp_path):
    written = write_checkpoint(tmp_path, "qwen2", max_shard_size="50KB", dtype=dtype).state_dict()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(tmp_path)
    tensors = checkpoint.tensors()
    assert tensors.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) and tensor.dtype == dtype for name, tensor in tensors.items())
    assert {tensor.dtype for tensor in checkpoint.tensors(torch.float64).values()} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_transformer_is_filled_with_fused_rows(family, dtype, tmp_path):
    written = write_checkpoint(tmp_path, family).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    model = Transformer(checkpoint.config).to(dtype)
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    fill(model, checkpoint)
    for name, parameter in model.named_parameters():
        expected = torch.cat([written[part] for part in parts_of(name)]).to(dtype)
        assert torch.equal(parameter, expected), name
    fused = model.get_parameter("model.layers.1.mlp.gate_up_proj.weight")  # the MLP takes its first half as gate
    assert torch.equal(fused[:80], written["model.layers.1.mlp.gate_proj.weight"].to(dtype))
    rows = parts_of("model.layers.2.self_attn.qkv_proj.bias")
    assert rows == tuple(f"model.layers.2.self_attn.{p}_proj.bias" for p in "qkv")


def test_stop_tokens_of_the_generation_config_are_added(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 257]}')
    assert open_checkpoint(directory).config.eos_token_ids == (257, 7)


def test_harmless_extra_tensors_are_ignored(tmp_path):
    write_checkpoint(tmp_path, "llama-tied", num_hidden_layers=1)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    change_tensors(tmp_path, add)
    fill(Transformer(open_checkpoint(tmp_path).config), open_checkpoint(tmp_path))


def test_a_tied_model_with_another_output_matrix_is_refused(directory):
    change_config(directory, tie_word_embeddings=True)
    assert "lm_head.weight is not model.embed_tokens.weight" in refusal(directory)


@pytest.mark.parametrize("ids", ["2", [[2]], {"a": 1}, [True]])
def test_stop_tokens_that_are_no_ids_are_refused(ids, directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert "generation_config.json: eos_token_id" in refusal(directory)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 200, 0.2, 0.5, -1])
def test_truncated_safetensors_are_refused(keep, directory):
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    message = refusal(directory)
    assert str(path) in message and "truncated or corrupt" in message and "again" in message


@pytest.mark.parametrize("junk", [b"\xff" * 400, b"\x10" + bytes(7) + b"{not json at all" + bytes(99)])
def test_corrupt_safetensors_are_refused(junk, directory):
    (directory / "model.safetensors").write_bytes(junk)
    assert "truncated or corrupt" in refusal(directory)


def test_missing_tensors_are_named(directory):
    change_tensors(directory, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    message = refusal(directory)
    assert "model.layers.0.mlp.up_proj.weight is missing" in message and str(directory) in message


def test_an_untied_model_without_output_matrix_is_refused(directory):
    change_tensors(directory, lambda tensors: tensors.pop("lm_head.weight"))
    assert "tie_word_embeddings" in refusal(directory)


def test_other_shapes_are_named_with_both_shapes(directory):
    change_config(directory, intermediate_size=96)
    message = refusal(directory)
    assert "mlp.gate_proj.weight has shape (80, 48)" in message and "(96, 48)" in message


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias"])
def test_unexpected_tensors_are_named(name, directory):
    change_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(80, 48)}))
    assert f"unexpected tensor {name}" in refusal(directory)


def test_quantised_weights_are_refused(directory):
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    message = refusal(directory)
    assert "F8_E4M3" in message and name in message
    change_config(directory, quantization_config={"quant_method": "gptq"})
    assert "quantised (gptq)" in refusal(directory)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad, directory):
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(directory, lambda tensors: tensors[name][3, 4].fill_(bad))
    checkpoint, threads = open_checkpoint(directory), torch.get_num_threads()
    with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
        fill(Transformer(checkpoint.config), checkpoint)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(pickle, directory):
    (directory / "model.safetensors").rename(directory / pickle)
    message = refusal(directory)
    assert pickle in message and "pickle" in message and "save_pretrained" in message
    assert "never pickles" in refusal(directory / pickle)


def test_a_directory_without_weights_or_config_is_refused(directory):
    (directory / "model.safetensors").unlink()
    assert "no weights" in refusal(directory)
    (directory / "config.json").unlink()
    assert "config.json is missing" in refusal(directory)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\x01"])
def test_a_config_that_is_no_json_object_is_refused(content, directory):
    (directory / "config.json").write_text(content)
    assert str(directory / "config.json") in refusal(directory)


def test_a_config_that_contradicts_itself_is_refused(directory):
    change_config(directory, num_key_value_heads=4)
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        open_checkpoint(directory)


def test_a_model_that_cannot_be_run_is_refused(directory):
    change_config(directory, model_type="gemma")
    assert "can size" in refusal(directory)


class TestShards:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        write_checkpoint(tmp_path, "llama", max_shard_size="50KB")
        return tmp_path

    def change_index(self, directory: Path, change) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    def test_an_absent_shard_is_named(self, sharded):
        gone = sorted(sharded.glob("*.safetensors"))[1]
        gone.unlink()
        assert f"{gone} is missing" in refusal(sharded)

    def test_a_tensor_that_is_not_where_the_index_says(self, sharded):
        name, shards = "model.norm.weight", sorted(path.name for path in sharded.glob("*.safetensors"))
        self.change_index(sharded, lambda index: index["weight_map"].update({name: shards[0]}))
        assert f"tensor {name} is missing" in refusal(sharded)

    @pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", "", 3, None])
    def test_an_index_never_leads_out_of_the_directory(self, place, sharded):
        self.change_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": place}))
        assert "not a file beside the index" in refusal(sharded)

    def test_an_index_without_map(self, sharded):
        self.change_index(sharded, lambda index: index.update(weight_map={}))
        assert "no weight_map" in refusal(sharded)

    def test_shards_without_their_index(self, sharded):
        (sharded / "model.safetensors.index.json").unlink()
        assert "model.safetensors.index.json" in refusal(sharded)


def test_what_does_not_exist_is_refused(tmp_path):
    assert "no such directory or file" in refusal(tmp_path / "nowhere.gguf")
    assert "no such directory or file" in refusal("not-a-model")
    lonely = tmp_path / "model.safetensors"
    lonely.write_bytes(b"")
    assert "config.json" in refusal(lonely)


@pytest.mark.parametrize("name", ["b" * 5000, "\0", "a\nb.safetensors"])
def test_an_index_with_impossible_file_names(name, directory):
    index = json.dumps({"weight_map": {"model.norm.weight": name}})
    (directory / "model.safetensors.index.json").write_text(index)
    assert "not a file beside the index" in refusal(directory) or len(name) > 255


def test_a_quantisation_config_of_any_form_is_refused(directory):
    change_config(directory, quantization_config=[1])
    assert "quantised" in refusal(directory)
