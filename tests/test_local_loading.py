"""Base models from GGUF files and Hugging Face ids, and SmolLM2 where it is installed.

Expected logits are those of the model that the file was written from.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gguf_files import random_llama, write_gguf

from rlhelpers.local import LocalService, loading
from rlhelpers.local.loading import UnknownModel, default_models, load_base_model
from rlhelpers.models import PRESETS, SMOLLM2_FILE
from rlhelpers.preflight import load_tokenizer

SMOLLM2 = PRESETS["smollm2-135m"]
needs_gguf = pytest.mark.skipif(
    find_spec("gguf") is None, reason="the package gguf is not installed"
)
needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2_FILE.is_file() or find_spec("gguf") is None,
    reason="SmolLM2 is not installed (make smollm2)",
)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, random_llama())


def logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([ids])).logits
    return found


@needs_gguf
def test_a_gguf_file_holds_the_model_it_was_written_from(
    gguf_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = load_base_model("x", {"x": gguf_file}, "cpu")
    expected = logits(random_llama(), [72, 101, 259, 32])
    for model in (base.trainable, base.sampling):
        assert torch.allclose(logits(model, [72, 101, 259, 32]), expected, atol=1e-5)
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
        assert not model.training
    assert (base.context_length, base.vocab_size) == (512, 260)
    assert base.end_token_ids == {257}
    assert base.tokenizer.decode([72, 105]) == base.tokenizer.decode(
        base.tokenizer("".join(base.tokenizer.decode([72, 105]))).input_ids
    )
    assert "%" not in capfd.readouterr().err  # no progress bar


@needs_gguf
def test_the_two_copies_share_no_weights(gguf_file: Path) -> None:
    base = load_base_model(str(gguf_file), {}, "cpu")
    places = [
        {weight.data_ptr() for weight in model.parameters()}
        for model in (base.trainable, base.sampling)
    ]
    assert not places[0] & places[1]
    embedding = base.sampling.get_input_embeddings().weight
    assert base.sampling.get_output_embeddings().weight is not embedding


@needs_gguf
def test_a_preset_reads_the_tokenizer_from_its_gguf_file(gguf_file: Path) -> None:
    preset = dataclasses.replace(SMOLLM2, tokenizer=gguf_file)
    assert preset.files == (str(gguf_file.parent), {"gguf_file": "tiny.gguf"})
    tokenizer = load_tokenizer(preset)
    assert "im_start" in str(tokenizer.chat_template)
    assert tokenizer.eos_token_id == 257


def test_a_missing_gguf_file_names_the_remedy(tmp_path: Path) -> None:
    absent = tmp_path / "absent.gguf"
    with pytest.raises(UnknownModel, match=r"no file 'absent\.gguf'; check the path"):
        load_base_model(str(absent), default_models(), "cpu")
    with pytest.raises(UnknownModel, match=r"local/smollm2-135m.*make smollm2"):
        load_base_model(SMOLLM2.base_model, {SMOLLM2.base_model: absent}, "cpu")
    preset = dataclasses.replace(SMOLLM2, tokenizer=absent)
    with pytest.raises(FileNotFoundError, match=r"'absent\.gguf'.*make smollm2"):
        load_tokenizer(preset)


def test_a_missing_reader_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there.gguf"
    there.touch()
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    monkeypatch.setattr("rlhelpers.preflight.find_spec", lambda name: None)
    with pytest.raises(UnknownModel, match="pip install gguf"):
        load_base_model(str(there), {}, "cpu")
    preset = dataclasses.replace(SMOLLM2, tokenizer=there)
    with pytest.raises(FileNotFoundError, match="needs the package gguf,.*smollm2"):
        load_tokenizer(preset)


def test_a_hub_id_that_cannot_be_had_is_named_with_the_remedy() -> None:
    with pytest.raises(UnknownModel) as caught:
        load_base_model("someone/some-model", default_models(), "cpu")
    for words in ("'someone/some-model'", "hf download someone/some-model", "network"):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ["some-model", "local/other", "a/b/c", "../x/y"])
def test_what_is_no_hub_id_is_refused_without_asking(name: str) -> None:
    with pytest.raises(UnknownModel, match="is not known.*local/tiny-arithmetic"):
        load_base_model(name, default_models(), "cpu")


def test_preset_and_service_mean_the_same_file() -> None:
    assert default_models()[SMOLLM2.base_model] == SMOLLM2_FILE


@needs_smollm2
@pytest.mark.slow
def test_smollm2_samples_with_the_log_probabilities_it_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fireworks.training.sdk import FiretitanServiceClient, types

    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    tokenizer = load_tokenizer(SMOLLM2)
    prompt = tokenizer("<|im_start|>user\nCompute 3 * 4.<|im_end|>\n").input_ids
    with LocalService(tmp_path) as service:
        client = FiretitanServiceClient(
            base_url=service.base_url, api_key=service.api_key
        )
        policy = client.create_lora_training_client(
            base_model=SMOLLM2.base_model, rank=8, seed=0
        )
        sampler = client.create_sampling_client(
            model_path=policy.save_weights_for_sampler("first").result().path,
            tokenizer=tokenizer,
        )
        sequence = sampler.sample(
            types.ModelInput.from_ints(prompt),
            1,
            types.SamplingParams(max_tokens=12, temperature=1.0, seed=1),
        )
        (sampled,) = sequence.result().sequences
        tokens = [*prompt, *sampled.tokens]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "weights": [1.0] * (len(tokens) - 1),
            },
        )
        output = policy.forward([datum], "cross_entropy").result()
        scored = output.loss_fn_outputs[0]["logprobs"].data[len(prompt) - 1 :]
        client.close()
    assert len(scored) == len(sampled.logprobs) > 0
    assert scored == pytest.approx(sampled.logprobs, abs=1e-4)
