"""Hold the numbers that prose quotes against the outputs that they come from.

    python scripts/quotes.py           # report every number that is not the stored one
    python scripts/quotes.py --write   # write them anew, from the stored outputs

`quotes.toml` lists them: where a number stands, as a regular expression with one group
for each number, and where it comes from. Prose stays plain, without marks in it. In the
files listed as `covered`, a number with a decimal point, a percent sign or a thousands
comma, and a count such as "8 of 10", has to be a quote, or `free` with the reason.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[1]
LIST = Path("scripts", "quotes.toml")
#: What looks like a result.
RESULT = re.compile(
    r"(?<![\w.,^/-])(?:[+−-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[+−-]?\d+\.\d+"
    r"|\d+(?= ?%)|\d+ of [\d,]+)(?![\w]|\.\d)"
)
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.S)
EXERCISE = re.compile(r"\s*(?:## Exercise|\*\*\d)")


@dataclass
class Document:
    """A notebook, or a text file as one cell without a name."""

    path: Path
    notebook: Any = None
    text: str = ""
    changed: bool = False

    @classmethod
    def read(cls, path: Path) -> Document:
        if path.suffix == ".ipynb":
            return cls(path, notebook=nbformat.read(path, as_version=4))
        return cls(path, text=path.read_text(encoding="utf-8"))

    def cells(self) -> Iterator[tuple[str, str]]:
        """Name and source of each cell of prose."""
        if self.notebook is None:
            yield "", self.text
            return
        for cell in self.notebook.cells:
            if cell.cell_type == "markdown":
                yield cell.id, cell.source

    def cell(self, name: str) -> Any:
        """The notebook's cell of that id."""
        for cell in self.notebook.cells:
            if cell.id == name:
                return cell
        raise ValueError(f"{self.path.name} has no cell {name!r} any more")

    def source(self, name: str) -> str:
        """The prose of one cell."""
        return str(self.text if self.notebook is None else self.cell(name).source)

    def shown(self, name: str) -> str:
        """What a code cell, or every one, printed or displayed; a text file's text."""
        if self.notebook is None:
            return self.text
        parts = []
        for cell in [self.cell(name)] if name else self.notebook.cells:
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                parts += [output.get("text", ""), data.get("text/markdown", "")]
                parts.append(data.get("text/plain", ""))
        return "\n".join(parts)

    def replace(self, name: str, text: str) -> None:
        """Put other prose in the place of a cell's."""
        self.changed |= text != self.source(name)
        if self.notebook is None:
            self.text = text
        else:
            self.cell(name).source = text

    def save(self) -> None:
        """Write the file if anything changed."""
        if self.changed and self.notebook is not None:
            nbformat.write(self.notebook, self.path)
        elif self.changed:
            self.path.write_text(self.text, encoding="utf-8")


@dataclass
class Report:
    """What a check found, and which spans of prose it accounts for."""

    problems: list[str] = field(default_factory=list)
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


class Documents:
    """The files that the list names, each read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[str, Document] = {}

    def at(self, place: str) -> tuple[Document, str]:
        """The document and the cell of ``file#cell``."""
        name, _, cell = place.partition("#")
        if name not in self.known:
            self.known[name] = Document.read(self.root / name)
        return self.known[name], cell


def check(root: Path = ROOT) -> list[str]:
    """Every number of the list that is not the one its source shows, and the rest."""
    return _go_through(root, write=False)


def rewrite(root: Path = ROOT) -> list[str]:
    """Write the numbers anew; what cannot be repaired so is returned."""
    _go_through(root, write=True)
    return _go_through(root, write=False)


def report(problems: Sequence[str]) -> int:
    """Print problems; 0 if there are none."""
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print("every quoted number is the one that its source shows")
    return 1 if problems else 0


def _go_through(root: Path, *, write: bool) -> list[str]:
    if not (root / LIST).is_file():
        return []
    entries = tomllib.loads((root / LIST).read_text(encoding="utf-8"))
    documents = Documents(root)
    found = Report()
    steps: tuple[tuple[str, Callable[..., None]], ...] = (
        ("block", _block),
        ("quote", _quote),
        ("free", _free),
    )
    for kind, step in steps:
        for entry in entries.get(kind, ()):
            try:
                step(entry, documents, found, write)
            except (KeyError, OSError, ValueError) as error:
                found.problems.append(f"{entry['in']}: {error}")
    for name in entries.get("covered", ()):
        found.problems += _unaccounted(name, documents, found)
    for document in documents.known.values():
        document.save()
    return found.problems


# -- one entry --------------------------------------------------------------------


def _block(
    entry: dict[str, Any], documents: Documents, found: Report, write: bool
) -> None:
    """A table between two comments, as a command wrote it to a file."""
    document, cell = documents.at(entry["in"])
    source, _ = documents.at(entry["from"])
    text, name = document.source(cell), entry["name"]
    start, end = _between(text, name)
    wanted = source.text[slice(*_between(source.text, name))]
    if text[start:end] == wanted:
        return
    if write:
        document.replace(cell, text[:start] + wanted + text[end:])
        return
    found.problems.append(
        f"{entry['in']}: the table {name!r} is not the one in {entry['from']}; "
        "run scripts/quotes.py --write"
    )


