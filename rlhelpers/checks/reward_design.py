"""Notebook 10: labelled replies, and the checkers of its exercises."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from rlhelpers.advantages import finite_reward
from rlhelpers.analysis import OUTCOMES, classify_outcome
from rlhelpers.checks.environment_and_grader import LabelledAnswer, labelled_answers
from rlhelpers.rewards import Grader, misranked, reward_of

_REPLIES = Path(__file__).resolve().parents[2] / "data" / "labelled_replies.jsonl"

_WORK = "47 * 36 = 47 * 30 + 47 * 6 = 1410 + 282 = 1692"
_SHORT, _LONG = f"{_WORK}\n1692", "\n".join([_WORK] * 4) + "\n1692"
#: Replies without a valid ending: the product is in the first alone.
_KNOWS, _LACKS = f"{_WORK}\nThe answer is 1692.", "Let me think about it step by step."


def labelled_replies() -> list[LabelledAnswer]:
    """Replies as policies write them when they are trained, with their outcomes.

    They stand beside :func:`rlhelpers.checks.labelled_answers`, which is about the
    spelling of the last line; these are about work, length, loops and lists.
    """
    return labelled_answers(_REPLIES)


def check_missing_case(grader: Grader, case: object) -> bool:
    """Notebook 10: a labelled answer that shows what is wrong with a grader.

    Args:
        grader: A grader that passes the table as it is, and is wrong all the same.
        case: A :class:`~rlhelpers.checks.LabelledAnswer`; ``...`` if not done yet.

    Returns:
        Whether the label is right and the grader fails on it.
    """
    if case is ...:
        print("… replace the ... with a LabelledAnswer(answer, expected, outcome, why)")
        return False
    if not isinstance(case, LabelledAnswer):
        print(f"✗ a case is a LabelledAnswer, got {case!r}")
        return False
    if case.outcome not in OUTCOMES:
        print(f"✗ {case.outcome!r} is no outcome; use one of {', '.join(OUTCOMES)}")
        return False
    found = classify_outcome(case.answer, case.expected)
    if found != case.outcome:
        print(f"✗ the label: by the rule of notebook 01 this answer is {found}")
        return False
    wanted = float(case.outcome == "correct")
    paid = reward_of(grader, case.answer, case.expected)
    if paid == wanted:
        print(f"✗ the label is right, and so is the grader: it pays {paid:g}, as it")
        print("  should; which integer does Python take for nothing at all?")
        return False
    print(f"✓ caught: it pays {paid:g} where {wanted:g} is right. Keep this row")
    return True


def check_reward(grader: object) -> bool:
    """Notebook 10: a reward with partial credit that cannot be gamed by these means.

    Five demands: a finite reward for every labelled reply; every right reply earns
    more than every wrong one; a wrong integer earns more than no valid ending; without
    a valid ending, a reply that holds the right integer earns more than one that does
    not; length makes no difference.

    Args:
        grader: The learner's function of a reply and the right answer; ``...`` if not
            done yet.

    Returns:
        Whether all five hold.
    """
    if grader is ...:
        print("… replace the ... with the name of your function")
        return False
    if not callable(grader):
        print(f"✗ a grader is a function of (answer, expected), got {grader!r}")
        return False
    reward = cast("Grader", grader)
    samples = [*labelled_answers(), *labelled_replies()]
    for sample in samples:
        try:
            result = reward(sample.answer, sample.expected)
        except Exception as error:
            print(f"✗ it raises {type(error).__name__} on {_short(sample)}")
            return False
        if result is ...:
            print("… replace the ... in your function with a reward")
            return False
        try:
            finite_reward(getattr(result, "reward", result), "the reward")
        except ValueError:
            print(f"✗ no finite reward for {_short(sample)}: {result!r}")
            return False
    checks = (
        _right_earns_most(reward, samples),
        _ending_earns_something(reward, samples),
        _knowing_earns_something(reward),
        _length_does_not_matter(reward),
    )
    return all(checks)


def _right_earns_most(grader: Grader, samples: list[LabelledAnswer]) -> bool:
    if pairs := misranked(grader, samples):
        good, bad = pairs[0]
        print(f"✗ {len(pairs)} pairs in the wrong order, such as {_short(bad)}, which")
        print(f"  earns {_paid(grader, bad):g}, and {_short(good)}, which is right and")
        print(f"  earns {_paid(grader, good):g}")
        return False
    print("✓ every right reply earns more than every wrong one")
    return True


def _ending_earns_something(grader: Grader, samples: list[LabelledAnswer]) -> bool:
    wrong = [s for s in samples if s.outcome == "wrong_integer"]
    invalid = [s for s in samples if s.outcome == "invalid_final_line"]
    least = min(wrong, key=lambda s: _paid(grader, s))
    most = max(invalid, key=lambda s: _paid(grader, s))
    if _paid(grader, least) > _paid(grader, most):
        print("✓ a wrong integer earns more than a reply without a valid ending")
        return True
    print(f"✗ {_short(most)} has no valid ending and earns {_paid(grader, most):g};")
    print(f"  {_short(least)} ends in an integer and earns {_paid(grader, least):g}")
    return False


def _knowing_earns_something(grader: Grader) -> bool:
    knows, lacks = (reward_of(grader, text, 1692) for text in (_KNOWS, _LACKS))
    if knows > lacks:
        print("✓ without a valid ending, the right integer in the text earns something")
        return True
    print(f"✗ 'The answer is 1692.' after the work earns {knows:g}, and a reply that")
    print(f"  never gets there {lacks:g}: a group of these two has to teach something")
    return False


def _length_does_not_matter(grader: Grader) -> bool:
    short, long = (reward_of(grader, text, 1692) for text in (_SHORT, _LONG))
    if short == long:
        print("✓ the same ending earns the same, however long the work")
        return True
    print(f"✗ the same right ending earns {short:g} after one line of work, and")
    print(f"  {long:g} after four: a policy would go for the length")
    return False


def _paid(grader: Grader, sample: LabelledAnswer) -> float:
    return reward_of(grader, sample.answer, sample.expected)


def _short(sample: LabelledAnswer) -> str:
    text = repr(sample.answer)
    return text if len(text) <= 40 else text[:36] + "…'"
