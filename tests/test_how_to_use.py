"""The Python examples of the page on using the course run as they are printed, here on a tiny model."""

import re

import pytest
import torch

import kvlab
from kvlab.model.tiny import byte_tokenizer, tiny_config
from kvlab.model.transformer import Transformer
from kvlab.model.zoo import LoadedModel


def examples(root) -> list[str]:
    page = (root / "book" / "how_to_use.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def tiny(monkeypatch):
    torch.manual_seed(0)
    config = tiny_config("gqa")
    model = Transformer(config).eval().requires_grad_(False)
    monkeypatch.setattr(kvlab, "load", lambda: LoadedModel(model, byte_tokenizer(), config, "tiny"), raising=False)


def test_the_examples_run(root, tiny, capsys):
    (serving,) = examples(root)
    names: dict[str, object] = {}
    exec(compile(serving, "how_to_use.md", "exec"), names)
    printed = capsys.readouterr().out
    engine, colours = names["engine"], names["colours"]
    assert "colours ends with 'length'" in printed and len(colours.sequences[0].output_ids) == 40
    assert engine.stats.finished == {"length": 2, "cancelled": 2}
    assert engine.stats.hit_tokens == 2 * (len(names["guide"]) // 16 * 16) and "0 preemptions" in printed
    assert all(group.used == 0 for group in engine.usage()) and not engine.busy
