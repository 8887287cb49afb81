"""The walls between the parts, and the promises of the set-up files."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlhelpers"
#: Decide what a number means; may not touch a file, a socket or a service.
PURE = ("answers", "advantages", "datums", "analysis", "tables")


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import in a file, wherever it stands."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from ((base, alias.name) for alias in node.names)


def sources(inside_local: bool) -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if ("local" in path.relative_to(PACKAGE).parts[:-1]) == inside_local
    ]


def dotted(path: Path) -> str:
    """The name under which a module of the package is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def full_name(module: str, name: str) -> str:
    return f"{module}.{name}" if name else module


@pytest.mark.parametrize("path", sources(True), ids=lambda p: p.name)
def test_local_service_imports_nothing_from_the_rest(path: Path) -> None:
    for module, name in imports(path):
        target = full_name(module, name)
        if target.split(".")[0] == "rlhelpers":
            assert target.startswith("rlhelpers.local"), f"{path.name}: {target}"


@pytest.mark.parametrize("path", sources(False), ids=lambda p: p.name)
def test_the_rest_sees_only_the_objects_that_start_the_service(path: Path) -> None:
    starts = ("rlhelpers.local.LocalService", "rlhelpers.local.LocalServiceProcess")
    for module, name in imports(path):
        target = full_name(module, name)
        if target.startswith("rlhelpers.local"):
            assert target in starts, f"{path.name}: {target}"


@pytest.mark.parametrize("name", PURE)
def test_pure_core_does_no_io_and_knows_no_service(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    allowed = {"math", "re", "collections", "dataclasses", "statistics", "typing"}
    allowed |= {"__future__", "itertools"}
    for module, imported in imports(path):
        target = full_name(module, imported)
        own = [f"rlhelpers.{other}." for other in PURE]
        if name == "datums" and module == "fireworks.training.sdk":
            assert imported in {"Datum", "ModelInput", "TensorData"}
            continue
        assert module.split(".")[0] in allowed or any(
            target.startswith(prefix) for prefix in own
        ), f"{name}: {target}"
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "exec", "eval"}


def test_public_names_are_importable() -> None:
    import rlhelpers

    for name in (
        "grade_final_integer",
        "make_taskset",
        "split_taskset",
        "group_relative_advantages",
        "within_group_reward_std",
        "make_datum",
        "make_training_batch",
        "classify_outcome",
    ):
        assert name in rlhelpers.__all__
    for name in rlhelpers.__all__:  # each is imported at its first use
        assert callable(getattr(rlhelpers, name))
        assert name in dir(rlhelpers)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = rlhelpers.trian
    with pytest.raises(ImportError, match="trian"):
        from rlhelpers import trian  # noqa: F401


@pytest.mark.parametrize(
    "name", [dotted(path) for path in sources(False) if path.stem != "__main__"]
)
def test_examples_in_docstrings_hold(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_checkers_live_in_the_module_of_their_notebook() -> None:
    from rlhelpers import checks

    homes = {path.stem for path in (PACKAGE / "checks").glob("*.py")}
    lessons = {path.stem[3:] for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert homes - {"__init__", "lesson", "marking"} <= lessons
    assert all(hasattr(checks, name) for name in checks.__all__)


IMPORT_PROBE = """
import os, sys
{first}
import rlhelpers
print([name for name in ("hud", "fireworks", "torch") if name in sys.modules])
from hud.settings import settings
print(settings.telemetry_enabled, settings.span_dir)
print("rfc3987_syntax" in sys.modules)  # a slow part of jsonschema
"""


@pytest.mark.parametrize("first", ["", "import hud"], ids=["alone", "after-hud"])
def test_import_switches_hud_telemetry_off(first: str, tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    printed = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE.format(first=first)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    loaded, *rest = printed.splitlines()
    # They take seconds, and a local service apart never needs the first two.
    assert loaded == ("['hud']" if first else "[]")
    *telemetry, slow = " ".join(rest).split()
    assert telemetry == ["False", str(ROOT / "runs" / "hud-spans")]
    assert slow == "False" or first


def test_telemetry_stays_on_for_whoever_asks_for_it(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE.format(first="")],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "HUD_TELEMETRY_ENABLED": "true",
            "HUD_TELEMETRY_LOCAL_DIR": str(tmp_path / "mine"),
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split() == ["[]", "True", str(tmp_path / "mine"), "False"]


# Set-up files

LOCK_LINE = re.compile(
    r'[a-z0-9-]+==[0-9][A-Za-z0-9.]*(; [a-z_]+ [<>=!]+ "[a-z0-9.]+")?'
)


def lock_lines() -> list[str]:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_lock_pins_names_and_versions_and_nothing_else() -> None:
    for line in lock_lines():
        assert LOCK_LINE.fullmatch(line), line
    names = [line.split("==")[0] for line in lock_lines()]
    assert names == sorted(set(names))
    assert "torch==2.13.0" in lock_lines()
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]
    assert "rlhelpers" not in names


def test_lock_covers_every_declared_dependency() -> None:
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
    ]
    locked = dict(line.split(";")[0].split("==") for line in lock_lines())
    for text in declared:
        requirement = Requirement(text)
        version = locked[requirement.name.lower().replace("_", "-")]
        assert version in requirement.specifier, text


def test_make_chooses_a_python_that_runs(tmp_path: Path) -> None:
    """A shim that exists and fails is passed over; with none left, make says so."""
    shims = tmp_path / "bin"
    shims.mkdir()
    for name in ("python3.11", "python3.12", "python3"):
        shim = shims / name
        shim.write_text("#!/bin/sh\necho shim failed >&2\nexit 127\n")
        shim.chmod(0o755)
    for tool in ("make", "sh", "rm", "touch", "cat"):
        found = subprocess.run(
            ["/bin/sh", "-c", f"command -v {tool}"], capture_output=True, text=True
        ).stdout.strip()
        if not found:
            pytest.skip(f"{tool} is not installed")
        (shims / tool).symlink_to(found)
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    result = subprocess.run(
        [str(shims / "make"), "setup"],
        cwd=tmp_path,
        env={"PATH": str(shims)},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "the course needs Python 3.11 or 3.12" in result.stderr
    assert not (tmp_path / ".venv").exists()
