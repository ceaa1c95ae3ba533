"""OpenAI's batch format: one `/v1/chat/completions` request per line, each with its own sampling.

{"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...], ...}}

Answers go to one file, failures to another beside it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.batch_files.rows import Answer, Constraint, Row, RowRequest, RowSource
from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import EngineError

URL = "/v1/chat/completions"


_NOT_GIVEN = {
    "stream": "a stream",
    "tools": "tools",
    "functions": "functions",
    "logprobs": "probabilities of tokens",
    "top_logprobs": "probabilities of tokens",
    "logit_bias": "a bias of tokens",
    "frequency_penalty": "a penalty",
    "presence_penalty": "a penalty",
    "audio": "sound",
    "web_search_options": "a web search",
}
_MOST_SEED = 2**63
_LEAST_TOP_P = 1e-6
"""Greedy: only the most likely token, as 0 means."""


class BadRequestError(ValueError):
    """A row that cannot be answered as requested; the message completes a sentence about it."""


def holds_openai_requests(source: RowSource) -> bool:
    """Whether an input is in this format."""
    return {"custom_id", "body"} <= set(source.columns)


def openai_request(row: Row, defaults: SamplingParams) -> RowRequest:
    """The request in a row.

    Args:
        defaults: for everything missing in its body.

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
    _refuse_what_is_not_given(body)
    return RowRequest(row.index, _messages(body.get("messages")), _sampling(body, defaults), _constraint(body))


def _refuse_what_is_not_given(body: Mapping[str, Any]) -> None:
    """Refuses unsupported options that would change the answer; ignores those about users or service levels."""
    if body.get("n") not in (None, 1):
        raise BadRequestError("asks for several answers (n); a batch gives one per row")
    for name, words in _NOT_GIVEN.items():
        if body.get(name):
            raise BadRequestError(f"asks for {words} ({name}), which a batch does not give")
    if body.get("modalities") not in (None, ["text"]):
        raise BadRequestError("asks for modalities other than text")


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequestError("has no messages")
    messages = []
    for entry in value:
        role = entry.get("role") if isinstance(entry, Mapping) else None
        if role == "developer":
            role = "system"
        if role not in ("system", "user", "assistant"):
            raise BadRequestError(f"has a message with the role {str(role)[:20]!r}; use system, user or assistant")
        messages.append(ChatMessage(role, _content(entry.get("content"))))
    return tuple(messages)


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    raise BadRequestError("has a message that is not text")


def _sampling(body: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    names = {
        "temperature": "temperature",
        "top_p": "top_p",
        "seed": "seed",
        "max_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
    }
    asked: dict[str, Any] = {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
    for name, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, int if name in ("seed", "max_tokens") else int | float):
            raise BadRequestError(f"has {str(value)[:20]!r} as {name}")
    if "seed" in asked:
        asked["seed"] %= _MOST_SEED
    if asked.get("top_p") == 0:
        asked["top_p"] = _LEAST_TOP_P
    stop = body.get("stop")
    if isinstance(stop, str):
        stop = [stop]
    if stop is not None:
        if not isinstance(stop, list) or not all(isinstance(entry, str) and entry for entry in stop):
            raise BadRequestError("has a stop that is neither a string nor a list of strings")
        asked["stop"] = tuple(stop)
    try:
        return replace(defaults, **asked)
    except EngineError as error:
        raise BadRequestError(f"has an invalid option: {error.message}") from None


def _constraint(body: Mapping[str, Any]) -> Constraint | None:
    form = body.get("response_format")
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Constraint(schema='{"type": "object"}')
    described = form.get("json_schema") if isinstance(form, Mapping) else None
    schema = described.get("schema", {"type": "object"}) if isinstance(described, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise BadRequestError(f"has an unsupported response_format type {str(kind)[:20]!r}")
    return Constraint(schema=json.dumps(schema))


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
