"""What made-up rows say together: means and spreads, and no difference where the seeds' ranges meet."""

from __future__ import annotations

import json

import pytest

from kvlab.training.table import COLUMNS, NO_DIFFERENCE, TOO_FEW, append_row, difference, lines, read_rows, summarise

SIZES = {"mha": 256, "gqa": 64, "mqa": 32, "mla": 48}


def rows_of(attention: str, bits: list[float], **changes) -> list[dict]:
    return [
        {"model": f"tiny-{attention}", "seed": seed, "parameters": 984_192, "recipe": {"steps": 9}, "text": {"sha": 1},
         "elements_per_token_and_layer": SIZES[attention], "cache_bytes_per_token": 8 * SIZES[attention],
         "step": 9, "steps": 9, "held_out_bits_per_byte": value} | changes
        for seed, value in enumerate(bits)
    ]  # fmt: skip


def test_mean_spread_and_order_by_cache_bytes():
    rows = rows_of("mqa", [2.2, 2.3, 2.4]) + rows_of("mla", [2.0, 2.0, 2.3]) + rows_of("mha", [1.9, 2.0, 2.1])
    summaries = summarise(rows)
    assert [s.model for s in summaries] == ["tiny-mha", "tiny-mla", "tiny-mqa"]
    assert summaries[2].mean == pytest.approx(2.3) and summaries[2].seeds == (0, 1, 2)
    cells = lines(summaries)
    assert all(len(line) == len(COLUMNS) for line in cells)
    assert cells[2][:5] == ["tiny-mqa", "984,192", "32", "256", "3"]
    assert cells[2][5:] == ["2.300", "2.200 - 2.400", "0.300 bits more than tiny-mha"]
    assert cells[1][-1] == NO_DIFFERENCE and cells[0][-1] == ""


def test_differences_in_words():
    low, high, wide = (summarise(rows_of("gqa", b))[0] for b in ([1.0, 1.1], [1.2, 1.3], [1.05, 1.25]))
    assert difference(high, low) == "0.200 bits more than tiny-gqa"
    assert difference(low, high) == "0.200 bits fewer than tiny-gqa"
    assert difference(wide, low) == difference(low, wide) == difference(wide, high) == NO_DIFFERENCE
    touching = summarise(rows_of("gqa", [1.1, 1.2]))[0]
    assert difference(touching, low) == difference(touching, high) == NO_DIFFERENCE


def test_one_seed_says_nothing():
    one, three = summarise(rows_of("mqa", [3.0]))[0], summarise(rows_of("mha", [1.0, 1.1, 1.2]))[0]
    assert difference(one, three) == difference(three, one) == TOO_FEW


def test_only_finished_runs_count_and_each_once():
    rows = rows_of("mha", [3.0], step=5) + rows_of("mha", [2.0]) + rows_of("mha", [2.5]) + rows_of("gqa", [4.0], step=5)
    assert [(s.model, s.bits) for s in summarise(rows)] == [("tiny-mha", (2.5,))]
    assert summarise([]) == [] and lines([]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": {"steps": 10}}, "runs with different recipes cannot be compared: steps is 9 for tiny-mha and 10 "),
        (
            {"text": {"sha": 2}},
            "runs with different texts cannot be compared: sha is 1 for tiny-mha and 2 for tiny-gqa",
        ),
    ],
)
def test_runs_that_differ_in_more_than_attention_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        summarise(rows_of("mha", [2.0]) + rows_of("gqa", [2.0], **changes))


def test_rows_on_disk(tmp_path):
    file = tmp_path / "results" / "rows.jsonl"
    rows = rows_of("mha", [2.0, 2.1])
    for row in rows:
        append_row(file, row)
    assert read_rows(file) == rows
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_row(file, {"bits": float("nan")})
    file.write_text(file.read_text() + '{"model": "ti')
    with pytest.raises(ValueError, match="line 3 is not JSON"):
        read_rows(file)
    append_row(file, rows[0])  # behind what a killed run left, not into it
    assert file.read_text().splitlines()[2:] == ['{"model": "ti', json.dumps(rows[0])]
    file.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1 is not JSON"):
        read_rows(file)
