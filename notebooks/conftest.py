"""For nbval: what is compared, and how long each chapter took."""

from collections import defaultdict

# A chapter should take at most 60 s on two cores. Shared machines are slow at times: failing needs twice that.
SOFT_LIMIT_S, HARD_LIMIT_S = 60, 120
SECONDS = defaultdict(float)


def pytest_collectstart(collector):
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)  # ipykernel writes warnings of its own there


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid.split("::")[0]] += report.duration


def pytest_sessionfinish(session):
    if any(seconds > HARD_LIMIT_S for seconds in SECONDS.values()):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    for name, seconds in SECONDS.items():
        verdict = " TOO SLOW" if seconds > HARD_LIMIT_S else " slow" if seconds > SOFT_LIMIT_S else ""
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}{verdict}  (limit {SOFT_LIMIT_S} s)")
