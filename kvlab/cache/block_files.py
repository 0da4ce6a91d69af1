"""Blocks in files: one memory-mapped safetensors file each, and nothing in it is believed before its checksum is.

Files are only ever written whole, under another name, and then renamed. So a process that is killed leaves no file
that looks like a block, and processes that share a directory can only find each other's blocks, or miss them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvlab.cache.tiers import StoreWarning

KEY, BLOCK, PARTIAL = re.compile("[0-9a-f]{64}"), ".block.safetensors", ".partial"
BLANK = b"0" * 64  # what stands for the checksum while it is computed
CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')


class BlockFiles:
    """Tensors under keys, in the files of one directory, least recently used out first.

    keys    64 hexadecimal digits, which name the content: whoever writes a key again writes the same
    about   what the content is of, strings under names; a file that is about something else is a miss

    `budget_bytes` is kept by all processes together, for the files are the only record: the time of a file's last
    change says when it was last used.
    """

    def __init__(self, directory: str | Path, budget_bytes: int):
        """Make the directory if need be. Raises OSError where it cannot be written."""
        if not budget_bytes >= 1:
            raise ValueError(f"a directory of blocks needs a budget of at least one byte, got {budget_bytes}")
        self.directory, self.budget_bytes = Path(directory), budget_bytes
        self._latest = 0  # ns
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._blocks()  # to know how late it is for those who share them
            handle, probe = self._open_new("probe")
            os.close(handle)
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise OSError(error.errno, f"{directory} cannot hold blocks ({error.strerror}): name another directory") \
                from None  # fmt: skip

    def has(self, key: str) -> bool:
        """Whether there is a file; only `get` knows whether it is any good."""
        return self._path(key).exists()

    def get(self, key: str, about: Mapping[str, str]) -> list[Tensor] | None:
        """The tensors under a key; None, and a warning that names the file, where it is not there, whole and ours."""
        path = self._path(key)
        try:
            wrong = damage(path)
            if wrong is None:
                with safe_open(path, framework="pt") as file:
                    found = file.metadata() or {}
                    tensors = [file.get_tensor(name).clone() for name in sorted(file.keys())]
                with suppress(OSError):  # another process made room, or the file is somebody else's: it was read
                    self._touch(path)
                wrong = _difference(found, about)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:  # the last two: it changed while opened
            return _miss(path, f"cannot be read ({error})" if os.path.exists(path) else "is missing")
        if wrong is None:
            return tensors
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            return _miss(path, f"{wrong}, and cannot be removed ({error.strerror})")
        return _miss(path, f"{wrong}, and was removed")

    def put(self, key: str, about: Mapping[str, str], tensors: Sequence[Tensor]) -> None:
        """Write a block, at the cost of those that nobody used for longest.

        Raises OSError, with nothing written, where there is no room or no permission.
        """
        path, content = self._path(key), sealed(about, tensors)
        self._make_room(path, len(content))
        try:
            self._write(path, content)
        except OSError as error:
            raise OSError(error.errno, f"{path} could not be written: {error.strerror}") from None

    def remove(self, key: str) -> None:
        """Forget a block; nothing happens where there is none."""
        self._path(key).unlink(missing_ok=True)

    def used_bytes(self) -> int:
        return sum(size for _, size, _ in self._blocks())

    def _path(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise ValueError(f"a key is 64 hexadecimal digits, got {key!r}")
        return self.directory / (key + BLOCK)

    def _make_room(self, path: Path, size: int) -> None:
        if size > self.budget_bytes:
            raise OSError(errno.ENOSPC, f"{path} needs {size} bytes, the budget is {self.budget_bytes}")
        others = [block for block in sorted(self._blocks()) if block[2] != path]
        left = self.budget_bytes - size - sum(used for _, used, _ in others)
        for _, used, other in others:
            if left >= 0:
                return
            other.unlink(missing_ok=True)  # whoever has it open still reads all of it
            left += used

    def _blocks(self) -> list[tuple[int, int, Path]]:
        """When each block was last used, and its bytes."""
        found = []
        for entry in os.scandir(self.directory):
            if entry.name.endswith(BLOCK) and KEY.fullmatch(entry.name.removesuffix(BLOCK)):
                try:
                    status = entry.stat()
                except FileNotFoundError:  # another process made room
                    continue
                found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        self._latest = max([self._latest, *(used for used, _, _ in found)])  # clocks differ, and are set back
        return found

    def _write(self, path: Path, content: bytes) -> None:
        handle, partial = self._open_new(path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(handle)  # else a power cut may leave the new name on an empty file
                self._touch(partial)
                os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_directory(self.directory)

    def _open_new(self, name: str) -> tuple[int, Path]:
        """A new file that is locked as long as this process lives and writes: how others know it is not left over."""
        while True:
            partial = self.directory / f".{name}.{secrets.token_hex(8)}{PARTIAL}"
            handle = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if os.fstat(handle).st_nlink:  # else another process swept it away before it was locked
                    return handle, partial
            except BaseException:
                os.close(handle)
                partial.unlink(missing_ok=True)
                raise
            os.close(handle)

    def _sweep(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        for partial in self.directory.glob(f".*{PARTIAL}"):
            try:
                with open(partial, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    partial.unlink(missing_ok=True)
            except OSError:  # somebody writes it, or has finished, or it is another user's
                continue

    def _touch(self, path: Path) -> None:
        self._latest = max(time.time_ns(), self._latest + 1)  # a file system's own clock ticks every few milliseconds
        os.utime(path, ns=(self._latest, self._latest))


def sealed(about: Mapping[str, str], tensors: Sequence[Tensor]) -> bytes:
    """A safetensors file whose metadata hold `about`, and the SHA-256 of the file with zeros in place of it."""
    named = {f"{index:04}": x.contiguous() for index, x in enumerate(tensors)}
    content = bytearray(save(named, {**about, "checksum": BLANK.decode()}))
    place = CHECKSUM.search(content).start(1)
    content[place : place + len(BLANK)] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def damage(path: Path) -> str | None:
    """Say what is wrong with a file, None if every bit is as it was written. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return "is empty"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
            found = CHECKSUM.search(mapped)
            if found is None:
                return "has no checksum"
            (first, last), written = found.span(1), found[1]
            del found  # it holds on to the map
            digest = hashlib.sha256(content[:first])
            digest.update(BLANK)
            digest.update(content[last:])
            return None if digest.hexdigest().encode() == written else "does not match its checksum"


def _difference(found: Mapping[str, str], about: Mapping[str, str]) -> str | None:
    names = [name for name in sorted({*found, *about} - {"checksum"}) if found.get(name) != about.get(name)]
    return f"is about another {names[0]}" if names else None


def _miss(path: Path, what: str) -> None:
    warnings.warn(f"{path} {what}: its block counts as not stored", StoreWarning, stacklevel=3)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
