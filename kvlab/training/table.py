"""Rows of training runs on disk, and what they say together: quality beside cache bytes, with the spread over seeds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

NO_DIFFERENCE = "no difference detected"
TOO_FEW = "too few seeds to tell"
FIELDS = (
    "model", "seed", "step", "steps", "parameters", "elements_per_token_and_layer", "cache_bytes_per_token",
    "held_out_bits_per_byte", "recipe", "text",
)  # fmt: skip


def append_row(path: Path, row: Mapping) -> None:
    """Add one JSON line, behind a broken one where an earlier run was killed while it wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(dict(row), allow_nan=False) + "\n"
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(line.encode())


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSON Lines file; raises ValueError naming the line that is none."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}, line {number} is not JSON: delete it and --resume its run") from None
        missing = [field for field in FIELDS if not isinstance(row, dict) or field not in row]
        if missing:
            raise ValueError(f"{path}, line {number} is no row of a training run, it has no {missing[0]}: name --rows")
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Summary:
    """One model over its seeds: held-out bits per byte after the last step, one for each seed."""

    model: str
    parameters: int
    elements_per_token_and_layer: int
    cache_bytes_per_token: int
    seeds: tuple[int, ...]
    bits: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean bits per byte over the seeds."""
        return mean(self.bits)


def summarise(rows: Iterable[Mapping]) -> list[Summary]:
    """One summary for each model with a finished run, the largest cache first.

    Raises ValueError where runs differ in recipe or text: their numbers cannot stand in one table.
    """
    finished = {(row["model"], row["seed"]): row for row in rows if row["step"] == row["steps"]}
    _check_comparable(list(finished.values()))
    by_model: dict[str, list[Mapping]] = {}
    for _, row in sorted(finished.items()):  # in order of seeds
        by_model.setdefault(row["model"], []).append(row)
    summaries = [
        Summary(
            name, some[0]["parameters"], some[0]["elements_per_token_and_layer"], some[0]["cache_bytes_per_token"],
            tuple(row["seed"] for row in some), tuple(row["held_out_bits_per_byte"] for row in some),
        )
        for name, some in by_model.items()
    ]  # fmt: skip
    return sorted(summaries, key=lambda summary: -summary.cache_bytes_per_token)


def _check_comparable(rows: Sequence[Mapping]) -> None:
    for row in rows[1:]:
        for key in ("recipe", "text"):
            if row[key] != rows[0][key]:
                named = next(k for k in row[key] if row[key][k] != rows[0][key].get(k))
                raise ValueError(
                    f"runs with different {key}s cannot be compared: {named} is {rows[0][key].get(named)} for "
                    f"{rows[0]['model']} and {row[key][named]} for {row['model']}"
                )


def difference(one: Summary, other: Summary) -> str:
    """How `one` compares with `other`, in words; a difference is only named where the seeds' ranges part.

    With three seeds each, ranges of two equal models part by chance once in ten times (2 of the 20 ways to rank
    six numbers): this is a guard against reading noise, not a proof.
    """
    if min(len(one.bits), len(other.bits)) < 2:
        return TOO_FEW
    if min(one.bits) <= max(other.bits) and min(other.bits) <= max(one.bits):
        return NO_DIFFERENCE
    gap = one.mean - other.mean
    return f"{abs(gap):.3f} bits {'more' if gap > 0 else 'fewer'} than {other.model}"


COLUMNS = [
    "model", "parameters", "numbers/token/layer", "cache bytes/token", "seeds", "bits/byte", "lowest - highest",
    "beside the first",
]  # fmt: skip


def lines(summaries: Sequence[Summary]) -> list[list[str]]:
    """The table's cells under COLUMNS: mean and spread (lowest to highest), compared with the largest cache."""
    return [
        [
            s.model, f"{s.parameters:,}", str(s.elements_per_token_and_layer), f"{s.cache_bytes_per_token:,}",
            str(len(s.seeds)), f"{s.mean:.3f}", f"{min(s.bits):.3f} - {max(s.bits):.3f}",
            "" if s is summaries[0] else difference(s, summaries[0]),
        ]
        for s in summaries
    ]  # fmt: skip
