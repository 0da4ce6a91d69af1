"""Sliders for a live kernel: the bytes of a cache while its factors move.

ipywidgets is optional and imported when a widget is made. A static page cannot run these.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.config import ModelConfig, preset_names, resolve
from kvlab.planning import amount
from kvlab.sizing import GIB, SizingError, bytes_ideal, bytes_per_token, layout, weights_bytes

CONTEXTS = tuple(2**power for power in range(7, 21))  # tokens
BATCHES = tuple(2**power for power in range(9))
DTYPES = ("bf16", "fp32", "fp8", "int8", "int4", "q8_0", "q4_0", "kivi2-g32")
MEMORIES_GIB = (16, 24, 40, 80, 141, 640)


@dataclass(frozen=True)
class Reading:
    """What the sliders show: exact bytes, and the same in words."""

    cache_bytes: int
    weights_bytes: int
    memory_bytes: int
    lines: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.cache_bytes + self.weights_bytes <= self.memory_bytes


def read_size(model: str, context: int, batch: int, dtype: str, memory_gib: int) -> Reading:
    """Size one setting. Sliding layers hold their window, as `bytes_ideal` says."""
    config = resolve(model)
    cache, weights, memory = bytes_ideal(config, context, batch, dtype), weights_bytes(config), memory_gib * GIB
    one = bytes_per_token(config, dtype)
    total = f"{(cache + weights) / GIB:,.2f} of {memory_gib} GiB"
    verdict = "fits" if cache + weights <= memory else "does not fit"
    lines = [
        f"cache: {amount(cache)}; {one:,} bytes per token, {layout(config)}",
        f"weights: {amount(weights)}, as published",
        f"together {total}: {verdict}, activations not counted",
    ]
    if config.max_position_embeddings is not None and context > config.max_position_embeddings:
        lines.append(f"{model} was trained on {config.max_position_embeddings:,} positions only")
    return Reading(cache, weights, memory, tuple(lines))


def models() -> list[str]:
    """Presets that can be shown beside their weights."""
    return [name for name in preset_names() if _knows_its_weights(resolve(name))]


def _knows_its_weights(config: ModelConfig) -> bool:
    try:
        return weights_bytes(config) > 0
    except SizingError:
        return False


def size_explorer(
    model: str = "llama-3-8b", context: int = 8192, batch: int = 1, dtype: str = "bf16", memory_gib: int = 80
):
    """Sliders for model, context, batch, dtype and memory; below them the bytes, and a bar of the memory in use.

    Raises ImportError, saying what to install, where ipywidgets is missing.
    """
    try:
        import ipywidgets
    except ImportError:
        raise ImportError("sliders need ipywidgets: pip install ipywidgets, then restart the kernel") from None
    controls = {
        "model": ipywidgets.Dropdown(options=models(), value=model, description="model"),
        "context": ipywidgets.SelectionSlider(options=_named(CONTEXTS), value=context, description="context"),
        "batch": ipywidgets.SelectionSlider(options=_named(BATCHES), value=batch, description="batch"),
        "dtype": ipywidgets.Dropdown(options=DTYPES, value=dtype, description="dtype"),
        "memory_gib": ipywidgets.SelectionSlider(options=MEMORIES_GIB, value=memory_gib, description="GiB"),
    }
    bar, words = ipywidgets.FloatProgress(min=0.0, max=1.0, description="in use"), ipywidgets.HTML()

    def show(_change=None) -> None:
        reading = read_size(**{name: control.value for name, control in controls.items()})
        bar.value = min(1.0, (reading.cache_bytes + reading.weights_bytes) / reading.memory_bytes)
        bar.bar_style = "info" if reading.fits else "danger"
        words.value = "<br>".join(reading.lines)

    for control in controls.values():
        control.observe(show, names="value")
    show()
    return ipywidgets.VBox([*controls.values(), bar, words])


def _named(counts: tuple[int, ...]) -> list[tuple[str, int]]:
    return [(f"{count:,}", count) for count in counts]
