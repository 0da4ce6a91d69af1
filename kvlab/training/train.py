"""One training run: from random weights, or from where it was interrupted, to a directory that `load` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from kvlab.config import ModelConfig
from kvlab.hardware import stamp
from kvlab.model.transformer import Transformer
from kvlab.sizing import bytes_per_token
from kvlab.training.recipe import Recipe, batch_of, bits_of, bits_per_byte, initial_model, optimiser
from kvlab.training.state import StateError, read_state, write_state
from kvlab.training.text import Corpus

STATE = "state.safetensors"
KEEP_EVERY = 100  # steps between two states on disk


class Run:
    """A model in training; `step` steps are done, and `state_file` holds where it stands from time to time.

    The same config, corpus, recipe and seed give the same weights on the same machine, interrupted or not.
    Raises StateError where `state_file` exists and `resume` is not asked for, or does not belong to this run.
    """

    def __init__(
        self, config: ModelConfig, corpus: Corpus, recipe: Recipe, seed: int, state_file: Path, resume: bool = False
    ):
        self.corpus, self.recipe, self.seed, self.state_file = corpus, recipe, seed, state_file
        self.model = initial_model(config, seed).train()
        self.optimiser = optimiser(self.model, recipe)
        self.progress = {"step": 0, "seconds": 0.0, "bits": 0.0, "steps_in_bits": 0}
        self.identity = {
            "model": config.name, "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "seed": seed, "recipe": asdict(recipe), "text": dict(corpus.about),
        }  # fmt: skip
        if state_file.exists():
            if not resume:
                raise StateError(f"{state_file} is there already: --resume to go on with it, or use another --out")
            about = read_state(state_file, self.model, self.optimiser, self.identity)
            self.progress = {key: about[key] for key in self.progress}

    @property
    def step(self) -> int:
        """Steps done."""
        return self.progress["step"]

    def finish(self, on_row: Callable[[dict], None], on_step: Callable[[float], None] = lambda bits: None) -> None:
        """Train to the last step. `on_row` gets a result row at each evaluation, `on_step` each step's bits per byte.

        A row that was written just before an interruption is given again, the same but for its seconds.
        """
        while self.step < self.recipe.steps:
            bits = self.advance()
            on_step(bits)
            evaluates = self.recipe.evaluates_after(self.step)
            if evaluates:
                on_row(self.row())
                self.progress |= {"bits": 0.0, "steps_in_bits": 0}
            if evaluates or self.step % KEEP_EVERY == 0:
                write_state(self.state_file, self.model, self.optimiser, {**self.identity, **self.progress})

    def advance(self) -> float:
        """Do one step and return its bits per byte; raises ValueError when they are not a finite number."""
        start = perf_counter()
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        self.optimiser.zero_grad()
        bits = bits_of(self.model, *batch_of(self.corpus.train, self.recipe, self.seed, self.step))
        bits.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        value = float(bits.detach())
        if not torch.isfinite(bits):
            raise ValueError(f"the loss of step {self.step} is {value}: lower the learning rate {self.recipe.rate}")
        self.optimiser.step()
        done = self.progress
        self.progress = {
            "step": done["step"] + 1, "seconds": done["seconds"] + perf_counter() - start,
            "bits": done["bits"] + value, "steps_in_bits": done["steps_in_bits"] + 1,
        }  # fmt: skip
        return value

    def row(self) -> dict:
        """What is known now: bits per byte in training (since the last row) and held out, cost, and circumstances."""
        held_out = bits_per_byte(self.model, self.corpus.held_out, self.recipe.context)
        return {
            **self.identity, **cost_of(self.model), "step": self.step, "steps": self.recipe.steps,
            "train_bits_per_byte": self.progress["bits"] / self.progress["steps_in_bits"],
            "held_out_bits_per_byte": held_out, "seconds": round(self.progress["seconds"], 1),
            "environment": stamp(torch=torch.__version__, threads=str(torch.get_num_threads())),
        }  # fmt: skip


def cost_of(model: Transformer) -> Mapping[str, int]:
    """What one token costs in the cache: numbers in one layer, and bytes in all layers at 2 bytes a number."""
    size, layers = bytes_per_token(model.config, "fp16"), model.config.num_hidden_layers
    return {"elements_per_token_and_layer": size // layers // 2, "cache_bytes_per_token": size}
