"""An engine over a store of blocks: the same answers, whatever the store has lost, and prefixes that outlive it."""

import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache.block_files import BlockFiles
from kvlab.cache.tiers import StoreWarning, TieredStore
from kvlab.engine.block_mover import BlockMover
from kvlab.engine.engine import Engine
from kvlab.engine.prefix_cache import next_key, root_key
from kvlab.engine.request import NOBODY, Identity, Request
from kvlab.model.transformer import Transformer
from tests.engine.serving import MODELS, Failing, alone, check_answers, check_nothing_is_lost, some_requests
from tests.harness import tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]
LARGE = 10**9
PROMPT = [(7 * i) % 61 for i in range(21)]  # five full blocks of four, and one token


class FlakyFiles(BlockFiles):
    """A disk that fails at any moment, and sometimes forgets."""

    def __init__(self, directory, seed: int):
        super().__init__(directory, LARGE)
        self.dice = random.Random(seed)

    def _risk(self):
        if self.dice.random() < 0.3:
            raise OSError(5, "the disk had a bad moment")

    def has(self, key):
        self._risk()
        return super().has(key)

    def get(self, key, about):
        self._risk()
        if self.dice.random() < 0.2:
            super().remove(key)
        return super().get(key, about)

    def put(self, key, about, tensors):
        self._risk()
        super().put(key, about, tensors)

    def remove(self, key):
        self._risk()
        super().remove(key)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 10_000), block_size=st.sampled_from([1, 3, 16]),
    budget=st.integers(1, 40), preemption=st.sampled_from(["recompute", "swap"]),
    ram_bytes=st.sampled_from([0, 5_000, LARGE]), disk=st.sampled_from(["none", "sound", "flaky"]),
)  # fmt: skip
def test_every_request_gets_what_it_would_get_alone(name, seed, block_size, budget, preemption, ram_bytes, disk):
    """Two engines, one after the other, over one store and the same requests; random arrivals and cancels."""
    model, dice = MODELS[name](), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        files = {"none": None, "sound": BlockFiles(folder, LARGE), "flaky": FlakyFiles(folder, seed)}[disk]
        store = TieredStore(ram_bytes, files)
        for _ in range(2):
            requests = some_requests(seed, 5)
            most = max(len(r.prompt_ids) + r.max_new_tokens + budget for r in requests)
            engine = Engine(
                model, num_blocks=-(-most // block_size) + dice.randrange(4), block_size=block_size,
                token_budget=budget, max_running=4, preemption=preemption, swap_blocks=dice.choice([2, 30]),
                store=store,
            )  # fmt: skip
            serve(engine, list(requests), dice)
            check_answers(model, requests)
            check_nothing_is_lost(engine)
            engine.close()
            if disk != "flaky":
                assert not any("swapped" in entry.about for entry in store._entries.values())


def serve(engine: Engine, waiting: list[Request], dice: random.Random) -> None:
    steps = 0
    while waiting or engine.busy:
        if waiting and (dice.random() < 0.4 or not engine.busy):
            engine.submit(waiting.pop(0))
        if engine.busy and dice.random() < 0.03:
            engine.cancel(dice.choice(sorted(engine.scheduler.requests)))
        engine.step()
        steps += 1
        assert steps < 2_000


def ask(store: TieredStore, model: Transformer | None = None, prompt=PROMPT, **options) -> tuple[list[int], Engine]:
    """Serve one request by an engine that is new."""
    engine = Engine(model or tiny_model("gqa"), num_blocks=20, block_size=4, store=store, **options)
    answer = [output.token_id for output in engine.stream(Request("r", prompt, max_new_tokens=6))]
    engine.close()
    return answer, engine


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("ram_bytes", [0, LARGE])
def test_a_prefix_outlives_its_engine(tmp_path, name, ram_bytes):
    model = MODELS[name]()
    first, before = ask(TieredStore(ram_bytes, BlockFiles(tmp_path, LARGE)), model)
    again, after = ask(TieredStore(ram_bytes, BlockFiles(tmp_path, LARGE)), model)
    assert first == again == alone(model, Request("r", PROMPT, max_new_tokens=6))
    assert (before.stats.hit_tokens, before.stats.restored_tokens) == (0, 0)
    assert (after.stats.hit_tokens, after.stats.restored_tokens) == (20, 20)
    assert after.stats.computed_tokens == before.stats.computed_tokens - 20
    longer = [*PROMPT, *again, 3]  # the answer was kept as well: 26 tokens have keys, six full blocks
    _, third = ask(TieredStore(ram_bytes, BlockFiles(tmp_path, LARGE)), model, longer)
    assert third.stats.restored_tokens == 24


def test_what_the_pools_have_is_not_read_again():
    store = TieredStore()
    ask(store)
    engine = Engine(tiny_model("gqa"), num_blocks=20, block_size=4, store=store)
    for number, (restored, hits) in enumerate([(20, 20), (20, 40)]):
        list(engine.stream(Request(f"{number}", PROMPT, max_new_tokens=2)))
        assert (engine.stats.restored_tokens, engine.stats.hit_tokens) == (restored, hits)


@pytest.mark.parametrize("kv_dtype", [None, "bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize("name", ["gqa", "mla", "hybrid"])
def test_restored_blocks_are_the_stored_ones_bit_by_bit(tmp_path, name, kv_dtype):
    answers, contents = [], []
    for _ in range(2):
        store = TieredStore(0, BlockFiles(tmp_path, LARGE))
        answer, engine = ask(store, MODELS[name](), kv_dtype=kv_dtype)
        answers.append(answer)
        contents.append([x.view(torch.uint8) for layer in engine.cache.layers for x in fifth_block(engine, layer)])
    assert answers[0] == answers[1] and engine.stats.restored_tokens == 20
    assert all(torch.equal(*pair) for pair in zip(*contents, strict=True))


def fifth_block(engine: Engine, layer) -> list[torch.Tensor]:
    """The last full block of the prompt: every window still sees it."""
    pool = engine.scheduler.cache.pools[layer.group]
    keys = {block: pool.key_of(block) for block in range(pool.num_blocks)}
    (found,) = (block for block, key in keys.items() if key is not None and len(key.spelt()[1]) == 20)
    return layer.read_blocks([found])


SERVE = """
from tests.engine.test_store import *
answer, engine = ask(TieredStore(LARGE, BlockFiles(sys.argv[1], LARGE)))
print(json.dumps([answer, engine.stats.restored_tokens]))
"""


def test_a_new_process_finds_what_an_old_one_kept(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SERVE, str(tmp_path)]
    first, second = (
        json.loads(subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    assert first[0] == second[0] and (first[1], second[1]) == (0, 20)


class Losing(TieredStore):
    """Fails to deliver the n-th block that is asked for."""

    def __init__(self, lost: int):
        super().__init__()
        self.lost = lost

    def get(self, key, about):
        self.lost -= 1
        return None if self.lost == 0 else super().get(key, about)


@pytest.mark.parametrize("lost, found", [(1, 0), (3, 2), (5, 4), (9, 5)])
def test_a_hit_is_what_was_loaded(lost, found):
    """LMCache #3022: hits were reported for data that never came."""
    store = Losing(0)
    expected, _ = ask(store)
    store.lost = lost
    answer, engine = ask(store)
    assert answer == expected
    assert engine.stats.hit_tokens == engine.stats.restored_tokens == 4 * found
    assert engine.stats.computed_tokens == 26 - 4 * found


def test_other_weights_dtypes_and_block_sizes_find_nothing():
    store = TieredStore()
    ask(store)
    torch.manual_seed(0)
    other = Transformer(tiny_config()).eval().requires_grad_(False)
    other.load_state_dict(tiny_model("gqa").state_dict())
    other = other.double()
    other.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-9  # one weight, hardly
    for options in (dict(model=other), dict(kv_dtype="bf16"), dict(model=tiny_model("mqa"))):
        assert ask(store, **options)[1].stats.restored_tokens == 0
    engine = Engine(tiny_model("gqa"), num_blocks=20, block_size=2, store=store)
    list(engine.stream(Request("r", PROMPT, max_new_tokens=2)))
    assert engine.stats.restored_tokens == 0
    list(engine.stream(Request("t", PROMPT, max_new_tokens=2, identity=Identity(tenant="t"))))
    assert engine.stats.hit_tokens == 0
    assert ask(store)[1].stats.restored_tokens == 20


def test_equal_hashes_of_other_tokens_are_a_miss():
    """A digest that always collides: only the comparison of all tokens is left."""
    engine = Engine(tiny_model("gqa"), num_blocks=4, block_size=4, store=TieredStore())
    mover, collide = engine.mover, lambda data: b"same"
    mine, theirs = (next_key(next_key(root_key(NOBODY, collide), [t] * 4, collide), [9] * 4, collide) for t in (1, 2))
    mover.keep([[(mine, 0)]])
    assert mover.has(0, theirs) and not mover.load(0, theirs) and mover.load(0, mine)
    tenants = next_key(next_key(root_key(Identity(tenant="t"), collide), [1] * 4, collide), [9] * 4, collide)
    mover.forget([])
    assert not mover.load(0, tenants)


@pytest.mark.parametrize("fate", ["kept", "removed", "damaged"])
def test_swapped_blocks_on_the_disk(tmp_path, fate):
    """traps: two requests of 34 tokens that answer with 35, in 7 blocks of 16. What is lost is computed again."""
    model, dice = tiny_model("gqa"), random.Random(7)
    store = TieredStore(0, BlockFiles(tmp_path, LARGE))
    engine = Engine(model, num_blocks=7, block_size=16, preemption="swap", swap_blocks=8, token_budget=64, store=store)
    requests = [Request(f"{i}", [dice.randrange(61) for _ in range(34)], max_new_tokens=35) for i in range(2)]
    for request in requests:
        engine.submit(request)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while engine.busy:
            engine.step()
            for path in [mover_file(engine, tmp_path, *ticket) for ticket in engine.mover._tickets]:
                if fate == "removed":
                    path.unlink(missing_ok=True)
                elif fate == "damaged" and path.exists():
                    os.truncate(path, 100)
    assert engine.stats.swap_preemptions > 0
    assert bool(engine.stats.lost_swaps) == bool(caught) == (fate != "kept")
    check_answers(model, requests)
    check_nothing_is_lost(engine)


def mover_file(engine: Engine, directory: Path, group: int, place: int) -> Path:
    return directory / f"{engine.mover._key(group, place)}.block.safetensors"


def test_a_step_that_fails_after_blocks_were_read_loses_only_itself():
    torch.manual_seed(0)
    model = Transformer(tiny_config()).double().eval().requires_grad_(False)
    store = TieredStore()
    expected, _ = ask(store, model)
    model.model.layers[0] = Failing(model.model.layers[0])
    engine = Engine(model, num_blocks=20, block_size=4, store=TieredStore())
    engine.mover = engine.scheduler.tables.shelf = BlockMover(engine.mover.layers_of, store, named_like(store))
    model.model.layers[0].armed = True
    engine.submit(Request("a", PROMPT, max_new_tokens=6))
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    model.model.layers[0].armed = False
    assert engine.stats.restored_tokens == 20
    assert [output.token_id for output in engine.stream(Request("b", PROMPT, max_new_tokens=6))] == expected
    assert engine.stats.restored_tokens == 40
    check_nothing_is_lost(engine)


def named_like(store: TieredStore) -> str:
    """The name of the model whose blocks a store has."""
    return next(iter(store._entries.values())).about["identity"].split(",")[0]


def test_a_store_needs_the_chain_of_hashes():
    for prefix in ("radix", "none"):
        with pytest.raises(ValueError, match=f"it needs prefix='hash' and window=None, got '{prefix}', None"):
            Engine(tiny_model("gqa"), num_blocks=2, prefix=prefix, store=TieredStore())


def test_a_full_disk_loses_no_request(tmp_path):
    with pytest.warns(StoreWarning, match="the budget is 10"):
        answer, _ = ask(TieredStore(0, BlockFiles(tmp_path, 10)))
    assert answer == alone(tiny_model("gqa"), Request("r", PROMPT, max_new_tokens=6))
    assert list(tmp_path.iterdir()) == []
