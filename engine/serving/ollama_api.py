"""Ollama's interface: `/api/tags`, `show`, `ps`, `version`, `chat`, `generate` and `embed`."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar

from starlette.responses import Response

from engine.batch_files.openai_requests import (
    BadRequestError,
    Interface,
    read_content,
    read_messages,
    read_text,
    with_pictures,
)
from engine.checkpoint.library import LibraryEntry, chat_template
from engine.common.chat import ChatMessage, ToolCall
from engine.common.errors import EngineError
from engine.common.untrusted import json_text
from engine.families.replies.reader import Part, Spoken, Thought
from engine.protocol import Ask, Began, Progress, Token
from engine.serving.answers import Answer, Call, Endpoint, openai_tools, respond
from engine.serving.embeddings import Embedded, Text, read_texts
from engine.serving.link import AnswerEvent
from engine.serving.service import NO_TOOLS, Offer, on_a_thread

VERSION = "0.12.0"
"""The version of the interface that is spoken here: clients ask for it before they use what came later."""
_NEVER = "2318-01-01T00:00:00+00:00"
"""As Ollama's own for a model that is kept: its program takes one without a time for one that is being freed."""
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "ns": 1e-9}
_PIECE = r"(\d+(?:\.\d*)?|\.\d+)(ms|us|\u00b5s|ns|h|m|s)"
_DURATION = re.compile(rf"(-?)\+?(?:(\d+(?:\.\d*)?)|((?:{_PIECE})+))")
_LONGEST_S = 1e8
"""Three years: a longer one is for ever."""


def error_body(error: EngineError, _status: int) -> dict[str, Any]:
    return {"error": error.message}


async def alive(_call: Call) -> Any:
    return Response("Switchyard is running", media_type="text/plain")


async def version(_call: Call) -> Any:
    return {"version": VERSION}


async def tags(call: Call) -> Any:
    return {"models": [_described(entry) for entry in await call.service.models()]}


async def running(call: Call) -> Any:
    loaded = call.service.broker.state.model
    entries = [entry for entry in await call.service.models() if entry.path == loaded]
    extra = {"size_vram": 0, "expires_at": _NEVER}
    return {"models": [{**_described(e), **extra, "context_length": e.context_tokens} for e in entries[:1]]}


async def show(call: Call) -> Any:
    body = call.body
    _name, entry = await call.service.entry_of(body.get("model") or body.get("name"))
    family = entry.family or "unknown"
    info = {"general.architecture": family, f"{family}.context_length": entry.context_tokens}
    template = await on_a_thread(lambda: chat_template(entry.path))
    chats = not entry.embeds
    able = {
        "completion": chats,
        "vision": chats and entry.sees,
        "tools": chats and entry.calls_tools,
        "thinking": chats and entry.thinks,
        "embedding": entry.embeds,
    }
    described = {"details": _described(entry)["details"], "model_info": info, "template": template}
    capabilities = [name for name, is_able in able.items() if is_able]
    return {"modelfile": "", "parameters": "", **described, "capabilities": capabilities}


async def embed(call: Call) -> Any:
    body = _with_options(call.body)
    began_ns = time.monotonic_ns()
    value = body.get("input")
    name, found = await _embedded(call, body, read_texts(value) if value not in ("", []) else [])
    return {
        "model": name,
        "embeddings": list(found.numbers()),
        "total_duration": time.monotonic_ns() - began_ns,
        "load_duration": 0,
        "prompt_eval_count": found.tokens,
    }


async def embed_one(call: Call) -> Any:
    """As it was before there was `embed`."""
    body = _with_options(call.body)
    prompt = read_text(body.get("prompt") or "")
    _name, found = await _embedded(call, body, [prompt] if prompt else [])
    return {"embedding": next(found.numbers(), [])}


