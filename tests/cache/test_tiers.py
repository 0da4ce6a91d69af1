"""Two tiers against two dictionaries, and a disk that fails whenever it likes."""

import os
import tempfile
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlab.cache.block_files import BLOCK, BlockFiles, sealed
from kvlab.cache.tiers import StoreWarning, TieredStore
from tests.cache.test_block_files import ABOUT, block, key, same

SIZES = (4, 40, 130)  # one is larger than the memory, and fits on the disk
RAM = 3 * sum(x.nbytes for x in block(size=40))
DISK = 4 * len(sealed(ABOUT, block(size=40)))
numbers, sizes = st.integers(0, 6), st.sampled_from(SIZES)


class Tiers(RuleBasedStateMachine):
    """The model: what each tier holds, least recently used first. RAM entries remember whether a file has them."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.ram: OrderedDict[int, tuple[int, bool]] = OrderedDict()  # number -> size of the block, in a file
        self.disk: OrderedDict[int, int] = OrderedDict()
        self.broken: set[int] = set()  # numbers whose files are damaged
        self.open()

    def open(self):
        self.store = TieredStore(RAM, BlockFiles(self.folder.name, DISK))

    def teardown(self):
        self.folder.cleanup()

    def keep(self, number, size, in_file):
        self.ram.pop(number, None)
        self.ram[number] = (size, in_file)
        while sum(sum(x.nbytes for x in block(size=size)) for size, _ in self.ram.values()) > RAM:
            oldest, (size, in_file) = self.ram.popitem(last=False)
            if not in_file or oldest not in self.disk:
                self.spill(oldest, size)

    def spill(self, number, size):
        need = len(sealed(ABOUT, block(size=size)))
        if need > DISK:
            return
        self.disk.pop(number, None)
        while sum(len(sealed(ABOUT, block(size=size))) for size in self.disk.values()) + need > DISK:
            self.broken.discard(self.disk.popitem(last=False)[0])
        self.disk[number] = size
        self.broken.discard(number)

    @rule(number=numbers, size=sizes)
    def put(self, number, size):
        self.store.put(key(number), ABOUT, block(number, size))
        self.keep(number, size, in_file=False)

    @rule(number=numbers)
    def get(self, number):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self.store.get(key(number), ABOUT)
        if number in self.ram:
            self.ram.move_to_end(number)
            assert same(found, block(number, self.ram[number][0])) and not caught
        elif number in self.disk and number not in self.broken:
            self.disk.move_to_end(number)
            assert same(found, block(number, self.disk[number])) and not caught
            self.keep(number, self.disk[number], in_file=True)
        else:
            assert found is None and len(caught) == 1 and key(number) in str(caught[0].message)
            self.disk.pop(number, None)
            self.broken.discard(number)

    @rule(number=numbers)
    def get_something_else(self, number):
        """Only from memory: a file about something else is removed, and that has a test of its own."""
        if number in self.ram:
            assert self.store.get(key(number), ABOUT | {"tokens": "[1, 2, 4]"}) is None
            self.ram.move_to_end(number)

    @rule(number=numbers)
    def remove(self, number):
        self.store.remove(key(number))
        self.ram.pop(number, None)
        self.disk.pop(number, None)
        self.broken.discard(number)

    @rule()
    def flush(self):
        self.store.flush()
        for number, (size, in_file) in list(self.ram.items()):
            if not in_file or number not in self.disk:
                self.spill(number, size)
                self.ram[number] = (size, True)

    @rule()
    def restart(self):
        """A process that is killed: what was only in memory is gone."""
        self.open()
        self.ram.clear()

    @precondition(lambda self: self.disk)
    @rule(data=st.data())
    def damage(self, data):
        number = data.draw(st.sampled_from(sorted(self.disk)))
        if number in self.broken:  # two flips may undo each other
            return
        path = Path(self.folder.name) / (key(number) + BLOCK)
        used, content = path.stat().st_mtime_ns, bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 16
        path.write_bytes(content)
        os.utime(path, ns=(used, used))
        self.broken.add(number)

    @invariant()
    def the_store_holds_what_the_model_holds(self):
        expected = set(self.ram) | set(self.disk)
        assert {number for number in range(7) if self.store.has(key(number))} == expected
        assert self.store.used_bytes == sum(sum(x.nbytes for x in block(size=s)) for s, _ in self.ram.values()) <= RAM
        assert self.store.files.used_bytes() <= DISK


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_memory_alone():
    store = TieredStore(RAM)
    for number in range(4):
        store.put(key(number), ABOUT, block(number, 40))
    assert [store.has(key(number)) for number in range(4)] == [False, True, True, True]
    assert store.get(key(0), ABOUT) is None
    store.flush()
    store.remove(key(1))
    store.remove(key(1))
    assert not store.has(key(1)) and store.used_bytes == RAM * 2 // 3
    with pytest.raises(ValueError, match="at least 0, got -1"):
        TieredStore(-1)


def test_what_leaves_memory_is_on_the_disk_and_comes_back(tmp_path):
    store = TieredStore(RAM, BlockFiles(tmp_path, 10**9))
    for number in range(5):
        store.put(key(number), ABOUT, block(number, 40))
    assert len(list(tmp_path.iterdir())) == 2
    assert all(same(store.get(key(number), ABOUT), block(number, 40)) for number in range(5))
    store.flush()
    later = TieredStore(RAM, BlockFiles(tmp_path, 10**9))
    assert all(same(later.get(key(number), ABOUT), block(number, 40)) for number in range(5))


class FailingFiles(BlockFiles):
    """A disk that went away after the directory was opened."""

    def _fail(self, *arguments):
        raise OSError(5, "the disk is gone")

    has = get = put = remove = _fail


def test_a_disk_that_fails_is_a_miss_and_a_warning(tmp_path):
    store = TieredStore(0, FailingFiles(tmp_path, 10**9))
    for action, answer in (
        (lambda: store.put(key(1), ABOUT, block()), None), (lambda: store.has(key(1)), False),
        (lambda: store.get(key(1), ABOUT), None), (lambda: store.remove(key(1)), None),
    ):  # fmt: skip
        with pytest.warns(StoreWarning, match="the disk is gone: a block counts as not stored"):
            assert action() is answer
    assert store.used_bytes == 0


def test_a_full_disk_keeps_memory_as_it_was(tmp_path):
    store = TieredStore(RAM, BlockFiles(tmp_path, 10))
    store.put(key(1), ABOUT, block(1, 40))
    with pytest.warns(StoreWarning, match="the budget is 10: a block counts as not stored"):
        store.flush()
    assert same(store.get(key(1), ABOUT), block(1, 40)) and list(tmp_path.iterdir()) == []


def test_what_was_read_last_stays_in_memory():
    store = TieredStore(RAM)  # three blocks of size 40
    for number in range(3):
        store.put(key(number), ABOUT, block(number, 40))
    store.get(key(0), ABOUT)
    store.put(key(3), ABOUT, block(3, 40))
    assert [store.has(key(number)) for number in range(4)] == [True, False, True, True]


def test_a_block_that_came_from_a_file_is_written_again_only_if_the_file_is_gone(tmp_path):
    files = BlockFiles(tmp_path, DISK)
    files.put(key(0), ABOUT, block(0, 40))
    path, written = tmp_path / f"{key(0)}{BLOCK}", []
    store, put = TieredStore(RAM, files), files.put
    files.put = lambda *given: (written.append(given[0]), put(*given))
    store.get(key(0), ABOUT)
    store.flush()
    assert written == []
    path.unlink()  # another process made room
    store.flush()
    assert written == [key(0)] and same(files.get(key(0), ABOUT), block(0, 40))
