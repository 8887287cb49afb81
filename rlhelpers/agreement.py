"""Whether tokenizer, chat template and preset agree, before anything is paid for.

Prompts are rendered here and sent as token ids, and replies come back as token ids: a
disagreement is no error anywhere, only rewards of 0 that cost money. Everything here
is local and takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rlhelpers.models import ModelPreset
from rlhelpers.sampling import end_token_ids, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER, _REPLY = "What is 47 * 36? Last line: 1692.", "47 * 36\n1692"


class Disagreement(ValueError):
    """Tokenizer, chat template and preset do not fit each other; nothing was sent."""


def check_agreement(preset: ModelPreset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer or a chat template that would spoil every rollout.

    Args:
        preset: The model's preset, with the options of its chat template.
        tokenizer: The tokenizer that was loaded for it.

    Raises:
        Disagreement: What does not fit, and the remedy.

    Example:
        >>> from rlhelpers.models import resolve_preset
        >>> from rlhelpers.preflight import load_tokenizer
        >>> preset = resolve_preset("tiny-arithmetic")
        >>> check_agreement(preset, load_tokenizer(preset))
    """
    for problem in (
        _end_markers(tokenizer),
        _prompt(preset, tokenizer),
        _options(preset, tokenizer),
        _reply_end(preset, tokenizer),
    ):
        if problem:
            raise Disagreement(
                f"tokenizer {str(preset.tokenizer)!r} of base model "
                f"{preset.base_model!r}: {problem}. Nothing was sent."
            )


def _end_markers(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A marker that ends a reply must be one token, for the SDK sends it as text."""
    for token in end_token_ids(tokenizer):
        text = tokenizer.decode([token], skip_special_tokens=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != [token]:
            return (
                f"the end marker {text!r} is token {token}, but its text is encoded "
                f"as {ids}, so no reply would be stopped there; use the tokenizer "
                "with its special tokens (tokenizer_config.json)"
            )
    return None


def _prompt(preset: ModelPreset, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Rendering is repeatable, holds the task, and opens the assistant's turn."""
    turn = [{"role": "user", "content": _USER}]
    ids = render_prompt(tokenizer, preset, turn)
    if render_prompt(tokenizer, preset, turn) != ids:
        return (
            "the chat template renders one prompt in two ways (a date or a random "
            "id in it?); use a template without them"
        )
    if max(ids) >= len(tokenizer):
        return f"the chat template gives token {max(ids)} of {len(tokenizer)}"
    if _USER not in tokenizer.decode(ids, skip_special_tokens=False):
        return (
            "the rendered prompt does not hold the task's text; use the tokenizer "
            "of the instruct model itself"
        )
    start = tokenizer.bos_token_id
    if start is not None and ids[:2] == [start, start]:
        return "the chat template writes the start token twice; use it once"
    closed = _rendered(preset, tokenizer, turn)
    if len(ids) <= len(closed) or ids[: len(closed)] != closed:
        return (
            "the chat template does not open the assistant's turn at the end of the "
            "prompt (add_generation_prompt); use the instruct model's own template"
        )
    return None


def _options(preset: ModelPreset, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """An option that the template does not know would be ignored in silence."""
    template = str(tokenizer.chat_template)
    unknown = [name for name in preset.chat_template_kwargs if name not in template]
    if unknown and "think" in template:
        return (
            f"its chat template does not know {', '.join(unknown)} and would ignore "
            "it; look up the template's own name for it (chat_template_kwargs)"
        )
    if preset.chat_template_kwargs.get("enable_thinking") is False:
        turn = [{"role": "user", "content": _USER}]
        ids = render_prompt(tokenizer, preset, turn)
        text = str(tokenizer.decode(ids, skip_special_tokens=False))
        if text.count("<think>") > text.count("</think>"):
            return (
                "thinking is off in the preset (enable_thinking), and the rendered "
                "prompt opens a thinking block all the same"
            )
    return None


def _reply_end(preset: ModelPreset, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template must end an assistant's turn with a token that ends a reply."""
    turn = {"role": "user", "content": _USER}
    reply = {"role": "assistant", "content": _REPLY}
    asked = len(_rendered(preset, tokenizer, [turn]))
    answered = _rendered(preset, tokenizer, [turn, reply])[asked:]
    if not set(answered) & set(end_token_ids(tokenizer)):
        ends = end_token_ids(tokenizer)
        markers = [str(tokenizer.decode([token])) for token in ends]
        return (
            f"its chat template ends a reply with none of {', '.join(markers)}, so a "
            "reply would only end at the token limit; use the instruct model's own"
        )
    return None


def _rendered(
    preset: ModelPreset,
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, str]],
) -> list[int]:
    """Token ids of finished turns."""
    ids = tokenizer.apply_chat_template(
        list(turns),
        tokenize=True,
        add_generation_prompt=False,
        return_dict=False,
        **preset.chat_template_kwargs,
    )
    return [int(token) for token in cast("Sequence[int]", ids)]