async def _embedded(call: Call, body: Mapping[str, Any], texts: list[Text]) -> tuple[str, Embedded]:
    name, path = await call.service.path_of(body.get("model"))
    dimensions = body.get("dimensions")
    if dimensions is not None and (not isinstance(dimensions, int) or isinstance(dimensions, bool)):
        raise BadRequestError("has dimensions that are no whole number")
    truncates, keep_s = body.get("truncate", True) is not False, _keep_s(body.get("keep_alive"))
    options: dict[str, Any] = {"dimensions": dimensions or None, "truncates": truncates, "keep_s": keep_s}
    return name, await call.service.embed(call.request, path, texts, **options)


async def chat(call: Call) -> Any:
    body = _with_options(call.body)
    if body.get("messages") == []:
        answer = await _load_or_free(call, body)
        return answer | {"message": {"role": "assistant", "content": ""}}
    offer = openai_tools({"tools": body.get("tools")})
    return await _answer(call, body, "ollama", offer, read_messages(body.get("messages")))


async def generate(call: Call) -> Any:
    body = _with_options(call.body)
    prompt = read_text(body.get("prompt") or "")
    images = body.get("images")
    if not prompt and not images:
        return await _load_or_free(call, body) | {"response": ""}
    system = read_text(body.get("system") or "")
    messages = [ChatMessage("system", system)] if system else []
    if body.get("raw"):
        if images:
            raise BadRequestError("has both raw and images; leave one of them out")
        return await _answer(call, body, "generate", NO_TOOLS, (), prompt)
    text, parts = read_content(with_pictures(prompt, images) if images else prompt)
    messages.append(ChatMessage("user", text, parts=parts))
    return await _answer(call, body, "generate", NO_TOOLS, tuple(messages))


async def _load_or_free(call: Call, body: Mapping[str, Any]) -> dict[str, Any]:
    """Who asks nothing wants the model to be loaded, or with a `keep_alive` of nothing to be freed."""
    name, path = await call.service.path_of(body.get("model"))
    keep_s = _keep_s(body.get("keep_alive"))
    goes = keep_s == 0
    if goes:
        call.service.broker.release(path)
    else:
        only_loads = Ask(path, (ChatMessage("user", "Hello"),), keep_s=keep_s)
        await call.service.prompt_length(call.request, only_loads)
    return {"model": name, "created_at": _now(), "done": True, "done_reason": "unload" if goes else "load"}


async def _answer(
    call: Call,
    body: Mapping[str, Any],
    interface: Interface,
    offer: Offer,
    messages: tuple[ChatMessage, ...],
    text: str | None = None,
) -> Any:
    """Answers the conversation, or continues a text in its place."""
    name, ask = await call.service.ask_of(body, interface, messages, offer)
    ask = replace(ask, text=text, keep_s=_keep_s(body.get("keep_alive")))
    reply = _Answer(name, ask, is_chat=interface == "ollama")
    return await respond(call, [ask], reply, streams=body.get("stream", True))


PATHS = (
    Endpoint("GET", "/", alive),
    Endpoint("GET", "/api/version", version),
    Endpoint("GET", "/api/tags", tags),
    Endpoint("GET", "/api/ps", running),
    Endpoint("POST", "/api/show", show),
    Endpoint("POST", "/api/chat", chat),
    Endpoint("POST", "/api/generate", generate),
    Endpoint("POST", "/api/embed", embed),
    Endpoint("POST", "/api/embeddings", embed_one),
)


