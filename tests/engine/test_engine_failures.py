"""Engines under bad requests and broken steps: one line that says what is wrong, others go on, no block is lost."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from itertools import count
from unittest.mock import Mock

import pytest
import torch

from kvlab.engine.engine import Engine
from kvlab.engine.request import Output, Request
from kvlab.engine.scheduler import RequestRefused
from kvlab.model.transformer import Transformer
from tests.engine.serving import Failing, alone, check_answers, check_nothing_is_lost, hybrid
from tests.harness import tiny_config, tiny_model

BROKEN = 60  # a token whose embedding is no number while `broken`


@contextmanager
def broken(model: Transformer):
    weight = model.model.embed_tokens.weight
    before = weight[BROKEN].clone()
    weight[BROKEN] = float("nan")
    yield
    weight[BROKEN] = before


def all_finite(engine: Engine) -> bool:
    return all(bool(x.isfinite().all()) for layer in engine.cache.layers for x in layer.tensors)


# sequences that fail by themselves


@pytest.mark.parametrize("prefix", ["hash", "radix"])
@pytest.mark.parametrize("place", [0, 6, 7, 9, 17])
def test_a_sequence_that_is_no_number_ends_alone_and_is_never_found(place, prefix):
    """A prompt in chunks of 7, 7 and 4 tokens; tokens are drawn from the last one, but any of them may fail."""
    model = copy.deepcopy(tiny_model("gqa"))
    engine = Engine(model, num_blocks=12, block_size=4, token_budget=8, prefix=prefix)
    prompt = [BROKEN if i == place else i for i in range(18)]
    other = engine.submit(Request("other", [7, 8, 9], max_new_tokens=12))
    engine.step()
    request = engine.submit(Request("bad", prompt, max_new_tokens=4))
    with broken(model):
        outputs = [output for _ in range(4) for output in engine.step()]
    assert [output for output in outputs if output.request_id == "bad"] == [Output("bad", 0, None, "error")]
    assert request.sequences[0].error == ("request bad: logits are not finite: use a wider dtype, or check the weights")
    assert all_finite(engine) and not other.finished
    again = engine.submit(Request("again", prompt, max_new_tokens=4))  # the model is whole again
    list(engine.run())
    assert engine.stats.finished == {"error": 1, "length": 2}
    assert engine.stats.hit_tokens == place // 7 * 7 // 4 * 4  # what was stored before it failed, and nothing else
    check_answers(model, [other, again])
    check_nothing_is_lost(engine)


def test_one_of_three_answers_fails_and_the_others_go_on():
    model = copy.deepcopy(tiny_model("gqa"))
    request = Request("n", [1, 2, 3], max_new_tokens=20, temperature=2.0, n=3)
    answers = [alone(model, request, index) for index in range(3)]
    fails = [BROKEN in answer[:-1] for answer in answers]
    assert True in fails and False in fails
    engine = Engine(model, num_blocks=30, block_size=4)
    engine.submit(request)
    with broken(model):
        list(engine.run())
    for sequence, answer, failed in zip(request.sequences, answers, fails, strict=True):
        assert sequence.finish_reason == ("error" if failed else "length")
        assert sequence.output_ids == (answer[: answer.index(BROKEN) + 1] if failed else answer)
    assert all_finite(engine)
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_own_request(wrong, temperature, monkeypatch):
    model = tiny_model("gqa")
    engine = Engine(model, num_blocks=12, block_size=4)
    requests = [
        engine.submit(Request(f"{i}", [i] * 4, max_new_tokens=3, temperature=temperature, seed=i)) for i in range(3)
    ]
    unembed = model.unembed

    def spoilt(hidden):
        logits = unembed(hidden)
        logits[1, 7] = wrong
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(model, "unembed", spoilt)
        assert [(o.request_id, o.finished) for o in engine.step()] == [("0", None), ("2", None), ("1", "error")]
    list(engine.run())
    assert [request.sequences[0].finish_reason for request in requests] == ["length", "error", "length"]
    check_answers(model, requests)
    check_nothing_is_lost(engine)


# steps that fail


def test_a_failed_step_ends_its_own_requests_and_leaves_no_trace():
    torch.manual_seed(0)
    model = Transformer(tiny_config()).double().eval().requires_grad_(False)
    failing = model.model.layers[1] = Failing(model.model.layers[1])
    engine = Engine(model, num_blocks=12, block_size=4, token_budget=8)
    first, second = (engine.submit(Request(f"{i}", [i] * 8, max_new_tokens=6)) for i in range(2))
    failing.armed = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    failing.armed = False
    assert first.sequences[0].error == "request 0: the step failed: the device is gone" and not second.finished
    assert not any(bool(x.any()) for layer in engine.cache.layers for x in layer.tensors)
    list(engine.run())
    assert engine.stats.finished == {"error": 1, "length": 1}
    check_answers(model, [second])
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("method", ["read_blocks", "write_blocks", "copy_blocks"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_failure_while_blocks_are_moved_loses_none(method, layer, monkeypatch):
    """Out to CPU memory, back from it, and copies before writes; the second layer group fails after the first."""
    model = hybrid()
    engine = Engine(model, num_blocks=8, block_size=3, preemption="swap", swap_blocks=8, token_budget=24)

    def fail(*given):
        raise MemoryError("no memory left")

    requests = [
        engine.submit(Request(f"{i}", [i, 2, 3, 4, 5], max_new_tokens=14, temperature=1.0, n=1 + (i == 0), seed=i))
        for i in range(3)
    ]
    while not (engine.stats.swap_preemptions if method == "write_blocks" else engine.scheduler.running):
        engine.step()
    with monkeypatch.context() as patch:
        target = engine.cache.layers[layer]
        patch.setattr(target, method, fail if method != "copy_blocks" else lambda pairs: fail() if pairs else None)
        with pytest.raises(MemoryError, match="no memory left"):
            list(engine.run())
    ended = [s for r in requests for s in r.sequences if s.finish_reason == "error"]
    assert ended and all(s.error == f"request {s.request.id}: the step failed: no memory left" for s in ended)
    requests.append(engine.submit(Request("later", [4, 5, 6], max_new_tokens=5)))
    list(engine.run())
    check_answers(model, requests)
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix", ["hash", "radix"])
@pytest.mark.parametrize("method", ["give_back", "fits_step", "extend", "attach_prefix", "fits_whole", "fits_swapped"])
def test_a_step_that_cannot_be_planned_costs_nobody_a_token(method, prefix, preemption, monkeypatch):
    """Some calls fail, whatever was planned before them: an interrupt may come anywhere."""
    model = hybrid()
    engine = Engine(model, num_blocks=9, block_size=3, prefix=prefix, preemption=preemption, swap_blocks=20)
    requests = [Request(f"{i}", [i, 2, 3, 4], max_new_tokens=18, temperature=1.0, n=1 + i, seed=i) for i in range(2)]
    tables, calls, interrupts = engine.scheduler.tables, count(1), 0
    real = getattr(tables, method)

    def interrupted(*given):
        if next(calls) in (2, 5, 9, 14, 20, 27, 35, 44):
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(tables, method, interrupted)
    for request in requests:
        engine.submit(request)
    while engine.busy:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        assert engine.stats.steps < 200  # a block that is lost would be waited for without end
    assert engine.stats.finished == {"length": 3}
    assert interrupts or (method, preemption) == ("fits_swapped", "recompute")
    check_answers(model, requests)
    check_nothing_is_lost(engine)


def test_an_interrupt_and_a_long_message_are_told_in_one_line():
    model = Transformer(tiny_config()).double().eval().requires_grad_(False)
    for error, words in (KeyboardInterrupt(), "KeyboardInterrupt"), (ValueError("two\n  lines"), "two lines"):
        engine = Engine(model, num_blocks=12, block_size=4)
        engine.mover.move = Mock(side_effect=error)
        request = engine.submit(Request("r", [1], max_new_tokens=2))
        with pytest.raises(type(error)):
            engine.step()
        assert request.sequences[0].error == f"request r: the step failed: {words}"


# calls from within a step


def within_a_step(engine: Engine, call) -> None:
    """Take a step, and make a call while it runs."""
    move = engine.mover.move

    def moved(plan):
        call()
        return move(plan)

    engine.mover.move = moved
    engine.step()
    engine.mover.move = move


def test_a_request_cancelled_within_a_step_gives_its_name_free_and_nothing_else():
    model = tiny_model("gqa")
    engine = Engine(model, num_blocks=24, block_size=4)
    old, new = (Request("r", [1, 2, 3], max_new_tokens=9, temperature=1.0, seed=seed) for seed in range(2))
    engine.submit(old)
    engine.step()

    def exchange():
        engine.cancel("r")
        engine.submit(new)

    within_a_step(engine, exchange)
    list(engine.run())
    assert old.sequences[0].finish_reason == "cancelled"
    check_answers(model, [new])  # with random numbers of its own
    check_nothing_is_lost(engine)


def test_a_cancel_within_a_step_leaves_others_what_they_are_to_get_back():
    model = tiny_model("gqa")
    engine = Engine(model, num_blocks=7, preemption="swap", swap_blocks=8, token_budget=64)
    requests = [engine.submit(Request(f"{i}", [i] * 34, max_new_tokens=35)) for i in range(2)]
    third = engine.submit(Request("third", [5, 6], max_new_tokens=60))

    def cancel():
        if any(engine.scheduler._planned.swap_in) and not third.finished:
            engine.cancel("third")

    while engine.busy:
        within_a_step(engine, cancel)
    assert third.sequences[0].finish_reason == "cancelled" and engine.stats.finished == {"length": 2, "cancelled": 1}
    check_answers(model, requests)
    check_nothing_is_lost(engine)


def test_a_step_within_a_step_is_refused():
    engine = Engine(tiny_model("gqa"), num_blocks=12, block_size=4)
    request = engine.submit(Request("r", [1, 2, 3], max_new_tokens=3))

    def again():
        with pytest.raises(ValueError, match="a step is under way: wait for its end"):
            engine.step()

    within_a_step(engine, again)
    list(engine.run())
    check_answers(engine.model, [request])


# streams


def test_tokens_stream_while_others_go_on():
    model = tiny_model("gqa")
    engine = Engine(model, num_blocks=40, block_size=4)
    other = engine.submit(Request("other", [1, 2, 3], max_new_tokens=30))
    outputs = list(engine.stream(Request("mine", [4, 5], max_new_tokens=5)))
    assert [o.request_id for o in outputs] == ["mine"] * 5 and outputs[-1].finished == "length"
    assert not other.finished and len(other.sequences[0].output_ids) >= 5
    list(engine.run())
    check_answers(model, [other])


@pytest.mark.parametrize("n", [1, 3])
def test_streams_beside_each_other_lose_no_token(n):
    """Each stream takes the step that it needs, and these steps bring the others' tokens."""
    model = tiny_model("gqa")
    engine = Engine(model, num_blocks=60, block_size=4)
    requests = [Request(f"{i}", [i, i + 1], max_new_tokens=3 + 4 * i, temperature=1.0, n=n, seed=i) for i in range(3)]
    streams, outputs = [engine.stream(request) for request in requests], [[] for _ in requests]
    for turn in range(100):
        at = turn * turn % 3
        outputs[at] += [output for output in [next(streams[at], None)] if output]
    for request, stream, found in zip(requests, streams, outputs, strict=True):
        found += stream
        assert {output.request_id for output in found} == {request.id}
        for sequence in request.sequences:
            mine = [output for output in found if output.index == sequence.index]
            assert [output.token_id for output in mine] == sequence.output_ids == alone(model, request, sequence.index)
            assert [output.finished for output in mine] == [None] * (len(mine) - 1) + ["length"]
    check_nothing_is_lost(engine)


