"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): keys are turned by position, then stored.

Convention of Llama and Hugging Face: dimension i is paired with i + D/2 ("half-split"). Shapes: B batch,
T tokens, H heads, D head_dim. Angles are computed in fp32: bf16 cannot tell position 8191 from 8192.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

SCALINGS = ("default", "linear", "llama3", "yarn")
LARGEST = 1e15  # beyond it a config is wrong, and what is computed from it leaves the range of numbers
_CHANGES = "its frequencies change with the length, so keys stored rotated would become wrong"
_WHY_NOT = {"dynamic": _CHANGES, "longrope": _CHANGES}


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping | None, max_positions: int | None
) -> tuple[Tensor, float]:
    """Return turning speeds (D/2,) in radians per token, fp32, and the "attention factor" on cos and sin.

    `scaling` is the config's `rope_scaling` with its type under "rope_type"; None is plain RoPE. Raises
    ValueError for a type that kvlab does not run or for a missing or impossible parameter.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"RoPE turns pairs of dimensions: head_dim must be even and > 0, got {head_dim}")
    if not 0 < theta < math.inf:
        raise ValueError(f"rope_theta must be positive and finite, got {theta}")
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SCALINGS:
        why = _WHY_NOT.get(kind, "kvlab does not know it")
        raise ValueError(f"rope scaling {kind!r} cannot be run: {why}; supported: {', '.join(SCALINGS)}")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor {scaling['partial_rotary_factor']} cannot be run: kvlab rotates whole heads"
        )
    plain = 1.0 / theta ** (_arange(0, head_dim, 2) / head_dim)  # (D/2,)
    if kind == "linear":
        return plain / positive(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling, max_positions), 1.0
    if kind == "yarn":
        return _yarn(head_dim, theta, scaling, max_positions)
    return plain, 1.0


def rope_tables(positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin (B, 1, T, D) in `dtype` for positions (B, T); padding's −1 gives finite values."""
    angles = positions[..., None].to(torch.float32) * inv_freq.to(positions.device)  # (B, T, D/2)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # (B, 1, T, D)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys (B, H, T, D) by the tables' angles; each pair is (x[i], x[i + D/2])."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_by(keys: Tensor, delta: Tensor | int, inv_freq: Tensor) -> Tensor:
    """Turn stored keys (B, H, T, D) by `delta` tokens more: an int, or integers of shape (B, T) or (B, H, T).

    Rotations add up: a key stored at position p and turned by d equals the key stored at p + d. The attention
    factor is in the stored key already. Computed in fp32, returned in the keys' dtype.
    """
    delta = torch.as_tensor(delta, device=keys.device)
    if delta.ndim == 2:
        delta = delta.unsqueeze(1)  # (B, T) -> (B, 1, T): the same for every head
    angles = delta[..., None].to(torch.float32) * inv_freq.to(keys.device)  # (..., T, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # (..., T, D)
    return rotate(keys.to(torch.float32), angles.cos(), angles.sin()).to(keys.dtype)


def _llama3(plain: Tensor, scaling: Mapping, max_positions: int | None) -> Tensor:
    """Llama 3.1: slow turns are stretched by `factor`, fast ones kept, those between blended."""
    factor, low, high = (positive(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise ValueError(f"rope scaling 'llama3' needs high_freq_factor > low_freq_factor, got {high} and {low}")
    original = _original_positions(scaling, max_positions)
    wavelength = 2 * math.pi / plain  # tokens for one full turn
    stretched = torch.where(wavelength > original / low, plain / factor, plain)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched)


def _yarn(head_dim: int, theta: float, scaling: Mapping, max_positions: int | None) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): fast dimensions are kept, slow ones interpolated."""
    if theta <= 1:
        raise ValueError(f"rope scaling 'yarn' needs rope_theta above 1, got {theta}")
    original = _original_positions(scaling, max_positions)
    if scaling.get("factor") is None and max_positions:
        scaling = {**scaling, "factor": max_positions / original}
    factor = positive(scaling, "factor")

    def dimension_of(turns: float) -> float:  # which dimension turns so often over the original context
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (dimension_of(positive(scaling, key, other)) for key, other in (("beta_fast", 32), ("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    # The operations follow transformers' order, so that the two agree to the last bit.
    ramp = (_arange(head_dim // 2) - low) / (high - low)  # (D/2,)
    kept = 1 - ramp.clamp(0, 1)
    turns = theta ** (_arange(0, head_dim, 2) / head_dim)
    return 1.0 / (factor * turns) * (1 - kept) + 1.0 / turns * kept, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Mapping, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(positive(scaling, "attention_factor"))
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(positive(scaling, "mscale")) / mscale(positive(scaling, "mscale_all_dim"))
    return mscale(1.0)


def _arange(*bounds: int) -> Tensor:
    """Like torch.arange in fp32, but with values even where a model is built on the meta device."""
    return torch.arange(*bounds, dtype=torch.float32, device="cpu")


def _original_positions(scaling: Mapping, max_positions: int | None) -> float:
    key = "original_max_position_embeddings"
    return positive({key: max_positions, **{k: v for k, v in scaling.items() if k == key}}, key)


def positive(scaling: Mapping, key: str, default: float | None = None) -> float:
    """The positive number under `key`; `default` where there is none, null or 0. Raises ValueError for others."""
    value = scaling.get(key) if default is None else scaling.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise ValueError(f"rope scaling needs a positive number under {key!r}, got {value!r}")
    return value
