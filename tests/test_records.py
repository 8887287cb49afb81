"""Tables that commands write for the README and the model card to quote."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def benchmark_script() -> ModuleType:
    path = ROOT / "benchmarks" / "full_run.py"
    spec = importlib.util.spec_from_file_location("full_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def side(correct: int, wrong: int, invalid: int, limit: int, tokens: float) -> Any:
    return {
        "n": 100,
        "correct": correct,
        "wrong_integer": wrong,
        "invalid_final_line": invalid,
        "token_limit": limit,
        "mean_output_tokens": tokens,
    }


def row(seed: int, after: Any) -> Any:
    return {
        "seed": seed,
        "before": side(70, 10, 20, 15, 50.04),
        "after": after,
        "rewards": [0.5],
        "losses": [0.1],
        "max_ratio_error": 1e-5,
        "seconds": {"train": 1.0},
        "step_share": {"sampling": 1.0},
        "step_seconds": 1.0,
    }


ROWS = [row(0, side(98, 2, 0, 0, 30.0)), row(1, side(100, 0, 0, 0, 30.04))]
SUMMARY = """
| | before | after, 2 seeds |
|---|---:|---:|
| accuracy | 70.0 % | 98.0 to 100.0 % |
| invalid final line | 20 | 0 |
| wrong integer | 10 | 0 to 2 |
| token limit hit | 15 | 0 |
| mean output tokens | 50.0 | 30.0 |
"""


def test_the_tables_of_a_full_run(
    benchmark_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    earlier, target = tmp_path / "rows.json", tmp_path / "full_run.md"
    earlier.write_text(json.dumps(ROWS))
    command = ["full_run.py", "--rows", str(earlier), "--record", str(target)]
    monkeypatch.setattr(sys, "argv", command)
    asyncio.run(benchmark_script.main())
    text = target.read_text(encoding="utf-8")
    assert f"<!-- five-seeds -->\n{SUMMARY}\n<!-- /five-seeds -->" in text
    # Wilson, 95 %, 70 of 100: 60.4 to 78.1; 98 of 100: 93.0 to 99.4.
    assert "| before | 70.0% (60.4 to 78.1) | 10 | 20 | 15 | 50.0 |" in text
    assert "| after, seed 0 | 98.0% (93.0 to 99.4) | 2 | 0 | 0 | 30.0 |" in text
    assert text.count("| after, seed") == 2


@pytest.mark.slow
def test_the_tables_of_the_model_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlhelpers.local.pretrain import REWARD_RANGES, evaluate_folder

    target = tmp_path / "evaluation.md"
    evaluate_folder(ROOT / "data" / "tiny-policy", target, count=8)
    text = target.read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    tables = re.findall(r"<!-- (\w+) -->\n\n(.+?)\n\n<!-- /\1 -->", text, re.S)
    assert [name for name, _ in tables] == ["greedy", "ranges"]
    assert all(table in printed for _, table in tables)
    counts = [int(n) for n in re.findall(r"\| (\d+) / 8 \|", tables[0][1])]
    assert sum(counts[:3]) == 8  # correct, wrong integer, invalid final line
    assert tables[1][1].count(" / 4 |") == len(REWARD_RANGES)
