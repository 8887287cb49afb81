"""Set the course up inside a kernel of a hosted service, such as Colab or Kaggle.

The first code cell of every notebook fetches the repository where the package is not
importable, and calls :func:`set_up`. The kernel's own torch stays as it is (there it is
built for the service's GPU), and so does its numpy, which it may have imported already.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Never replaced in a running kernel.
KEPT = ("torch", "numpy")
#: What only a machine of one's own needs: the front end and the headless runners.
NOT_IN_A_KERNEL = ("jupyterlab", "papermill", "nbval")
PYTHONS = ((3, 11), (3, 12))
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def set_up(clone: str | Path) -> None:
    """Install what the kernel lacks, and make the course of a clone importable.

    Afterwards the working directory is the clone's folder of notebooks, so that runs
    are written where the notebooks look for them.

    Args:
        clone: The folder that holds ``pyproject.toml`` and ``rlhelpers``.

    Raises:
        RuntimeError: This Python is none that the course supports, or pip failed.
    """
    check_python(sys.version_info[:2])
    clone = Path(clone).resolve()
    installed = {name: found for name in KEPT if (found := installed_version(name))}
    if "torch" not in installed:
        pip([wanted("torch", clone), *cpu_only()])
    constraints = [f"{name}=={found}" for name, found in installed.items()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text("\n".join(constraints))
        left_out = (*NOT_IN_A_KERNEL, "torch")
        pip(["--constraint", str(file), *requirements(clone, left_out)])
    sys.path.insert(0, str(clone))
    importlib.invalidate_caches()
    os.chdir(clone / "notebooks")
    print("The course is set up. Runs are written into the folder runs of", clone.name)


def check_python(found: tuple[int, ...]) -> None:
    """Refuse a Python for which HUD does not exist."""
    if found not in PYTHONS:
        raise RuntimeError(
            f"the course needs Python 3.11 or 3.12, and this kernel runs "
            f"{'.'.join(map(str, found))}; choose another runtime or image"
        )


def requirements(clone: Path, left_out: Collection[str] = ()) -> list[str]:
    """The package's declared requirements, without those ``left_out``."""
    text = (clone / "pyproject.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)["project"]["dependencies"]
    return [line for line in declared if name_of(line) not in left_out]


def wanted(name: str, clone: Path) -> str:
    """The declared requirement of one package."""
    return next(line for line in requirements(clone) if name_of(line) == name)


def name_of(requirement: str) -> str:
    """The name in a requirement.

    >>> name_of("fireworks-ai[training-sdk]>=1.2.30,<1.3")
    'fireworks-ai'
    """
    return re.split(r"[\[<>=~!; ]", requirement, maxsplit=1)[0].lower()


def installed_version(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_only() -> list[str]:
    """pip's option for the build without CUDA, on Linux without an NVIDIA driver."""
    if sys.platform == "linux" and shutil.which("nvidia-smi") is None:
        return ["--index-url", CPU_BUILDS]
    return []


def pip(arguments: Sequence[str]) -> None:
    """Install into this kernel's environment."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install the course:\n{done.stderr[-2000:]}")
