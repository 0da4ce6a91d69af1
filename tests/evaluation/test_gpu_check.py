"""The GPU check without a GPU: it says so, and its judgements hold on a CPU. No test here asserts a speed."""

from __future__ import annotations

import json

import pytest
import torch

from kvlab.attention import DensePart, Step
from kvlab.evaluation import gpu_check, gpu_paths
from kvlab.generate import last_logits
from tests.harness import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def one_call(monkeypatch):
    """Contestants are called once instead of timed; each is said to take a second more than the one before."""

    def called(contestants, device, turns=1, calls=1):
        for run in contestants.values():
            run()
        return {name: 1.0 + i for i, name in enumerate(contestants)}

    monkeypatch.setattr(gpu_paths, "median_seconds", called)


@pytest.fixture
def as_with_a_gpu(monkeypatch):
    """main() takes the rows that are given to it for those of a GPU."""
    monkeypatch.setattr(gpu_check, "absent", lambda: None)
    monkeypatch.setattr(gpu_check, "gpu_facts", lambda device: {"name": "none"})
    return lambda rows: monkeypatch.setattr(gpu_check, "rows_of", lambda device, model: iter(rows))


def test_without_a_gpu_it_says_so_and_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "no GPU to check: PyTorch finds no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ok", "error", "code"), [(True, 1e-6, 0), (False, 0.5, 1), (False, float("nan"), 1)])
def test_rows_are_written_and_a_wrong_one_is_the_exit_code(ok, error, code, as_with_a_gpu, tmp_path, capsys):
    row = {"check": "prefill", "tokens": 2048, "batch": 1, "dtype": "bf16", "ok": ok, "error": error, "vs_math": 2.5}
    left_out = {"check": "triton decode", "tokens": 8, "batch": 1, "dtype": "bf16", "skipped": "no Triton"}
    as_with_a_gpu([row, left_out])
    assert gpu_check.main(["--out", str(tmp_path / "new" / "x.json")]) == code
    said = capsys.readouterr().out
    assert ("right" if ok else "WRONG") in said and "2.50 x math" in said and "skipped, no Triton" in said
    written = json.loads((tmp_path / "new" / "x.json").read_text())
    assert written["gpu"] == {"name": "none"} and written["environment"]["torch"] == torch.__version__
    assert [r["check"] for r in written["rows"]] == ["prefill", "triton decode"]
    assert written["rows"][0]["error"] == (None if error != error else error)


def test_what_was_measured_before_something_broke_is_kept(as_with_a_gpu, tmp_path):
    def rows():
        yield {"check": "prefill", "tokens": 8, "batch": 1, "dtype": "bf16", "ok": True, "error": 0.0}
        raise RuntimeError("out of memory")

    as_with_a_gpu(rows())
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu_check.main(["--out", str(tmp_path / "x.json")])
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 1


def test_without_triton_its_rows_say_why(monkeypatch):
    monkeypatch.setattr(gpu_paths.triton_decode, "absent", lambda: "there is no Triton")
    rows = list(gpu_paths.triton_rows(CPU, torch.float32, contexts=(8, 16), tokens=32))
    assert [(row["cache"], row["tokens"], row["batch"]) for row in rows] == [
        (cache, *sizes) for cache in ("int8", "fp8") for sizes in ((8, 1), (8, 4), (16, 1), (16, 2))
    ]
    assert {row["skipped"] for row in rows} == {"there is no Triton"}


def test_a_prompt_is_checked_and_timed(one_call):
    (row,) = gpu_paths.prefill_rows(CPU, torch.float32, lengths=(64,), checked=8)
    assert row["ok"] and row["error"] < 1e-4 and row["vs_math_kernel"] == 2.0 and isinstance(row["flash"], bool)


@pytest.mark.parametrize(("dtype", "share", "ok"), [
    (torch.float32, 0.0, True), (torch.float32, 1e-3, False), (torch.bfloat16, 1e-3, True), (torch.bfloat16, 0.1, False)
])  # fmt: skip
def test_an_error_is_judged_by_what_rounding_may_do(dtype, share, ok):
    queries, keys, values = gpu_paths._random(1, 1, 40, CPU, dtype)
    part, step = DensePart(keys, values, torch.arange(40)[None, None]), Step(torch.tensor([[39]]))
    out, _ = part.attend_with_lse(queries, step, scale=0.1)
    assert gpu_paths.error_of(out * (1 + share), queries, part, step, 0.1)["ok"] == ok


@pytest.mark.parametrize("wrong_by", [0.0, 0.5])
def test_the_compiled_step_is_held_against_the_eager_one(wrong_by, monkeypatch):
    class Step:
        """Stands for CompiledStep: the same interface, nothing compiled."""

        def __init__(self, model, cache):
            self.model, self.cache = model, cache

        def warm_up(self):
            return 1.5

        def __call__(self, token, position):
            return last_logits(self.model, [token], position, self.cache) + wrong_by

    monkeypatch.setattr(gpu_paths, "CompiledStep", Step)
    model = tiny_model(dtype=torch.float32)
    row = gpu_paths.compiled_row(model, model, prompt_tokens=6, steps=8)
    assert row["ok"] == (wrong_by == 0.0) and row["error"] == pytest.approx(wrong_by, abs=1e-4)
    assert row["warmup_s"] == 1.5 and set(row["seconds"]) == {"eager", "compiled"} and row["vs_eager"] > 0
