"""Blocks in files: whole or a miss, whatever happens to the file, the disk or the process that writes it."""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from kvlab.cache import block_files
from kvlab.cache.block_files import BLOCK, PARTIAL, BlockFiles, sealed
from kvlab.cache.paged import PagedCache
from kvlab.cache.tiers import StoreWarning

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"identity": "a model, bf16", "tokens": "[1, 2, 3]"}
LARGE = 10**9


def key(number: int) -> str:
    return f"{number:064x}"


def block(number: int = 0, size: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(2, 3, size, generator=generator), torch.randn(2, 1, size, generator=generator).bfloat16()]


def same(ours, theirs) -> bool:
    return len(ours) == len(theirs) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(ours, theirs, strict=True)
    )  # fmt: skip


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("kv_dtype", [None, "bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize("width, values", [(8, True), (16, False)], ids=["keys and values", "latent"])
def test_blocks_of_every_layout_come_back_bit_by_bit(tmp_path, kv_dtype, width, values):
    """A NaN's payload and a minus zero included; MLA's rotated columns lie apart."""
    layer = PagedCache(6, 4, kv_dtype=kv_dtype, rope_width=0 if values else 4)
    like = torch.zeros(1, 2, 1, width)
    layer.allocate(like, like if values else None)
    for x in layer.tensors:
        x.view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    stored = layer.read_blocks([4, 2])
    files = BlockFiles(tmp_path, LARGE)
    files.put(key(1), ABOUT, stored)
    found = BlockFiles(tmp_path, LARGE).get(key(1), ABOUT)
    assert same(stored, found)
    layer.write_blocks([0, 5], found)
    assert same(stored, layer.read_blocks([0, 5]))


def test_packed_codes_come_back_bit_by_bit(tmp_path):
    from kvlab.codecs import Codec
    from kvlab.quantization import encode

    coded = encode(torch.randn(1, 2, 6, 32), Codec("affine", 4, 16))
    parts = [coded.codes, coded.scales, coded.minima]
    files = BlockFiles(tmp_path, LARGE)
    files.put(key(1), ABOUT, parts)
    assert same(parts, files.get(key(1), ABOUT))


def assert_a_miss(files: BlockFiles, number: int = 1, words: str = "", about=ABOUT) -> None:
    with pytest.warns(StoreWarning, match=f"{key(number)}{BLOCK}.*{words}.*counts as not stored"):
        assert files.get(key(number), about) is None


def header_end(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


CUTS = {
    "empty": lambda end, size: 0, "in the length": lambda end, size: 5, "behind the length": lambda end, size: 8,
    "in the header": lambda end, size: end // 2, "before the header's end": lambda end, size: end - 1,
    "behind the header": lambda end, size: end, "in the payload": lambda end, size: (end + size) // 2,
    "before the last byte": lambda end, size: size - 1,
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_truncated_file_is_a_miss_and_can_be_written_again(tmp_path, cut):
    files = BlockFiles(tmp_path, LARGE)
    files.put(key(1), ABOUT, block())
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    os.truncate(path, cut(header_end(content), len(content)))
    assert_a_miss(files)
    assert not files.has(key(1)) and names(tmp_path) == []
    files.put(key(1), ABOUT, block())
    assert same(block(), files.get(key(1), ABOUT))


@pytest.mark.parametrize("more", [b"\0", b"{}" * 500])
def test_a_file_that_grew_is_a_miss(tmp_path, more):
    files = BlockFiles(tmp_path, LARGE)
    files.put(key(1), ABOUT, block())
    with open(next(tmp_path.iterdir()), "ab") as file:
        file.write(more)
    assert_a_miss(files, words="checksum")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_a_miss(data):
    """In the length, the header with its shapes, types and checksum, or the payload."""
    content = bytearray(sealed(ABOUT, block()))
    place = data.draw(st.one_of(st.integers(0, header_end(content) - 1), st.integers(0, len(content) - 1)))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        files = BlockFiles(folder, LARGE)
        (Path(folder) / (key(1) + BLOCK)).write_bytes(content)
        assert_a_miss(files, words="checksum")


@pytest.mark.parametrize("field", ["identity", "tokens"])
def test_a_foreign_file_is_a_miss(tmp_path, field):
    """Whole, and under the right name: but of another model, or other tokens whose hash is the same."""
    files = BlockFiles(tmp_path, LARGE)
    files.put(key(1), ABOUT, block())
    assert_a_miss(files, words=f"is about another {field}", about=ABOUT | {field: "b"})
    files.put(key(2), ABOUT, block())
    os.rename(tmp_path / (key(2) + BLOCK), tmp_path / (key(1) + BLOCK))
    assert same(block(), files.get(key(1), ABOUT))  # a name alone proves nothing, what a file is about does


@pytest.mark.parametrize("content", [b"garbage", b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}"])
def test_files_that_are_none_of_ours(tmp_path, content):
    files = BlockFiles(tmp_path, LARGE)
    (tmp_path / (key(1) + BLOCK)).write_bytes(content)
    (tmp_path / "notes.txt").write_bytes(content)
    assert_a_miss(files)
    assert names(tmp_path) == ["notes.txt"]


def test_a_missing_file_is_a_miss(tmp_path):
    assert_a_miss(BlockFiles(tmp_path, LARGE), words="is missing")


def test_the_least_recently_used_go_first_and_the_budget_is_kept(tmp_path):
    size = len(sealed(ABOUT, block()))
    files = BlockFiles(tmp_path, 3 * size)
    (tmp_path / "notes.txt").write_bytes(bytes(5 * size))
    for number in range(3):
        files.put(key(number), ABOUT, block(number))
    files.get(key(0), ABOUT)
    files.put(key(3), ABOUT, block(3))
    assert [files.has(key(number)) for number in range(4)] == [True, False, True, True]
    files.put(key(3), ABOUT, block(3))  # again: it needs no more room than it has
    assert [files.has(key(number)) for number in range(4)] == [True, False, True, True]
    assert files.used_bytes() == 3 * size and (tmp_path / "notes.txt").exists()
    again = BlockFiles(tmp_path, 2 * size)  # another process, with less room, knows who was used when
    again.put(key(4), ABOUT, block(4))
    assert [files.has(key(number)) for number in range(5)] == [False, False, False, True, True]


def test_a_block_larger_than_the_budget_is_refused_and_evicts_nobody(tmp_path):
    files = BlockFiles(tmp_path, len(sealed(ABOUT, block())))
    files.put(key(1), ABOUT, block())
    with pytest.raises(OSError, match=f"{key(2)}.* the budget is {files.budget_bytes}"):
        files.put(key(2), ABOUT, block(size=500))
    assert same(block(), files.get(key(1), ABOUT))


def test_options_that_cannot_work(tmp_path):
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        BlockFiles(tmp_path, 0)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        BlockFiles(tmp_path, 1).put("../x", {}, [])


@contextmanager
def nobody():
    """File permissions mean nothing to root, so be somebody else for a while."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/blocks cannot hold blocks \(Not a directory\): name another directory"):
        BlockFiles(tmp_path / "file" / "blocks", LARGE)
    os.chmod(tmp_path, 0o555)
    with nobody(), pytest.raises(OSError, match=r"cannot hold blocks \(Permission denied\)"):
        BlockFiles(tmp_path, LARGE)


def test_a_directory_that_is_locked_later_changes_nothing():
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: its parents let nobody else in
        files = BlockFiles(folder, LARGE)
        files.put(key(1), ABOUT, block())
        os.chmod(folder, 0o555)
        with nobody(), pytest.raises(OSError, match=f"{key(2)}{BLOCK} could not be written: Permission denied"):
            files.put(key(2), ABOUT, block(2))
        assert names(Path(folder)) == [key(1) + BLOCK] and same(block(), files.get(key(1), ABOUT))
        os.chmod(folder, 0o755)


def test_a_damaged_file_that_cannot_be_removed_is_a_miss():
    with tempfile.TemporaryDirectory() as folder:
        files = BlockFiles(folder, LARGE)
        files.put(key(1), ABOUT, block())
        os.truncate(files._path(key(1)), 100)
        os.chmod(folder, 0o555)
        with nobody():
            assert_a_miss(files, words=r"cannot be removed \(Permission denied\)")
        os.chmod(folder, 0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_what_another_user_left_is_not_swept_and_stops_nobody():
    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / f".left{PARTIAL}"
        partial.touch(mode=0o600)
        os.chmod(folder, 0o1777)
        with nobody():
            files = BlockFiles(folder, LARGE)
            files.put(key(1), ABOUT, block())
            assert same(block(), files.get(key(1), ABOUT))
        assert partial.exists()


def test_a_clock_that_is_set_back_changes_nobodys_turn(tmp_path, monkeypatch):
    size = len(sealed(ABOUT, block()))
    for number in range(2):
        BlockFiles(tmp_path, 3 * size).put(key(number), ABOUT, block(number))
    monkeypatch.setattr(block_files.time, "time_ns", lambda: 10**9)
    files = BlockFiles(tmp_path, 3 * size)
    files.get(key(0), ABOUT)
    for number in range(2, 4):
        files.put(key(number), ABOUT, block(number))
    assert [files.has(key(number)) for number in range(4)] == [True, False, True, True]


def test_a_file_that_is_cut_to_nothing_while_it_is_read(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, LARGE)
    files.put(key(1), ABOUT, block())
    (path,) = tmp_path.iterdir()
    opened = block_files.mmap.mmap

    def cut(*arguments, **options):
        os.truncate(path, 0)
        return opened(*arguments, **options)

    monkeypatch.setattr(block_files.mmap, "mmap", cut)
    assert_a_miss(files, words="cannot be read")


def test_a_whole_file_without_metadata_is_about_something_else(tmp_path):
    """Its checksum holds, in the middle of a tensor, and nothing says what it is about."""
    content = bytearray(save({"a": torch.zeros(30)}))
    content[-100:] = b'"checksum":"' + block_files.BLANK + b'"' + bytes(23)
    place = content.index(block_files.BLANK)
    content[place : place + 64] = hashlib.sha256(content).hexdigest().encode()
    (tmp_path / (key(1) + BLOCK)).write_bytes(content)
    assert_a_miss(BlockFiles(tmp_path, LARGE), words="is about another identity")


def python(code: str, *arguments: object, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from tests.cache.test_block_files import *\n" + code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


WRITE_UNTIL_STOPPED = """
import kvlab.cache.block_files as module
def fsync(handle):
    os.truncate(handle, os.fstat(handle).st_size // 2)  # as if only half had arrived
    print("writing", flush=True)
    signal.pause()
files = BlockFiles(sys.argv[1], LARGE)
files.put(key(1), ABOUT, block())
module.os = type("os", (), {**vars(os), "fsync": staticmethod(fsync)})
files.put(key(2), ABOUT, block(2))
"""


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_trusted(tmp_path):
    with python(WRITE_UNTIL_STOPPED, tmp_path) as child:
        assert child.stdout.readline() == "writing\n"
        partial = next(path for path in tmp_path.iterdir() if path.name.endswith(PARTIAL))
        ours = BlockFiles(tmp_path, LARGE)
        assert partial.exists() and not ours.has(key(2))  # its writer lives: this is not left over
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL and partial.exists()
    assert not ours.has(key(2)) and same(block(), ours.get(key(1), ABOUT))
    BlockFiles(tmp_path, LARGE)
    assert names(tmp_path) == [key(1) + BLOCK]


def fill(directory) -> None:
    """Write until the disk is full, and see that nothing but whole blocks is left."""
    files, written = BlockFiles(directory, LARGE), 0
    files.put(key(0), ABOUT, block())
    with pytest.raises(OSError, match=f"{BLOCK} could not be written: (No space left on device|File too large)"):
        for number in range(1, 100):
            files.put(key(number), ABOUT, block(number, size=4000 * number))
            written = number
    assert names(Path(directory)) == [key(number) + BLOCK for number in range(written + 1)]
    assert all(files.get(key(number), ABOUT) is not None for number in range(written + 1))
    files.put(key(100), ABOUT, block())
    print("full", written)


def test_a_full_disk_refuses_one_block_and_keeps_the_others(tmp_path):
    """A limit on the size of files fails where a full disk does: in the middle of a write."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\nfill(sys.argv[1])"
    with python(limit, tmp_path) as child:
        assert child.stdout.read().startswith("full ")
    assert child.returncode == 0


def test_a_file_system_without_room(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody mount a small file system")
    try:
        fill(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("moment", ["damage", "safe_open", "_touch"])
def test_a_file_that_another_process_evicts_while_it_is_read(tmp_path, monkeypatch, moment):
    """Before its checksum is read or before its tensors are: a miss. Behind them: it was read."""
    files = BlockFiles(tmp_path, LARGE)
    files.put(key(1), ABOUT, block())
    owner = files if moment == "_touch" else block_files
    go_on = getattr(owner, moment)

    def evicted(path, *rest, **named):
        path.unlink()
        return go_on(path, *rest, **named)

    monkeypatch.setattr(owner, moment, evicted)
    if moment == "_touch":
        assert same(block(), files.get(key(1), ABOUT))
    else:
        assert_a_miss(files, words="is missing")


def test_a_file_that_another_process_evicts_while_it_is_opened(tmp_path, monkeypatch):
    """safetensors opens a file twice, and what it raises in between is PyTorch's."""
    files = BlockFiles(tmp_path, LARGE)
    files.put(key(1), ABOUT, block())
    from_file = torch.UntypedStorage.from_file

    def evicted(path, *rest, **named):
        Path(path).unlink()
        return from_file(path, *rest, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", evicted)
    assert_a_miss(files, words="is missing")


SHARE = """
import random, warnings
warnings.simplefilter("ignore")
files, dice, found = BlockFiles(sys.argv[1], int(sys.argv[2])), random.Random(int(sys.argv[3])), 0
for _ in range(150):
    number = dice.randrange(8)
    if dice.random() < 0.5:
        files.put(key(number), ABOUT, block(number))
    elif files.has(key(number)):
        tensors = files.get(key(number), ABOUT)
        assert tensors is None or same(tensors, block(number))
        found += tensors is not None
    if dice.random() < 0.05:
        files = BlockFiles(sys.argv[1], int(sys.argv[2]))  # sweeps while the other one writes
print(found)
"""


def test_two_processes_share_a_directory(tmp_path):
    """Room for five of eight blocks: each evicts what the other wrote, and nobody ever reads half of anything."""
    size = len(sealed(ABOUT, block()))
    children = [python(SHARE, tmp_path, 5 * size, seed) for seed in range(2)]
    for child in children:
        with child:
            assert int(child.stdout.read()) > 10
        assert child.returncode == 0
    files = BlockFiles(tmp_path, 5 * size)
    assert all(name.endswith(BLOCK) for name in names(tmp_path)) and 0 < files.used_bytes() <= 6 * size
