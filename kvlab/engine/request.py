"""What a client asks for, the tokens that it gets, and the sequences that they come from."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from enum import Enum
from types import NoneType


@dataclass(frozen=True)
class Identity:
    """What keys and values depend on besides the tokens: only equal identities may share blocks.

    An adapter that is loaded again under its old name is another adapter: give it another `adapter_version`.
    """

    adapter: str | None = None
    adapter_version: int = 0
    tenant: str | None = None  # a salt: tenants can neither read nor guess by timing what others have cached

    def __post_init__(self) -> None:
        kinds = (self.adapter, (str, NoneType)), (self.adapter_version, (int,)), (self.tenant, (str, NoneType))
        if any(type(value) not in allowed for value, allowed in kinds):
            raise ValueError(f"adapter and tenant are text or None, adapter_version is a whole number: got {self}")

    def encoded(self) -> bytes:
        """Bytes that differ wherever identities differ, the same in every process."""
        return json.dumps(astuple(self)).encode()


NOBODY = Identity()


@dataclass(eq=False)
class Request:
    """A prompt and how to continue it: `n` sequences of at most `max_new_tokens` tokens (a stop token included).

    Raises ValueError for what no engine could serve. `top_k` and `top_p` are for kvlab.sampling.Sampler to check.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    n: int = 1
    identity: Identity = NOBODY
    arrival_s: float | None = field(default=None, init=False)  # set when submitted, as are the sequences
    sequences: list[Sequence] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.prompt_ids = self._token_ids("prompt_ids", self.prompt_ids)
        self.stop_ids = frozenset(self._token_ids("stop_ids", self.stop_ids))
        if not self.prompt_ids:
            raise ValueError(f"request {self.id}: the prompt is empty: give at least one token")
        for name in "max_new_tokens", "n":
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"request {self.id}: {name} must be a whole number >= 1, got {value!r}")
        if type(self.seed) is not int:
            raise ValueError(f"request {self.id}: seed must be a whole number, got {self.seed!r}")
        if type(self.temperature) not in (int, float) or not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(
                f"request {self.id}: temperature must be 0 (greedy) or a positive number, got {self.temperature!r}"
            )
        if not isinstance(self.identity, Identity):
            raise ValueError(f"request {self.id}: identity must be an Identity, got {self.identity!r}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"request {self.id}: greedy gives the same text {self.n} times: raise temperature or n=1")

    def _token_ids(self, name: str, ids: object) -> tuple[int, ...]:
        try:
            found = tuple(ids)
        except TypeError:
            raise ValueError(f"request {self.id}: {name} must be a list of token ids, got {ids!r}") from None
        wrong = [token for token in found if type(token) is not int or token < 0]
        if wrong:
            raise ValueError(f"request {self.id}: {name} must be whole numbers >= 0, got {wrong[0]!r}")
        return found

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for a prompt or stop token that the model does not know."""
        for name, ids in ("prompt token", self.prompt_ids), ("stop token", self.stop_ids):
            if max(ids, default=0) >= vocab_size:
                raise ValueError(f"request {self.id}: {name} {max(ids)} is outside the vocabulary of {vocab_size}")

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and all(s.state is State.FINISHED for s in self.sequences)


@dataclass(frozen=True)
class Output:
    """One new token of one sequence; `finished` says why it was the last one ("stop", "length"), or is None.

    A sequence that failed by itself ends with the token None and "error"; its `error` says why.
    """

    request_id: str
    index: int
    token_id: int | None
    finished: str | None


class State(Enum):
    """Where a sequence is; one that was preempted waits again, or is swapped out to CPU memory."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One continuation of a request, and what the engine knows of it.

    tokens      prompt and output; the last one has no keys and values yet, except while its prompt is prefilled
    stored      how many tokens have keys and values in blocks
    peak        the most that `stored` has ever been: what lies below and is computed again is no progress
    tables      one block table per layer group
    swapped     the tables of CPU blocks, while swapped out
    path        how far the prefix cache knows it: `registered` blocks
    order       (arrival number of its request, index): who goes first
    """

    request: Request
    index: int
    order: tuple[int, int]
    tokens: list[int]
    stored: int = 0
    peak: int = 0
    tables: list[list[int]] = field(default_factory=list)
    swapped: list[list[int]] = field(default_factory=list)
    path: object = None
    registered: int = 0
    state: State = State.WAITING
    finish_reason: str | None = None  # "stop", "length", "cancelled", "dropped" (a beam) or "error"
    error: str | None = None  # one line, where that is the reason
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def remaining(self) -> int:
        """Known tokens that have no keys and values yet."""
        return len(self.tokens) - self.stored

    @property
    def draws(self) -> int:
        """Tokens to draw once all known ones are stored: n from a prompt that has not been continued, then one."""
        fresh = len(self.tokens) == len(self.request.prompt_ids)
        return self.request.n if fresh else 1

    @property
    def queue_s(self) -> float | None:
        """From arrival to the first step that computed one of its tokens."""
        return None if self.scheduled_s is None else self.scheduled_s - self.request.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None before the end and where there was only one."""
        count = len(self.output_ids) - 1
        return (self.finished_s - self.first_token_s) / count if self.finished_s is not None and count > 0 else None


def tokens_of(request: Request, step: Callable[[], object]) -> Iterator[Output]:
    """Iterate over the tokens of a request that was submitted, taking steps until it is finished.

    Others may take steps too. Raises ValueError at the end of a request that failed.
    """
    sent: Counter[int] = Counter()  # by sequence: other streams take steps too, so tokens are looked up
    ended = False
    while not ended:
        ended = request.finished
        for sequence in request.sequences:
            for token in sequence.output_ids[sent[sequence.index] :]:
                sent[sequence.index] += 1
                newest = sent[sequence.index] == len(sequence.output_ids)
                yield Output(request.id, sequence.index, token, sequence.finish_reason if newest else None)
        if not request.finished:
            step()
    for error in filter(None, (sequence.error for sequence in request.sequences)):
        raise ValueError(error)
