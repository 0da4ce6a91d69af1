"""Arguments and options that several commands take, with one wording."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a directory, a config.json, or a hub id.")]
Batch = Annotated[int, typer.Option("--batch", help="Requests at once.")]
Dtype = Annotated[
    Optional[str],  # noqa: UP045 (older typers cannot read `str | None` here)
    typer.Option("--dtype", help="Of the cache: bf16, fp8, int4, q8_0, int4-g64, ... [the model's own]"),
]
MlaLayout = Annotated[str, typer.Option("--mla-layout", help="What an MLA runtime stores: latent or expanded.")]
Json = Annotated[bool, typer.Option("--json", help="JSON alone on stdout.")]
