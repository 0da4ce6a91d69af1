"""Where a training run stands, in one safetensors file: weights, optimiser state, and JSON in its header.

No pickle: torch.save would write one, and a pickle can run any code when it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvlab.model.saving import replace_file
from kvlab.model.transformer import Transformer

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps for each parameter


class StateError(ValueError):
    """A training state that cannot be continued; one line: file, what is wrong, the way out."""


def write_state(path: Path, model: Transformer, optimiser: torch.optim.Optimizer, about: Mapping) -> None:
    """Replace the file at `path` in one step; a write cut short leaves the older one as it was."""
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight/{name}"] = weight.detach()
        tensors |= {f"{moment}/{name}": optimiser.state[weight][moment] for moment in MOMENTS}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, save(tensors, {"run": json.dumps(dict(about))}))


@torch.no_grad()
def read_state(path: Path, model: Transformer, optimiser: torch.optim.Optimizer, run: Mapping) -> dict:
    """Fill model and optimiser from `path` and return what was written beside them.

    Raises StateError where the file is broken, or belongs to a run that differs from `run` in any field.
    """
    about, tensors = _read(path)
    different = [key for key, value in run.items() if about.get(key) != value]
    if different:
        key = different[0]
        raise StateError(
            f"{path} belongs to another run: its {key} is {about.get(key)}, this one's {run[key]}: use another --out"
        )
    for name, weight in model.named_parameters():
        weight.copy_(tensors[f"weight/{name}"])
        optimiser.state[weight] = {moment: tensors[f"{moment}/{name}"].clone() for moment in MOMENTS}
    return about


def _read(path: Path) -> tuple[dict, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["run"])
            return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise StateError(f"{path} cannot be read ({reason}): delete it and train anew") from None
