"""How the tiny models are trained: one recipe, so that nothing but attention differs between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvlab.attention import Step
from kvlab.config import ModelConfig
from kvlab.model.transformer import Transformer


@dataclass(frozen=True)
class Recipe:
    """Steps, data and the optimiser's settings; raises ValueError for what cannot be trained.

    steps, batch, context   2,048 bytes in each of 1,000 steps: five times through the text
    rate                    reached after `warmup` steps, then a cosine down to `last_share` of it
    evaluations             how often bits per byte are taken, the last time after the last step
    """

    steps: int = 1000
    batch: int = 8
    context: int = 256
    rate: float = 4e-3
    warmup: int = 50
    last_share: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 5

    def __post_init__(self):
        for field in ("steps", "batch", "context", "evaluations"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (self.last_share + (1 - self.last_share) * (1 + math.cos(math.pi * progress)) / 2)

    def evaluates_after(self, steps: int) -> bool:
        """Whether bits per byte are taken when this many steps are done."""
        return steps == self.steps or steps % max(1, self.steps // self.evaluations) == 0


def initial_model(config: ModelConfig, seed: int) -> Transformer:
    """A transformer with random weights that keep the size of what passes through: std = inputs ** -0.5.

    What is added to the residual stream starts smaller, by sqrt(2 x layers), as in GPT-2.
    """
    model, generator = Transformer(config), torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            added = name.endswith(("o_proj.weight", "down_proj.weight"))
            share = (2 * config.num_hidden_layers) ** -0.5 if added else 1.0
            nn.init.normal_(weight, std=share * weight.shape[1] ** -0.5, generator=generator)
    return model


def optimiser(model: Transformer, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that lets matrices decay and norms alone."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    parameters = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(parameters, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay)


def batch_of(data: Tensor, recipe: Recipe, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (batch, context) of a step: the text in windows, shuffled anew each time through.

    A function of seed and step alone: every model gets the same batches, and a resumed run needs no generator.
    Raises ValueError where the text has fewer windows than a batch.
    """
    windows = (len(data) - 1) // recipe.context - 1  # one less, so that the grid can be shifted
    if windows < recipe.batch:
        needed = (recipe.batch + 1) * recipe.context + 1
        raise ValueError(f"the text has {len(data)} bytes, but a batch of this recipe needs {needed}")
    epoch, place = divmod(step, windows // recipe.batch)
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    shift = int(torch.randint(recipe.context, (1,), generator=generator))
    chosen = torch.randperm(windows, generator=generator)[place * recipe.batch : (place + 1) * recipe.batch]
    starts = chosen * recipe.context + shift
    rows = data[starts[:, None] + torch.arange(recipe.context + 1)]  # (batch, context + 1)
    return rows[:, :-1], rows[:, 1:]


def bits_of(model: Transformer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean bits per byte: log2 of how many ways the model still saw for each byte (B, T)."""
    positions = torch.arange(inputs.shape[1], dtype=torch.int32).expand(inputs.shape)
    logits = model(inputs, Step.plan(positions))  # (B, T, 256)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / math.log(2)


@torch.no_grad()
def bits_per_byte(model: Transformer, data: Tensor, context: int, batch: int = 16) -> float:
    """Bits per byte over a whole text, in windows of `context`: a byte is judged after 0 to context - 1 others."""
    starts = torch.arange(0, len(data) - 1, context)
    total = 0.0
    for some in starts.split(batch):
        windows = [data[start : start + context + 1] for start in some]
        whole = [window for window in windows if len(window) == context + 1]
        for rows in ([torch.stack(whole)] if whole else []) + [w[None] for w in windows if len(w) <= context]:
            total += float(bits_of(model, rows[:, :-1], rows[:, 1:])) * rows[:, 1:].numel()
    return total / (len(data) - 1)
