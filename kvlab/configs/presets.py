"""The models whose published shapes come with the package, and those whose weights do."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path


@cache
def load() -> dict[str, tuple[dict, dict]]:
    """For each preset its config as the hub has it, and the fields of `ModelConfig` published beside it."""
    text = Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return {name: _entry(dict(section), data["family"]) for name, section in data["model"].items()}


def shipped() -> dict[str, Path]:
    """The directories of the tiny models that are part of the package, by name (see kvlab/model/tiny.py)."""
    folders = (Path(__file__).parent.parent / "data" / "tiny").glob("*/config.json")
    return {f"tiny-{file.parent.name}": file.parent for file in sorted(folders)}


def _entry(section: dict, families: dict) -> tuple[dict, dict]:
    hub, published = section.pop("hub"), section.pop("published", {})
    config = families.get(section.pop("like", ""), {}) | section
    return config, published | {"hub_id": hub, "source": f"https://huggingface.co/{hub} config.json"}
