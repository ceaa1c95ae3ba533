"""Output in OpenAI's batch format: answers in one file, failures in another beside it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.batch_files.answer import Answer
from engine.batch_files.row import Row

_NAMESPACE = uuid.UUID("6f6b0b6e-52a5-4d0e-9d67-2a1d3d6c7e55")
_FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "context": "length"}


def errors_path(output: Path) -> Path:
    """Where the failures of a batch with this output are written."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def write_openai(good: Path, bad: Path, answered: Iterable[tuple[Row, Answer]], created_s: int = 0) -> int:
    """Writes answers to one new file and failures to another; returns the number of failures.

    Args:
        created_s: when the job started, seconds since 1970.

    Raises:
        OSError: they cannot be written.
    """
    failures = 0
    with (
        open(good, "w", encoding="utf-8", newline="\n") as answers,
        open(bad, "w", encoding="utf-8", newline="\n") as problems,
    ):
        for row, answer in answered:
            failures += answer.failed
            file = problems if answer.failed else answers
            file.write(json.dumps(_line(row, answer, created_s), ensure_ascii=False) + "\n")
    return failures


def _line(row: Row, answer: Answer, created_s: int) -> dict[str, Any]:
    custom_id = row.fields.get("custom_id")
    # Ids are stable: the same row always gets the same ones.
    key = uuid.uuid5(_NAMESPACE, f"{custom_id}\0{answer.row}").hex
    line: dict[str, Any] = {"id": f"batch_req_{key}", "custom_id": custom_id, "response": None, "error": None}
    if answer.failed:
        # OpenAI reports refused requests like this; `error` is for expired batches, which do not exist here.
        error = {
            "message": f"The row {answer.problem}.",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
        line["response"] = {"status_code": 400, "request_id": key, "body": {"error": error}}
    else:
        line["response"] = {"status_code": 200, "request_id": key, "body": _completion(row, answer, key, created_s)}
    return line


def _completion(row: Row, answer: Answer, key: str, created_s: int) -> dict[str, Any]:
    body = row.fields.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None,
        "finish_reason": _FINISH.get(answer.finish_reason, "stop"),
    }
    return {
        "id": f"chatcmpl-{key}",
        "object": "chat.completion",
        "created": created_s,
        "model": model if isinstance(model, str) else "",
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.generated_tokens,
            "total_tokens": answer.prompt_tokens + answer.generated_tokens,
        },
        "system_fingerprint": None,
    }
