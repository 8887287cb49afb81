"""How the tests are shared among processes: by pytest itself, on files of its own."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import workers

pytest_plugins = ("pytester",)

TWO = "def test_1():\n    pass\ndef test_2():\n    pass\n"
LONG = "import pytest\n@pytest.mark.slow\n" + TWO


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(workers).failed == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_files_stay_whole_and_the_longest_goes_first(
    processes: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of the outer pytest
    monkeypatch.setenv("PYTHONPATH", str(Path(workers.__file__).parent))
    pytester.makeini("[pytest]\nmarkers = slow\n")
    pytester.makepyfile(test_a=TWO, test_b=TWO, test_c=LONG, test_d=TWO)
    done = pytester.runpytest_subprocess("-v", "-n", str(processes), "-p", "workers")
    done.assert_outcomes(passed=8)
    ran = re.findall(r"\[(gw\d)\] .*PASSED (\w+)\.py::(\w+)", done.stdout.str())
    where: dict[str, set[str]] = {}
    order: dict[str, list[str]] = {}
    for process, file, test in ran:
        where.setdefault(file, set()).add(process)
        order.setdefault(file, []).append(test)
    assert all(len(found) == 1 for found in where.values())
    assert set(map(tuple, order.values())) == {("test_1", "test_2")}
    if processes == 1:
        assert list(order) == ["test_c", "test_a", "test_b", "test_d"]
