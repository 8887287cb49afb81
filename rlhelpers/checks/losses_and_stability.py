"""Notebook 08: pushes by hand, which knob to turn, and a loss under repair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlhelpers.checks.marking import (
    NOT_TRIED,
    as_list,
    call,
    check_choices,
    is_function,
    is_number,
    near,
    shown,
)
from rlhelpers.losses import CLIP, token_losses, token_pushes

#: (ratio, advantage) of a token.
Token = tuple[float, float]


def check_pushes(tokens: Sequence[Token], ppo: object, cispo: object) -> bool:
    """How hard ppo and cispo push some tokens, by hand.

    Args:
        tokens: Ratio and advantage of each.
        ppo, cispo: The learner's numbers, one per token; ``...`` if not tried yet.
    """
    passed = _check_pushes_of("ppo", tokens, ppo)
    return _check_pushes_of("cispo", tokens, cispo) and passed


def _check_pushes_of(name: str, tokens: Sequence[Token], answer: object) -> bool:
    if answer is NOT_TRIED:
        print(f"… {name}: replace the ... with a list of {len(tokens)} numbers")
        return False
    values = as_list(answer)
    if (
        values is None
        or len(values) != len(tokens)
        or not all(is_number(value) for value in values)
    ):
        print(
            f"✗ {name}: expected a list of {len(tokens)} numbers, got {shown(answer)}"
        )
        return False
    for place, ((ratio, advantage), value) in enumerate(
        zip(tokens, values, strict=True), start=1
    ):
        right = float(token_pushes(name, ratio, advantage))
        if not near(value, right, 0.006):
            said = _push_slip(name, ratio, advantage, value)
            print(f"✗ {name}, token {place}: {said}")
            return False
    print(f"✓ {name}: right on all {len(tokens)} tokens")
    return True


def _push_slip(name: str, ratio: float, advantage: float, value: float) -> str:
    """What a wrong push was probably taken for."""
    right = float(token_pushes(name, ratio, advantage))
    clipped = min(max(ratio, CLIP[0]), CLIP[1]) * advantage
    if right and near(value, -right, 0.006):
        return "the sign: a token with a negative advantage is pushed down"
    if name == "ppo" and right and near(value, 0.0, 0.006):
        return (
            "not silent: the smaller of the two products is the unclipped one, because "
            "the ratio went against the advantage and has to be pulled back"
        )
    if name == "ppo" and near(value, clipped, 0.006):
        return (
            "that would be cispo's; where ppo takes the clipped product, that is a "
            "constant, and where it does not, the ratio stays as it is"
        )
    if name == "ppo" and near(value, ratio * advantage, 0.006):
        return "the clipped product is the smaller one: a constant, without a gradient"
    if name == "cispo" and near(value, 0.0, 0.006):
        return "cispo bounds a token's weight and never silences it"
    if name == "cispo" and near(value, ratio * advantage, 0.006):
        return "the ratio lies outside the bounds: clip it first"
    return f"not {value:g}: work out the ratio's part first, then times {advantage:g}"


#: The exercise's runs: which knob to turn, and what a wrong choice overlooks.
_KNOBS: Mapping[str, tuple[str, str]] = {
    "A": (
        "a higher learning rate",
        "groups teach and nothing breaks, but the policy is where it was: its KL is "
        "next to nothing",
    ),
    "B": (
        "a lower learning rate",
        "endings are valid and the integers in them become wrong, with one on-policy "
        "update per batch",
    ),
    "C": (
        "fewer updates per batch",
        "a third of the tokens has left the bounds: most of what is trained on is no "
        "longer what the policy says",
    ),
    "D": (
        "a KL coefficient",
        "the reward is nearly full while the policy drifts ever further from anything "
        "that the base would say",
    ),
    "E": (
        "larger groups",
        "the reward hardly moves because two rollouts are nearly always alike: hardly "
        "a group has a spread",
    ),
}


def check_knobs(answers: object) -> bool:
    """Which one thing to change in each of five runs.

    Args:
        answers: Run, A to E, → the change; ``...`` where not tried yet.
    """
    return check_choices(
        answers,
        {run: knob for run, (knob, _) in _KNOBS.items()},
        {run: hint for run, (_, hint) in _KNOBS.items()},
        options=sorted(knob for knob, _ in _KNOBS.values()),
        wanted="a change",
    )


#: Tokens that the learner's loss is tried on, with what each is there for.
_CASES: tuple[tuple[Token, str], ...] = (
    ((1.0, 1.0), "at ratio 1"),
    ((1.1, -2.0), "within the bounds"),
    ((1.5, 1.0), "pushed up far enough"),
    ((0.5, -1.0), "pushed down far enough"),
    ((1.5, -1.0), "went up and should go down"),
    ((0.5, 1.0), "went down and should go up"),
    ((1.5, 0.0), "without an advantage"),
)


def _clipped(ratio: float) -> float:
    return min(max(ratio, CLIP[0]), CLIP[1])


#: Likely mistakes: (the loss it gives, what is wrong).
_MISTAKES: tuple[tuple[Callable[[float, float], float], str], ...] = (
    (
        lambda ratio, advantage: -_clipped(ratio) * advantage,
        "always clips, so that a token which went the wrong way is not pulled "
        "back: take the smaller of the two products",
    ),
    (
        lambda ratio, advantage: -max(ratio * advantage, _clipped(ratio) * advantage),
        "takes the larger product; PPO is the pessimist and takes the smaller one",
    ),
    (
        lambda ratio, advantage: -ratio * advantage,
        "never clips; that is importance_sampling",
    ),
    (
        lambda ratio, advantage: min(ratio * advantage, _clipped(ratio) * advantage),
        "has the wrong sign: a loss is to be made small, so it is minus the smaller "
        "product",
    ),
)


def check_ppo_loss(answer: object) -> bool:
    """PPO's loss of one token, as a function of ratio and advantage.

    Args:
        answer: ``function(ratio, advantage)``, clipped to 0.8 … 1.2; ``...`` if not
            tried yet.
    """
    if not is_function(answer, "broken_ppo"):
        return False
    tried = [(*case, *call(answer, *case[0])) for case in _CASES]
    # An exception says more than a number that is off, so it comes first.
    for token, what, given, error in sorted(tried, key=lambda row: row[3] is None):
        right = float(token_losses("ppo", *token))
        if error is None and is_number(given) and near(given, right, 1e-6):
            continue
        said = error or _loss_slip([row[2] for row in tried])
        print(f"✗ a token {what} (ratio {token[0]:g}, advantage {token[1]:g}):")
        print(f"  your function {said}")
        if error is None and is_number(given):
            print(f"  its loss is {right:g}, yours gives {given:g}")
        return False
    print(f"✓ right on {len(_CASES)} tokens, on both sides of both bounds")
    return True


def _loss_slip(given: Sequence[object]) -> str:
    """The mistake that explains all that a function returned, if there is one."""
    odd = [value for value in given if not is_number(value)]
    if odd:
        return f"returns {shown(odd[0])}, not a number"
    numbers = [value for value in given if is_number(value)]
    for mistake, said in _MISTAKES:
        values = [mistake(*token) for token, _ in _CASES]
        if all(
            near(mine, its, 1e-6) for mine, its in zip(numbers, values, strict=True)
        ):
            return said
    return "is another loss; PPO's is minus the smaller of two products"
