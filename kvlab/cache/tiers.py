"""A store of blocks in two tiers: CPU memory, and behind it files; the least recently used move down, then out."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from kvlab.cache.block_files import BlockFiles


class StoreWarning(UserWarning):
    """A stored block is missing, damaged or somebody else's, or could not be written; it counts as not stored."""


@dataclass
class _Entry:
    about: Mapping[str, str]
    tensors: list[Tensor]
    in_file: bool

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)


class TieredStore:
    """Tensors under keys; see BlockFiles for what keys and `about` are.

    What is stored here may be gone at any time: a file that fails is a miss and a warning, never an error, and so is
    a disk that is full. So whoever stores here must be able to compute again what it stores.

    ram_bytes  most bytes of tensors in CPU memory
    files      what is behind it; None: what leaves memory is gone
    """

    def __init__(self, ram_bytes: float = math.inf, files: BlockFiles | None = None):
        if not ram_bytes >= 0:
            raise ValueError(f"ram_bytes must be at least 0, got {ram_bytes}")
        self.ram_bytes, self.files = ram_bytes, files
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Bytes in CPU memory."""
        return self._used

    def has(self, key: str) -> bool:
        """Whether a block seems to be there; only `get` finds out."""
        if key in self._entries or self.files is None:
            return key in self._entries
        with _only_a_miss():
            return self.files.has(key)
        return False

    def get(self, key: str, about: Mapping[str, str]) -> list[Tensor] | None:
        """The tensors under a key, not to be written to; None if they are not there, or about something else."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry.tensors if entry.about == about else None
        tensors = None
        if self.files is not None:
            with _only_a_miss():
                tensors = self.files.get(key, about)
        if tensors is not None:
            self._keep(key, _Entry(about, tensors, in_file=True))
        return tensors

    def put(self, key: str, about: Mapping[str, str], tensors: Sequence[Tensor]) -> None:
        """Store tensors, which belong to the store from then on."""
        self._keep(key, _Entry(dict(about), list(tensors), in_file=False))

    def remove(self, key: str) -> None:
        """Forget a block, in both tiers."""
        self._forget(key)
        if self.files is not None:
            with _only_a_miss():
                self.files.remove(key)

    def flush(self) -> None:
        """Write to files what only memory has, so that it outlives this process."""
        for key, entry in self._entries.items():
            self._write(key, entry)

    def _keep(self, key: str, entry: _Entry) -> None:
        self._forget(key)
        self._entries[key] = entry
        self._used += entry.nbytes
        while self._used > self.ram_bytes:
            oldest = next(iter(self._entries))
            self._write(oldest, self._forget(oldest))

    def _forget(self, key: str) -> _Entry | None:
        entry = self._entries.pop(key, None)
        self._used -= 0 if entry is None else entry.nbytes
        return entry

    def _write(self, key: str, entry: _Entry) -> None:
        if self.files is None:
            return
        with _only_a_miss():
            if not (entry.in_file and self.files.has(key)):  # it may have been evicted there
                self.files.put(key, entry.about, entry.tensors)
                entry.in_file = True


@contextmanager
def _only_a_miss() -> Iterator[None]:
    """Whatever the file system says, nobody who is served depends on it."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{error.strerror or error}: a block counts as not stored", StoreWarning, stacklevel=3)
