"""The text that tiny models learn: what `help()` says about Python's own language, which every Python ships."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SHARED = 60  # characters in a row that a training paragraph may not have in common with the held-out part
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to be judged on (N,), int64, and what a result must say of them."""

    train: Tensor
    held_out: Tensor
    about: Mapping[str, str | int]

    @classmethod
    def of(cls, train: str, held_out: str, about: Mapping[str, str | int] | None = None) -> Corpus:
        """A corpus of two texts; its sizes are added to `about`."""
        first, second = as_bytes(train), as_bytes(held_out)
        sizes = {"train_bytes": len(first), "held_out_bytes": len(second)}
        return cls(first, second, {**(about or {}), **sizes})


def as_bytes(text: str) -> Tensor:
    """The UTF-8 bytes of a text, which are its token ids (N,)."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def python_topics() -> Corpus:
    """`pydoc_data.topics` of the running Python: 466 kB of English in 3.11, other text in other versions.

    Held out are the last topics in the alphabet, as many as fit in a tenth of the bytes.
    """
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    count = last_that_fit(texts, HELD_OUT_SHARE)
    train, held_out = texts[:-count], texts[-count:]
    whole = "\n\n".join(texts).encode()
    about = {
        "source": "pydoc_data.topics", "python": platform.python_version(), "sha256": hashlib.sha256(whole).hexdigest(),
        "bytes": len(whole), "topics": len(texts), "held_out_topics": count,
    }  # fmt: skip
    return Corpus.of("\n\n".join(without_shared(train, held_out)), "\n\n".join(held_out), about)


def last_that_fit(texts: list[str], share: float) -> int:
    """How many texts at the end hold at most `share` of all bytes; at least one."""
    sizes = [len(text.encode()) for text in texts]
    counts = [n for n in range(1, len(sizes)) if sum(sizes[-n:]) <= share * sum(sizes)]
    return max(counts, default=1)


def without_shared(train: list[str], held_out: list[str]) -> list[str]:
    """The training texts without paragraphs that the held-out texts repeat.

    A fifth of these topics is written twice ("compound" holds all of "while" and "with"): without this the
    held-out part would reward learning by heart. Line breaks do not count, since copies are wrapped differently.
    """
    seen = {piece for text in held_out for paragraph in text.split("\n\n") for piece in windows(paragraph)}
    return [
        "\n\n".join(paragraph for paragraph in text.split("\n\n") if seen.isdisjoint(windows(paragraph)))
        for text in train
    ]


def windows(paragraph: str) -> list[str]:
    """Every run of SHARED characters, with white space made one blank."""
    plain = " ".join(paragraph.split())
    return [plain[i : i + SHARED] for i in range(len(plain) - SHARED + 1)]
