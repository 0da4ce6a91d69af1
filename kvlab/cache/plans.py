"""Names of caches that keep less, and the layers that they stand for.

    window-256                 the newest 256 tokens
    sinks4-252                 the first 4 and the newest 252
    sinks4-252-rerotated       the same, with positions inside the cache
    h2o-256  h2o-25%           a method of scores.METHODS with a budget in tokens, or as a share of the tokens seen

and behind a method's budget, in any order:

    -sinks4  -recent64         tokens that always stay (else 4, and a quarter of the budget but no more than 32; of
                               H2O's budget one half, as published; -sinks0 -recent0 protects nothing)
    -stride32                  positions between decisions (else an eighth of the budget, but no more than 64)
    -prompt                    a prompt is kept whole, and decided on where it ends
    -shared                    all KV heads of a layer keep the same tokens, those of the best mean score
    -pyramid                   more for the first layers, less for the last, the same in all
    +int8                      codes with scales for each row, as in codecs.RECIPES
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

import torch

from kvlab.cache.base import LayerCache
from kvlab.cache.budgets import Budget, pyramid
from kvlab.cache.evicting import STRIDE, EvictingCache
from kvlab.cache.formats import CodedRows, PlainRows
from kvlab.cache.rerotated import RerotatedCache
from kvlab.cache.scores import METHODS, shared
from kvlab.cache.sliding import SlidingCache
from kvlab.codecs import recipe
from kvlab.config import ModelConfig
from kvlab.rope import inverse_frequencies

FAMILIES = {
    "window-N": "the newest N tokens of each layer",
    "sinksS-N": "the first S and the newest N tokens; -rerotated: with positions inside the cache",
    **{f"{method}-N": "N tokens of each KV head, or a share of all (25%), chosen by score" for method in METHODS},
}
SINKS, RECENT = 4, 32  # protected where the name does not say
WINDOW = re.compile(r"(?:window|sinks(?P<sinks>\d+))-(?P<window>\d+)(?P<rerotated>-rerotated)?(?P<codes>\+.*)?")
SCORED = re.compile(
    rf"(?P<method>{'|'.join(METHODS)})-(?P<amount>\d+(?:\.\d+)?%|\d+)"
    r"(?P<options>(?:-(?:(?:sinks|recent|stride)\d+|prompt|shared|pyramid))*)(?:\+(?P<codes>.+))?"
)
FIRST_WORD = re.compile(rf"({'|'.join(METHODS)}|window|sinks)\b.*|sinks\d.*")


@dataclass(frozen=True)
class WindowPlan:
    """Sinks and a window, decided by position alone."""

    window: int
    sinks: int
    rerotated: bool

    def layers(self, config: ModelConfig) -> list[LayerCache]:
        """A cache for each layer of the model; layers whose own window is no wider keep that one, which is exact."""
        return [self._layer(config, config.window(index)) for index in range(config.num_hidden_layers)]

    def _layer(self, config: ModelConfig, own: int | None) -> LayerCache:
        if own is not None and own <= self.window:
            return SlidingCache(own)
        if not self.rerotated:
            return SlidingCache(self.window, self.sinks, imposed=True)
        width = config.qk_rope_head_dim or config.head_dim
        rope = (config.rope_theta, config.rope_scaling, config.max_position_embeddings)
        return RerotatedCache(self.window, self.sinks, inverse_frequencies(width, *rope)[0])


@dataclass(frozen=True)
class ScoredPlan:
    """A method and its budgets."""

    method: str
    tokens: int | None
    share: Fraction | None
    sinks: int
    recent: int
    stride: int
    whole_prompt: bool = False
    shared: bool = False
    pyramid: bool = False
    codes: str | None = None

    def layers(self, config: ModelConfig) -> list[LayerCache]:
        """A cache for each layer of the model; layers whose own window is within the budget keep that one."""
        budgets, form = self.budgets(config.num_hidden_layers), self._form(config)
        return [self._layer(config.window(index), budget, form, index) for index, budget in enumerate(budgets)]

    def budgets(self, layers: int) -> list[Budget]:
        """The budget of each of so many layers."""
        tokens = [self.tokens] * layers
        if self.pyramid:
            tokens = pyramid(self.tokens, layers, self.sinks + self.recent)
        return [Budget(count, self.share, self.sinks, self.recent) for count in tokens]

    def _layer(self, own: int | None, budget: Budget, form: PlainRows | CodedRows, index: int) -> LayerCache:
        if own is not None and budget.tokens is not None and own <= budget.tokens:
            return SlidingCache(own)
        how = {"whole_prompt": self.whole_prompt, "form": form, "seed": index}
        method = METHODS[self.method]
        return EvictingCache(shared(method) if self.shared else method, budget, self.stride, **how)

    def _form(self, config: ModelConfig) -> PlainRows | CodedRows:
        if self.codes is None:
            return PlainRows()
        width = math.gcd(config.kv_lora_rank, config.qk_rope_head_dim) if config.is_mla else config.head_dim
        how = recipe(self.codes, width)
        how.keys.check_width(width)
        return CodedRows(how.keys, how.values, config.qk_rope_head_dim if config.is_mla else 0)


def parse(name: str) -> WindowPlan | ScoredPlan | None:
    """The plan called `name`; None for names of other caches.

    Raises ValueError for a budget, an option or codes that the named method cannot have.
    """
    if found := WINDOW.fullmatch(name):
        return _window_plan(name, **found.groupdict())
    if found := SCORED.fullmatch(name):
        return _scored_plan(name, **found.groupdict())
    if FIRST_WORD.fullmatch(name):
        raise ValueError(
            f"cannot read the cache {name!r}: window-256, sinks4-252, sinks4-252-rerotated, or a method "
            f"({', '.join(METHODS)}) with its budget, h2o-256 or h2o-25%, then -sinks4, -recent64, -stride32, -prompt, "
            "-shared, -pyramid and +int8"
        )
    return None


def _window_plan(name: str, sinks: str | None, window: str, rerotated: str | None, codes: str | None) -> WindowPlan:
    if codes is not None:
        why = "codes cannot be turned" if rerotated else f"recent-{window}{codes} keeps the newest as codes"
        raise ValueError(f"{name}: a window keeps keys and values as they came; {why}")
    plan = WindowPlan(int(window), int(sinks or 0), rerotated is not None)
    SlidingCache(plan.window, plan.sinks, imposed=True)  # refuses what no layer could have
    if plan.rerotated:
        RerotatedCache(plan.window, plan.sinks, torch.empty(0))
    return plan


def _scored_plan(name: str, method: str, amount: str, options: str, codes: str | None) -> ScoredPlan:
    found = re.findall(r"-([a-z]+)(\d*)", options)
    if len({word for word, _ in found}) < len(found):
        raise ValueError(f"{name}: an option is given twice")
    given = {word: int(number) if number else True for word, number in found}
    tokens, share = (None, Fraction(amount[:-1]) / 100) if amount.endswith("%") else (int(amount), None)
    if share is not None and "pyramid" in given:
        raise ValueError(f"{name}: a pyramid shares out tokens among layers; give the budget in tokens")
    if codes is not None:
        how = recipe(codes, 32)
        if how is None or how.residual:
            raise ValueError(
                f"{name}: eviction drops tokens one by one, which {codes!r} cannot: use codes with scales for each "
                "row and no residual, such as int8, fp8 or int4-g64"
            )
    half = method.startswith("h2o")  # one half the newest, one half those of the most attention
    recent = RECENT if tokens is None else tokens // 2 if half else min(RECENT, tokens // 4)
    plan = ScoredPlan(
        method, tokens, share,
        sinks=given.get("sinks", SINKS if tokens is None else min(SINKS, tokens // 4)),
        recent=given.get("recent", max(recent, 1)),
        stride=given.get("stride", STRIDE if tokens is None else max(1, min(STRIDE, tokens // 8))),
        whole_prompt="prompt" in given, shared="shared" in given, pyramid="pyramid" in given, codes=codes,
    )  # fmt: skip
    for budget in plan.budgets(2):
        EvictingCache(method, budget, plan.stride)
    return plan