def _between(text: str, name: str) -> tuple[int, int]:
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    if opening not in text or closing not in text:
        raise ValueError(f"no place marked {opening} … {closing}")
    return text.index(opening) + len(opening), text.index(closing)


def _quote(
    entry: dict[str, Any], documents: Documents, found: Report, write: bool
) -> None:
    """Numbers in prose, each with the number that its source shows."""
    document, cell = documents.at(entry["in"])
    text = document.source(cell)
    match = re.search(entry["prose"].replace(" ", r"\s+"), text)
    if match is None:
        raise ValueError(f"the prose has nothing like {entry['prose']!r} any more")
    values = _values(entry, documents)
    if len(values) != len(match.groups()):
        raise ValueError(
            f"{entry['prose']!r} quotes {len(match.groups())} numbers and "
            f"{entry['shown']!r} finds {len(values)}"
        )
    for number in range(len(values), 0, -1):  # from the end: spans stay right
        start, end = match.span(number)
        wanted = written(values[number - 1], like=match[number])
        if match[number] != wanted and write:
            text = text[:start] + wanted + text[end:]
        elif match[number] != wanted:
            found.problems.append(
                f"{entry['in']} says {match[number]} where {entry['from']} shows "
                f"{wanted} ({' '.join(match[0].split())!r})"
            )
    document.replace(cell, text)
    again = re.search(entry["prose"].replace(" ", r"\s+"), text)
    if again is not None:
        whole = (again.start(1), again.end(len(values)))  # such as "126 of 128"
        found.spans.setdefault(entry["in"], []).append(whole)


def _values(entry: dict[str, Any], documents: Documents) -> list[float]:
    """The numbers that a source shows, as the prose states them."""
    source, cell = documents.at(entry["from"])
    match = re.search(entry["shown"], source.shown(cell))
    if match is None:
        raise ValueError(
            f"{entry['from']} shows nothing like {entry['shown']!r}; store the "
            "notebook anew, or change scripts/quotes.toml"
        )
    values = [value_of(text) for text in match.groups()]
    if entry.get("sum"):
        values = [sum(values)]
    if "out_of" in entry:
        values = [entry["out_of"] - value for value in values]
    values = [value * entry.get("times", 1) for value in values]
    step = entry.get("round")
    return values if step is None else [step * round(value / step) for value in values]


def value_of(text: str) -> float:
    """A number as it is printed: with thousands commas, and either minus sign."""
    return float(text.replace(",", "").replace("−", "-"))


def written(value: float, *, like: str) -> str:
    """A number with the decimals and the sign of another.

    >>> written(71.875, like="68.2"), written(1234, like="999")
    ('71.9', '1,234')
    >>> written(1.5, like="+0.5"), written(-0.5, like="−1.5")
    ('+1.5', '−0.5')
    """
    decimals = len(like.partition(".")[2])
    text = f"{value:{'+' if like[0] == '+' else ''},.{decimals}f}"
    return text.replace("-", "−") if "−" in like else text


# -- what is not a quote ----------------------------------------------------------


def _free(
    entry: dict[str, Any], documents: Documents, found: Report, write: bool
) -> None:
    """Numbers that are no results, with the reason."""
    document, cell = documents.at(entry["in"])
    text = document.source(cell)
    spans = found.spans.setdefault(entry["in"], [])
    for number in entry["numbers"]:
        hits = [m.span() for m in RESULT.finditer(text) if m[0] == number]
        if not hits:
            raise ValueError(f"{number!r} is listed as free and is not there any more")
        spans += hits


def _unaccounted(name: str, documents: Documents, found: Report) -> Iterator[str]:
    """Numbers that look like results and that no entry accounts for."""
    document, _ = documents.at(name)
    for cell, text in document.cells():
        if EXERCISE.match(text):
            continue  # its numbers are given
        place = f"{name}#{cell}" if cell else name
        spans = found.spans.get(place, [])
        spans = [*spans, *(m.span() for m in NOT_PROSE.finditer(text)), *_tables(text)]
        for match in RESULT.finditer(text):
            if not any(a < match.end() and match.start() < b for a, b in spans):
                around = text[max(0, match.start() - 30) : match.end() + 20]
                yield (
                    f"{place} says {match[0]!r} (… {' '.join(around.split())} …): name "
                    "its source, or why it needs none, in scripts/quotes.toml"
                )


def _tables(text: str) -> Iterator[tuple[int, int]]:
    """The spans between two comments of one name."""
    for match in re.finditer(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", text, re.S):
        yield match.span()


if __name__ == "__main__":
    sys.exit(report(rewrite() if "--write" in sys.argv[1:] else check()))
