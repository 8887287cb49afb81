"""The help pages: terms are explained, links lead somewhere, messages are real."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_notebooks import printed, read

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "notebooks" / "glossary.md"
TROUBLE = ROOT / "notebooks" / "troubleshooting.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "data" / "tiny-policy" / "README.md",
    ROOT / "data" / "tiny-guesser" / "README.md",
    *sorted((ROOT / "notebooks").glob("*.md")),
    *sorted((ROOT / "rlhelpers").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

#: The words that code, text and plots share; one word for one thing.
FIELD_TERMS = {
    "rollout", "group", "advantage", "policy", "snapshot", "datum", "held-out",
    "reward", "task", "template", "grader", "agent", "environment", "outcome", "cause",
    "token limit", "flat group", "within-group spread", "calibration", "greedy",
    "log-probability", "ratio", "on-policy", "mask", "loss", "entropy", "KL", "LoRA",
    "adapter", "base model", "Adam", "learning rate", "checkpoint", "resume",
    "promotion", "session", "sampler", "seed", "step", "temperature", "watch prompts",
    "training service", "HUD", "GRPO",
}  # fmt: skip
#: Bold in the lessons for weight, not as a term.
EMPHASIS = {
    "and", "anywhere", "not", "one", "quoted", "same", "decisions", "1692",
    "pays for a bad ending", "refuses right answers",
    "say it once, last, and stop", "tells of length imbalance, never of progress",
    "wrong integers", "stays flat", "whole batch",
    "form stays and arithmetic goes",
}  # fmt: skip
LESSONS = sorted((ROOT / "notebooks").rglob("[0-9][0-9]_*.ipynb"))


def words(text: str) -> str:
    return " ".join(text.split())


def entries() -> dict[str, tuple[str, str, str]]:
    """Term → (explanation, number, link)."""
    pattern = r"^- \*\*(.+?)\*\*: (.+?)\s\[(\d\d)\]\((.+?)\)$"
    text = GLOSSARY.read_text(encoding="utf-8")
    found = re.findall(pattern, text, re.M | re.S)
    assert len(found) == text.count("\n- **")
    return {term: (words(said), number, link) for term, said, number, link in found}


def cells(path: Path) -> list[dict[str, object]]:
    notebook: dict[str, list[dict[str, object]]] = json.loads(
        path.read_text(encoding="utf-8")
    )
    return notebook["cells"]


def prose(path: Path) -> str:
    parts = [c["source"] for c in cells(path) if c["cell_type"] == "markdown"]
    return words(" ".join("".join(part) for part in parts))  # type: ignore[arg-type]


# -- the glossary -----------------------------------------------------------------


def test_every_term_of_the_course_is_in_the_glossary() -> None:
    assert entries().keys() >= FIELD_TERMS


def test_the_glossary_is_in_order_and_short() -> None:
    known = entries()
    assert list(known) == sorted(known, key=str.lower)
    for term, (said, _, _) in known.items():
        assert len(re.findall(r"[.:](?: |$)", said)) <= 4, term
        assert len(said) <= 260, term


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_bold_terms_of_a_lesson_are_in_the_glossary(path: Path) -> None:
    known = "|".join(re.escape(term.lower()) for term in entries())
    text = re.sub(r"`[^`]*`", "", prose(path))
    for bold in re.findall(r"\*\*(.+?)\*\*", text):
        if re.search(r"[.:·^=?]|^\d \(|^[A-Z]$", bold) or bold in EMPHASIS:
            continue  # a sentence, a lesson's name, a formula, an exercise, a choice
        assert re.search(rf"\b({known})s?\b", bold.lower()), (
            f"{path.name} introduces **{bold}**: explain it in notebooks/glossary.md, "
            "or list it under EMPHASIS here"
        )


@pytest.mark.parametrize("term", sorted(entries()))
def test_the_notebook_that_a_term_names_uses_it(term: str) -> None:
    _, number, link = entries()[term]
    path = ROOT / "notebooks" / link
    assert link.startswith(f"{number}_")
    text = words(f"{prose(path)} {printed(read(path))}").lower()
    assert term.lower().removesuffix("s") in text


# -- links ------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """What GitHub and JupyterLab make of the headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S))


def check_link(link: str, page: Path, text: str) -> None:
    if re.match(r"https?://|attachment:", link):
        return
    target, _, anchor = link.partition("#")
    where = (page.parent / target).resolve() if target else page
    assert where.exists(), f"{page.name}: {link}"
    if anchor and where.suffix == ".md":
        shown = where.read_text(encoding="utf-8") if target else text
        assert anchor in anchors(shown), f"{page.name}: {link}"


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: f"{page.parent.name}-{page.name}"
)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in links(text):
        check_link(link, page, text)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").rglob("*.ipynb")), ids=lambda path: path.stem
)
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    text = prose(path)
    for link in links(text):
        check_link(link, path, text)


# -- quoted messages --------------------------------------------------------------


@cache
def spoken() -> list[str]:
    """Every text that the package, its scripts or the set-up can say.

    Of an f-string the fixed parts, with a mark where a value goes.
    """
    said = []
    for folder in ("rlhelpers", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            said += [words(text) for text in strings(tree)]
    said.append(words(re.sub(r'" >&2; \\|echo "', "", (ROOT / "Makefile").read_text())))
    return said


def strings(tree: ast.AST) -> Iterator[str]:
    """Texts of a module; ``"a" + x + "b"`` counts as one, as an f-string does.

    Docstrings are left out: they are said to nobody.
    """
    nodes = list(ast.walk(tree))
    silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        kinds = ast.JoinedStr | ast.BinOp | ast.Constant
        if isinstance(node, kinds) and id(node) not in silent:
            yield template(node)


def template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "\0"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "\0"


def quoted() -> list[str]:
    """The messages of the course that the page quotes."""
    text = TROUBLE.read_text(encoding="utf-8")
    return [words(block) for block in re.findall(r"```text\n(.+?)```", text, re.S)]


@pytest.mark.parametrize("message", quoted())
def test_the_package_can_say_what_the_page_quotes(message: str) -> None:
    """The fixed parts stand in one message of the source, in this order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), re.S)
    assert parts
    assert any(pattern.search(text) for text in spoken()), message


def test_the_page_quotes_enough() -> None:
    assert len(quoted()) >= 50
    assert len(set(quoted())) == len(quoted())


def test_a_message_that_does_not_exist_is_noticed() -> None:
    assert not any("no such message is written anywhere" in t for t in spoken())


def test_every_status_and_verdict_is_on_the_page() -> None:
    from rlhelpers.analysis import _VERDICTS
    from rlhelpers.refusals import _REMEDIES

    text = words(TROUBLE.read_text(encoding="utf-8")).lower()
    for status in _REMEDIES:
        if status not in (409, 503):  # said by the same words as 429; 500 to 599
            assert str(status) in text, status
    for code, (_, advice) in _VERDICTS.items():
        if code != "healthy":
            assert advice.split(",")[0].split(":")[0].lower() in text, code
