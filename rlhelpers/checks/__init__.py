"""Claims that a notebook proves, exercise checkers, and labelled answers.

One module for each notebook, named after it; :mod:`~rlhelpers.checks.lesson` holds what
every notebook uses, :mod:`~rlhelpers.checks.marking` what every checker uses. Import
from here.
"""

from __future__ import annotations

from rlhelpers.checks.before_and_after import (
    check_mcnemar,
    check_tasks_needed,
    check_transitions,
)
from rlhelpers.checks.calibration import (
    REMEDIES,
    check_flat_groups,
    check_flat_share,
    check_remedies,
    check_spread,
)
from rlhelpers.checks.checkpoints import (
    check_adam_step,
    check_checkpoint_kinds,
    check_resume_plan,
)
from rlhelpers.checks.environment_and_grader import (
    LabelledAnswer,
    check_grader,
    check_reward_tests,
    check_three_outcomes,
    labelled_answers,
)
from rlhelpers.checks.full_run import check_decisions, check_group_size
from rlhelpers.checks.lesson import Lesson, LessonFailed
from rlhelpers.checks.losses_and_stability import (
    check_knobs,
    check_ppo_loss,
    check_pushes,
)
from rlhelpers.checks.one_update import (
    check_advantage_function,
    check_advantages,
    check_datum_rows,
    check_on_policy_loss,
)
from rlhelpers.checks.reward_design import (
    check_missing_case,
    check_reward,
    labelled_replies,
)
from rlhelpers.checks.several_turns import (
    check_episode_rows,
    check_lucky_waste,
    check_player,
)
from rlhelpers.checks.your_own_task import (
    TOOLS,
    check_agreement,
    check_estimate_grader,
    check_tools,
)

__all__ = [
    "REMEDIES",
    "TOOLS",
    "LabelledAnswer",
    "Lesson",
    "LessonFailed",
    "check_adam_step",
    "check_advantage_function",
    "check_advantages",
    "check_agreement",
    "check_checkpoint_kinds",
    "check_datum_rows",
    "check_decisions",
    "check_episode_rows",
    "check_estimate_grader",
    "check_flat_groups",
    "check_flat_share",
    "check_grader",
    "check_group_size",
    "check_knobs",
    "check_lucky_waste",
    "check_mcnemar",
    "check_missing_case",
    "check_on_policy_loss",
    "check_player",
    "check_ppo_loss",
    "check_pushes",
    "check_remedies",
    "check_resume_plan",
    "check_reward",
    "check_reward_tests",
    "check_spread",
    "check_tasks_needed",
    "check_three_outcomes",
    "check_tools",
    "check_transitions",
    "labelled_answers",
    "labelled_replies",
]
