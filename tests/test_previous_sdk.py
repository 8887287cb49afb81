"""A program of the previous SDK generation trains on the local service, unmodified.

``previous_sdk/program.py`` runs in a virtual environment of its own, made once from
``previous_sdk/requirements.txt``, against ``python -m rlhelpers.local``, which it finds
through the environment alone. It prints what came back; the values are held here
against what they should be.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = REPOSITORY / "tests" / "previous_sdk"
REQUIREMENTS = SOURCES / "requirements.txt"
ENVIRONMENT = REPOSITORY / ".venv-previous-sdk"
POLICY = REPOSITORY / "data" / "tiny-policy"
#: The name that the program has for its base model; here it means the tiny policy.
BASE_MODEL = "accounts/fireworks/models/qwen3p8-27b"
#: What pip says when no registry answers.
UNREACHABLE = ("(from versions: none)", "connection broken by", "ReadTimeoutError")

Record = dict[str, Any]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def packages(folder: Path) -> Path:
    """Where an environment keeps what is installed into it."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))


def install(folder: Path) -> Path:
    """The interpreter of an environment that has the previous SDK.

    The course's environment lies under it: only what differs is installed.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    course = sysconfig.get_path("purelib")
    made_from = f"{sys.version}\n{course}\n{REQUIREMENTS.read_text(encoding='utf-8')}"
    stamp = folder / "made-from.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_from:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder)
    (packages(folder) / "course.pth").write_text(course, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    # Nothing of the course's own may be taken for installed here, or be removed.
    options = ["--no-deps", "--ignore-installed", "--retries", "2"]
    done = subprocess.run(
        [*pip, *options, "-r", str(REQUIREMENTS)], capture_output=True, text=True
    )
    if done.returncode != 0 and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip("pip reaches no registry to install the previous SDK from")
    assert done.returncode == 0, done.stderr
    stamp.write_text(made_from, encoding="utf-8")
    return python


@pytest.fixture(scope="module")
def previous_python() -> Path:
    """The interpreter that has the previous SDK."""
    return install(ENVIRONMENT)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """``python -m rlhelpers.local``: where it listens, and its key."""
    service = subprocess.Popen(
        [
            *(sys.executable, "-m", "rlhelpers.local"),
            *("--state-dir", str(tmp_path_factory.mktemp("state"))),
            *("--model", f"{BASE_MODEL}={POLICY}"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert service.stdout is not None
    lines = [service.stdout.readline().strip() for _ in range(2)]
    assert all("=" in line for line in lines), lines
    yield dict(line.split("=", 1) for line in lines)
    service.terminate()
    service.wait(timeout=60)
    service.stdout.close()


@pytest.fixture(scope="module")
def record(previous_python: Path, endpoint: dict[str, str]) -> Record:
    """What the program did."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": endpoint["base_url"],
        "FIREWORKS_BASE_URL": endpoint["base_url"],
        "FIREWORKS_API_KEY": endpoint["api_key"],
        "NO_PROXY": "127.0.0.1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [
            str(previous_python),
            str(SOURCES / "program.py"),
            str(POLICY / "tokenizer.json"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    result: Record = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def training(record: Record) -> Record:
    """The part about one policy from its first step to its end."""
    part: Record = record["training"]
    return part


def outputs(first: Record, which: str) -> list[np.ndarray]:
    """Per rollout, the trainer's log-probabilities of its sampled tokens."""
    return [
        np.array(values[len(rollout["prompt"]) - 1 :])
        for values, rollout in zip(first[which], first["rollouts"], strict=True)
    ]


def test_the_program_ran_on_the_previous_generation(record: Record) -> None:
    assert record["versions"] == {"fireworks-ai": "1.2.20", "tinker": "0.23.0"}


def test_the_model_is_the_one_that_was_asked_for(training: Record) -> None:
    assert training["lora_rank"] == 8
    assert training["base_model"] == BASE_MODEL
    assert training["run"].startswith("run-")


def test_trainer_and_sampler_agree_and_the_first_ratio_is_one(
    training: Record,
) -> None:
    first = training["first"]
    trained = np.concatenate(outputs(first, "before"))
    sampled = np.concatenate([r["logprobs"] for r in first["rollouts"]])
    assert len(sampled) > 500
    np.testing.assert_allclose(trained, sampled, atol=1e-4)
    np.testing.assert_allclose(np.exp(trained - sampled), 1.0, atol=1e-4)


def test_the_first_loss_is_the_imbalance_of_lengths(training: Record) -> None:
    """At ratio 1 each rollout adds minus its advantage for every token."""
    first = training["first"]
    expected = -sum(r["advantage"] * len(r["tokens"]) for r in first["rollouts"])
    assert first["metrics"]["loss:sum"] == pytest.approx(expected, abs=0.01)
    assert first["optimizer"]["lr:last"] == pytest.approx(1e-3)


def test_the_first_update_moves_tokens_the_way_of_their_advantage(
    training: Record,
) -> None:
    first = training["first"]
    changes = [
        float(np.sum(after - before))
        for before, after in zip(
            outputs(first, "before"), outputs(first, "after"), strict=True
        )
    ]
    advantages = [rollout["advantage"] for rollout in first["rollouts"]]
    assert float(np.dot(advantages, changes)) > 0


def test_the_reward_rises(training: Record) -> None:
    rewards = training["rewards"]
    assert np.mean(rewards[-2:]) > rewards[0] + 0.2
    assert training["first"]["rollouts"][0]["stop_reason"] in ("stop", "length")


def test_resuming_with_the_optimizer_equals_not_stopping(training: Record) -> None:
    resume = training["resume"]
    assert resume["with_optimizer_loaded"] == resume["saved"]
    assert resume["with_optimizer"] == resume["on"]  # bit for bit
    assert resume["in_place"] == resume["on"]
    assert resume["without_loaded"] == resume["saved"]
    assert resume["without"] != resume["on"]
    assert sum(resume["on"]) > sum(resume["saved"])


def test_checkpoints_are_listed(training: Record) -> None:
    assert training["resume"]["path"] in training["listed"]
    types = {row["checkpointType"] for row in training["promotion"]["rows"]}
    assert types == {
        "CHECKPOINT_TYPE_TRAINING_LORA",
        "CHECKPOINT_TYPE_INFERENCE_LORA",
    }


def test_a_promoted_snapshot_is_an_adapter_folder(training: Record) -> None:
    model = training["promotion"]["model"]
    folder = Path(model["localFolder"])
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["r"]) == ("LORA", 8)
    assert (folder / "adapter_model.safetensors").stat().st_size > 10_000
    assert model["state"] == "READY"


