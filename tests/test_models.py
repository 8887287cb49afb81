"""Presets: one place for everything that must agree with a base model."""

from __future__ import annotations

import dataclasses

import pytest

from rlhelpers.models import PRESETS, resolve_preset


def test_default_models() -> None:
    assert resolve_preset(None).name == "tiny-arithmetic"
    assert resolve_preset(None, "fireworks").name == "qwen3p8-27b"


def test_a_base_model_id_finds_its_preset() -> None:
    found = resolve_preset("accounts/fireworks/models/qwen3p8-27b", "fireworks")
    assert found is PRESETS["qwen3p8-27b"]


def test_unknown_model_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown model 'gpt-99'") as caught:
        resolve_preset("gpt-99", "local")
    for name in PRESETS:
        assert name in str(caught.value)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"unknown backend 'cloud'.*local, fireworks"):
        resolve_preset(None, "cloud")


@pytest.mark.parametrize(
    ("model", "backend"), [("tiny-arithmetic", "fireworks"), ("qwen3p8-27b", "local")]
)
def test_a_model_of_the_other_backend_is_refused(model: str, backend: str) -> None:
    with pytest.raises(ValueError, match=f"BACKEND is '{backend}'") as caught:
        resolve_preset(model, backend)
    assert repr(model) in str(caught.value)


def test_fireworks_defaults() -> None:
    preset = PRESETS["qwen3p8-27b"]
    assert preset.operands == (1000, 9999)
    assert (preset.max_tokens, preset.context) == (2048, 8192)
    assert (preset.lora_rank, preset.learning_rate) == (8, 2.5e-5)
    assert (preset.max_concurrent, preset.evaluation_tasks) == (4, 16)
    assert preset.chat_template_kwargs == {"enable_thinking": False}
    assert preset.token_limit is not None


def test_course_defaults() -> None:
    preset = PRESETS["tiny-arithmetic"]
    assert (preset.steps, preset.tasks_per_step, preset.group_size) == (30, 8, 8)
    assert preset.rollouts_per_step == 64
    assert preset.evaluation_tasks == 128
    assert preset.token_limit is None


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_preset_is_sound(preset: object) -> None:
    assert dataclasses.is_dataclass(preset)
    values = {
        field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)
    }
    assert values["licence"]
    low, high = values["operands"]
    assert 0 < low < high
    assert values["max_tokens"] < values["context"]
    for example in values["worked_examples"]:
        assert example.reply.splitlines()[-1] == str(example.a * example.b)


def test_presets_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["tiny-arithmetic"].steps = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["tiny-arithmetic"]  # type: ignore[index]


def test_smollm2_fits_its_operand_range() -> None:
    preset = resolve_preset("smollm2-135m", "local")
    assert preset is resolve_preset("local/smollm2-135m")
    assert preset.operands == (1, 9)
    pairs = 45  # 9 × 10 / 2
    assert preset.evaluation_tasks == 32
    assert pairs - preset.evaluation_tasks >= preset.tasks_per_step
    assert (preset.steps, preset.tasks_per_step, preset.group_size) == (10, 4, 8)
    assert len(preset.worked_examples) == 2
    assert "Apache-2.0" in preset.licence


def test_files_are_what_from_pretrained_takes() -> None:
    _, options = PRESETS["smollm2-135m"].files
    assert options == {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    folder, options = PRESETS["tiny-arithmetic"].files
    assert folder.endswith("tiny-policy")
    assert options == {}
    assert PRESETS["qwen3p8-27b"].files == ("Qwen/Qwen3.8-27B", {})
