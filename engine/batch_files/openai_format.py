"""OpenAI's batch format: one `/v1/chat/completions` request per line, each with its own sampling.

{"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...], ...}}

Answers go to one file, failures to another beside it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from engine.batch_files.openai_requests import (
    BadRequestError,
    read_constraint,
    read_messages,
    read_sampling,
    refuse_what_is_not_given,
)
from engine.batch_files.rows import Answer, Row, RowRequest, RowSource
from engine.common.config import SamplingParams

URL = "/v1/chat/completions"
_FIRST_ROWS = 200
"""Rows that tell the format."""


_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
"""What only other servers are asked for."""


def holds_openai_requests(source: RowSource) -> bool:
    """Whether an input is in this format: its first rows are read, as other files have columns of these names, too."""
    if not {"custom_id", "body"} <= set(source.columns):
        return False
    bodies = ((row.fields, row.fields.get("body")) for row in islice(source.rows(), _FIRST_ROWS))
    return any(isinstance(body, Mapping) and ("url" in fields or "messages" in body) for fields, body in bodies)


def openai_request(
    row: Row, defaults: SamplingParams, *, elsewhere: bool = False, folder: Path | None = None
) -> RowRequest:
    """The request in a row.

    Args:
        defaults: for everything missing in its body.
        elsewhere: see `read_messages`.
        folder: in which paths of pictures begin that this machine reads.

    Raises:
        BadRequestError: it cannot be answered as requested.
    """
    url, body = row.fields.get("url"), row.fields.get("body")
    if not isinstance(row.fields.get("custom_id"), str):
        raise BadRequestError("has no custom_id")
    if row.fields.get("method", "POST") != "POST":
        raise BadRequestError(f"has the method {str(row.fields['method'])[:20]!r} where POST belongs")
    if url != URL:
        raise BadRequestError(f"asks for {str(url)[:60]!r}; only {URL} is answered")
    if not isinstance(body, Mapping):
        raise BadRequestError("has no body")
    tools = (
        {name: body[name] for name in _TOOLS if body.get(name) is not None} if elsewhere and body.get("tools") else {}
    )
    refuse_what_is_not_given({name: value for name, value in body.items() if name not in tools}, "batch")
    messages = read_messages(body.get("messages"), elsewhere=elsewhere, local_files=folder)
    sampling = replace(defaults, **read_sampling(body))
    kept = json.dumps(tools, ensure_ascii=False) if tools else ""
    return RowRequest(row.index, messages, sampling, read_constraint(body), kept)


_NAMESPACE = uuid.UUID("6f6b0b6e-52a5-4d0e-9d67-2a1d3d6c7e55")
FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "context": "length", "cancelled": "stop"}
"""Why an answer ended, in OpenAI's words."""


def errors_path(output: Path) -> Path:
    """Where the failures of a batch with this output are written."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def write_openai(good: Path, bad: Path, answered: Iterable[tuple[Row, Answer]], created_s: int = 0) -> int:
    """Writes answers to one new file and failures to another; returns the number of failures.

    Args:
        created_s: when the job started, seconds since 1970.
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
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.tool_calls:
        message |= {"content": answer.text or None, "tool_calls": json.loads(answer.tool_calls)}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": "tool_calls" if answer.tool_calls else FINISH.get(answer.finish_reason, "stop"),
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
