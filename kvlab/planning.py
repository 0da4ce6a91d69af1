"""What fits: weights first, the cache in what is left; and the line that launches an engine so."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass

from kvlab.config import ModelConfig
from kvlab.schemes import BLOCKS, parse
from kvlab.sizing import GIB, SizingError, check_counts, max_batch, max_context, weights_bytes

LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Cache dtypes of each engine, by its own documentation; what it calls each of them.
VLLM = {"fp8": "fp8", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
SGLANG = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
LLAMA_CPP = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"} | {name: name for name in BLOCKS}
ENGINES = {
    "vllm": ("bf16", "fp16", "fp32", *VLLM),
    "sglang": ("bf16", "fp16", *SGLANG),
    "llama.cpp": tuple(LLAMA_CPP),
    "transformers": ("bf16", "fp16", "fp32"),
}
# Both refuse a context beyond the trained positions unless told so.
LONGER = {
    "vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 ",
    "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 ",
}


@dataclass(frozen=True)
class Plan:
    """What fits in a memory: `max_batch` at `context`, `max_context` at `batch`.

    Where every layer slides, memory sets no limit to the context: it is the model's own (or None).
    """

    model: str
    engine: str
    dtype: str
    memory_bytes: int
    weights_bytes: int
    reserve_bytes: int
    cache_budget_bytes: int
    context: int
    batch: int
    max_batch: int
    max_context: int | None
    context_limited_by: str  # "memory", or "model" where every layer slides
    fits: bool
    command: str

    def as_dict(self) -> dict:
        """The fields, for JSON."""
        return asdict(self)


def make_plan(
    config: ModelConfig,
    memory_bytes: int,
    context: int,
    batch: int = 1,
    dtype: str | None = None,
    engine: str = "vllm",
    weights: int | None = None,
    reserve_bytes: int = 0,
    mla_layout: str = "latent",
) -> Plan:
    """Divide `memory_bytes` into weights, a reserve and the cache; raises SizingError if the weights fill it.

    The launch line is for `context` and `batch` where these fit, else for the longest context that does.
    """
    check_counts(context=context, batch=batch)
    dtype = config.dtype if dtype is None else dtype
    weights = weights_bytes(config) if weights is None else weights
    budget = _left_for_cache(config, memory_bytes, weights, reserve_bytes)
    at_context = max_batch(config, budget, context, dtype, mla_layout)
    longest = max_context(config, budget, batch, dtype, mla_layout)
    if longest == 0:
        room = f"the {amount(budget)} left for the cache"
        raise SizingError(f"{config.name}: {room} do not hold one token of {batch} requests: use more memory")
    fits, limited_by = batch <= at_context, "memory" if longest else "model"
    longest = longest or config.max_position_embeddings
    command = launch_line(config, engine, dtype, context if fits else longest, batch)
    return Plan(
        config.name, engine, dtype, memory_bytes, weights, reserve_bytes, budget, context, batch, at_context,
        longest, limited_by, fits, command,
    )  # fmt: skip


def _left_for_cache(config: ModelConfig, memory: int, weights: int, reserve: int) -> int:
    if memory > weights + reserve:
        return memory - weights - reserve
    kept = f"weights of {amount(weights)}" + (f" and {amount(reserve)} reserved" if reserve else "")
    way_out = "use more memory, or weights in fewer bits (--weights-gib)"
    raise SizingError(f"{config.name}: {kept} leave nothing of {amount(memory)} for the cache: {way_out}")


def launch_line(config: ModelConfig, engine: str, dtype: str, context: int, batch: int) -> str:
    """The shell line that starts `engine` for this cache dtype, context and batch.

    Raises SizingError naming what there is for an engine, or a dtype of it, that does not exist.
    """
    if engine not in ENGINES:
        raise SizingError(f"unknown engine {engine!r}: one of {', '.join(ENGINES)}")
    raw = str(dtype).strip().lower()
    name = raw if raw in ENGINES[engine] else parse(dtype).name
    if name not in ENGINES[engine]:
        raise SizingError(f"{engine} has no cache in {dtype}: it has {', '.join(ENGINES[engine])}")
    model = shlex.quote(config.hub_id or config.name)
    longer = config.max_position_embeddings is not None and context > config.max_position_embeddings
    allow = LONGER.get(engine, "") if longer else ""
    build = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp, "transformers": _transformers}[engine]
    return allow + build(model, config.dtype, name, context, batch)


def _weights_flag(own: str, cache: str) -> str:
    """These engines keep an unquantised cache in the dtype of the weights."""
    return f" --dtype {LONG[cache]}" if cache in LONG and cache != own else ""


def _vllm(model: str, own: str, cache: str, context: int, batch: int) -> str:
    kv = f" --kv-cache-dtype {VLLM[cache]}" if cache in VLLM else ""
    return f"vllm serve {model} --max-model-len {context} --max-num-seqs {batch}{_weights_flag(own, cache)}{kv}"


def _sglang(model: str, own: str, cache: str, context: int, batch: int) -> str:
    kv = f" --kv-cache-dtype {SGLANG[cache]}" if cache in SGLANG else ""
    start = f"python -m sglang.launch_server --model-path {model}"
    return f"{start} --context-length {context} --max-running-requests {batch}{_weights_flag(own, cache)}{kv}"


def _llama_cpp(model: str, own: str, cache: str, context: int, batch: int) -> str:
    """-c is shared by the slots; quantised values need flash attention; the GGUF is the user's to make."""
    file = shlex.quote(model.strip("'").rstrip("/").rsplit("/", 1)[-1] + ".gguf")
    kv = LLAMA_CPP[cache]
    return f"llama-server -m {file} -c {context * batch} -np {batch} -ctk {kv} -ctv {kv} -fa on"


def _transformers(model: str, own: str, cache: str, context: int, batch: int) -> str:
    """Its server takes the cache as blocks of 256 tokens for all requests together."""
    blocks = batch * -(-context // 256)
    return (f"transformers serve {model} --continuous-batching --cb-block-size 256 --cb-num-blocks {blocks}"
            f" --dtype {LONG[cache]}")  # fmt: skip


def amount(size: int) -> str:
    """Bytes for people: GiB with their unit, the exact number beside."""
    return f"{size / GIB:,.2f} GiB ({size:,} bytes)"
