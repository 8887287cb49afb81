"""The benchmarks run, and count rightly; how fast anything is, is not asserted here."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a script is run: its own folder comes first."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def run(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    load(name).main(["--quick", *arguments])
    return capsys.readouterr().out


@pytest.mark.slow
def test_sampling_prints_both_sides_and_the_ratio(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = run("sampling", capsys)
    assert "4 completions a round (2 prompts × 2), limit 16" in out
    assert re.search(r"^service +\d+\.\d{3} +\d+\.\d{3} +[\d,]+ +\d+\.\d$", out, re.M)
    assert re.search(r"^generate, 1 threads +\d+\.\d{3} ", out, re.M)
    assert re.search(r"service against generate, 1 threads: \d+\.\d\d × \(", out)
    assert "goal at least 1.5 ×: " in out


@pytest.mark.slow
def test_training_step_computes_the_same_update_as_plain_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = run("training_step", capsys)
    assert re.search(r"^8 datums of \d+ to \d+ tokens", out, re.M)
    service = re.search(r"^service +\S+ +\S+ +(-?\S+) +(-?\S+)$", out, re.M)
    plain = re.search(
        r"^torch and peft, 1 threads +\S+ +\S+ +(-?\S+) +(-?\S+)$", out, re.M
    )
    assert service is not None
    assert plain is not None
    # Two updates were made; a first loss says nothing of the optimizer, a second does.
    for ours, theirs in zip(service.groups(), plain.groups(), strict=True):
        assert float(ours) == pytest.approx(float(theirs), abs=0.05)
    assert service.group(1) != service.group(2)


@pytest.mark.slow
def test_rollouts_per_second_prints_every_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = run("rollouts_per_second", capsys)
    assert re.search(r"^8 +\d+\.\d\d +\d+\.\d +\d+\.\d +\d+\.\d$", out, re.M)
    last = r"^16 +\d+\.\d\d +\d+\.\d +\d+\.\d +\d+\.\d +\d+\.\d\d × \("
    assert re.search(last, out, re.M)
    assert re.search(r"^goal no fall: (reached|MISSED at 16)$", out, re.M)


@pytest.mark.parametrize("size", ["12", "0", "-8"])
def test_rollouts_come_in_whole_groups(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load("rollouts_per_second").main(["--sizes", size])
    assert f"multiples of the group of 8, got [{size}]" in capsys.readouterr().err


def test_rollouts_of_every_size_are_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("rollouts_per_second").main(["--sizes", "24", "64"])
    assert "must divide the largest, [24] do not" in capsys.readouterr().err


@pytest.mark.slow
def test_step_share_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import PreTrainedModel

    from rlhelpers.local import decoding
    from rlhelpers.local.trainer import PolicyTrainer

    before = decoding.draw, PolicyTrainer.run, PreTrainedModel.__call__
    out = run("step_share", capsys)
    assert (decoding.draw, PolicyTrainer.run, PreTrainedModel.__call__) == before
    assert "2 steps of 2 × 4: median " in out
    for label in ("passes while sampling", "drawing tokens", "passes of training"):
        found = re.search(rf"^{label} +(\d+\.\d+) +(\d+\.\d+) +\S+%$", out, re.M)
        assert found is not None, label
        assert float(found[1]) > 0, label
    assert re.search(r"outside the model's own compute: \d+\.\d%", out)
    assert re.search(
        r"^floor \d+\.\d+ s of CPU time; the model's own compute", out, re.M
    )


def test_only_the_outer_of_two_measured_functions_counts() -> None:
    import threading

    meter = load("step_share").Meter()
    inner = meter.timed("inner", lambda: 1)
    outer = meter.timed("outer", lambda: inner() + 1)
    assert (outer(), dict(meter.wall)) == (2, {})  # not the compute thread

    thread = threading.Thread(target=outer, name=load("step_share").COMPUTE_THREAD)
    thread.start()
    thread.join()
    assert list(meter.wall) == ["outer"]


def test_operations_are_counted_as_by_hand() -> None:
    floor = load("floor")
    # One layer 3 → 5 and one 5 → 2: 15 + 10 weights; rank 2: 2·8 + 2·7 = 30.
    shape = floor.Shape(((3, 5), (5, 2)), layers=1, width=4, rank=2)
    assert (shape.weights, shape.adapter) == (25, 30)
    # Positions 1 and 2 (the second and third) see 2 and 3 positions: 2·25·2 for the
    # weights, 4·4·(2 + 3) for attention.
    assert shape.read(1, 3) == 100 + 80
    # Both ways: the weights twice, attention three times, the adapter 2·30·2 thrice.
    assert shape.train(1, 3) == 200 + 240 + 360
    # Two rollouts of one prompt: it is read once, and each reply up to its last token.
    work = floor.count_step(shape, [(1, 3), (1, 2)], [(1, 3), (1, 2)], group=2)
    assert work.prompts == shape.read(0, 1)
    assert work.sampling == shape.read(1, 3) + shape.read(1, 2)
    assert work.training == (shape.train(0, 1) + shape.train(1, 3) + shape.train(1, 2))


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    sides = load("side_by_side")
    ours = [sides.Timing(1, 6), sides.Timing(1, 4), sides.Timing(2, 20)]
    theirs = [sides.Timing(1, 2), sides.Timing(2, 4), sides.Timing(1, 2)]
    # 6 / 2, 4 / 2, 10 / 2
    found = sides.ratio(ours, theirs)
    assert (found.median, found.low, found.high) == (3, 2, 5)


async def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    sides = load("side_by_side")
    order: list[str] = []

    def side(name: str):
        async def one(number: int):
            order.append(f"{name}{number}")
            return sides.Timing(1, number)

        return one

    timings = await sides.alternate({"a": side("a"), "b": side("b")}, 2)
    assert order == ["b0", "a0", "a1", "b1", "b2", "a2"]
    assert [timing.work for timing in timings["a"]] == [1, 2]


@pytest.mark.slow
def test_trl_run_trains_our_sides_in_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = run("trl_run", capsys, "--only-ours")
    found = {}
    for side in ("ours", "ours, service apart"):
        assert re.search(rf"^round 1, {side}: \S+ s, .* of 8 right$", out, re.M)
        row = rf"^{side} +\d+\.\d +([\d,]+) +(\d+\.\d%)$"
        match = re.search(row, out, re.M)
        assert match is not None, out
        found[side] = match.groups()
    assert found["ours"] == found["ours, service apart"]  # the same seeds and tasks


def test_both_sides_of_the_trl_run_get_the_same_work() -> None:
    trl_run = load("trl_run")
    import argparse

    options = argparse.Namespace(
        model=None, seed=0, steps=2, tasks=3, group=4, max_tokens=None, held_out=5
    )
    work = trl_run.Work.of(options)
    again = trl_run.Work.of(options)
    steps = [[t.slug for t in work.pool.tasks_for_step(s).tasks] for s in (0, 1)]
    assert steps == [
        [t.slug for t in again.pool.tasks_for_step(s).tasks] for s in (0, 1)
    ]
    trained = {slug for step in steps for slug in step}
    held_out = {task.slug for task in work.held_out}
    assert (len(trained), len(held_out)) == (6, 5)
    assert not trained & held_out


def test_reply_length_counts_the_end_token_once() -> None:
    reply_length = load("sampling").reply_length
    assert reply_length([7, 8, 2, 2, 2], [2, 3]) == 3
    assert reply_length([7, 8, 9], [2, 3]) == 3
    assert reply_length([3], [2, 3]) == 1


@pytest.mark.slow
def test_several_turns_prints_games_and_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import asyncio

    target = tmp_path / "turns.md"
    script = load("several_turns")
    arguments = ["--quick", "--runs-dir", str(tmp_path), "--record", str(target)]
    asyncio.run(script.main(arguments))
    out = capsys.readouterr().out
    assert re.search(
        r"^  before +\d+\.\d% \(\d+\.\d to \d+\.\d\) \| \d\.\d\d \| ", out, re.M
    )
    assert re.search(r"^  bisection  left: 31\.00  ", out, re.M)
    text = target.read_text(encoding="utf-8")
    tables = re.findall(r"<!-- (\w+) -->\n\n(.+?)\n\n<!-- /\1 -->", text, re.S)
    assert [name for name, _ in tables] == ["seeds", "left"]
    assert all(table in out for _, table in tables)
    # The same tables from the JSON that the run left.
    (rows,) = tmp_path.glob("several-turns-*.json")
    again = tmp_path / "again.md"
    asyncio.run(script.main(["--rows", str(rows), "--record", str(again)]))
    assert again.read_text(encoding="utf-8") == text