def test_a_stream_refuses_at_once_ends_with_a_cancel_and_tells_of_a_failure():
    model = copy.deepcopy(tiny_model("gqa"))
    engine = Engine(model, num_blocks=8, block_size=4)
    with pytest.raises(RequestRefused, match="request big: 100 prompt tokens"):
        engine.stream(Request("big", [1] * 100))
    tokens = engine.stream(Request("cancelled", [1, 2], max_new_tokens=20))
    next(tokens)
    engine.cancel("cancelled")
    assert list(tokens) == []
    tokens = engine.stream(Request("bad", [1, BROKEN], max_new_tokens=3))
    with broken(model), pytest.raises(ValueError, match="request bad: logits are not finite"):
        next(tokens)
    check_nothing_is_lost(engine)


# bad input, while others are served

TABLE = [
    (dict(prompt_ids=[1] * 300), "request odd: 300 prompt tokens and 4 new ones exceed the model's 256"),
    (dict(max_new_tokens=255), "request odd: 2 prompt tokens and 255 new ones exceed the model's 256"),
    (dict(prompt_ids=[1] * 100), "request odd: 100 prompt tokens and 4 new ones need 26 blocks of 4 tokens and can "
     "never fit into 8: shorten one of them, or make the pool larger"),
    (dict(prompt_ids=[]), "request odd: the prompt is empty: give at least one token"),
    (dict(prompt_ids=[61]), "request odd: prompt token 61 is outside the vocabulary of 61"),
    (dict(prompt_ids=[-1]), "request odd: prompt_ids must be whole numbers >= 0, got -1"),
    (dict(prompt_ids=torch.tensor([1])), r"request odd: prompt_ids must be whole numbers >= 0, got tensor\(1\)"),
    (dict(max_new_tokens=0), "request odd: max_new_tokens must be a whole number >= 1, got 0"),
    (dict(n=0), "request odd: n must be a whole number >= 1, got 0"),
    (dict(n=7, temperature=1.0), "request odd: n=7, but only 6 sequences can run"),
    (dict(n=2), "request odd: greedy gives the same text 2 times: raise temperature or n=1"),
    (dict(stop_ids=[99]), "request odd: stop token 99 is outside the vocabulary of 61"),
    (dict(stop_ids=["</s>"]), "request odd: stop_ids must be whole numbers >= 0, got '</s>'"),
    (dict(temperature=-0.5), r"temperature must be 0 \(greedy\) or a positive number, got -0.5"),
    (dict(temperature=float("inf")), r"temperature must be 0 \(greedy\) or a positive number, got inf"),
    (dict(temperature="hot"), r"temperature must be 0 \(greedy\) or a positive number, got 'hot'"),
    (dict(temperature=1.0, top_k=0), "request odd: top_k must be a whole number >= 1, or None to keep all, got 0"),
    (dict(temperature=1.0, top_k=1.5), "request odd: top_k must be a whole number >= 1, or None to keep all, got 1.5"),
    (dict(temperature=1.0, top_p=0), "request odd: top_p must be above 0 and at most 1, or None to keep all, got 0"),
    (dict(temperature=1.0, top_p=2), "request odd: top_p must be above 0 and at most 1, or None to keep all, got 2"),
    (dict(seed=0.5), "request odd: seed must be a whole number, got 0.5"),
    (dict(id="other"), "request other was submitted before: make a new one, with an id of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), TABLE, ids=[words[:70] for _, words in TABLE])
def test_a_refused_request_changes_nothing_for_others(given, words):
    model = tiny_model("gqa")
    engine = Engine(model, num_blocks=8, block_size=4, max_running=6)
    other = engine.submit(Request("other", [3, 4, 5], max_new_tokens=9))
    engine.step()
    before = engine.usage(), sorted(engine.scheduler.requests), copy.copy(engine.stats)
    with pytest.raises(ValueError, match=words) as caught:
        engine.submit(Request(**{"id": "odd", "prompt_ids": [1, 2], "max_new_tokens": 4, **given}))
    assert "\n" not in str(caught.value)
    assert before == (engine.usage(), sorted(engine.scheduler.requests), engine.stats)
    list(engine.run())
    check_answers(model, [other])
    check_nothing_is_lost(engine)


def test_cancelling_and_closing():
    engine = Engine(tiny_model("gqa"), num_blocks=8, block_size=4)
    one, two, three = (engine.submit(Request(f"{i}", [i, i], max_new_tokens=20 - 17 * (i == 2))) for i in range(3))
    engine.step()
    engine.cancel("0")
    for name in "0", "nobody":
        with pytest.raises(ValueError, match=f"request {name} is not there: it was never submitted, or is finished"):
            engine.cancel(name)
    while not three.finished:
        engine.step()
    with pytest.raises(ValueError, match="request 2 is not there"):
        engine.cancel("2")
    check_answers(engine.model, [three])
    engine.close()
    engine.close()
    assert [r.sequences[0].finish_reason for r in (one, two)] == ["cancelled", "cancelled"]
    with pytest.raises(ValueError, match="request 3: the engine is closed; make a new one"):
        engine.submit(Request("3", [1]))
    assert engine.step() == [] and list(engine.run()) == []
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("end", [lambda engine: engine.cancel("1"), Engine.close])
def test_what_was_swapped_out_is_forgotten_with_its_request(end):
    model = tiny_model("gqa")
    engine = Engine(model, num_blocks=7, preemption="swap", swap_blocks=8, token_budget=64)
    requests = [engine.submit(Request(f"{i}", [i] * 34, max_new_tokens=35)) for i in range(2)]
    while not engine.stats.swap_preemptions:
        engine.step()
    assert engine.mover._tickets
    end(engine)
    assert not engine.mover._tickets
    list(engine.run())
    check_answers(model, requests)
    check_nothing_is_lost(engine)


OPTIONS = [
    (dict(num_blocks=0), "an engine needs at least one block, got 0"),
    (dict(num_blocks=4.5), "an engine needs at least one block, got 4.5"),
    (dict(num_blocks="8"), "an engine needs at least one block, got '8'"),
    (dict(block_size=0), "block_size >= 1, got 4 and 0"),
    (dict(block_size=2.0), "block_size >= 1, got 4 and 2.0"),
    (dict(block_size=True), "block_size >= 1, got 4 and True"),
    (dict(token_budget=0), "token_budget, max_running are whole numbers >= 1, got 0, 64"),
    (dict(token_budget=float("nan")), "whole numbers >= 1, got nan, 64"),
    (dict(max_running=0), "token_budget, max_running are whole numbers >= 1, got 512, 0"),
    (dict(max_running=None), "whole numbers >= 1, got 512, None"),
    (dict(window=float("nan")), "at least one token, and sinks from 0 on, in whole numbers: got nan and 0"),
    (dict(window=True), "in whole numbers: got True and 0"),
    (dict(window=4, sinks=1.5), "in whole numbers: got 4 and 1.5"),
    (dict(sinks=None), "in whole numbers: got None and None"),
    (dict(swap_blocks=-1), "preemption='recompute' needs swap_blocks, .*: a whole number >= 0, got -1"),
    (dict(preemption="swap", swap_blocks=2.5), "a whole number >= 1, got 2.5"),
    (dict(prefix="trie"), "unknown prefix cache 'trie': one of hash, radix, none"),
    (dict(preemption="drop"), "preemption is 'recompute' or 'swap', got 'drop'"),
    (dict(preemption="swap"), "preemption='swap' needs swap_blocks, blocks of CPU memory: a whole number >= 1, got 0"),
    (dict(kv_dtype="int3"), "pools of blocks hold fp32, bf16, fp16, fp8, int8, not 'int3'"),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS)
def test_options_that_cannot_work(options, words):
    with pytest.raises(ValueError, match=words):
        Engine(tiny_model("gqa"), **{"num_blocks": 4, **options})


def test_a_pool_too_small_for_a_block_of_each_layer_group():
    """One block per group holds a request of one block's tokens, and refuses the next longer one."""
    model = hybrid()
    engine = Engine(model, num_blocks=1, block_size=4)
    fits = engine.submit(Request("fits", [1, 2, 3], max_new_tokens=2))  # four are stored
    with pytest.raises(RequestRefused, match="need 2 blocks of 4 tokens and can never fit into 1"):
        engine.submit(Request("odd", [1, 2, 3], max_new_tokens=3))
    list(engine.run())
    check_answers(model, [fits])
    check_nothing_is_lost(engine)
