"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): one small vector per token serves all heads.

Keys and values of every head are linear in the same latent c (R numbers a token):

    key of head h = [ W_uk[h] c ‖ k_rope ]        value of head h = W_uv[h] c

so the latent can be stored instead of them, with one rotated key part k_rope (D_r numbers) shared by all heads.
Three layouts compute the same function:

    absorbed     store [c ‖ k_rope]; move W_uk to the query, q . (W_uk c) = (W_uk^T q) . c, and W_uv behind the
                 softmax. Attention is then MQA over the latent itself, whose first R columns are the values.
    unabsorbed   store [c ‖ k_rope]; expand keys and values of all stored tokens again at every step.
    expanded     store the expanded keys and values of every head: as many bytes as MHA.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvlab.attention import DensePart, Step, View, attend
from kvlab.cache.base import LayerCache
from kvlab.config import ModelConfig
from kvlab.rope import positive, rotate

LAYOUTS = ("absorbed", "unabsorbed", "expanded")


class LatentAttention(nn.Module):
    """MLA with decoupled RoPE, in one of three layouts (`layout`, which may be changed at any time)."""

    def __init__(self, config: ModelConfig, layer: int, layout: str = "absorbed"):
        super().__init__()
        if (config.rope_scaling or {}).get("mscale_all_dim"):  # then both are part of the softmax scale
            positive(config.rope_scaling, "factor"), positive(config.rope_scaling, "mscale_all_dim")
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.rank, self.rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.nope_dim, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        self.layout, self.window, self.scale = layout, config.window(layer), softmax_scale(config)
        query_rows = self.heads * (self.nope_dim + self.rope_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, query_rows, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=1e-6)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_rows, bias=False)
        self.compressed_queries = config.q_lora_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope_dim + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value_dim, hidden, bias=False)

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor], step: Step, cache: LayerCache) -> Tensor:
        B, T, _ = hidden.shape
        nope, rope = self._queries(hidden).split([self.nope_dim, self.rope_dim], -1)  # (B, H, T, nope | D_r)
        latent, key_rope = self.kv_a_proj_with_mqa(hidden)[:, None].split([self.rank, self.rope_dim], -1)
        latent = self.kv_a_layernorm(latent)  # (B, 1, T, R)
        rope, key_rope = rotate(halves(rope), *tables), rotate(halves(key_rope), *tables)
        if self.layout == "absorbed":
            queries = torch.cat([nope @ self._up()[0], rope], -1)  # (B, H, T, R + D_r)
            view = cache.update(torch.cat([latent, key_rope], -1), None, step)
            out = attend(queries, view, step, scale=self.scale, window=self.window)[..., : self.rank]  # (B, H, T, R)
            out = out @ self._up()[1].transpose(-1, -2)  # (B, H, T, D_v)
        else:
            queries = torch.cat([nope, rope], -1)  # (B, H, T, nope + D_r)
            view = self._expanded_view(latent, key_rope, step, cache)
            out = attend(queries, view, step, scale=self.scale, window=self.window)  # (B, H, T, D_v)
        cache.observe(queries, view, step, scale=self.scale, window=self.window)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))

    def _queries(self, hidden: Tensor) -> Tensor:
        if self.compressed_queries:
            rows = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        else:
            rows = self.q_proj(hidden)
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, nope + D_r)

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_uk (H, nope, R) and W_uv (H, D_v, R), as views of the one stored matrix."""
        both = self.kv_b_proj.weight.view(self.heads, self.nope_dim + self.value_dim, self.rank)
        return both[:, : self.nope_dim], both[:, self.nope_dim :]

    def _expanded_view(self, latent: Tensor, key_rope: Tensor, step: Step, cache: LayerCache) -> View:
        if self.layout == "expanded":
            return cache.update(*self._expand(latent, key_rope), step)
        view = cache.update(torch.cat([latent, key_rope], -1), None, step)
        return tuple(self._expand_part(part) for part in view)

    def _expand_part(self, part: DensePart) -> DensePart:
        if not isinstance(part, DensePart) or part.length is not None:
            raise ValueError(f"the unabsorbed layout expands dense parts of eager caches, not {type(part).__name__}")
        keys, values = self._expand(*part.keys.split([self.rank, self.rope_dim], -1))
        # flash attention on CPU wants D_k = D_v; without it a prompt took twice as long
        values = F.pad(values, (0, max(0, keys.shape[-1] - self.value_dim)))  # (B, H, S, D_k)
        return replace(part, keys=keys, values=values, value_width=self.value_dim)

    def _expand(self, latent: Tensor, key_rope: Tensor) -> tuple[Tensor, Tensor]:
        up_keys, up_values = self._up()
        keys = latent @ up_keys.transpose(-1, -2)  # (B, H, S, nope)
        shared = key_rope.expand(-1, self.heads, -1, -1)  # (B, H, S, D_r)
        return torch.cat([keys, shared], -1), latent @ up_values.transpose(-1, -2)


def softmax_scale(config: ModelConfig) -> float:
    """(nope + D_r) ** -0.5, the head as it was trained, times YaRN's factor squared; never the stored width."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling or {}
    share = scaling.get("mscale_all_dim", 0)
    if scaling.get("rope_type", "default") == "default" or not share or scaling["factor"] <= 1:
        return scale
    return scale * (0.1 * share * math.log(scaling["factor"]) + 1.0) ** 2


def halves(x: Tensor) -> Tensor:
    """DeepSeek's rotary pairs are neighbours (0, 1), (2, 3), ...; `rotate` pairs i with i + D/2."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
