"""The Triton kernels: computed by Triton's interpreter, compiled for absent GPUs, and missed in words.

Triton decides when it is imported whether it interprets, so both run in processes of their own, started once each.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kvlab.attention_quantized import QuantizedPart
from kvlab.codecs import Codec
from kvlab.native import triton_decode
from kvlab.quantization import quantize

HERE = Path(__file__).parent
MODES = {"triton_interpreted.py": "1", "triton_interpreted_blocks.py": "1", "triton_compiled.py": "0"}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (it exists for Linux only)"
)


def cases_of(file: str) -> list[str]:
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


@cache
def outcomes(file: str, root: Path, scratch: Path) -> dict[str, list[str]]:
    """Run one file's tests: name -> the messages of what failed."""
    report = scratch / f"{file}.xml"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"TRITON_INTERPRET": MODES[file], "TRITON_CACHE_DIR": str(scratch), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file), f"--junitxml={report}"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        messages = [problem.text or "" for kind in ("failure", "error", "skipped") for problem in case.findall(kind)]
        found.setdefault(case.get("name").split("[")[0], []).extend(messages)
    return found


@needs_triton
@pytest.mark.parametrize(("file", "name"), [(file, name) for file in MODES for name in cases_of(file)])
def test_kernels(file, name, root, tmp_path_factory):
    found = outcomes(file, root, tmp_path_factory.getbasetemp())
    assert name in found, f"{name} did not run; {sorted(found)} did"
    assert not found[name], "\n".join(found[name])


@pytest.fixture
def as_if(monkeypatch):
    """(interpreting, modules) -> the words of `absent` on a machine without a GPU where Triton is as given."""

    def words(interpreting: str, triton) -> str | None:
        monkeypatch.setenv("TRITON_INTERPRET", interpreting)
        monkeypatch.setitem(sys.modules, "triton", triton)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return triton_decode.absent.__wrapped__()

    return words


def module(version: str):
    triton = types.ModuleType("triton")
    triton.__version__ = version
    return triton


def test_its_absence_is_said_in_words(as_if):
    assert "no CUDA device" in as_if("0", module("3.7.1"))
    assert "cannot be imported" in as_if("1", None) and "pip install triton" in as_if("1", None)
    assert "3.2.0 is older than 3.4" in as_if("1", module("3.2.0"))
    assert as_if("1", module("3.10.0+git1")) is None


def test_on_a_cpu_attention_takes_the_other_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    block = quantize(torch.zeros(1, 2, 8, 64), Codec())
    part = QuantizedPart((block,), (block,), torch.arange(8)[None, None])
    assert not triton_decode.can_decode(torch.zeros(1, 2, 1, 64), part)


@pytest.mark.parametrize(
    ("heads", "most", "processors", "runs"), [(8, 1000, 132, 64), (96, 1000, 132, 6), (1, 3, 132, 3), (999, 50, 8, 1)]
)
def test_runs_keep_all_processors_reading(heads, most, processors, runs):
    assert triton_decode.count_runs(heads, most, processors) == runs
