"""What every command shares: JSON alone on stdout, tables for people, errors and warnings on stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys

import typer
from typer.core import TyperGroup

from kvlab.configs.hf_layout import one_line

GIB = 2**30
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]  # click's, wherever this version of typer keeps them


class OneLineErrors(TyperGroup):
    """A command group whose every error is one line on stderr and exit code 2, never a traceback."""

    def main(self, *args, standalone_mode: bool = True, **kwargs):
        """Run the command line; the exit code is 2 on an error, else what the command asked for."""
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
            sys.stdout.flush()  # here what cannot be written is one line, later it is Python's traceback
        except SystemExit as end:  # how typer and rich answer a reader that has gone
            code = report(end.__context__) if isinstance(end.__context__, BrokenPipeError) else end.code
        except Exception as error:
            code = report(error)
        if standalone_mode:
            sys.exit(code or 0)
        return code


def report(error: Exception) -> int:
    """Say in one line what went wrong; return the exit code. KVLAB_DEBUG=1 raises it instead."""
    if os.environ.get("KVLAB_DEBUG"):
        raise error
    if isinstance(error, typer.Abort):
        print("aborted", file=sys.stderr)
        return 130
    if isinstance(error, BrokenPipeError):  # the reader has gone: `kvlab models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    print(f"error: {one_line(_message(error))}", file=sys.stderr)
    return 2


def _message(error: Exception) -> str:
    if isinstance(error, _ClickException):
        if not isinstance(error, _UsageError):
            return error.format_message()
        where = error.ctx.command_path if error.ctx is not None else "kvlab"
        return f"{error.format_message().rstrip('.')}{_refused(error)} (see {where} --help)"
    if isinstance(error, (ValueError, OSError)):
        return str(error) or type(error).__name__
    if isinstance(error, ImportError):
        return f"{error}: install what is missing (pip install {error.name or 'it'})"
    what = f"{type(error).__name__}: {error}"
    return f"internal error, please report it: {what} (KVLAB_DEBUG=1 shows the traceback)"


def _refused(error: Exception) -> str:
    """The value that typer's newer messages leave out: pydantic, which refused it, names it."""
    found = re.search(r"input_value=(.+), input_type=", str(error.__cause__))
    return f", got {found[1]}" if found else ""


def warn(text: str) -> None:
    """A warning on stderr: the answer on stdout stands."""
    print(f"warning: {one_line(text)}", file=sys.stderr)


def print_json(answer: dict | list) -> None:
    """The one JSON value of a `--json` run."""
    print(json.dumps(answer, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(title: str, columns: list[str], lines: list[list[str]], right: tuple[int, ...] = ()) -> None:
    """A table for people; `right` are the indices of right-aligned columns, whose numbers stay on one line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def add(i: int, column: str) -> None:  # of columns with numbers only the title may take several lines
        kept = max([len(line[i]) for line in lines] + [len(word) for word in column.split()]) if right else None
        table.add_column(
            column,
            justify="right" if i in right else "left",
            overflow="fold",
            min_width=kept if i in right or i == 0 else None,
        )

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=any(columns),
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for i, column in enumerate(columns):
        add(i, column)
    for line in lines:
        table.add_row(*line)
    Console(width=width(), highlight=False, markup=False).print(table)


def width() -> int:
    """Columns to print in: the terminal's, and 140 into a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 140


def amount(size: int) -> str:
    """Bytes for people: GiB (small ones in MiB) with the unit, the exact number beside."""
    small = size < GIB / 100
    return f"{size / (2**20 if small else GIB):,.3f} {'MiB' if small else 'GiB'} ({size:,} bytes)"


def seconds(time_s: float) -> str:
    """A time for people, with a unit that fits."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if time_s * factor >= 1 or unit == "µs":
            return f"{time_s * factor:,.3g} {unit}"
    return f"{time_s} s"


def warn_about(config, context: int | None = None) -> None:
    """Warn of what was taken for granted in a config, and of a context beyond its trained positions."""
    for note in config.notes:
        warn(f"{config.name}: {note}")
    trained = config.max_position_embeddings
    if context is not None and trained is not None and context > trained:
        warn(f"{config.name} was trained on {trained:,} positions; {context:,} is beyond them")
