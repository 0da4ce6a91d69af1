"""What kvlab does in its own way on a GPU, checked against slow references and timed beside what it replaces.

What comes out are result rows: `check`, its sizes, `ok`, how far off it was, and median seconds of one call for each
contestant. All of it runs on a CPU too, slowly and through other kernels, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvlab.attention import DensePart, Step, attend
from kvlab.attention_quantized import QuantizedPart
from kvlab.cache.build import build_cache
from kvlab.codecs import recipe
from kvlab.generate import last_logits, prefill, stream
from kvlab.model.compiled import CompiledStep
from kvlab.model.transformer import Transformer
from kvlab.native import triton_decode
from kvlab.quantization import quantize

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # an 8B Llama's attention
TOKENS = 65536  # of all rows together in a large batch: more bytes than a GPU's own cache keeps
PEAKED = 3.0  # queries are stretched by this: some slots count, and outputs do not average to nothing
WARM_STEPS = 3  # decode steps that are not counted


def median_seconds(
    contestants: dict[str, Callable[[], object]], device: torch.device, turns: int = 7, calls: int = 20
) -> dict[str, float]:
    """Seconds of one call for each contestant, launches included: the median of turns that they take in order."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()  # compiled and allocated before it counts
    for _ in range(turns):
        for name, run in contestants.items():
            _wait(device)
            before = perf_counter()
            for _ in range(calls):
                run()
            _wait(device)
            times[name].append((perf_counter() - before) / calls)
    return {name: median(seconds) for name, seconds in times.items()}


