"""The sliders show the numbers of `sizing`, whatever is moved."""

import builtins

import pytest

from kvlab import sizing, widgets
from kvlab.config import resolve


def explorer(**settings):
    pytest.importorskip("ipywidgets")
    box = widgets.size_explorer(**settings)
    *controls, bar, words = box.children
    return {control.description: control for control in controls}, bar, words


def test_it_starts_with_what_it_is_given():
    controls, bar, words = explorer(model="llama-3-8b", context=8192, memory_gib=80)
    assert "1.00 GiB (1,073,741,824 bytes)" in words.value and "131,072 bytes per token, gqa" in words.value
    assert "fits" in words.value and "does not fit" not in words.value
    weights = sizing.weights_bytes(resolve("llama-3-8b"))
    assert bar.value == pytest.approx((2**30 + weights) / (80 * 2**30))
    assert bar.bar_style == "info" and set(controls) == {"model", "context", "batch", "dtype", "GiB"}


@pytest.mark.parametrize(
    ("moved", "value", "size"),
    [
        ("model", "llama-3-70b", 2_684_354_560),
        ("context", 131_072, 17_179_869_184),
        ("batch", 16, 17_179_869_184),
        ("dtype", "int4", 268_435_456),
        ("dtype", "q8_0", 570_425_344),
    ],
)
def test_moving_one_slider_shows_the_numbers_of_sizing(moved, value, size):
    controls, _, words = explorer()
    controls[moved].value = value
    setting = {name: controls[name].value for name in ("context", "batch", "dtype")}
    assert sizing.bytes_ideal(resolve(controls["model"].value), **setting) == size
    assert f"({size:,} bytes)" in words.value


def test_what_does_not_fit_is_said_in_words_and_fills_the_bar():
    controls, bar, words = explorer(memory_gib=16)
    controls["batch"].value = 256
    assert bar.value == 1.0 and bar.bar_style == "danger" and "does not fit" in words.value
    controls["batch"].value = 1
    controls["GiB"].value = 24
    assert bar.value < 1.0 and bar.bar_style == "info" and "does not fit" not in words.value


def test_windows_and_trained_positions_are_respected():
    reading = widgets.read_size("mistral-7b", 131_072, 1, "bf16", 80)
    assert reading.cache_bytes == 4096 * 131_072
    assert reading.lines[-1] == "mistral-7b was trained on 32,768 positions only"
    assert len(widgets.read_size("mistral-7b", 32_768, 1, "bf16", 80).lines) == 3


def test_every_model_that_is_offered_can_be_read_in_every_dtype():
    assert {"smollm2-135m", "llama-3-8b", "gemma-3-12b", "deepseek-v3"} <= set(widgets.models())
    for model in widgets.models():
        for dtype in widgets.DTYPES:
            assert widgets.read_size(model, 1024, 2, dtype, 80).cache_bytes > 0


def test_without_ipywidgets_the_error_says_what_to_install(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "ipywidgets":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install ipywidgets"):
        widgets.size_explorer()
