"""An engine: many requests, one model, and in each step one flat batch of whatever tokens there are to run.

It does what a Plan says and nothing else: who runs, and in which blocks, is the scheduler's business; where keys and
values lie is the pools'. The model sees N tokens in a row and their positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvlab.attention_paged import Rows
from kvlab.cache.base import KVCache
from kvlab.cache.paged import PagedCache, layer_groups, paged_layers
from kvlab.cache.tiers import TieredStore
from kvlab.engine.block_mover import BlockMover
from kvlab.engine.block_pool import BlockPool
from kvlab.engine.plan import Plan, Row
from kvlab.engine.prefix_cache import HashChain, NoPrefixCache
from kvlab.engine.radix_cache import RadixCache
from kvlab.engine.request import Request
from kvlab.engine.scheduler import Scheduler
from kvlab.engine.stats import Stats, Usage
from kvlab.model.fingerprint import fingerprint
from kvlab.model.transformer import Transformer
from kvlab.sampling import Sampler

PREFIX_CACHES = {"hash": HashChain, "radix": RadixCache, "none": NoPrefixCache}


@dataclass(frozen=True)
class Output:
    """One new token of one sequence; `finished` says why it was the last one ("stop", "length"), or is None."""

    request_id: str
    index: int
    token_id: int
    finished: str | None


class Engine:
    """Serves requests with continuous batching over paged memory.

    num_blocks    blocks of `block_size` tokens in each layer group's pool
    kv_dtype      what the pools hold: "fp32", "bf16", "fp16", "fp8", "int8"; None: the model's own dtype
    prefix        "hash" (a chain of block hashes), "radix" (a tree of tokens) or "none"
    token_budget  most tokens in a step; prompts are cut into chunks that fit
    preemption    what becomes of a sequence that must give up its blocks: "recompute", or "swap" to `swap_blocks`
                  blocks of CPU memory, or of the store
    store         keeps full blocks, so that prefixes outlive the pools, and with files this process. Only the same
                  weights, dtype and layout find them again; for that all weights are hashed once

    Raises ValueError for sizes that cannot work.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_blocks: int,
        block_size: int = 16,
        kv_dtype: str | None = None,
        prefix: Literal["hash", "radix", "none"] = "hash",
        token_budget: int = 512,
        max_running: int = 64,
        preemption: Literal["recompute", "swap"] = "recompute",
        swap_blocks: int = 0,
        store: TieredStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if num_blocks < 1:
            raise ValueError(f"an engine needs at least one block, got {num_blocks}")
        if prefix not in PREFIX_CACHES:
            raise ValueError(f"unknown prefix cache {prefix!r}: one of {', '.join(PREFIX_CACHES)}")
        if store is not None and prefix != "hash":
            raise ValueError(f"a store finds blocks by a chain of hashes: it needs prefix='hash', got {prefix!r}")
        self.model, self.block_size, self.clock = model, block_size, clock
        windows, group_of = layer_groups(model.config)
        pools = [BlockPool(num_blocks, block_size) for _ in windows]
        layers: list[PagedCache] = paged_layers(model.config, num_blocks, block_size, kv_dtype)
        self.cache = KVCache(layers)
        layers_of = [[x for x, at in zip(layers, group_of, strict=True) if at == g] for g in range(len(windows))]
        if store is None:
            self.mover = BlockMover(layers_of, TieredStore())
        else:
            self._take_memory(len(windows))
            self.mover = BlockMover(layers_of, store, fingerprint(model))
        self.scheduler = Scheduler(
            PREFIX_CACHES[prefix](pools, windows), token_budget=token_budget, max_running=max_running,
            max_length=model.config.max_position_embeddings, preemption=preemption, swap_blocks=swap_blocks,
            shelf=self.mover, clock=clock,
        )  # fmt: skip
        self._streams: dict[tuple[str, int], torch.Generator] = {}  # (request, sequence) -> its random numbers
        self._closed = False

    @property
    def stats(self) -> Stats:
        """What was counted since the engine started."""
        return self.scheduler.stats

    def reset_stats(self) -> None:
        """Count from zero again."""
        self.scheduler.stats = Stats()

    def usage(self) -> list[Usage]:
        """Where the blocks of each layer group are now."""
        return self.scheduler.usage()

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.scheduler.requests)

    def submit(self, request: Request) -> Request:
        """Queue a request. Raises ValueError for one that can never be served here, or after `close`."""
        if self._closed:
            raise ValueError(f"request {request.id}: the engine is closed; make a new one")
        request.check_vocabulary(self.model.config.vocab_size)
        _sampler(request)  # raises for top_k and top_p that cannot be
        self.scheduler.submit(request)
        return request

    def cancel(self, request_id: str) -> None:
        """End a request at once. Raises ValueError if it is not there."""
        self.scheduler.cancel(request_id)
        self._forget_finished()

    def close(self) -> None:
        """Cancel what is not finished and take no more requests; the blocks are free again, and prefixes in files."""
        for request_id in list(self.scheduler.requests):
            self.cancel(request_id)
        self.mover.store.flush()
        self._closed = True

    def run(self) -> Iterator[Output]:
        """Step until nobody is left, and yield tokens as they are drawn."""
        while self.busy:
            yield from self.step()

    def stream(self, request: Request) -> Iterator[Output]:
        """Submit a request and yield its tokens; all others go on beside it."""
        self.submit(request)
        while not request.finished:
            yield from (output for output in self.step() if output.request_id == request.id)

    @torch.no_grad()
    def step(self) -> list[Output]:
        """Do one step for everybody whom the plan names. If it fails, these requests end in "error", others go on."""
        began = self.clock()
        plan = self.scheduler.plan()
        planned = self.clock()
        if not plan.rows:
            self.scheduler.complete(plan, [])
            return []
        try:
            self.mover.move(plan)
            drawn = self._draw(plan, self._logits(plan))
        except BaseException:
            self.mover.clear(plan, self.block_size)
            self.scheduler.abandon(plan)
            self._forget_finished()
            raise
        drew = self.clock()
        continued = self.scheduler.complete(plan, drawn)
        scheduling = planned - began + self.clock() - drew
        self.mover.keep(self.scheduler.tables.take_filled())
        self._forget_finished()
        self.stats.count_step(scheduling, whole=self.clock() - began)
        return [Output(s.request.id, s.index, s.tokens[-1], s.finish_reason) for s in continued]

    @torch.no_grad()
    def _take_memory(self, groups: int) -> None:
        """Make the layers allocate their pools, by a token that is forgotten at once: a restart reads blocks first."""
        self._hidden([0], Rows.plan([0], [1], [[(0,)]] * groups, self.block_size, device=self._device))
        for layer in self.cache.layers:
            layer.zero_blocks([0])

    @property
    def _device(self) -> torch.device:
        return self.model.model.embed_tokens.weight.device

    def _hidden(self, token_ids: list[int], rows: Rows) -> Tensor:
        """The hidden states (N, hidden) of N tokens."""
        return self.model.hidden_states(torch.tensor([token_ids], device=self._device), rows.step(), self.cache)[0]

    def _logits(self, plan: Plan) -> Tensor:
        """Run the step's tokens; the logits of those that tokens are drawn from (samples, vocabulary)."""
        tables = [[row.tables[group] for row in plan.rows] for group in range(len(self.scheduler.cache.pools))]
        rows = Rows.plan(
            [row.start for row in plan.rows], [row.count for row in plan.rows], tables, self.block_size,
            device=self._device,
        )  # fmt: skip
        hidden = self._hidden([token for row in plan.rows for token in row.token_ids], rows)
        last = [end - 1 for end, row in zip(rows.starts[1:], plan.rows, strict=True) if row.draws]
        return self.model.unembed(hidden[last])

    def _draw(self, plan: Plan, logits: Tensor) -> list[list[int]]:
        """Draw for each sample as many tokens as its sequence wants, each from its own stream of random numbers."""
        self._check_finite(plan, logits)
        best = logits.max(-1).indices.tolist()  # on a CPU four times faster than argmax in bf16, and the first as well
        return [self._draw_row(row, logits[i : i + 1], best[i]) for i, row in enumerate(plan.samples)]

    def _check_finite(self, plan: Plan, logits: Tensor) -> None:
        """Name the request whose logits are not; extremes tell it, and read them faster than a test of each does."""
        finite = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()  # (samples,); NaN is an extreme of its row
        if not bool(finite.all()):
            request = plan.samples[finite.tolist().index(False)].sequence.request
            raise ValueError(f"request {request.id}: logits are not finite: use a wider dtype, or check the weights")

    def _draw_row(self, row: Row, logits: Tensor, best: int) -> list[int]:
        request, first = row.sequence.request, row.sequence.index
        if request.temperature == 0:
            return [best]
        streams = [self._stream(request, index) for index in range(first, first + row.draws)]
        return [int(_sampler(request).pick(logits, stream)) for stream in streams]

    def _stream(self, request: Request, index: int) -> torch.Generator:
        """A sequence's own random numbers: who shares its steps changes nothing, and preemption neither."""
        key = (request.id, index)
        if key not in self._streams:
            self._streams[key] = _sampler(request).generator(index)
        return self._streams[key]

    def _forget_finished(self) -> None:
        alive = self.scheduler.requests
        self._streams = {key: stream for key, stream in self._streams.items() if key[0] in alive}
        self.mover.forget(self.scheduler.tables.swap_pools)


def _sampler(request: Request) -> Sampler:
    return Sampler(request.temperature, request.top_k, request.top_p, request.seed)
