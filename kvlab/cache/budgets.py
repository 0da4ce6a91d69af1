"""How many tokens a layer keeps: a number, or a share of what it has seen; alike in all layers, or a pyramid."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True)
class Budget:
    """What a decision keeps of each KV head: `tokens`, or a `share` (0 to 1) of the tokens seen so far.

    sinks   the first tokens of a text, which always stay
    recent  the newest tokens at a decision, which always stay

    Raises ValueError where the two do not fit, or where neither or both of tokens and share are given.
    """

    tokens: int | None = None
    share: float | Fraction | None = None
    sinks: int = 0
    recent: int = 0

    def __post_init__(self):
        if (self.tokens is None) == (self.share is None):
            raise ValueError(f"a budget is either tokens or a share, got tokens {self.tokens} and share {self.share}")
        if self.share is not None:
            is_number = type(self.share) is not bool and isinstance(self.share, int | float | Fraction)
            if not is_number or not 0 < self.share <= 1:
                shown = float(self.share) if isinstance(self.share, Fraction) else self.share
                raise ValueError(f"a share of the tokens lies above 0 and is 1 at most, got {shown!r}")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise ValueError(f"a budget keeps a whole number of tokens and at least 1, got {self.tokens}")
        if any(type(count) is not int or count < 0 for count in (self.sinks, self.recent)):
            raise ValueError(f"sinks and recent tokens are counted from 0, got {self.sinks!r} and {self.recent!r}")
        if self.tokens is not None and self.protected > self.tokens:
            raise ValueError(
                f"a budget of {self.tokens} tokens cannot hold {self.sinks} sinks and {self.recent} recent tokens: "
                f"give at least {self.protected}"
            )

    @property
    def protected(self) -> int:
        return self.sinks + self.recent

    def kept(self, length: int) -> int:
        """How many of `length` tokens stay: never none, and with a share never less than what is protected."""
        if self.tokens is not None:
            return min(self.tokens, length)
        # 1 - 0.9 is not 0.1: the nearest simple fraction is what was meant, and whole-number arithmetic keeps it
        share = Fraction(self.share).limit_denominator(1_000_000)
        return min(max(int(length * share), self.protected, 1), length)


def pyramid(tokens: int, layers: int, protected: int = 0, steepness: int = 20) -> list[int]:
    """A budget for each layer, falling from the first to the last, as many in all as `layers` x `tokens`.

    What is not protected falls linearly to 1/steepness of its mean (PyramidKV, Cai et al. 2024, arXiv:2406.02069).
    Raises ValueError where the protected tokens do not fit into the mean, or a count is no whole number.
    """
    whole = all(type(count) is int for count in (tokens, layers, protected))
    if not whole or tokens < 1 or not 0 <= protected <= tokens or layers < 1 or steepness < 1:
        raise ValueError(f"no pyramid of {layers} layers, {tokens} tokens on average, {protected} of them protected, "
                         f"and steepness {steepness}")  # fmt: skip
    free = Fraction(tokens - protected)
    last = max(free / steepness, Fraction(1 - protected))  # no layer stays empty
    step = 2 * (free - last) / max(layers - 1, 1)
    first = free + step * (layers - 1) / 2
    # the sums are rounded: a layer gains or loses less than one token, and all of them together none
    sums = [int(count * first - step * count * (count - 1) / 2) for count in range(layers + 1)]
    return [protected + after - before for before, after in pairwise(sums)]
