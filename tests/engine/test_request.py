"""Requests: what is refused at once, and what tells identities apart."""

import pytest

from kvlab.engine.request import Identity, Request, Sequence, State


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(prompt_ids=[]), "request r: the prompt is empty: give at least one token"),
        (dict(prompt_ids=[1, -2]), "prompt_ids must be whole numbers >= 0, got -2"),
        (dict(prompt_ids=[1.5]), "prompt_ids must be whole numbers >= 0, got 1.5"),
        (dict(prompt_ids=[True]), "got True"),
        (dict(prompt_ids=5), "request r: prompt_ids must be a list of token ids, got 5"),
        (dict(stop_ids=None), "request r: stop_ids must be a list of token ids, got None"),
        (dict(stop_ids=[[1]]), r"stop_ids must be whole numbers >= 0, got \[1\]"),
        (dict(identity="alice"), "request r: identity must be an Identity, got 'alice'"),
        (dict(temperature=10**400), "temperature must be 0"),
        (dict(max_new_tokens=0), "max_new_tokens must be a whole number >= 1, got 0"),
        (dict(max_new_tokens=2.5), "max_new_tokens must be a whole number >= 1, got 2.5"),
        (dict(n=0, temperature=1.0), "n must be a whole number >= 1, got 0"),
        (dict(n=4), "greedy gives the same text 4 times"),
        (dict(temperature=-1.0), "temperature must be 0"),
        (dict(temperature=float("nan")), "temperature must be 0"),
        (dict(seed="x"), "seed must be a whole number, got 'x'"),
        (dict(stop_ids=["</s>"]), "stop_ids must be whole numbers >= 0, got '</s>'"),
    ],
)
def test_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Request("r", **{"prompt_ids": [1], **given})


def test_tokens_that_the_model_does_not_know():
    Request("r", [1, 9], stop_ids={3}).check_vocabulary(10)
    with pytest.raises(ValueError, match="prompt token 10 is outside the vocabulary of 10"):
        Request("r", [1, 10]).check_vocabulary(10)
    with pytest.raises(ValueError, match="stop token 77 is outside the vocabulary of 10"):
        Request("r", [1], stop_ids=[3, 77]).check_vocabulary(10)


def test_identities_differ_in_every_field_and_are_spelled_without_doubt():
    others = [
        Identity(), Identity("a"), Identity("b"), Identity("a", 1), Identity(tenant="a"), Identity("a", tenant="b"),
        Identity("a, 0, b"), Identity('a", 0, "b'),
    ]  # fmt: skip
    assert len(set(others)) == len({identity.encoded() for identity in others}) == len(others)


@pytest.mark.parametrize("given", [dict(adapter=["a"]), dict(tenant=b"t"), dict(adapter_version="1"), dict(tenant=5)])
def test_identities_that_could_not_be_told_apart_are_refused(given):
    with pytest.raises(ValueError, match="adapter and tenant are text or None, adapter_version is a whole number: got"):
        Identity(**given)


def test_times_of_a_sequence():
    request = Request("r", [1, 2, 3])
    request.arrival_s = 10.0
    sequence = Sequence(request, 0, (0, 0), [1, 2, 3])
    assert sequence.ttft_s is sequence.queue_s is sequence.tpot_s is None
    sequence.scheduled_s, sequence.first_token_s, sequence.finished_s = 11.0, 14.0, 20.0
    sequence.tokens += [7]
    assert (sequence.queue_s, sequence.ttft_s, sequence.tpot_s) == (1.0, 4.0, None)
    sequence.tokens += [8, 9, 9]
    assert sequence.tpot_s == 2.0 and sequence.output_ids == [7, 8, 9, 9]


def test_a_request_is_finished_when_all_its_sequences_are():
    request = Request("r", [1], n=2, temperature=1.0)
    assert not request.finished
    request.sequences = [Sequence(request, i, (0, i), [1]) for i in range(2)]
    request.sequences[0].state = State.FINISHED
    assert not request.finished
    request.sequences[1].state = State.FINISHED
    assert request.finished
