"""Plain English with no numbers in it, to bury facts in, and dice that fall alike on every Python."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

WHEN = (
    "In the morning", "Before lunch", "Late in the evening", "After the rain", "At the end of the week",
    "On quiet days", "During the holidays", "When the wind dropped", "Early in spring", "Shortly before dark",
    "Every now and then", "As usual", "Once the shops had closed", "In the warm months", "Without any hurry",
    "On the way home",
)  # fmt: skip
WHO = (
    "the old gardener", "a baker from the valley", "the school choir", "my neighbour", "the ferry captain",
    "two young painters", "the librarian", "a tired postman", "the twins", "their grandmother", "the village doctor",
    "an apprentice carpenter", "the night watchman", "some of the students", "the beekeeper", "a travelling musician",
)  # fmt: skip
DID = (
    "watered the roses", "read an old newspaper", "carried baskets of apples", "talked about the weather",
    "repaired a wooden fence", "listened to the bells", "drank tea with honey", "looked for a lost glove",
    "swept the fallen leaves", "wrote a long letter", "watched the boats come in", "fed the geese",
    "hung up the washing", "sharpened the kitchen knives", "practised a slow waltz", "sorted buttons by size",
)  # fmt: skip
WHERE = (
    "behind the chapel", "near the stone bridge", "in the small courtyard", "beside the river", "under the lime trees",
    "at the edge of the meadow", "in front of the town hall", "by the kitchen window", "on the narrow balcony",
    "along the harbour wall", "next to the mill", "outside the station", "at the foot of the hill",
    "in the empty classroom", "across from the market", "among the tall ferns",
)  # fmt: skip
SHORT = ("All was quiet.", "Nobody spoke.", "It rained.", "Yes.")
NAMES = (
    "Anna Peter Maria David Laura Simon Emma Oscar Clara Henry Julia Martin Alice Victor Sarah Felix Nora Hugo Rosa "
    "Paul Irene Thomas Helen George Diana Frank Louise Robert Grace Walter Alan Bruno Carmen Doris Edgar Fiona Gustav "
    "Hannah Ivan Jacob Kevin Linda Monica Nathan Olivia Patrick Quentin Rachel Steven Teresa Ursula Vincent William "
    "Xavier Yvonne Zoe"
)
FAMILY_NAMES = "Baker Fisher Hill Marsh Stone Wood Young Miller Parker Turner Walker Cook Ford Lake Moss"


class Dice:
    """Random choices made of `random.random()` alone, the one method whose sequence Python promises to keep."""

    def __init__(self, seed: str):
        self._random = random.Random(seed).random

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit - 1."""
        return int(self._random() * limit)

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """All of the items in random order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(len(left))]

    def numbers(self, digits: int, count: int, besides: Sequence[str] = ()) -> list[str]:
        """`count` different numbers of so many digits, none of them in `besides`."""
        found: dict[str, None] = {}
        while len(found) < count:
            number = str(10 ** (digits - 1) + self.below(9 * 10 ** (digits - 1)))
            if number not in besides:
                found[number] = None
        return list(found)


def sentence(dice: Dice) -> str:
    """One of 65,536 sentences of about 15 tokens."""
    return f"{dice.pick(WHEN)}, {dice.pick(WHO)} {dice.pick(DID)} {dice.pick(WHERE)}."


def people(dice: Dice) -> list[str]:
    """Names in random order: first names alone come first, then first and family names."""
    names = NAMES.split()
    full = [f"{name} {family}" for name in names for family in FAMILY_NAMES.split()]
    return dice.shuffled(names) + dice.shuffled(full)


def fill(room: int, long: Callable[[], str | None], short: Sequence[str], cost: Callable[[str], int]) -> list[str]:
    """Texts that cost at most `room` tokens together, and so much that none of the short ones would still fit.

    `long()` gives the next text, or None at the end of its stock; `short` ones, in random places, close the last gap.
    """
    chosen: list[str] = []
    while (text := long()) is not None and cost(text) <= room:
        chosen.append(text)
        room -= cost(text)
    while fitting := [text for text in short if cost(text) <= room]:
        chosen.append(max(fitting, key=cost))
        room -= cost(chosen[-1])
    return chosen
