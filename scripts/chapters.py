"""What the scripts and the tests know about a chapter's notebook: its parts, its facts, its normal form."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from stamps import ROOT

FOLDER = ROOT / "notebooks"
IGNORED_TAGS = {"nbval-ignore-output", "nbval-skip", "raises-exception"}
IGNORED_COMMENTS = re.compile(r"^#\s*(NBVAL_IGNORE_OUTPUT|NBVAL_SKIP|PYTEST_VALIDATE_IGNORE_OUTPUT)", re.M)
SETUP_TAGS = ["nbval-skip", "remove-cell"]
# The committed set-up cell. publish.py puts the installing one in its place for Colab.
SETUP_SOURCE = """\
# Set-up: nothing to do where kvlab is installed.
import importlib.util

if importlib.util.find_spec("kvlab") is None:
    print("kvlab is not installed: run `make book` in the course's folder, then use its .venv.")"""
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "file_extension": ".py", "pygments_lexer": "ipython3"}
# Threads that wait should sleep: where other work shares the cores, spinning ones make a small model ten times slower.
KERNEL_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
# ipykernel says this on stderr in every kernel; it is no output of the chapter.
KERNEL_NOISE = re.compile(r"^.*TCP.*without encryption.*\n?", re.M)
METADATA = ("mystnb", "tags")  # what a cell may say about itself
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def chapters(folder: Path = FOLDER) -> list[Path]:
    """The chapters' notebooks in order."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def text(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook).rstrip() + "\n"


def write(notebook: NotebookNode, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(notebook), encoding="utf-8")


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def is_skipped(cell: NotebookNode) -> bool:
    return "nbval-skip" in tags(cell) or "NBVAL_SKIP" in "".join(IGNORED_COMMENTS.findall(cell.source))


def is_compared(cell: NotebookNode) -> bool:
    """Whether nbval compares this cell's output."""
    ignored = tags(cell) & IGNORED_TAGS or IGNORED_COMMENTS.search(cell.source)
    return cell.cell_type == "code" and not ignored


def text_of(output: NotebookNode) -> str:
    """The text that an output shows: printed lines or a plain result; empty for figures."""
    if output.output_type == "stream":
        return output.text if output.name == "stdout" else ""
    data = output.get("data", {})
    return "" if any(kind.startswith("image/") for kind in data) else data.get("text/plain", "")


def facts(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """(cell's first line, printed line) for every line of text that nbval compares."""
    for cell in notebook.cells:
        if not is_compared(cell):
            continue
        title = next((line for line in cell.source.splitlines() if line.strip()), "")
        for output in cell.outputs:
            yield from ((title, line) for line in text_of(output).splitlines() if line.strip())


def normalise(notebook: NotebookNode) -> NotebookNode:
    """The same notebook in its one normal form: two runs with the same facts give the same file."""
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNEL), language_info=NotebookNode(LANGUAGE))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: set[str] = set()
    for cell in notebook.cells:
        cell.id = _cell_id(cell, seen)
        cell.source = cell.source.rstrip()
        cell.metadata = NotebookNode({k: cell.metadata[k] for k in METADATA if k in cell.metadata})
        if cell.cell_type == "code":
            cell.outputs = _normal_outputs(cell.outputs)
    return notebook


def _cell_id(cell: NotebookNode, seen: set[str]) -> str:
    """An id that follows from the content, so that adding a cell leaves the others' ids alone."""
    base = hashlib.sha256(f"{cell.cell_type}\0{cell.source.rstrip()}".encode()).hexdigest()[:12]
    count = sum(known.startswith(base) for known in seen)
    seen.add(name := f"{base}-{count}" if count else base)
    return name


def _normal_outputs(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join streams that were cut at random, drop the kernel's noise and views that need a live kernel."""
    kept: list[NotebookNode] = []
    for output in outputs:
        output.pop("transient", None)
        if WIDGET_VIEW in output.get("data", {}):
            continue
        if output.output_type == "stream":
            output.text = KERNEL_NOISE.sub("", output.text)
            if not output.text:
                continue
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += output.text
                continue
        kept.append(output)
    return kept