def triton_rows(
    device: torch.device, dtype: torch.dtype, contexts: Sequence[int] = (2048, 8192, 32768), tokens: int = TOKENS
) -> Iterator[dict]:
    """Triton's decode over int8 and fp8, one row and many, against fp64 over the dequantised slots.

    Beside it: PyTorch's path over the same codes, and PyTorch's attention over keys and values in full.
    """
    for scheme in ("int8", "fp8"):
        for S in contexts:
            for B in sorted({1, max(1, tokens // S)}):
                row = {"check": "triton decode", "cache": scheme, "tokens": S, "batch": B, "dtype": _name(dtype)}
                if (why := triton_decode.absent()) is not None:
                    yield row | {"skipped": why}
                else:
                    yield row | _triton_row(scheme, S, B, device, dtype)


def _triton_row(scheme: str, S: int, B: int, device: torch.device, dtype: torch.dtype) -> dict:
    queries, keys, values = _random(B, 1, S, device, dtype)
    at = torch.arange(S, dtype=torch.int32, device=device).expand(B, 1, S)
    step = Step(torch.full((B, 1), S - 1, dtype=torch.int32, device=device), S - 1)
    codec, scale = recipe(scheme, HEAD_DIM).keys, HEAD_DIM**-0.5
    part = QuantizedPart((quantize(keys, codec),), (quantize(values, codec),), at, 0)
    contestants = {
        "triton": partial(triton_decode.decode, queries, part, step.positions, scale=scale),
        # not part.attend, which hands over to Triton
        "torch over codes": partial(part._attend_tile, queries, step, scale, None, 0),
        "torch over all numbers": partial(DensePart(keys, values, at, 0).attend, queries, step, scale=scale),
    }
    seconds, stored = median_seconds(contestants, device), part.keys[0].nbytes + part.values[0].nbytes
    return decode_error(queries, part, step, scale) | {
        "seconds": seconds, "read_bytes": stored, "read_bytes_per_s": stored / seconds["triton"],
        "vs_torch_over_codes": seconds["torch over codes"] / seconds["triton"],
        "vs_torch_over_all_numbers": seconds["torch over all numbers"] / seconds["triton"],
    }  # fmt: skip


def _random(B: int, T: int, S: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, HEADS, T, HEAD_DIM), stretched, and keys and values (B, KV_HEADS, S, HEAD_DIM)."""
    generator = torch.Generator(device).manual_seed(S + B)
    shapes = (B, HEADS, T, HEAD_DIM), (B, KV_HEADS, S, HEAD_DIM), (B, KV_HEADS, S, HEAD_DIM)
    queries, *stored = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
    return queries * PEAKED, *stored


def decode_error(queries: Tensor, part: QuantizedPart, step: Step, scale: float) -> dict:
    """How far Triton's answer for the first row is from attention over the dequantised slots in fp64."""
    out, lse = triton_decode.decode(queries, part, step.positions, scale=scale)
    keys, values = (blocks[0].dequantize(torch.float64)[:1] for blocks in (part.keys, part.values))
    row = DensePart(keys, values, part.positions[:1], part.start)
    first = Step(step.positions[:1], step.start)
    _, expected_lse = row.attend_with_lse(queries[:1].double(), first, scale=scale)
    lse_error = float((lse[:1] - expected_lse).abs().max())  # scores are not rounded: a few errors of fp32 at most
    found = error_of(out[:1], queries[:1], row, first, scale)
    return found | {"ok": found["ok"] and lse_error <= 1e-4 * float(expected_lse.abs().max()), "lse_error": lse_error}


def error_of(out: Tensor, queries: Tensor, part: DensePart, step: Step, scale: float) -> dict:
    """How far `out` is from fp64, and whether roundings explain it.

    Weights, values and out are each rounded to the queries' dtype, by half its eps at most: together by less than
    2 eps of attention over absolute values.
    """
    exact = replace(part, keys=part.keys.double(), values=part.values.double())
    expected, _ = exact.attend_with_lse(queries.double(), step, scale=scale)
    sizes, _ = replace(exact, values=exact.values.abs()).attend_with_lse(queries.double(), step, scale=scale)
    error = (out - expected).abs()
    of_bound = float((error / (2 * torch.finfo(queries.dtype).eps * sizes + 1e-5)).max())
    return {"ok": of_bound <= 1, "error": float(error.max()), "error_of_bound": of_bound}


def prefill_rows(
    device: torch.device, dtype: torch.dtype, lengths: Sequence[int] = (2048, 8192), checked: int = 32
) -> Iterator[dict]:
    """Attention of a whole prompt: does PyTorch's flash kernel take it, is it right (the last queries are checked)?"""
    for T in lengths:
        queries, keys, values = _random(1, T, T, device, dtype)
        at = torch.arange(T, dtype=torch.int32, device=device)[None]
        part, scale, last = DensePart(keys, values, at[:, None], 0), HEAD_DIM**-0.5, slice(T - checked, T)
        run = partial(attend, queries, (part,), Step(at, 0), scale=scale)
        seconds = median_seconds({"as called": run, "math kernel": _with(SDPBackend.MATH, run)}, device, 5, 3)
        found = error_of(run()[:, :, last], queries[:, :, last], part, Step(at[:, last]), scale)
        yield {
            "check": "prefill", "tokens": T, "batch": 1, "dtype": _name(dtype), **found,
            "flash": _takes(SDPBackend.FLASH_ATTENTION, run), "seconds": seconds,
            "vs_math_kernel": seconds["math kernel"] / seconds["as called"],
        }  # fmt: skip


def _with(backend: SDPBackend, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def forced():
        with sdpa_kernel(backend):
            return run()

    return forced


def _takes(backend: SDPBackend, run: Callable[[], Tensor]) -> bool:
    try:
        _with(backend, run)()
    except RuntimeError:  # "No available kernel"
        return False
    return True


def compiled_row(exact: Transformer, fast: Transformer, prompt_tokens: int = 128, steps: int = 32) -> dict:
    """The compiled decode step: `exact`, the model in fp32, checks its logits, and `fast` is timed."""
    prompt = torch.randint(exact.config.vocab_size, (prompt_tokens,), generator=torch.Generator().manual_seed(0))
    largest, error = _logits_error(exact, prompt.tolist(), steps)
    caches = {"eager": build_cache(fast.config), "compiled": build_cache(fast.config, "static", prompt_tokens + steps)}
    step = CompiledStep(fast, caches["compiled"])
    warmup_s, seconds = step.warm_up(), {}
    for name, decode in (("eager", None), ("compiled", step)):
        tokens = list(stream(fast, prompt.tolist(), caches[name], max_new_tokens=steps, decode=decode))
        seconds[name] = median(token.seconds for token in tokens[WARM_STEPS:])
    return {
        "check": "compiled decode", "model": exact.config.name, "tokens": prompt_tokens, "batch": 1,
        "dtype": _name(fast.model.embed_tokens.weight.dtype), "ok": error <= 1e-3 * largest, "error": error,
        "largest_logit": largest, "warmup_s": warmup_s, "seconds": seconds,
        "vs_eager": seconds["eager"] / seconds["compiled"],
    }  # fmt: skip


def _logits_error(model: Transformer, prompt: list[int], steps: int) -> tuple[float, float]:
    """The largest logit of `steps` tokens decoded eagerly, and the largest difference of the compiled step's."""
    eager, static = build_cache(model.config), build_cache(model.config, "static", len(prompt) + steps)
    step = CompiledStep(model, static)
    step.warm_up()
    for cache in (eager, static):
        prefill(model, prompt, cache)
    largest = error = 0.0
    for position in range(len(prompt), len(prompt) + steps):
        token = prompt[position % len(prompt)]
        expected = last_logits(model, [token], position, eager)
        largest = max(largest, float(expected.abs().max()))
        error = max(error, float((step(token, position) - expected).abs().max()))
    return largest, error


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
