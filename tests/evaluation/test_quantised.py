"""The measurements of chapter 07, on a tiny trained model whose tokens are bytes."""

from __future__ import annotations

import json

import pytest
import torch

from kvlab.cache.build import build_cache
from kvlab.evaluation import quantised
from kvlab.evaluation.divergence import divergence_rows, first_difference
from kvlab.evaluation.kv_grid import BITS, GRID, REPAIR, Widths, codec, grid_rows, stored_bits
from kvlab.evaluation.quality import held_out_text
from kvlab.evaluation.static_scales import CODECS, sample_tensors, static_rows
from kvlab.generate import generate
from kvlab.model import zoo

TEXT = held_out_text()[:300]


@pytest.fixture(scope="module")
def tiny() -> zoo.LoadedModel:
    return zoo.load("tiny-mha", dtype="fp32", device="cpu")


def test_the_grid_holds_every_pair_once_and_the_repair_compares_like_with_like():
    assert len({(w.keys, w.values) for w in GRID}) == len(GRID) == len(BITS) ** 2 == 16
    plain, repaired = ([w for w in REPAIR if w.keys_along == along] for along in ("channels", "tokens"))
    assert [(w.keys, w.values, w.residual) for w in plain] == [(w.keys, w.values, w.residual) for w in repaired]


@pytest.mark.parametrize("bits, stored", [("full", 16), ("8", 9), ("4", 5), ("2", 3), ("fp8", 8.5)])
def test_scales_and_minima_are_counted(bits, stored):
    assert stored_bits(codec(bits)) == stored
    if bits in ("4", "2"):
        assert stored_bits(codec(bits, along="tokens")) == stored


def test_a_grid_row(tiny, tmp_path):
    tick: list = []
    widths = [Widths("full", "full"), Widths("2", "full"), Widths("2", "full", "tokens", 32)]
    facts = {"samples": 2, "tasks": {"passkey": 300}, "text": TEXT, "work": tmp_path}
    exact, plain, repaired = grid_rows(tiny, widths, tick=tick.append, **facts)
    assert exact["kl"] == 0.0 and exact["top1_agreement"] == 1.0 and exact["passkey"]["total"] == 2
    assert plain["key_bits"] == 4 and repaired["key_bits"] == 3 and plain["value_bits"] == 16 and plain["kl"] > 0.01
    assert repaired["name"] == "K2 per channel Vfull, residual 32" and 0 < repaired["kl"] < plain["kl"]
    assert len(tick) == 3 * (2 + 1)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert list(grid_rows(tiny, widths, **facts)) == [exact, plain, repaired]  # read, not run again
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_the_first_difference_is_where_free_running_texts_part(tiny):
    prompt = tiny.tokenizer.encode("The import statement")
    written = generate(tiny.model, prompt, max_new_tokens=30).token_ids
    assert first_difference(tiny, prompt, written, build_cache(tiny.config)) == 30
    for name in ("int2-g16", "kivi2-g16-r32", "int4-g16"):
        other = generate(tiny.model, prompt, name, max_new_tokens=30).token_ids
        apart = next((i for i, pair in enumerate(zip(written, other, strict=True)) if pair[0] != pair[1]), 30)
        assert first_difference(tiny, prompt, written, build_cache(tiny.config, name)) == apart, name


def test_divergence_rows(tiny):
    rows = list(divergence_rows(tiny, ["contiguous", "int2-g16"], ["one", "two words"], tokens=20))
    assert rows[0] == {"cache": "contiguous", "tokens": 20, "same": 2, "places": [20, 20]}
    assert len(rows[1]["places"]) == 2 and rows[1]["same"] == sum(place == 20 for place in rows[1]["places"])


def test_static_scales_clamp_what_lies_beyond_them(tiny):
    rows = list(static_rows(tiny, {"int8": CODECS["int8"]}, text=TEXT))
    by = {row["scales"]: row for row in rows}
    assert by["dynamic"]["clamped"] == 0 and by["dynamic"]["kl"] < by["static, ranges x 0.25"]["kl"]
    assert by["static, 512 tokens"]["clamped"] <= by["static, 16 tokens"]["clamped"]
    assert by["static, ranges x 0.5"]["clamped"] < by["static, ranges x 0.25"]["clamped"] < 1


def test_samples_are_what_a_cache_holds(tiny):
    layers = sample_tensors(tiny, 40)
    assert len(layers) == 4 and {tuple(x.shape) for pair in layers for x in pair} == {(1, 8, 40, 16)}
    assert not torch.equal(layers[0][0], layers[1][0])


def test_the_command_records_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "static_rows", lambda loaded, tick: iter([{"codec": loaded.config.name}]))
    quantised.main(["static", "--model", "tiny-mha", "--out", str(tmp_path / "new" / "rows.json")])
    answer = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert answer["rows"] == [{"codec": "tiny-mha"}] and answer["command"].endswith("quantised static")
    assert answer["dtype"] == "fp32" and "seed 0" in answer["note"]
