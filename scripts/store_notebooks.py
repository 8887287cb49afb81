"""Run the notebooks again and store them with the outputs of that run.

    python scripts/store_notebooks.py                # the course and its solutions
    python scripts/store_notebooks.py --only 05 06   # these lessons and their solutions
    python scripts/store_notebooks.py --check        # run nothing, look at the stored

All of them run first, in order, and are stored only if every one passed and no output
breaks a rule: no error, warning, path, key, picture without words, or progress bar left
behind. Each has the cell for hosted services (hosted_cell.py) on top. The numbers that
the prose quotes are then written anew (quotes.py).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
import papermill

sys.path.insert(0, str(Path(__file__).resolve().parent))
import quotes
from run_course import failure_of

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
HOSTED = Path(__file__).with_name("hosted_cell.py")
WIDGET = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}

#: What no stored output may hold, and how it is called in the report.
FORBIDDEN = {
    "a path of this machine": r"(?:^|[\s'\"(=>])(?:/(?:home|root|tmp|work|Users|mnt)/)"
    r"|\b[A-Z]:\\\\?(?:Users|home)",
    "a traceback": r"Traceback \(most recent call last\)",
    "a warning": r"\b\w*Warning: ",
    "a key": r"\bfw_[A-Za-z0-9]{8}|\bsk-[A-Za-z0-9]{8}|api_key=['\"]?\w{8}",
    "a progress bar": r"\d+%\|[█▏▎▍▌▋▊▉ #]+\|",
    "an object's address": r"\bat 0x[0-9a-f]{6,}>",
    "a picture without words": r"<Figure size",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, check and store; 0 if every notebook was stored, or is in order."""
    options = _parser().parse_args(argv)
    try:
        paths = select(options.notebooks, options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        stored = {path: nbformat.read(path, as_version=4) for path in paths}
    else:
        executed = run_all(paths)
        if executed is None:
            return 1
        stored = executed
    found = [
        f"{path.relative_to(options.notebooks)}, {problem}"
        for path, notebook in stored.items()
        for problem in problems(notebook)
    ]
    if found:
        print("\n".join(found), file=sys.stderr)
        print(f"nothing was stored: {len(found)} outputs to repair", file=sys.stderr)
        return 1
    if options.check:
        return quotes.report(quotes.check(options.notebooks.parent))
    for path, notebook in stored.items():
        nbformat.write(notebook, path)
        print("stored", path.relative_to(options.notebooks))
    return quotes.report(quotes.rewrite(options.notebooks.parent))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NN", help="numbers, such as 01 03"
    )
    parser.add_argument("--check", action="store_true", help="run and store nothing")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS)
    return parser


def select(folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """The numbered notebooks, then their solutions; all, or those with these numbers.

    Raises:
        ValueError: There are none, or none with one of the numbers.
    """
    lessons = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    solutions = sorted(folder.glob("solutions/[0-9][0-9]_*.ipynb"))
    numbers = sorted({path.name[:2] for path in lessons})
    if not numbers:
        raise ValueError(f"no notebooks named NN_*.ipynb in {folder}")
    if unknown := sorted(set(only) - set(numbers)):
        raise ValueError(
            f"no notebook {', '.join(unknown)}; there are {', '.join(numbers)}"
        )
    return [p for p in (*lessons, *solutions) if not only or p.name[:2] in only]


def run_all(paths: Sequence[Path]) -> dict[Path, Any] | None:
    """Execute the notebooks in order and tidy them; None after the first failure."""
    executed = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            print(f"running {path.name} ...", flush=True)
            copy = Path(folder) / path.name
            notebook = with_hosted_cell(nbformat.read(path, as_version=4))
            nbformat.write(notebook, copy)
            try:
                papermill.execute_notebook(
                    str(copy),
                    str(copy),
                    cwd=str(path.parent),
                    kernel_name="python3",
                    progress_bar=False,
                )
            except Exception as error:  # a cell failed, or the kernel died
                print(f"{path.name}{failure_of(error)}", file=sys.stderr)
                print("nothing was stored", file=sys.stderr)
                return None
            executed[path] = tidied(nbformat.read(copy, as_version=4))
    return executed


def with_hosted_cell(notebook: Any) -> Any:
    """The notebook with the cell for hosted services as its first code cell."""
    source = HOSTED.read_text(encoding="utf-8").rstrip("\n")
    metadata = {"jupyter": {"source_hidden": True}, "tags": ["hosted"]}
    cell = nbformat.v4.new_code_cell(source, id="hosted", metadata=metadata)
    others = [cell for cell in notebook.cells if cell.id != "hosted"]
    kinds = [cell.cell_type for cell in others]
    first = kinds.index("code") if "code" in kinds else len(kinds)
    notebook.cells = [*others[:first], cell, *others[first:]]
    return notebook


def tidied(notebook: Any) -> Any:
    """The notebook without anything that differs from run to run by itself.

    Times and the runner's own notes go; outputs printed in several pieces become one;
    the ids of widget views, which nothing refers to once the kernel has gone, follow
    from the cell.
    """
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        for name in ("papermill", "execution"):
            cell.metadata.pop(name, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                if view := output.get("data", {}).get(WIDGET):
                    digest = hashlib.sha256(cell.id.encode()).hexdigest()
                    view["model_id"] = digest[:32]
    return notebook


def _joined(outputs: Sequence[Any]) -> list[Any]:
    """Consecutive pieces of one stream as one output."""
    joined: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and joined:
            last = joined[-1]
            if last.output_type == "stream" and last.name == output.name:
                last.text += output.text
                continue
        joined.append(output)
    return joined


def problems(notebook: Any) -> Iterator[str]:
    """What is wrong with a notebook's stored form, each with its cell's id."""
    count = 0
    for cell in notebook.cells:
        if not cell.source.strip():
            yield f"cell {cell.id}: empty"
        if cell.cell_type != "code":
            continue
        count += 1
        if cell.execution_count != count:
            yield (
                f"cell {cell.id}: run as number {cell.execution_count}, not {count}; "
                "run all cells in order"
            )
        for problem in _output_problems(cell.outputs):
            yield f"cell {cell.id}: {problem}"


def _output_problems(outputs: Sequence[Any]) -> Iterator[str]:
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    if len(images) > 1:
        yield f"{len(images)} images, where one cell shows one"
    for output in images:
        if len(output.data.get("text/plain", "")) < 40:
            yield "an image whose plain text does not say what it shows"
    for output in outputs:
        if output.output_type == "error":
            yield f"an error, {output.ename}: {output.evalue[:200]}"
        if output.get("name") == "stderr":
            yield f"text on stderr: {output.text.strip()[:200]!r}"
        for text in _texts(output):
            for what, pattern in FORBIDDEN.items():
                if match := re.search(pattern, text, re.M):
                    yield f"{what}: {match[0].strip()!r}"


def _texts(output: Any) -> Iterator[str]:
    """Everything in an output that a reader can read."""
    yield output.get("text", "")
    for kind, content in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield content


if __name__ == "__main__":
    sys.exit(main())
