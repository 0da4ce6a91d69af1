import pytest

from kvlab.engine.stats import Stats, Usage, percentile


def test_percentiles_interpolate():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 75, 100)] == [1.0, 2.5, 3.25, 4.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None
    with pytest.raises(ValueError, match="between 0 and 100, got 101"):
        percentile(values, 101)


def test_the_schedulers_share_of_the_steps():
    stats = Stats()
    assert stats.scheduling_share == 0.0
    stats.count_step(scheduling=1.0, whole=6.0)
    stats.count_step(scheduling=1.0, whole=2.0)
    assert (stats.scheduling_s, stats.step_s, stats.scheduling_share) == (2.0, 8.0, 0.25)


def test_nothing_served_yet():
    stats = Stats()
    assert stats.hit_rate == 0.0 and stats.preemptions == 0
    assert stats.percentiles() == {name: {50: None, 99: None} for name in ("ttft_s", "tpot_s", "queue_s")}
    assert Usage(0, 16, 0, 0, 0, 0, 0).waste == 0.0
