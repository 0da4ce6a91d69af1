"""`kvlab models`: the presets and their shapes."""

from __future__ import annotations

from kvlab.commands.options import Json
from kvlab.terminal import print_json, print_table, width


def models(json: Json = False) -> None:
    """List the models whose published shapes, or whose weights, come with kvlab."""
    from dataclasses import asdict

    from kvlab.config import preset_names, resolve
    from kvlab.configs.presets import shipped
    from kvlab.sizing import bytes_per_token, layout

    configs = [resolve(name) for name in (*preset_names(), *shipped())]
    if json:
        added = [{"layout": layout(c), "bytes_per_token": bytes_per_token(c)} for c in configs]
        print_json([asdict(c) | more for c, more in zip(configs, added, strict=True)])
        return
    lines = [line(c, bytes_per_token(c), layout(c)) for c in configs]
    columns = ["model", "layers", "heads /KV", "head dim", "bytes /token", "10^6 params", "layout", "in kvlab"]
    if width() < 120:  # no room for the reasons, which `kvlab size` gives too
        columns, lines = columns[:-1], [cells[:-1] for cells in lines]
    print_table("Presets (bytes per token in the model's own dtype)", columns, lines, right=(1, 2, 3, 4, 5))


def line(c, per_token: int, layout: str) -> list[str]:
    """One row of the table."""
    heads = f"{c.num_attention_heads}/{c.num_key_value_heads}"
    millions = f"{c.num_parameters / 1e6:,.1f}"
    shape = [str(c.num_hidden_layers), heads, str(c.head_dim), f"{per_token:,}", millions]
    return [c.name, *shape, layout, f"size only: {c.cannot_run}" if c.cannot_run else "runs"]
