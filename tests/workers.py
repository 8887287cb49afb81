"""Sharing the tests among processes (``pytest -n 2``, by pytest-xdist).

A file's tests stay together, since they share its fixtures, and a notebook's cells its
kernel. So do lessons 04 to 06, in their order: 05 and 06 read the run that 04 leaves.
What takes long goes first, so that the processes end together.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import tempfile
from collections import defaultdict
from typing import Any

import pytest

#: Whether this process is one of several.
SHARING = "PYTEST_XDIST_WORKER" in os.environ
# About how long a test takes, in seconds: good enough for an order.
SLOW, CELL, OTHER = 20.0, 2.0, 0.3


def share_of(nodeid: str) -> str:
    """The tests that one process runs in a row: a file's, or those of 04 to 06.

    >>> share_of("tests/test_kl.py::test_it[a::b]")
    'tests/test_kl.py'
    >>> share_of("notebooks/08_losses_and_stability.ipynb::Cell 3")
    'notebooks/08_losses_and_stability.ipynb'
    >>> share_of("notebooks/05_before_and_after.ipynb::Cell 3")
    'notebooks/04 to 06'
    """
    file = nodeid.split("::", 1)[0]
    return re.sub(r"^notebooks/0[456]_.*", "notebooks/04 to 06", file)


def likely_seconds(item: pytest.Item) -> float:
    """A guess from what kind of test it is."""
    if item.get_closest_marker("slow"):
        return SLOW
    return CELL if ".ipynb::" in item.nodeid else OTHER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there are several processes, put the longest share first."""
    if not SHARING:
        return
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        seconds[share_of(item.nodeid)] += likely_seconds(item)
    items.sort(key=lambda item: -seconds[share_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole shares, in the order that they were put into."""
    from xdist.scheduler import LoadScopeScheduling

    class Shares(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share_of(nodeid)

    config.option.loadscopereorder = False  # by how many tests a share has
    return Shares(config, log)


def keep_processes_apart() -> None:
    """Let several processes share the cores, and never take each other's ports.

    A kernel manager looks for free ports, and its kernel takes them a second later.
    Meanwhile another process could, so kernels get sockets in files instead.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if os.name == "nt":  # which has no such sockets
        return
    from jupyter_client import KernelManager

    folder = tempfile.mkdtemp(prefix="kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    names = (f"{folder}/{number}" for number in itertools.count())
    made = KernelManager.__init__

    def make(self: KernelManager, *args: Any, **options: Any) -> None:
        made(self, *args, **{"transport": "ipc", "ip": next(names), **options})

    KernelManager.__init__ = make  # type: ignore[method-assign]