class _Answer(Answer):
    error_body = staticmethod(error_body)
    headers: ClassVar[dict[str, str]] = {"Content-Type": "application/x-ndjson"}

    def __init__(self, name: str, ask: Ask, *, is_chat: bool) -> None:
        super().__init__(ask)
        self._name, self._is_chat = name, is_chat
        self._asked_ns, self._first_ns = time.monotonic_ns(), 0
        self._last: dict[str, Any] = {}
        self.beat = self.wire(self._line(Spoken("")))  # adds nothing: this interface has no other sign of life

    def take(self, event: AnswerEvent, _index: int = 0) -> list[dict[str, Any]]:
        if isinstance(event, Token):
            self._first_ns = self._first_ns or time.monotonic_ns()
        return super().take(event)

    def begins(self, _began: Began) -> list[dict[str, Any]]:
        return [{}]  # says nothing; but from here on errors are part of the stream

    def says(self, part: Part) -> list[dict[str, Any]]:
        return [self._line(part)]

    def ends(self) -> list[dict[str, Any]]:
        now = time.monotonic_ns()
        first = self._first_ns or now
        self._last = {
            "done": True,
            "done_reason": "length" if self.ended.finish_reason in ("length", "context") else "stop",
            "total_duration": now - self._asked_ns,
            "load_duration": 0,
            "prompt_eval_count": self.ended.prompt_tokens,
            "prompt_eval_duration": first - self._asked_ns,
            "eval_count": self.ended.generated_tokens,
            "eval_duration": now - first,
        }
        return [{**self._line(Spoken("")), **self._last}]

    def whole(self) -> dict[str, Any]:
        line = self._line(Spoken(self.text(Spoken)))
        holder = line["message"] if self._is_chat else line
        if thought := self.text(Thought):
            holder["thinking"] = thought
        if calls := self.calls:
            holder["tool_calls"] = [_call(call) for call in calls]
        return {**line, **self._last}

    def wire(self, line: dict[str, Any]) -> str:
        return json_text(line) + "\n" if line else ""

    def reads(self, _read: Progress, _index: int) -> str:
        return self.beat

    def _line(self, part: Part) -> dict[str, Any]:
        said = part.text if isinstance(part, Spoken) else ""
        extra: dict[str, Any] = {}
        if isinstance(part, Thought):
            extra["thinking"] = part.text
        if isinstance(part, ToolCall):
            extra["tool_calls"] = [_call(part)]
        head = {"model": self._name, "created_at": _now(), "done": False}
        if self._is_chat:
            return {**head, "message": {"role": "assistant", "content": said, **extra}}
        return {**head, "response": said, **extra}


def _keep_s(keep_alive: Any) -> float | None:
    """How long the model is kept: seconds, as a number or as text, or text such as `1h30m`; negative: for ever."""
    if keep_alive is None:
        return None
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool) and keep_alive == keep_alive:
        return float(keep_alive) if 0 <= keep_alive < _LONGEST_S else -1.0
    found = _DURATION.fullmatch(keep_alive.strip()) if isinstance(keep_alive, str) else None
    if found is None:
        words = f"has {str(keep_alive)[:20]!r} as keep_alive; use seconds, a time such as 5m or 1h30m, 0 or -1"
        raise BadRequestError(words)
    pieces = re.findall(_PIECE, found[3] or "")
    seconds = float(found[2] or 0) + sum(float(number) * _UNITS[unit] for number, unit in pieces)
    return seconds if seconds == 0 or (not found[1] and seconds < _LONGEST_S) else -1.0


def _call(call: ToolCall) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _with_options(body: dict[str, Any]) -> dict[str, Any]:
    """A request with its options among its fields, where other interfaces have them."""
    options = body.get("options")
    if options is None:
        return body
    if not isinstance(options, Mapping):
        raise BadRequestError("has options that are not an object")
    drawn = {"seed": None} if options.get("seed") == -1 else {}  # a fresh one
    return {**options, **drawn, **body}


def _described(entry: LibraryEntry) -> dict[str, Any]:
    used = datetime.fromtimestamp(entry.last_used or 0, UTC).isoformat()
    details = {
        "parent_model": "",
        "format": "gguf" if entry.path.suffix == ".gguf" else "safetensors",
        "family": entry.family,
        "families": [entry.family],
        "parameter_size": f"{entry.parameters / 1e9:.1f}B",
        "quantization_level": entry.precision_words or entry.dtype,
    }
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": used,
        "size": entry.bytes_on_disk,
        "digest": hashlib.sha256(f"{entry.path}\0{entry.bytes_on_disk}".encode("utf-8", "replace")).hexdigest(),
        "details": details,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat()
