"""What a chat request in OpenAI's format asks for; for rows of a batch file and for clients of the server alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Role, ToolCall
from engine.common.config import SamplingParams, Thinking
from engine.common.errors import EngineError
from engine.common.foreign import json_text, parse_json

_MOST_SEED = 2**63
_LEAST_TOP_P = 1e-6
"""Greedy: only the most likely token, as 0 means."""
MOST_STOPS = 100


class BadRequestError(ValueError):
    """A request that cannot be answered; the message completes a sentence about it."""


def read_messages(value: Any, *, elsewhere: bool = False) -> tuple[ChatMessage, ...]:
    """The conversation.

    Args:
        elsewhere: another server reads it, pictures and all: what is more than text goes along as it is.

    Raises:
        BadRequestError: it is empty, or not one of texts.
    """
    if not isinstance(value, list) or not value:
        raise BadRequestError("has no messages")
    return tuple(_message(entry, elsewhere=elsewhere) for entry in value)


def _message(entry: Any, *, elsewhere: bool) -> ChatMessage:
    if not isinstance(entry, Mapping):
        raise BadRequestError("has a message that is not an object")
    role = entry.get("role")
    role = {"developer": "system", "function": "tool"}.get(str(role), role)
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequestError(f"has a message with the role {str(role)[:20]!r}; use system, user, assistant or tool")
    calls = _calls(entry.get("tool_calls")) if role == "assistant" else ()
    content, parts = entry.get("content"), ""
    if elsewhere and isinstance(content, list) and _are_more_than_text(content):
        parts = json.dumps(content, ensure_ascii=False)
        content = [part for part in content if part.get("type") in _TEXTS]
    text = "" if content is None and (calls or role == "assistant") else read_text(content)
    reasoning = entry.get("reasoning_content")
    answers = entry.get("tool_call_id") or entry.get("name") or ""
    return ChatMessage(
        cast("Role", role),
        text,
        reasoning if role == "assistant" and isinstance(reasoning, str) else "",
        calls,
        str(answers) if role == "tool" else "",
        parts,
    )


_TEXTS = frozenset(("text", "input_text", "output_text"))


def _are_more_than_text(content: list[Any]) -> bool:
    """Whether these are parts in OpenAI's form, and some are something else."""
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    return all(isinstance(kind, str) for kind in kinds) and not _TEXTS.issuperset(kinds)


def read_text(value: Any) -> str:
    """A content that is text, or a list of texts.

    Raises:
        BadRequestError: it is something else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = {str(part.get("type")) if isinstance(part, Mapping) else "" for part in value}
        if kinds <= _TEXTS:
            return "".join(str(part.get("text", "")) for part in value)
        if kinds & {"image_url", "image", "input_image"}:
            raise BadRequestError("has a picture; this program answers texts only")
    raise BadRequestError("has a message that is not text")


def _calls(value: Any) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    calls = []
    entries: list[Any] = value if isinstance(value, list) else [None]
    for entry in entries:
        function = entry.get("function") if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequestError("has a tool call without a function name")
        calls.append(read_call(str(entry.get("id") or ""), function["name"], function.get("arguments")))
    return tuple(calls)


def read_call(call_id: str, name: str, arguments: Any) -> ToolCall:
    """A call that an assistant made earlier; its arguments are an object, or one as JSON text.

    Raises:
        BadRequestError: the arguments are neither.
    """
    try:
        known = parse_json(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except ValueError:
        known = None
    if not isinstance(known, Mapping):
        raise BadRequestError(f"has a call of {name[:40]!r} whose arguments are not a JSON object")
    return ToolCall(call_id, name, json_text(known))


def read_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that a request sets.

    Raises:
        BadRequestError: one of them makes no sense.
    """
    names = {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "seed": "seed",
        "max_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
    }
    asked: dict[str, Any] = {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
    for name, value in asked.items():
        whole = name in ("seed", "max_tokens", "top_k")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise BadRequestError(f"has {str(value)[:20]!r} as {name}")
    if "seed" in asked:
        asked["seed"] %= _MOST_SEED
    if asked.get("top_p") == 0:
        asked["top_p"] = _LEAST_TOP_P
    if body.get("stop") is not None:
        asked["stop"] = read_stop(body["stop"])
    if body.get("logit_bias"):
        asked["logit_bias"] = _bias(body["logit_bias"])
    if (thinking := _thinking(body)) is not None:
        asked["thinking"] = thinking
    try:
        SamplingParams(**asked)
    except EngineError as error:
        raise BadRequestError(f"has an invalid option: {error.message.rstrip('.')}") from None
    return asked


_EFFORTS: dict[str, Thinking] = {
    "none": "off",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}


def _thinking(body: Mapping[str, Any]) -> Thinking | None:
    """How much to think: `reasoning_effort`, or `enable_thinking` as other servers take it for the chat template."""
    effort, values = body.get("reasoning_effort"), body.get("chat_template_kwargs")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise BadRequestError(f"has {str(effort)[:20]!r} as reasoning_effort; use {', '.join(_EFFORTS)}")
        return _EFFORTS[effort]
    if isinstance(values, Mapping):
        for name in ("enable_thinking", "thinking"):
            if isinstance(values.get(name), bool):
                return "on" if values[name] else "off"
    return None


def read_stop(value: Any) -> tuple[str, ...]:
    """Strings that end an answer: one, or a list.

    Raises:
        BadRequestError: they are neither, or too many.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(entry, str) and entry for entry in texts):
        raise BadRequestError("has a stop that is neither a string nor a list of strings")
    if len(texts) > MOST_STOPS:
        raise BadRequestError(f"has {len(texts):,} stop strings; at most {MOST_STOPS} are taken")
    return tuple(texts)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), float(bias)) for token, bias in value.items())
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise BadRequestError("has a logit_bias that is not an object of token ids and numbers") from None


def read_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """What `response_format` wants of the answer.

    Raises:
        BadRequestError: it is of an unknown type.
    """
    form = body.get("response_format")
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        asked = form.get("schema") if isinstance(form, Mapping) else None  # llama.cpp's clients may add one
        return Constraint(schema=json_text(asked) if isinstance(asked, Mapping) else '{"type": "object"}')
    described = form.get("json_schema") if isinstance(form, Mapping) else None
    schema = described.get("schema", {"type": "object"}) if isinstance(described, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise BadRequestError(f"has an unsupported response_format type {str(kind)[:20]!r}")
    return Constraint(schema=json_text(schema))
