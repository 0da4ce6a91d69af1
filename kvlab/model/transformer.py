"""A decoder of the Llama family that never learns which cache it runs on.

Parameter names are those of Hugging Face, but for two fused projections: qkv_proj (rows of q, k, v) and
gate_up_proj (rows of gate, up). Fewer, larger matrix products read the same weights in less time.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from kvlab.attention import Step, attend
from kvlab.cache.base import KVCache, LayerCache, NoCache
from kvlab.config import ModelConfig
from kvlab.model.mla import LatentAttention
from kvlab.rope import inverse_frequencies, rope_tables, rotate

Tables = tuple[Tensor, Tensor]  # cosines and sines, each (B, 1, T, D)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions: MHA, GQA and MQA differ only in the number of key heads."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.window, self.scale = config.window(layer), config.head_dim**-0.5
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        normed = config.qk_norm
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(self, hidden: Tensor, tables: Tables, step: Step, cache: LayerCache) -> Tensor:
        B, T, _ = hidden.shape
        heads = self.qkv_proj(hidden).view(B, T, -1, self.head_dim)
        queries, keys, values = heads.transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], 1)
        queries = rotate(self.q_norm(queries), *tables)  # (B, H, T, D)
        keys = rotate(self.k_norm(keys), *tables)  # (B, H_kv, T, D), stored rotated: a key's position never changes
        view = cache.update(keys, values, step)
        out = attend(queries, view, step, scale=self.scale, window=self.window)
        cache.observe(queries, view, step, scale=self.scale, window=self.window)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config, index) if config.is_mla else Attention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, tables: Tables, step: Step, cache: LayerCache) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), tables, step, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """token ids (B, T) -> logits (B, T, vocabulary).

    Raises ValueError where the config describes a model that kvlab can size but not run.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.cannot_run:
            raise ValueError(f"kvlab can size {config.name} but not run it: {config.cannot_run}")
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        frequencies, self.rope_factor = inverse_frequencies(
            config.qk_rope_head_dim or config.head_dim, config.rope_theta, config.rope_scaling,
            config.max_position_embeddings,
        )  # fmt: skip
        # not a parameter: it must stay fp32 whatever dtype the model is cast to
        self.rope_frequencies = frequencies

    def forward(self, token_ids: Tensor, step: Step, cache: KVCache | None = None) -> Tensor:
        """Logits of every token; `step` comes from cache.begin(positions), or Step.plan(positions) without a cache."""
        return self.unembed(self.hidden_states(token_ids, step, cache))

    def hidden_states(self, token_ids: Tensor, step: Step, cache: KVCache | None = None) -> Tensor:
        """The last layer's output, normed: (B, T) -> (B, T, hidden)."""
        hidden = self.model.embed_tokens(token_ids)  # (B, T, hidden)
        frequencies = self.rope_frequencies.to(hidden.device)
        tables = rope_tables(step.positions, frequencies, self.rope_factor, hidden.dtype)
        layer_caches = cache.layers if cache is not None else [NoCache()] * len(self.model.layers)
        for layer, layer_cache in zip(self.model.layers, layer_caches, strict=True):
            hidden = layer(hidden, tables, step, layer_cache)
        return self.model.norm(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits: (..., hidden) -> (..., vocabulary). Take the rows you need first: this matrix is large."""
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, weight)