def test_samplers_serve_the_weights_they_are_bound_to(training: Record) -> None:
    sampling = training["sampling"]
    # A fresh adapter changes nothing, so it samples what its base model does.
    assert sampling["fresh"] == sampling["base"]
    assert sampling["trained"] != sampling["base"]
    assert sampling["again"] == sampling["trained"]
    assert set(sampling["greedy"]["logprobs"]) == {0.0}


def test_logprobs_of_a_prompt_are_the_trainers(training: Record) -> None:
    first, *rest = training["sampling"]["prompt_logprobs"]
    assert first is None
    np.testing.assert_allclose(
        rest, training["sampling"]["trainer_logprobs"], atol=1e-4
    )


@pytest.mark.parametrize(
    "loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
)
def test_every_loss_is_the_documented_sum(record: Record, loss: str) -> None:
    part = record["losses"]
    lp, q = np.array(part["logprobs"]), np.array(part["sampling"])
    a = np.array(part["advantages"])
    ratio = np.exp(lp - q)
    clipped = np.clip(ratio, 0.8, 1.2)
    expected = {
        "cross_entropy": -a * lp,
        "importance_sampling": -ratio * a,
        "ppo": -np.minimum(ratio * a, clipped * a),
        "cispo": -clipped * lp * a,
        "dro": -(lp * a - 0.025 * (lp - q) ** 2 * (a != 0)),
    }[loss].sum()
    assert part[loss]["loss:sum"] == pytest.approx(float(expected), rel=1e-4)
    assert part[loss]["num_loss_tokens:sum"] == 5


def test_a_loss_computed_by_the_program_makes_the_same_update(record: Record) -> None:
    part = record["own_loss"]
    assert part["own"] == part["service"]
    assert part["metrics"]["summed"] < sum(part["own"])  # before and after the update


def test_the_course_has_what_the_previous_sdk_asks_for(previous_python: Path) -> None:
    """Else its requirements.txt must name what the two need of their own."""
    found = {
        distribution.name: distribution.requires or []
        for distribution in metadata.distributions(path=[str(packages(ENVIRONMENT))])
    }
    assert {"fireworks-ai", "tinker"} <= found.keys()
    for text in (text for requires in found.values() for text in requires):
        requirement = Requirement(text)
        marker = requirement.marker
        asked = marker is None or marker.evaluate({"extra": "training-sdk"})
        if asked and requirement.name not in found:
            assert metadata.version(requirement.name) in requirement.specifier, text


def test_only_an_unreachable_registry_skips_these_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens
    with pytest.raises(pytest.skip.Exception, match="reaches no registry"):
        install(tmp_path / "unreachable")

    (tmp_path / "fireworks_ai-1.0-py3-none-any.whl").touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(AssertionError, match=r"from versions: 1\.0"):
        install(tmp_path / "withdrawn")


def test_the_readme_names_the_tested_versions() -> None:
    readme = (REPOSITORY / "rlhelpers" / "local" / "README.md").read_text("utf-8")
    lock = (REPOSITORY / "requirements.lock").read_text("utf-8").splitlines()
    pins = [line for line in lock if line.startswith("fireworks-ai==")]
    pins += [
        line for line in REQUIREMENTS.read_text("utf-8").splitlines() if "==" in line
    ]
    assert len(pins) == 3
    for name, version in (pin.split("==") for pin in pins):
        assert f"`{name}` {version}" in readme, name


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("loss", "'gspo' is not supported"),
        ("kind", "is a sampler checkpoint"),
        ("name", "1 to 63 lower-case"),
        ("taken", "exists already"),
        ("model", "'no/such' is not known"),
        ("key", "the API key is missing or wrong"),
        ("project", "fields ['project_id'] are not supported"),
        ("ttl", "fields ['ttl_seconds'] are not supported"),
        ("sampler", "has no model yet"),
        ("capabilities", "/get_server_capabilities is not supported by"),
        ("runs", "/training_runs is not supported by"),
        ("tinker", "/client/config is not supported by"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    training: Record, what: str, named: str
) -> None:
    assert named in training["refusals"][what]
