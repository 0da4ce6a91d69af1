"""Where the kernels cannot be built, that is said in words and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from kvlab.attention import DensePart, Step, attend
from kvlab.cache.quantized import QuantizedCache
from kvlab.codecs import Codec
from kvlab.native import build, decode, encode

needs_kernel = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("", "no C++ compiler was found"),
        ("false --quiet", "false --quiet could not build the C++ kernels: no message"),
        ("no-such-compiler", "could not build the C++ kernels: [Errno 2] No such file or directory"),
        ("true", "could not build the C++ kernels"),  # it says yes and builds nothing
    ],
)
def test_its_absence_is_said_in_words(compiler, words, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    answer = build.library.__wrapped__()
    assert isinstance(answer, str) and words in answer and "\n" not in answer


@needs_kernel
def test_a_broken_kernel_is_no_crash(monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(build, "SOURCES", (broken,))
    assert "broken.cpp" in build.library.__wrapped__()


def test_everything_works_without_a_compiler(monkeypatch):
    """A cache of codes and a plain one, both longer than what starts the compiler."""
    for module in (decode, encode):
        monkeypatch.setattr(module, "library", lambda: "no C++ compiler was found")
    keys, values = torch.randn(2, 1, 2, 600, 64)
    cache = QuantizedCache(Codec(), Codec())
    cache.update(keys[:, :, :599], values[:, :, :599], Step.plan(torch.arange(599)[None]))
    step = Step.plan(torch.tensor([[599]]))
    view = cache.update(keys[:, :, 599:], values[:, :, 599:], step)
    plain = DensePart(keys, values, torch.arange(600).expand(1, 1, 600), 0)
    queries = torch.randn(1, 4, 1, 64)
    outs = [attend(queries, parts, step, scale=0.1) for parts in (view, (plain,))]
    torch.testing.assert_close(*outs, rtol=0, atol=0.02)


def test_few_slots_never_start_the_compiler(monkeypatch):
    def library():
        raise AssertionError("the compiler was started")

    for module in (decode, encode):
        monkeypatch.setattr(module, "library", library)
    keys, values = torch.randn(2, 1, 2, build.FEWEST_SLOTS - 1, 64)
    for codec in (None, Codec()):
        cache = QuantizedCache(codec, codec)
        for first, last in ((0, 500), (500, 501), (501, 511)):
            step = Step.plan(torch.arange(first, last)[None])
            view = cache.update(keys[:, :, first:last], values[:, :, first:last], step)
            attend(torch.randn(1, 4, last - first, 64), view, step, scale=0.1)
