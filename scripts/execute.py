"""Re-execute the chapters in place and print which facts changed: `make outputs`, `make outputs ONLY=02`.

A fact is a line of text in a cell that nbval compares. A chapter whose sources and facts are as committed is
left as it is, so that new timings alone change no file; --rewrite writes it all the same. With --check nothing
is written, and the exit status is 1 when a fact would change.
"""

import argparse
import difflib
import itertools
import os
import sys
import time
from pathlib import Path

from nbclient import NotebookClient
from nbformat import NotebookNode

from chapters import KERNEL_ENVIRONMENT, chapters, facts, normalise, read, text, write


def execute(notebook: NotebookNode, folder: Path, timeout_s: int = 300) -> NotebookNode:
    """Run all cells in a fresh kernel started in `folder` and return the notebook in its normal form."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook,
        timeout=timeout_s,
        record_timing=False,
        extra_arguments=["--log-level=40"],
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return normalise(notebook)


def fact_lines(notebook: NotebookNode) -> list[str]:
    """One line per fact, under the first line of the cell that printed it."""
    by_cell = itertools.groupby(facts(notebook), key=lambda fact: fact[0])
    return [line for title, rows in by_cell for line in (f"[{title}]", *(f"  {text}" for _, text in rows))]


def changed_facts(before: NotebookNode, after: NotebookNode) -> list[str]:
    """A unified diff of the facts alone; empty when none changed."""
    return list(
        difflib.unified_diff(fact_lines(before), fact_lines(after), "committed", "executed", lineterm="", n=1)
    )


def is_normal(path: Path) -> bool:
    """Whether the file is in the normal form; ids follow from sources, so an edited chapter is not."""
    return text(normalise(read(path))) == path.read_text(encoding="utf-8")


def run(path: Path, check: bool, rewrite: bool) -> bool:
    """Execute one chapter; True when its facts are as committed."""
    before, started = read(path), time.perf_counter()
    after = execute(read(path), path.parent)
    difference = changed_facts(before, after)
    took = f"{time.perf_counter() - started:.0f} s"
    print(f"{path.name}: {len(list(facts(after)))} facts, {'changed' if difference else 'unchanged'}, {took}")
    print("".join(f"    {line}\n" for line in difference), end="", flush=True)
    if not check and (rewrite or difference or not is_normal(path)):
        write(after, path)
    return not difference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="chapters to run, by number or the start of their name")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a fact changes")
    parser.add_argument("--rewrite", action="store_true", help="take over new timings and figures too")
    options = parser.parse_args()
    os.environ.update(KERNEL_ENVIRONMENT)
    wanted = [p for p in chapters() if not options.only or p.name.startswith(tuple(options.only))]
    if options.only and not wanted:
        parser.error(f"no chapter starts with {' or '.join(options.only)}")
    same = [run(path, options.check, options.rewrite) for path in wanted]
    return int(options.check and not all(same))


if __name__ == "__main__":
    sys.exit(main())
