"""Stamps: what was done for which content, so that doing it again costs nothing. Standard library only."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
SKIPPED = {"__pycache__", ".ipynb_checkpoints"}


def files_under(paths: Iterable[Path]) -> list[Path]:
    """All files named by or below `paths`, sorted, without caches."""
    found: set[Path] = set()
    for path in paths:
        found.update(p for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())
    return sorted(p for p in found if not SKIPPED & set(p.parts))


def digest(paths: Iterable[Path], *extra: str) -> str:
    """A hash of names and contents below `paths` and of the strings in `extra`."""
    total = hashlib.sha256("\0".join(extra).encode())
    for path in files_under(paths):
        total.update(f"\0{path.relative_to(ROOT)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def is_current(stamp: Path, name: str, value: str) -> bool:
    """Whether `name` was last recorded in the file `stamp` with this value."""
    return stamp.exists() and json.loads(stamp.read_text()).get(name) == value


def record(stamp: Path, name: str, value: str) -> None:
    """Remember `value` for `name`; call it only after the work has succeeded."""
    known = json.loads(stamp.read_text()) if stamp.exists() else {}
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(json.dumps(known | {name: value}, indent=1))
