"""Every collected field case is named by a test, so that none is forgotten.

A test names a case in its own name (``test_s11_…``), in its docstring, in the docstring
of its file, in a comment of its file, or among its parameters (``("G01", …)``).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUMBERS = {  # grader; advantages and datums; sampling and service; notebooks
    "G": (1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 18, 19, 20, 21, 22, 23, 25),
    "A": (1, 2, 3, 5, 8, 9, 10, 11, 13, 15, 16, 18),
    "S": (1, 3, 4, 5, 7, 8, 10, 11, 13, 14, 16),
    "N": (1, 3, 5, 7, 8, 9, 10, 12, 14, 15, 17, 18, 20),
}
IDS = [f"{kind}{number:02}" for kind, found in NUMBERS.items() for number in found]
ID = re.compile(r"(?<![A-Za-z0-9\\])([GASNgasn]\d\d)(?![0-9A-Za-z])")


def named_in(path: Path) -> set[str]:
    """Ids in the names of tests, in strings and in comments of a file."""
    source = path.read_text(encoding="utf-8")
    texts = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in (tokenize.STRING, tokenize.COMMENT)
    ]
    texts += [
        node.name.replace("_", " ")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]
    return {found.upper() for text in texts for found in ID.findall(text)}


@pytest.fixture(scope="module")
def named() -> dict[str, list[str]]:
    """Files that name each id."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        if path.name != Path(__file__).name:
            for case in named_in(path):
                found.setdefault(case, []).append(path.name)
    return found


@pytest.mark.parametrize("case", IDS)
def test_a_test_names_the_case(case: str, named: dict[str, list[str]]) -> None:
    assert named.get(case), f"no test names {case}"


def test_no_test_names_a_case_that_there_is_not(named: dict[str, list[str]]) -> None:
    assert named.keys() <= set(IDS)
    assert len(IDS) == len(set(IDS)) == 53
