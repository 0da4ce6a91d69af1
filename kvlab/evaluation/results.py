"""Files of results: whole or not there at all, continued where they broke off, and stamped with their machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from kvlab.hardware import stamp
from kvlab.model.saving import replace_file


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file so that a reader finds the old one or the whole new one. Raises OSError naming the path."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give the name of a file")
    if path.exists() and not path.is_file():  # to replace /dev/null would do harm
        raise OSError(f"{path} is a pipe or a device: give the name of a file")
    replace_file(path, content)


def record(path: str | Path, command: str, rows: Iterable[dict], **facts) -> None:
    """Write result rows for the book: the command that reproduces them, the machine they were measured on, facts."""
    environment = stamp(torch=torch.__version__)
    answer = {"command": command, "environment": environment, **facts, "rows": list(rows)}
    write_whole(path, (json.dumps(answer, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def recorded(name: str) -> dict | list[dict]:
    """What book/results holds under a file name: an object for .json, a list of rows for .jsonl.

    Heavy measurements are not repeated where a chapter runs. Their rows come with the package; each .json names the
    command that measures them again, and the machine. Raises FileNotFoundError listing what there is.
    """
    package = Path(__file__).parents[1]
    places = (package / "data" / "results", package.parent / "book" / "results")  # installed, and in a checkout
    for folder in places:
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            return json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    known = sorted(file.name for folder in places if folder.is_dir() for file in folder.iterdir())
    raise FileNotFoundError(f"no recorded results {name!r}: there are {', '.join(known)}")


class Results:
    """Rows by id, written one by one as JSON Lines, so that a run that broke off continues where it was.

    The first line is the configuration that the rows were made with. `path` None keeps them in memory only.
    Raises ValueError for a file of another configuration, or one with a broken line before its last.
    """

    def __init__(self, path: str | Path | None, configuration: dict):
        self.path = None if path is None else Path(path)
        self.rows: dict[str, dict] = {}
        self._configuration = json.loads(json.dumps(configuration))  # as it comes back from a file: tuples are lists
        if self.path is None:
            return
        old = self.path.read_bytes() if self.path.exists() else b""
        whole = old[: old.rfind(b"\n") + 1]  # a run that was killed leaves a last line without an end
        self._read(whole)
        if not whole:
            self._begin(old)
        elif len(whole) < len(old):
            os.truncate(self.path, len(whole))

    def _begin(self, old: bytes) -> None:
        first = {"configuration": self._configuration}
        if not _line(first).startswith(old):  # not the beginning that a killed run leaves: it is somebody else's
            raise ValueError(f"{self.path}, line 1: not a file of results")
        self.path.write_bytes(b"")
        self._append(first)

    def _read(self, content: bytes) -> None:
        for number, line in enumerate(content.splitlines(), 1):
            try:
                row = json.loads(line)
                found = row["configuration"] if number == 1 else self.rows.setdefault(row["id"], row)
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{self.path}, line {number}: not a file of results") from None
            if number == 1 and found != self._configuration:
                raise ValueError(
                    f"{self.path} holds results of {found}, not of {self._configuration}: give another file"
                )

    def add(self, row: dict) -> None:
        """Keep a row; it is in the file when this returns."""
        self.rows[row["id"]] = row
        if self.path is not None:
            self._append(row)

    def _append(self, row: dict) -> None:
        with self.path.open("ab") as file:
            file.write(_line(row))


def _line(row: dict) -> bytes:
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
