"""Many requests at once in Hugging Face transformers: its padded static batch and its continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

Served = tuple[list[list[int]], float, int]  # token ids of each request, seconds for all, bytes of keys and values
NO_STOP = -1  # transformers' own word for "no stop token"


def static_batch(other, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Served:
    """Greedy tokens of one batch, padded on the left, that runs until its longest answer is done.

    Each request keeps its first counts[i] tokens. Stop tokens are switched off in `other`.
    """
    other.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    padded = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts], device=other.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=other.device)
    mask = torch.arange(longest, device=other.device) >= longest - lengths[:, None]
    before = perf_counter()
    out = other.generate(
        padded, attention_mask=mask.long(), do_sample=False, max_new_tokens=max(counts), use_cache=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    rows = out.sequences[:, longest:].tolist()
    seconds = perf_counter() - before
    name = "cache" if "cache" in list(out.keys()) else "past_key_values"  # its name before 5.24
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in out[name].layers)
    return [row[:count] for row, count in zip(rows, counts, strict=True)], seconds, kept


class ContinuousBatches:
    """transformers' continuous batching over `num_blocks` blocks, which it takes once and keeps.

    Raises ImportError where transformers is missing or has none, ValueError where `num_blocks` is too small.
    """

    def __init__(self, other, num_blocks: int, block_size: int, token_budget: int):
        from transformers import ContinuousBatchingConfig, GenerationConfig

        # no sharing: who sends the same prompts again would measure a prefix cache
        sizes = ContinuousBatchingConfig(
            page_size=block_size, num_blocks=num_blocks, max_batch_tokens=token_budget, allow_block_sharing=False
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=NO_STOP)
        self._manager = other.init_continuous_batching(greedy, sizes)

    def serve(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Served:
        """Greedy tokens of all requests, which arrive together. Raises RuntimeError where its thread died."""
        manager = self._manager
        manager.start()
        try:
            before = perf_counter()
            for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
                manager.add_request(list(prompt), f"{index}", max_new_tokens=count, eos_token_id=NO_STOP)
            tokens = self._collect(len(prompts))
            seconds = perf_counter() - before
        finally:
            manager.stop(keep_for_next_session=True)
        return tokens, seconds, manager.batch_processor.cache.cache_tensor.nbytes

    def _collect(self, count: int) -> list[list[int]]:
        tokens: dict[str, list[int]] = {}
        while len(tokens) < count:
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching ended before its requests did")
            if result is not None and result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                tokens[result.request_id] = result.generated_tokens
        return [tokens[f"{index}"] for index in range(count)]
