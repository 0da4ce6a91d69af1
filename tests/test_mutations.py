"""The script of planted faults: it must find its lines, and must not call a fault noticed that is none."""

import pytest

import mutations
from mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_line_to_break_is_there_once(mutation):
    text = (mutations.ROOT / mutations.located(mutation.file, "kvlab/engine")).read_text(encoding="utf-8")
    assert text.count(mutation.source) == 1
    assert mutation.source != mutation.replacement
    for test in mutation.tests:
        name, _, function = mutations.located(test, "tests/engine").partition("::")
        assert f"def {function.partition('[')[0]}" in (mutations.ROOT / name).read_text(encoding="utf-8")


def test_a_fault_that_no_test_notices_fails_the_run(monkeypatch, capsys):
    harmless = Mutation(
        "nothing", "block_pool.py", "def check(self) -> None:", "def check(self):", ("test_stats.py", "test_request.py")
    )
    monkeypatch.setattr(mutations, "MUTATIONS", [harmless])
    assert mutations.main([]) == 1
    assert "UNNOTICED  nothing" in capsys.readouterr().out
    assert mutations.main(["unheard of"]) == 2


def test_a_line_that_is_gone_fails_the_run(tmp_path):
    copy = mutations.make_copy(tmp_path)
    with pytest.raises(ValueError, match=r"block_pool\.py has 0 times, not once: 'no such line'"):
        Mutation("old", "block_pool.py", "no such line", "").apply(copy)
    Mutation("broken", "block_pool.py", "class OutOfBlocks", "class class").apply(copy)
    assert mutations.run_tests(copy, ("test_block_pool.py",)).returncode not in (0, 1)
