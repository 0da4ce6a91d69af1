"""`kvlab dataset`: questions with right answers as JSON Lines, the same bytes for the same seed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, List, Optional  # noqa: UP035 (older typers cannot read `list[str] | None`)

import typer

from kvlab.commands.options import Json
from kvlab.terminal import print_json, warn

Out = Annotated[Path, typer.Option("--out", help="The file to write.")]
Task = Annotated[
    Optional[List[str]],  # noqa: UP006, UP045
    typer.Option("--task", help="passkey, needles, recall, variables, tracking or recency; may be repeated. [all]"),
]
Tokens = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--tokens", help="Most tokens of a prompt. [each task's own, at which it is calibrated]"),
]
Depth = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--depth", help="Where the answer stands, 0 (start) to 1 (end). [the task's depths in turn]"),
]
Model = Annotated[str, typer.Option("--model", help="Whose tokenizer counts; its weights are not read.")]


def dataset(
    out: Out,
    task: Task = None,
    samples: Annotated[int, typer.Option("--samples", help="Of each task.")] = 40,
    seed: Annotated[int, typer.Option("--seed", help="Of the facts and the text around them.")] = 0,
    tokens: Tokens = None,
    depth: Depth = None,
    model: Model = "smollm2-135m",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that holds something else.")] = False,
    json: Json = False,
) -> None:
    """Write prompts with right answers: id, task, prompt, answer, depth, num_tokens and question of each."""
    if samples < 1:
        raise typer.BadParameter(f"at least one sample is needed, got {samples}", param_hint="--samples")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {out.parent} to write {out.name} into", param_hint="--out")
    if out.exists() and not out.is_file():
        what = "a directory" if out.is_dir() else "a pipe or a device"
        raise typer.BadParameter(f"{out} is {what}: give the name of a file", param_hint="--out")
    from kvlab.evaluation.tasks import TASKS, check_tasks

    names = list(dict.fromkeys(task or TASKS))
    check_tasks(names)
    lines = write_lines(names, model, samples, seed=seed, tokens=tokens, depth=depth)
    state = save(out, "".join(lines).encode(), force)
    for name in (name for name in names if not TASKS[name].is_gate(tokens)):
        warn(f"{name} at {tokens or TASKS[name].tokens} tokens is no gate: SmolLM2 was not shown to do it")
    answer = {"out": str(out), "state": state, "samples": len(lines), "tasks": names, "seed": seed}
    print_json(answer) if json else print(f"{out}: {len(lines)} samples of {', '.join(names)} ({state})")


def write_lines(names: list[str], model: str, count: int, **options) -> list[str]:
    """The samples as lines, with a progress bar on stderr where people see it."""
    from tqdm import tqdm

    from kvlab.evaluation.tasks import generate_samples, to_line

    tokenizer = tokenizer_of(model)
    with tqdm(total=count * len(names), unit="sample", disable=not sys.stderr.isatty()) as bar:
        lines = []
        for name in names:
            for sample in generate_samples(name, tokenizer, count, **options):
                lines.append(to_line(sample))
                bar.update()
    return lines


def save(out: Path, content: bytes, force: bool) -> str:
    """Write the file whole and say what happened; raises ValueError where it would replace something else."""
    from kvlab.evaluation.results import write_whole

    if out.exists():
        if out.read_bytes() == content:
            return "unchanged"
        if not force:
            raise ValueError(f"{out} exists and holds something else: --force replaces it")
    write_whole(out, content)
    return "written"


def tokenizer_of(model: str):
    """The tokenizer of a model by name, without its weights. Raises ValueError where there is none."""
    from kvlab.config import resolve
    from kvlab.configs.hub import fetch
    from kvlab.model import zoo
    from kvlab.model.tokenizer import Tokenizer

    if model == zoo.OFFLINE:
        return Tokenizer.load(zoo.offline_gguf())
    path = Path(model)
    if model and path.exists():
        files = [] if (path / "tokenizer.json").exists() else list(path.glob("*.gguf"))
        return Tokenizer.load(files[0] if len(files) == 1 else path)
    if model == zoo.HUB:
        place, revision = zoo.HUB_REPOSITORY, zoo.HUB_REVISION
    else:
        place, _, revision = (model if "/" in model else resolve(model).hub_id).partition("@")
    for file in ("tokenizer_config.json", "tokenizer.json"):
        found = fetch(place, file, revision or None)
    return Tokenizer.load(found.parent)
