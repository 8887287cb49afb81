"""Tables in Markdown, as notebooks show them, and the same for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True
) -> str:
    """A table in Markdown.

    Args:
        head: The heading of each column.
        rows: The cells, row by row.
        numbers: Whether all columns but the first are set to the right.

    >>> print(markdown_table(["", "n"], [["right", "3"]]))
    | | n |
    |---|---:|
    | right | 3 |
    """
    ruler = "|---" + ("|---:" if numbers else "|---") * (len(head) - 1) + "|"
    first, *others = (
        "|" + "".join(f" {cell} |" if cell else " |" for cell in row)
        for row in (head, *rows)
    )
    return "\n".join([first, ruler, *others])


def plain_text(markdown: str) -> str:
    """Our Markdown for a terminal: tables in columns, no asterisks.

    >>> print(plain_text("**Fine.**\\n\\n| x | y |\\n|---|---:|\\n| ab | 1 |"))
    Fine.
    <BLANKLINE>
    x   y
    ab  1
    """
    out: list[str] = []
    lines = markdown.replace("**", "").split("\n")
    for in_table, part in groupby(lines, key=lambda line: line.startswith("|")):
        found = list(part)
        out += _columns(found) if in_table else found
    return "\n".join(out)


def _columns(lines: Iterable[str]) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row for row in rows if not set("".join(row)) <= set(":-")]  # no ruler
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
