"""The command line as scripts and people meet it."""

import json
import os
import subprocess
import sys

import pytest

from kvlab.config import preset_names
from kvlab.configs.presets import shipped
from kvlab.sizing import GIB

MODELS = ("models", "--json")
GOOD = [
    (MODELS, None),
    (("size", "llama-3-70b", "--context", "131072", "--json"),
     {"bytes_per_token", "bytes_ideal", "bytes_allocated", "gib_ideal", "layout", "terms"}),
    (("plan", "llama-3-8b", "--memory-gib", "24", "--json"),
     {"weights_bytes", "cache_budget_bytes", "max_batch", "max_context", "command"}),
    (("roofline", "llama-3-8b", "--hardware", "h100", "--prompt", "512", "--batch", "4", "--json"),
     {"prefill", "decode"}),
]  # fmt: skip


@pytest.fixture
def kvlab(root):
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "KVLAB_OFFLINE": "1", "PYTHONPATH": str(root), "COLUMNS": "120", **environment}
        command = [sys.executable, "-m", "kvlab", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)

    return run


@pytest.mark.parametrize("arguments, keys", GOOD)
def test_json_is_all_there_is_on_stdout(kvlab, arguments, keys):
    done = kvlab(*arguments)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    if keys is None:
        assert [m["name"] for m in answer] == [*preset_names(), *shipped()]
        assert {"num_hidden_layers", "num_key_value_heads", "head_dim", "cannot_run"} <= set(answer[0])
    else:
        assert keys <= set(answer)
    for phase in ("prefill", "decode"):
        if phase in answer:
            assert {"flops", "bytes", "intensity", "time_s", "bound"} <= set(answer[phase])


def test_the_number_of_the_course(kvlab):
    done = kvlab("size", "llama-3-70b", "--context", "131072", "--json")
    answer = json.loads(done.stdout)
    assert answer["bytes_ideal"] == 42_949_672_960 and answer["gib_ideal"] == 40.0 and answer["layout"] == "gqa"
    assert done.stderr == "warning: llama-3-70b was trained on 8,192 positions; 131,072 is beyond them\n"


def test_options_of_size(kvlab):
    arguments = ("--batch", "3", "--dtype", "q8_0", "--block-size", "16", "--json")
    answer = json.loads(kvlab("size", "smollm2-135m", "--context", "17", *arguments).stdout)
    assert answer["bytes_per_token"] == 2 * 30 * 3 * 2 * 34 and "scales counted" in answer["counts"]
    assert answer["bytes_ideal"] == 3 * 17 * answer["bytes_per_token"]
    assert answer["bytes_allocated"] == 3 * 32 * answer["bytes_per_token"]
    expanded = kvlab("size", "deepseek-v3", "--context", "1", "--mla-layout", "expanded", "--json")
    assert json.loads(expanded.stdout)["bytes_per_token"] == 4_997_120
    assert json.loads(kvlab("size", "deepseek-v3", "--context", "1", "--json").stdout)["bytes_per_token"] == 70_272


def test_people_read_units_and_exact_bytes(kvlab):
    text = kvlab("size", "gemma-3-12b", "--context", "131072").stdout
    assert "8.312 GiB (8,925,478,912 bytes)" in text and "48.000 GiB" in text
    assert "can be sized, not run" in text and "sliding window 1024 in 40 of 48 layers" in text
    plan = kvlab("plan", "llama-3-8b", "--memory-gib", "24").stdout
    assert "14.958 GiB (16,060,522,496 bytes)" in plan and "vllm serve meta-llama/Meta-Llama-3-8B" in plan
    assert "memory" in kvlab("roofline", "llama-3-8b", "--hardware", "h100", "--prompt", "512").stdout
    models = kvlab("models").stdout
    assert all(name in models for name in (*preset_names(), *shipped()))


def test_plan_in_json(kvlab):
    answer = json.loads(kvlab("plan", "llama-3-8b", "--memory-gib", "24", "--context", "4096", "--json").stdout)
    assert answer["memory_bytes"] == 24 * GIB and answer["weights_bytes"] == 16_060_522_496
    assert answer["cache_budget_bytes"] == answer["memory_bytes"] - answer["weights_bytes"]
    assert answer["max_batch"] == answer["cache_budget_bytes"] // (4096 * 131_072)
    assert answer["max_context"] == answer["cache_budget_bytes"] // 131_072


