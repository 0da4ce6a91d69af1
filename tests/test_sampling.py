"""Sampling: what is kept, in which order, and that a seed decides."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvlab.sampling import Sampler

# no subnormal numbers: compiled kernels of other tests may leave the processor flushing them to zero
FLOATS = st.floats(-30, 30, width=32, allow_subnormal=False)
LOGITS = st.lists(FLOATS, min_size=1, max_size=40).map(lambda row: torch.tensor([row]))
TIED = st.lists(st.integers(0, 3).map(float), min_size=1, max_size=40).map(lambda row: torch.tensor([row]))


def kept_ids(sampler: Sampler, logits: torch.Tensor) -> list[int]:
    mass, ids = sampler.probabilities(logits)
    return ids[0, mass[0] > 0].tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": 0},
        {"top_k": -3},
        {"top_k": 2.5},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": -1},
        {"top_p": math.nan},
        {"seed": 1.5},
        {"seed": None},
    ],
)
def test_impossible_settings_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Sampler(**fields)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = torch.tensor([[0.0, 1.0], [bad, 0.0]])
    sampler = Sampler(temperature=temperature)
    with pytest.raises(ValueError, match="row 1 are not finite"):
        sampler.pick(logits, sampler.generators(2))


def test_logits_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(5,\)"):
        Sampler().pick(torch.zeros(5))
    with pytest.raises(ValueError, match=r"\(1, 0\)"):
        Sampler().pick(torch.zeros(1, 0))


@pytest.mark.parametrize("streams", [None, [], [torch.Generator()], torch.Generator()])
def test_a_wrong_number_of_generators_is_refused(streams):
    with pytest.raises(ValueError, match="2 rows"):
        Sampler(temperature=1.0).pick(torch.zeros(2, 3), streams)


@given(TIED)
def test_greedy_takes_the_lowest_id_among_equals(logits):
    row = logits[0].tolist()
    assert Sampler().pick(logits).tolist() == [row.index(max(row))]


@given(st.one_of(LOGITS, TIED), st.integers(1, 50))
def test_top_k_keeps_exactly_k_and_the_lower_ids_of_a_tie(logits, k):
    row = logits[0].tolist()
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert kept_ids(Sampler(temperature=1.0, top_k=k), logits) == expected


@given(st.one_of(LOGITS, TIED), st.floats(0.01, 1.0), st.floats(0.1, 5.0))
def test_top_p_keeps_the_smallest_prefix_of_that_mass(logits, p, temperature):
    full, _ = Sampler(temperature=temperature).probabilities(logits)
    mass, _ = Sampler(temperature=temperature, top_p=p).probabilities(logits)
    kept = int((mass > 0).sum())
    heights = full[0].double().cumsum(0)
    assume((heights - p).abs().min() > 1e-6)  # at the border rounding decides
    assert kept >= 1
    assert kept == 1 or heights[kept - 2] < p
    assert kept == int((full > 0).sum()) or heights[kept - 1] >= p
    assert torch.equal(mass[0, :kept], full[0, :kept])


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(0.3, 2.0), st.integers(1, 60), st.floats(0.2, 0.99))
def test_the_three_together_keep_what_transformers_keeps(seed, temperature, k, p):
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(seed)) * 3
    theirs = logits
    for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(k), TopPLogitsWarper(p)):
        theirs = warper(None, theirs)
    mass, ids = Sampler(temperature=temperature, top_k=k, top_p=p).probabilities(logits)
    ours = torch.zeros_like(logits).scatter(1, ids, mass)
    ours = ours / ours.sum(-1, keepdim=True)
    torch.testing.assert_close(ours, theirs.softmax(-1), atol=1e-5, rtol=1e-4)


@given(st.integers(0, 2**31), st.integers(0, 5))
def test_a_row_draws_the_same_alone_and_in_a_batch(seed, row):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler(temperature=1.3, top_k=20, top_p=0.9, seed=seed)
    together = [sampler.pick(logits, streams) for streams in [sampler.generators(6)] for _ in range(3)]
    alone = sampler.generator(row)
    single = [int(sampler.pick(logits[row : row + 1], alone)) for _ in range(3)]
    assert single == [int(ids[row]) for ids in together]


def test_seed_and_request_both_decide():
    logits = torch.zeros(1, 10_000)

    def draws(seed: int, request: int | str) -> list[int]:
        stream = Sampler(temperature=1.0, seed=seed).generator(request)
        return [int(Sampler(temperature=1.0, seed=seed).pick(logits, stream)) for _ in range(4)]

    assert draws(0, 0) == draws(0, 0)
    assert len({tuple(draws(*key)) for key in [(0, 0), (0, 1), (1, 0), (1, 1), (0, "a"), (-1, 0)]}) == 6


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0), math.log(8.0)]]).expand(20_000, 4)
    sampler = Sampler(temperature=1.0, seed=3)
    counts = sampler.pick(logits, [sampler.generator()] * 20_000).bincount(minlength=4) / 20_000
    torch.testing.assert_close(counts, torch.tensor([1, 2, 5, 8]) / 16, atol=0.015, rtol=0)


@given(LOGITS, st.sampled_from([1e-37, 1e-6, 1e-3]))
def test_a_tiny_temperature_is_nearly_greedy(logits, temperature):
    best = logits.max()
    sampler = Sampler(temperature=temperature)
    chosen = logits[0, int(sampler.pick(logits, sampler.generator()))]
    assert best - chosen <= 100 * temperature


def test_huge_and_half_precision_logits():
    sampler = Sampler(temperature=1.0, top_p=0.5)
    assert sampler.pick(torch.tensor([[-3e38, 3e38, 0.0]]), sampler.generator()).tolist() == [1]
    half = torch.tensor([[0.0, 60_000.0]], dtype=torch.float16)
    assert sampler.pick(half, sampler.generator()).tolist() == [1]
    assert Sampler().pick(torch.tensor([[0, 3, 1]], dtype=torch.bfloat16)).tolist() == [1]


def test_logits_are_left_as_they_were():
    logits = torch.randn(2, 9)
    before = logits.clone()
    sampler = Sampler(temperature=0.5, top_k=2, top_p=0.3)
    sampler.pick(logits, sampler.generators(2))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-38, 1e-50, 1e-300, 5e-324])
def test_a_temperature_too_small_for_fp32_is_greedy(temperature):
    sampler = Sampler(temperature)
    assert sampler.pick(torch.tensor([[1.0, 3.0, 2.0]]), sampler.generator()).tolist() == [1]
