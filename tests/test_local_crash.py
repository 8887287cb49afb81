"""A killed service loses nothing that it acknowledged and lists nothing half written.

``benchmarks/kill_service.py`` does the same many more times.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from local_crash import (
    Acknowledged,
    ServiceProcess,
    check_what_is_left,
    save_until_killed,
)
from local_helpers import TINY, Wire

from rlhelpers.local import LocalService

pytest_plugins = ("local_fixtures",)


@pytest.mark.slow
def test_a_killed_process_keeps_every_acknowledged_checkpoint(
    tiny_folder: Path, tmp_path: Path
) -> None:
    acknowledged = Acknowledged()
    for seed in range(3):
        service = ServiceProcess(tmp_path, tiny_folder)
        save_until_killed(service, random.Random(seed), acknowledged)
        check_what_is_left(tmp_path, acknowledged)
    assert len(acknowledged.training) > 3

    # The next service starts on what is there and resumes from the last checkpoint.
    path = list(acknowledged.training)[-1]
    with LocalService(tmp_path, models={TINY: tiny_folder}) as service:
        wire = Wire(service)
        with wire.http:
            model = wire.model(wire.session())
            load = {"model_id": model, "seq_id": 1, "path": path, "optimizer": True}
            assert wire.result(wire.submit("load_weights", load))["path"] == path
