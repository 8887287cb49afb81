"""What was used stands beside what was planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from noise_policy import plain
from paid_helpers import opened

from rlhelpers.evaluation import evaluate
from rlhelpers.local import LocalService
from rlhelpers.models import ModelPreset
from rlhelpers.usage import TokenCounts, UsageReport

pytest_plugins = ("paid_fixtures",)


def test_a_report_by_hand() -> None:
    report = UsageReport(
        used=TokenCounts(1_500_000, 250_000, 0),
        planned=TokenCounts(2_000_000, 1_000_000, 500_000),
        unanswered=TokenCounts(100, 20, 0),
        prices=(1.0, 2.0, 4.0),
    )
    # 1.5 × 1 + 0.25 × 2 dollars; 2 × 1 + 1 × 2 + 0.5 × 4.
    assert report.rows() == [
        ("prefill", "1,500,000", "2,000,000"),
        ("sampled", "250,000", "1,000,000"),
        ("trained", "0", "500,000"),
        ("together", "1,750,000", "3,500,000"),
        ("cost", "$2.00", "$6.00"),
        ("unanswered", "120", ""),
    ]
    assert "| cost | $2.00 | $6.00 |" in report._repr_markdown_()


async def test_a_paid_session_says_what_it_used_as_it_closes(
    endpoint: LocalService,
    paid: ModelPreset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    how = {"quiet": False, "planned_rollouts": 2, "planned_datums": 0, "max_tokens": 16}
    with opened(endpoint, paid, tmp_path, **how) as session:
        result = await evaluate(
            session,
            [plain(1), plain(2)],
            sampler=session.base_sampler(),
            run_dir=tmp_path / "run",
        )
    read = sum(record.prompt_tokens for record in result.records)
    sampled = sum(record.output_tokens for record in result.records)
    printed = capsys.readouterr().out.splitlines()
    # Own tasks may fill the context of 256: 2 × 240 read, 2 × 16 sampled.
    assert [line.split() for line in printed[-5:]] == [
        ["tokens", "used", "planned", "at", "most"],
        ["prefill", str(read), "480"],
        ["sampled", str(sampled), "32"],
        ["trained", "0", "0"],
        ["together", str(read + sampled), "512"],
    ]


def test_it_is_said_also_after_an_error(
    endpoint: LocalService,
    paid: ModelPreset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyError), opened(endpoint, paid, tmp_path, quiet=False):
        raise KeyError("a cell failed")
    assert "planned at most" in capsys.readouterr().out
