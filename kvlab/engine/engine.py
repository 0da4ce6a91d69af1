"""An engine: many requests, one model, and in each step one flat batch of whatever tokens there are to run.

It does what a Plan says and nothing else: who runs, and in which blocks, is the scheduler's business; where keys and
values lie is the pools'. The model sees N tokens in a row and their positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from kvlab.attention_paged import Rows
from kvlab.cache.base import KVCache
from kvlab.cache.paged import layer_groups, paged_layers
from kvlab.cache.tiers import TieredStore
from kvlab.engine.block_mover import BlockMover
from kvlab.engine.block_pool import BlockPool
from kvlab.engine.draws import Draws, sampler_of
from kvlab.engine.plan import Plan, Row
from kvlab.engine.prefix_cache import HashChain, NoPrefixCache
from kvlab.engine.radix_cache import RadixCache
from kvlab.engine.request import Output, Request, tokens_of
from kvlab.engine.scheduler import Scheduler
from kvlab.engine.stats import Stats, Usage
from kvlab.model.fingerprint import fingerprint
from kvlab.model.transformer import Transformer

PREFIX_CACHES = {"hash": HashChain, "radix": RadixCache, "none": NoPrefixCache}


class Engine:
    """Serves requests with continuous batching over paged memory.

    num_blocks    blocks of `block_size` tokens in each layer group's pool
    kv_dtype      what the pools hold: "fp32", "bf16", "fp16", "fp8", "int8"; None: the model's own dtype
    prefix        "hash" (a chain of block hashes), "radix" (a tree of tokens) or "none"
    token_budget  most tokens in a step; prompts are cut into chunks that fit
    preemption    what becomes of a sequence that must give up its blocks: "recompute", or "swap" to `swap_blocks`
                  blocks of CPU memory, or of the store
    window, sinks  imposed on a model that declares no window: a token sees the first `sinks` tokens and the newest
                  `window`, itself included; blocks between them are given back. Lossy, and not for a store
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
        window: int | None = None,
        sinks: int = 0,
        store: TieredStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        _check_sizes(num_blocks, prefix, preemption, swap_blocks)
        self.model, self.block_size, self.clock = model, block_size, clock
        windows, _ = layer_groups(model.config, window, sinks)
        prefixes = PREFIX_CACHES[prefix]([BlockPool(num_blocks, block_size) for _ in windows], windows, sinks)
        self.cache = KVCache(paged_layers(model.config, num_blocks, block_size, kv_dtype, window, sinks))
        self.mover = self._mover(len(windows), prefix, window, store)
        self.scheduler = Scheduler(
            prefixes, token_budget=token_budget, max_running=max_running, preemption=preemption,
            swap_blocks=swap_blocks, max_length=model.config.max_position_embeddings, shelf=self.mover, clock=clock,
        )  # fmt: skip
        self._draws = Draws()
        self._closed = False

    def _mover(self, groups: int, prefix: str, window: int | None, store: TieredStore | None) -> BlockMover:
        layers_of = [[layer for layer in self.cache.layers if layer.group == group] for group in range(groups)]
        if store is None:
            return BlockMover(layers_of, TieredStore())
        if prefix != "hash" or window is not None:
            needs = "prefix='hash' and window=None"
            raise ValueError(f"a store finds whole prefixes by hash: it needs {needs}, got {prefix!r}, {window}")
        self._take_memory(groups)
        return BlockMover(layers_of, store, fingerprint(self.model))

    @property
    def stats(self) -> Stats:
        """What was counted since the engine started, and with `usage` where its blocks are now."""
        return self.scheduler.stats

    def reset_stats(self) -> None:
        """Count from zero again."""
        self.scheduler.reset_stats()

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
        sampler_of(request)  # raises for top_k and top_p that cannot be
        self.scheduler.submit(request)
        return request

    def cancel(self, request_id: str) -> None:
        """End a request at once. Raises ValueError if it is not there."""
        self.scheduler.cancel(request_id)
        if not self.scheduler.planned:  # otherwise what a step has yet to move is needed until its end
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
        """Submit a request and iterate over its tokens; all others go on beside it, streamed or not.

        Raises what `submit` does, and ValueError at the end of a request that failed.
        """
        self.submit(request)
        return tokens_of(request, self.step)

    @torch.no_grad()
    def step(self) -> list[Output]:
        """Do one step for everybody whom the plan names, and return what is new.

        A sequence whose numbers are not finite ends in "error", others go on. If the step itself fails, all of its
        sequences do, and the exception is raised.
        """
        began = self.clock()
        plan = self._plan()
        planned = self.clock()
        if not plan.rows:
            self.scheduler.complete(plan, [])
            return []
        try:
            self.mover.move(plan)
            drawn = self._draw(plan, self._logits(plan))
        except BaseException as error:
            self.mover.clear(plan.rows, plan.restore)
            self.scheduler.abandon(plan, f"the step failed: {' '.join(str(error).split()) or type(error).__name__}")
            self._forget_finished()
            raise
        drew = self.clock()
        continued = self.scheduler.complete(plan, drawn)
        scheduling = planned - began + self.clock() - drew
        self.mover.keep(self.scheduler.tables.take_filled())
        self._forget_finished()
        self.stats.count_step(scheduling, whole=self.clock() - began)
        new = [(sequence, sequence.tokens[-1]) for sequence in continued]
        new += [(row.sequence, None) for row in plan.rows if row.sequence.error]
        return [Output(s.request.id, s.index, token, s.finish_reason) for s, token in new]

    def _plan(self) -> Plan:
        """The next step. If it cannot be planned, if only for an interrupt, nobody loses more than computed blocks."""
        if self.scheduler.planned:
            raise ValueError("a step is under way: wait for its end, and call the engine from one thread")
        try:
            return self.scheduler.plan()
        except BaseException:
            self.scheduler.take_back()
            self._forget_finished()
            raise

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
        ends = list(zip(plan.rows, rows.starts[1:], strict=True))
        chunks = [(row, end - 1) for row, end in ends if not row.draws]
        if chunks:
            self._end_failed([row for row, _ in chunks], hidden[[last for _, last in chunks]])
        last = [end - 1 for row, end in ends if row.draws]
        return self.model.unembed(hidden[last])

    def _draw(self, plan: Plan, logits: Tensor) -> list[list[int]]:
        """Draw for each sample as many tokens as its sequence wants, each from its own stream of random numbers."""
        self._end_failed(plan.samples, logits)
        best = logits.max(-1).indices.tolist()  # on a CPU four times faster than argmax in bf16, and the first as well
        return [self._draws.pick(row, logits[i : i + 1], best[i]) for i, row in enumerate(plan.samples)]

    def _end_failed(self, rows: list[Row], last: Tensor) -> None:
        """End sequences whose last token's numbers (rows, any) are not finite, before their blocks can be found.

        Extremes tell it, and read them faster than a test of each number does; NaN is an extreme.
        """
        finite = last.amax(-1).isfinite() & last.amin(-1).isfinite()  # (rows,)
        failed = [row for row, good in zip(rows, finite.tolist(), strict=True) if not good]
        self.mover.clear(failed)
        for row in failed:
            self.scheduler.fail(row.sequence, "logits are not finite: use a wider dtype, or check the weights")

    def _forget_finished(self) -> None:
        self._draws.keep(self.scheduler.requests.values())
        self.mover.forget(self.scheduler.tables.swap_pools)


def _check_sizes(num_blocks: int, prefix: str, preemption: str, swap_blocks: int) -> None:
    if type(num_blocks) is not int or num_blocks < 1:
        raise ValueError(f"an engine needs at least one block, got {num_blocks!r}")
    if prefix not in PREFIX_CACHES:
        raise ValueError(f"unknown prefix cache {prefix!r}: one of {', '.join(PREFIX_CACHES)}")
    least = 1 if preemption == "swap" else 0
    if type(swap_blocks) is not int or swap_blocks < least:
        needs = f"preemption={preemption!r} needs swap_blocks, blocks of CPU memory"
        raise ValueError(f"{needs}: a whole number >= {least}, got {swap_blocks!r}")
