"""Reading rollouts: choose some of a run's by what became of them, and show them.

The plain half of :class:`rlhelpers.widgets.RolloutBrowser`. Works on the rows of
``rollouts.jsonl``. Pure: no I/O, no service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rlhelpers.analysis import LABELS

if TYPE_CHECKING:
    from rlhelpers.metrics import RolloutRecord

Range = tuple[float, float]

#: What ``outcome`` may be in :func:`select_rollouts`; the limit overlaps the others.
KINDS: tuple[str, ...] = tuple(LABELS)

_WIDTH = 60  # characters of a reply in the plain table


def select_rollouts(
    records: Iterable[RolloutRecord],
    *,
    outcome: str | None = None,
    steps: Range | None = None,
    rewards: Range | None = None,
) -> list[RolloutRecord]:
    """The rollouts that fit every filter given, in their own order.

    Args:
        records: Rows of ``rollouts.jsonl``.
        outcome: An outcome, or ``"token_limit"`` for the replies that were cut off.
        steps: First and last training step, both included.
        rewards: Smallest and largest reward, both included.

    Raises:
        ValueError: An outcome that does not exist, or a range the wrong way round.

    Example:
        >>> select_rollouts([], outcome="correct", steps=(1, 5))
        []
    """
    if outcome is not None and outcome not in KINDS:
        raise ValueError(f"no outcome {outcome!r}; choose one of {', '.join(KINDS)}")
    for name, bounds in (("steps", steps), ("rewards", rewards)):
        if bounds is not None and bounds[0] > bounds[1]:
            raise ValueError(f"{name} = {bounds}: write the smaller bound first")
    return [
        record
        for record in records
        if (outcome is None or outcome == record.outcome or _cut(outcome, record))
        and (steps is None or steps[0] <= record.step <= steps[1])
        and (rewards is None or rewards[0] <= record.reward <= rewards[1])
    ]


def _cut(outcome: str, record: RolloutRecord) -> bool:
    return outcome == "token_limit" and record.token_limit


@dataclass(frozen=True)
class RolloutTable:
    """Rollouts as a table: each reply beside its numbers.

    Shows itself as HTML in a notebook, and as text where there is none. An advantage
    is missing where a rollout was not trained on: its group was flat, or it belongs to
    an evaluation.

    Attributes:
        records: The rollouts, one row each.
    """

    records: Sequence[RolloutRecord]

    HEADER = (
        "step",
        "task",
        "reward",
        "advantage",
        "outcome",
        "tokens",
        "ended",
        "reply",
    )

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells as text, the whole reply last."""
        return [
            (
                str(record.step),
                _task(record),
                f"{record.reward:g}",
                "none" if record.advantage is None else f"{record.advantage:+.2f}",
                LABELS.get(record.outcome or "", record.outcome or "none"),
                str(record.output_tokens),
                "cut off" if record.token_limit else record.finish_reason or "",
                record.text,
            )
            for record in self.records
        ]

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in self.HEADER)
        body = "\n".join(_html_row(cells) for cells in self.rows())
        return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"

    def __repr__(self) -> str:
        rows = [(*cells[:-1], _one_line(cells[-1])) for cells in self.rows()]
        table = [self.HEADER, *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
        return "\n".join(lines)


def _html_row(cells: Sequence[str]) -> str:
    numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells[:-1])
    reply = escape(cells[-1]) or "<i>(empty)</i>"
    # A reply of many lines scrolls, so that the next rollout stays in sight.
    return (
        f'<tr style="vertical-align:top">{numbers}<td style="text-align:left">'
        '<pre style="margin:0;max-height:9em;overflow:auto;white-space:pre-wrap">'
        f"{reply}</pre></td></tr>"
    )


def _task(record: RolloutRecord) -> str:
    """``47 × 36``, or the slug of a task of another kind."""
    args = record.args
    return f"{args['a']} × {args['b']}" if {"a", "b"} <= args.keys() else record.task


def _one_line(text: str) -> str:
    line = " / ".join(text.splitlines()) or "(empty)"
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
