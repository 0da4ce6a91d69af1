"""The C++ kernel against attention in float64, and what happens where it cannot be built."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import DensePart, Step, attend
from kvlab.native import build

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def expected(queries, keys, values, scale):
    step = Step(torch.full((queries.shape[0], 1), keys.shape[2], dtype=torch.int32))
    at = torch.arange(keys.shape[2]).expand(keys.shape[0], 1, -1)
    return attend(queries.double(), (DensePart(keys.double(), values.double(), at),), step, scale=scale)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_equals_attention_in_float64(data):
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    B, kv_heads, group = (data.draw(st.integers(1, n)) for n in (2, 3, 5))
    S, D = data.draw(st.integers(1, 700)), data.draw(st.sampled_from(build.HEAD_DIMS))
    generator = torch.Generator().manual_seed(S)
    queries = torch.randn(B, kv_heads * group, 1, D, generator=generator).to(dtype)
    buffers = torch.randn(2, B, kv_heads, S + 9, D, generator=generator).to(dtype)
    buffers[:, :, :, S:] = 1e30  # what lies behind the live slots must not be read
    keys, values = buffers[:, :, :, :S]
    assert build.can_decode(queries, keys, values)
    out = build.decode(queries, keys, values, 0.2)
    error = float((out.double() - expected(queries, keys, values, 0.2)).abs().max())
    assert error <= TOLERANCE[dtype] * 4


def test_large_scores_do_not_overflow():
    queries, keys, values = (torch.randn(1, 2, n, 64) for n in (1, 300, 300))
    out = build.decode(queries * 1e4, keys, values, 1.0)
    torch.testing.assert_close(out.double(), expected(queries * 1e4, keys, values, 1.0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", ["two queries", "head of 32", "float64", "strided", "other values"])
def test_it_takes_only_what_it_can_read(change):
    queries, keys, values = (torch.zeros(1, 2, n, 64) for n in (1, 8, 8))
    match change:
        case "two queries":
            queries = torch.zeros(1, 2, 2, 64)
        case "head of 32":
            queries, keys, values = queries[..., :32], keys[..., :32], values[..., :32]
        case "float64":
            queries, keys, values = queries.double(), keys.double(), values.double()
        case "strided":
            keys, values = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (keys, values))
        case "other values":
            values = torch.zeros(1, 2, 16, 64)[:, :, :8]
    assert not build.can_decode(queries, keys, values)


@pytest.mark.parametrize(
    ("compiler", "words"), [("", "no C[+][+] compiler was found"), ("false", "could not compile the kernel")]
)
def test_its_absence_is_said_in_words(compiler, words, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(AssertionError, match=words):
        assert isinstance(answer := build.library.__wrapped__(), ctypes.CDLL), answer


def test_a_broken_kernel_is_no_crash(monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(build, "SOURCE", broken)
    assert "could not compile" in build.library.__wrapped__()
    assert subprocess.run(["true"]).returncode == 0
