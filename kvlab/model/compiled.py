"""One decode step as one compiled graph, for every length.

Decoding at batch 1 reads all weights for a single token. PyTorch's eager matrix-vector products leave much of
the memory bandwidth unused on a CPU; compiled with frozen weights they do not. What makes a single graph possible
is that nothing in it depends on a Python number: the cache's cursor and the positions are tensors, and attention is
an operator that the compiler does not look into, which reads the live slots only.
"""

from __future__ import annotations

from time import perf_counter

import torch
import torch._inductor.config
from torch import Tensor

from kvlab.attention import Step
from kvlab.cache.base import KVCache
from kvlab.model.transformer import Transformer

CPU_OPTIONS = {
    "freezing": True,  # weights are constants: they are laid out once for the kernels that read them
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",  # a C++ kernel for one row reaches the memory bandwidth
}


class CompiledStep:
    """A decode step of batch 1 over a static cache: (token id, position) -> logits (1, vocabulary).

    Raises ValueError for a cache that cannot be compiled. Compiling takes seconds for a small model and about a
    minute for a real one; call `warm_up` to pay it at a known moment.
    """

    def __init__(self, model: Transformer, cache: KVCache | None):
        if cache is None or not cache.compilable:
            kinds = "no cache" if cache is None else ", ".join(sorted({type(x).__name__ for x in cache.layers}))
            raise ValueError(f"compiled decoding needs a static cache, got {kinds}")
        self.model, self.cache = model, cache
        self.device = model.model.embed_tokens.weight.device
        self._options = CPU_OPTIONS if self.device.type == "cpu" else {}
        self._graph = torch.compile(self._step, fullgraph=True, dynamic=False)

    def _step(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.model.hidden_states(token_ids, Step(positions), self.cache)  # (1, 1, hidden)
        return self.model.unembed(hidden[:, -1])

    @torch.no_grad()
    def __call__(self, token_id: int, position: int) -> Tensor:
        positions = torch.tensor([[position]], dtype=torch.int32, device=self.device)
        self.cache.begin(positions)  # refuses a step that does not fit, before the graph runs
        token_ids = torch.tensor([[token_id]], device=self.device)
        # not torch.compile(options=...): weights are frozen while tracing, which reads the global configuration
        with torch._inductor.config.patch(self._options):
            return self._graph(token_ids, positions)

    @torch.no_grad()
    def warm_up(self) -> float:
        """Compile now, on a token that is forgotten again, and return the seconds it took. The cache must be empty."""
        started = perf_counter()
        positions = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        # an eager step allocates the buffers, which the graph then holds on to
        self.model.hidden_states(token, self.cache.begin(positions), self.cache)
        self.cache.reset()
        for _ in range(2):  # the second run shows that nothing is compiled twice
            self(0, 0)
            self.cache.reset()
        return perf_counter() - started
