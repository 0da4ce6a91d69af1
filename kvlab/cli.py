"""The command `kvlab`: each one a function in `kvlab/commands` that imports what it needs.

To add a command: write `kvlab/commands/NAME.py` with a function, and a line here.
"""

from __future__ import annotations

import os
import sys

import typer

from kvlab.commands.dataset import dataset
from kvlab.commands.generate import generate
from kvlab.commands.models import models
from kvlab.commands.peers import peers
from kvlab.commands.plan import plan
from kvlab.commands.roofline import roofline
from kvlab.commands.size import size
from kvlab.commands.stream import stream
from kvlab.commands.train_tiny import train_tiny
from kvlab.terminal import OneLineErrors

app = typer.Typer(
    name="kvlab",
    cls=OneLineErrors,
    help="KV Cache Lab: how large a KV cache is, what fits, and how fast it can be.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (models, size, plan, roofline, generate, dataset, peers, stream, train_tiny):
    app.command()(command)


@app.callback()
def start(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    """KV Cache Lab: how large a KV cache is, what fits, and how fast it can be."""
    if version:
        import kvlab

        print(kvlab.__version__)
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command line and exit with its code."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (None where it was closed: >&-)
    for channel in (sys.stdout, sys.stderr):
        if hasattr(channel, "reconfigure"):
            channel.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the answer
    app(prog_name="kvlab")
