"""What the service answers, in the form that the SDK reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.responses import JSONResponse

from .batches import TrainingDatum
from .decoding import Completion
from .futures import Result
from .promotion import PromotedModel, row_id
from .store import ACCOUNT, CheckpointInfo
from .trainer import PassResult


def completion_event(completion: Completion, prompt: list[int]) -> Result:
    """One finished sequence, as the single event of its stream."""
    # With `echo` tokens and log-probabilities start with the prompt's.
    echoed = prompt if completion.prompt_logprobs else []
    content = [
        {"token_id": token, "logprob": raw, "sampling_logprob": None}
        for token, raw in zip(echoed, completion.prompt_logprobs, strict=True)
    ] + [
        {"token_id": token, "logprob": raw, "sampling_logprob": sampled}
        for token, raw, sampled in zip(
            completion.tokens,
            completion.logprobs,
            completion.sampling_logprobs,
            strict=True,
        )
    ]
    return {
        "choices": [
            {
                "index": 0,
                "text": "",
                "finish_reason": completion.finish_reason,
                "raw_output": {"completion_token_ids": echoed + completion.tokens},
                "logprobs": {"content": content},
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(completion.tokens),
            "total_tokens": len(prompt) + len(completion.tokens),
        },
        # Without it the SDK warns and keeps its window of parallel requests small.
        "perf_metrics": {"prefill-queue-duration": 0},
    }


def checkpoint_row(info: CheckpointInfo) -> Result:
    """A checkpoint in the control plane's list."""
    session = f"accounts/{ACCOUNT}/trainingSessions/{info.session_id}"
    purpose = "INFERENCE" if info.kind == "sampler" else "TRAINING"
    created = datetime.fromtimestamp(info.created, UTC)
    return {
        "name": f"{session}/checkpoints/{row_id(info.ref)}",
        "checkpointType": f"CHECKPOINT_TYPE_{purpose}_LORA",
        "promotable": info.kind == "sampler",
        "createTime": created.isoformat().replace("+00:00", "Z"),
        "baseModel": info.base_model,
        "sizeBytes": info.size,
        "path": info.ref.path,
    }


def model_row(promoted: PromotedModel) -> Result:
    """A promoted model, and the folder it is in."""
    return {
        "name": promoted.name,
        "state": "READY",
        "kind": "HF_PEFT_ADDON",
        "peftDetails": {
            "baseModel": promoted.base_model,
            "r": promoted.rank,
            "targetModules": promoted.target_modules,
        },
        "localFolder": str(promoted.folder.resolve()),
    }


def pass_outputs(
    data: Sequence[TrainingDatum], result: PassResult, top_k: int
) -> list[Result]:
    """What a pass gives for each datum, in order."""
    outputs = [
        {"logprobs": _tensor(values, list(datum.targets.shape))}
        for datum, values in zip(data, result.logprobs, strict=True)
    ]
    for output, datum, best in zip(outputs, data, result.top_k, strict=False):
        shape = [len(datum), top_k]
        output["top_k_logprobs"] = _tensor(best.logprobs, shape)
        output["top_k_indices"] = {**_tensor(best.tokens, shape), "dtype": "int64"}
    return outputs


def _tensor(values: Sequence[float], shape: list[int]) -> Result:
    return {"data": values, "dtype": "float32", "shape": shape}


def error_response(
    message: str, status: int, code: str = "bad_request"
) -> JSONResponse:
    """An HTTP error with a message that the SDK shows."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "code": code, "type": kind}}, status
    )