def test_what_does_not_fit_is_warned_of(kvlab):
    done = kvlab("plan", "llama-3.1-70b", "--memory-gib", "150", "--context", "131072", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["max_batch"] == 0
    assert done.stderr.startswith("warning: 1 x 131,072 tokens do not fit") and done.stderr.count("\n") == 1


def test_a_measured_device(kvlab):
    figures = ("--bandwidth-gb-per-s", "34", "--tflops", "0.2", "--overhead-ms", "50", "--json")
    answer = json.loads(kvlab("roofline", "smollm2-135m", "--hardware", "this", "--prompt", "8", *figures).stdout)
    assert answer["decode"]["bound"] == "overhead" and answer["decode"]["time_s"] == 0.05
    assert answer["decode"]["memory_s"] == answer["decode"]["bytes"] / 34e9


BAD = [
    ((), None),  # help, not an error
    (("frob",), "No such command 'frob'"),
    (("size", "llama-3-8b"), "--context"),
    (("size", "llama-3-8b", "--context", "many"), "'many'"),
    (("plan", "llama-3-8b", "--memory-gib", "24 GiB"), "'24 GiB'"),
    (("size", "llama-3-8b", "--context", "0"), "context must be a whole number of at least 1, not 0"),
    (("size", "llama-3-8b", "--context", "-5"), "not -5"),
    (("size", "llama-3-8b", "--context", "8", "--batch", "0"), "batch"),
    (("size", "llama-3-8b", "--context", "1" + "0" * 400), "context must be at most"),
    (("size", "llama-3-8b", "--context", "8", "--dtype", ""), "unknown dtype ''"),
    (("size", "llama-3-8b", "--context", "8", "--block-size", "-1"), "block_size"),
    (("size", "llama-3-8b", "--context", "8", "--dtype", "int3"), "int3"),
    (("size", "llama-3-8b", "--context", "8", "--mla-layout", "both"), "latent, expanded"),
    (("size", "llama-3-8b", "--context", "8", "--frob"), "--frob"),
    (("size", "lama-3-8b", "--context", "8"), "did you mean llama-3-8b"),
    (("size", "./nowhere", "--context", "8"), "./nowhere: no such file"),
    (("size", "~nobody-at-all/x", "--context", "8"), "~nobody-at-all/x: no such file"),
    (("size", "nobody/nothing", "--context", "8"), "nobody/nothing"),
    (("plan", "llama-3-70b", "--memory-gib", "80"), "leave nothing of 80.00 GiB"),
    (("plan", "llama-3-8b", "--memory-gib", "-1"), "--memory-gib"),
    (("plan", "llama-3-8b", "--memory-gib", "nan"), "--memory-gib"),
    (("plan", "llama-3-8b", "--memory-gib", "1e300"), "--memory-gib"),
    (("plan", "llama-3-8b", "--memory-gib", "24", "--context", "1" + "0" * 400), "context must be at most"),
    (("plan", "llama-3-8b", "--memory-gib", "inf"), "--memory-gib"),
    (("plan", "llama-3-8b", "--memory-gib", "24", "--reserve-gib", "-1"), "--reserve-gib"),
    (("plan", "llama-3-8b", "--memory-gib", "24", "--engine", "tgi"), "unknown engine 'tgi'"),
    (("plan", "llama-3-8b", "--memory-gib", "24", "--dtype", "q8_0"), "vllm has no cache in q8_0"),
    (("plan", "llama-3-8b", "--memory-gib", "24", "--context", "0"), "context"),
    (("roofline", "llama-3-8b", "--hardware", "h999", "--prompt", "8"), "h999"),
    (("roofline", "llama-3-8b", "--hardware", "this", "--prompt", "8"), "not known"),
    (("roofline", "llama-3-8b", "--hardware", "h100", "--prompt", "0"), "prompt must be"),
    (("roofline", "llama-3-8b", "--hardware", "h100", "--prompt", "1" + "0" * 310), "prompt must be at most"),
    (("roofline", "llama-3-8b", "--hardware", "h100", "--prompt", "8", "--overhead-ms", "inf"), "overhead"),
    (("roofline", "llama-3-8b", "--hardware", "h100", "--prompt", "8", "--bandwidth-gb-per-s", "1e300"), "bandwidth"),
    (("roofline", "llama-3-8b", "--hardware", "h100", "--prompt", "8", "--tflops", "0"), "--tflops"),
]


@pytest.mark.parametrize("arguments, words", [b for b in BAD if b[1]])
def test_errors_are_one_line_on_stderr_and_exit_2(kvlab, arguments, words):
    done = kvlab(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_bad_config_files_are_one_line_too(kvlab, tmp_path):
    config = tmp_path / "config.json"
    for content in ("{", "{}", '{"num_attention_heads": 7, "num_key_value_heads": 2, "hidden_size": 14, '
                    '"num_hidden_layers": 1}', '{"model_type": "mamba"}'):  # fmt: skip
        config.write_text(content)
        done = kvlab("size", str(config), "--context", "8", "--json")
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert str(config) in done.stderr


def test_a_config_without_a_dtype_is_warned_of(kvlab, tmp_path):
    raw = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    done = kvlab("size", str(tmp_path), "--context", "8", "--json")
    assert json.loads(done.stdout)["bytes_per_token"] == 2 * 2 * 64 * 2 and "bf16 (2 bytes) is taken" in done.stderr
    plan = kvlab("plan", str(tmp_path), "--memory-gib", "1")
    assert plan.returncode == 2 and "how large the weights are" in plan.stderr


def test_help_and_version(kvlab):
    assert "size" in kvlab().stdout and kvlab().returncode == 0
    assert "--memory-gib" in kvlab("plan", "--help").stdout
    version = kvlab("--version")
    assert version.returncode in (0, 2)  # 2 where the package is not installed
    assert "Traceback" not in version.stderr


@pytest.mark.parametrize("arguments", [MODELS, ("models",), ("size", "smollm2-135m", "--context", "5"), ("--help",)])
def test_a_reader_that_has_gone_is_no_error(root, arguments):
    """`kvlab models | head -1`: exit code 1 would say that a gate failed."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvlab", *arguments]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("where, code, words", [(">&-", 0, ""), ("> /dev/full", 2, "No space left on device")])
def test_a_stdout_that_takes_nothing(root, where, code, words):
    command = f"{sys.executable} -m kvlab size smollm2-135m --context 5 {where}"
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == code and words in done.stderr and done.stderr.count("\n") == bool(words)


def test_an_unforeseen_error_is_one_line_too(monkeypatch, capsys):
    from typer.testing import CliRunner

    from kvlab import config
    from kvlab.cli import app

    def broken(model):
        raise KeyError("lost")

    monkeypatch.setattr(config, "resolve", broken)
    done = CliRunner().invoke(app, ["size", "llama-3-8b", "--context", "8"])
    assert done.exit_code == 2 and "Traceback" not in done.output
