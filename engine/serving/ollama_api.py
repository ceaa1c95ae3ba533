"""Ollama's interface: `/api/tags`, `show`, `ps`, `version`, `chat` and `generate`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.batch_files.openai_requests import BadRequestError, read_constraint, read_messages, read_sampling
from engine.checkpoint.library import LibraryEntry
from engine.common.chat import ChatMessage, ToolCall
from engine.common.errors import EngineError
from engine.common.foreign import json_text
from engine.families.replies.reader import Part, ReplyReader, Spoken, Thought
from engine.serving.asking import Ask, Began, Ended, Progress, Said
from engine.serving.service import Service, body_of, of_engine, status_of, while_connected
from engine.serving.streams import JSONResponse, Lines, Streamed, lines_of, opened
from engine.serving.tools import ToolUse, openai_tools

VERSION = "0.12.0"
"""The version of the interface that is spoken here: clients ask for it before they use what came later."""
_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


def ollama_error(error: EngineError | BadRequestError, status: int | None = None) -> Response:
    """An error in Ollama's form, with a status that is its own or this."""
    error = of_engine(error)
    return JSONResponse({"error": error.message}, status or status_of(error))


def routes(service: Service) -> list[Route]:
    """The paths of this interface."""
    api = _Ollama(service)
    return [
        Route("/", api.alive, methods=["GET", "HEAD"]),
        Route("/api/version", api.version, methods=["GET"]),
        Route("/api/tags", api.tags, methods=["GET"]),
        Route("/api/ps", api.running, methods=["GET"]),
        Route("/api/show", api.show, methods=["POST"]),
        Route("/api/chat", api.chat, methods=["POST"]),
        Route("/api/generate", api.generate, methods=["POST"]),
    ]


class _Ollama:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def alive(self, _request: Request) -> Response:
        return Response("Switchyard is running", media_type="text/plain")

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def tags(self, _request: Request) -> Response:
        return JSONResponse({"models": [_described(entry) for entry in await self._service.models()]})

    async def running(self, _request: Request) -> Response:
        loaded = self._service.desk.state.model
        entries = [entry for entry in await self._service.models() if entry.path == loaded]
        return JSONResponse({"models": [{**_described(entry), "size_vram": 0} for entry in entries[:1]]})

    async def show(self, request: Request) -> Response:
        body = await body_of(request)
        _name, entry = await self._service.entry_of(body.get("model") or body.get("name"))
        family = entry.family or "unknown"
        info = {"general.architecture": family, f"{family}.context_length": entry.context_tokens}
        described = {
            "details": _described(entry)["details"],
            "model_info": info,
            "capabilities": ["completion", "tools"],
        }
        return JSONResponse({"modelfile": "", "parameters": "", "template": "", **described})

    async def chat(self, request: Request) -> Response:
        body = await body_of(request)
        if body.get("messages") == []:
            answer = await self._come_or_go(request, body)
            return JSONResponse(answer | {"message": {"role": "assistant", "content": ""}})
        uses = openai_tools({"tools": body.get("tools")})
        return await self._answer(request, body, uses, read_messages(_own_calls(body.get("messages"))))

    async def generate(self, request: Request) -> Response:
        body = await body_of(request)
        prompt = body.get("prompt") or ""
        if not isinstance(prompt, str) or body.get("images") or body.get("suffix"):
            raise BadRequestError("has a prompt that is not text alone")
        if not prompt:
            return JSONResponse(await self._come_or_go(request, body) | {"response": ""})
        if body.get("raw"):
            return await self._answer(request, body, ToolUse(), (), prompt)
        system = body.get("system")
        messages = (ChatMessage("system", str(system)),) if system else ()
        return await self._answer(request, body, ToolUse(), (*messages, ChatMessage("user", prompt)))

    async def _come_or_go(self, request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
        """Who asks nothing wants the model to be loaded, or with a `keep_alive` of nothing to be freed."""
        name, path = await self._service.path_of(body.get("model"))
        goes = _is_nothing(body.get("keep_alive"))
        if goes:
            self._service.desk.release(path)
        else:
            only_loads = Ask(path, (ChatMessage("user", "Hello"),))
            await while_connected(request, self._service.prompt_length(only_loads))
        return {"model": name, "created_at": _now(), "done": True, "done_reason": "unload" if goes else "load"}

    async def _answer(
        self,
        request: Request,
        body: Mapping[str, Any],
        uses: ToolUse,
        messages: tuple[ChatMessage, ...],
        text: str | None = None,
    ) -> Response:
        name, path = await self._service.path_of(body.get("model"))
        asked = Ask(
            path,
            messages=messages,
            tools=uses.tools,
            text=text,
            sampling={**_sampling(body.get("options")), **_thinking(body.get("think"))},
            constraint=read_constraint({"response_format": _format(body.get("format"))}),
        )
        answer = _Answer(name, uses, is_chat="messages" in body)
        if body.get("stream", True):
            lines = await opened(request, self._stream(asked, answer))
            return Streamed(lines, media_type="application/x-ndjson")

        async def whole() -> dict[str, Any]:
            async for event in self._service.events(asked):
                answer.take(event)
            return answer.whole()

        return JSONResponse(await while_connected(request, whole()))

    def _stream(self, asked: Ask, answer: _Answer) -> Lines:
        def take(event: Progress) -> list[str]:
            if isinstance(event, Began):
                return ["", *map(_json_line, answer.take(event))]  # from here on errors are part of the stream
            return [_json_line(line) for line in answer.take(event)]

        return lines_of(self._service.events(asked), take, lambda error: [_json_line({"error": error.message})])


class _Answer:
    """One answer: what has come of it, and what to send for each event."""

    def __init__(self, name: str, uses: ToolUse, *, is_chat: bool) -> None:
        self._name, self._uses, self._is_chat = name, uses, is_chat
        self._reader: ReplyReader | None = None
        self._said, self._thought, self._calls = "", "", list[ToolCall]()
        self._last: dict[str, Any] = {}
        self._asked_ns = time.monotonic_ns()
        self._first_ns = 0

    def take(self, event: Progress) -> list[dict[str, Any]]:
        """The lines of a stream that an event makes."""
        if isinstance(event, Began):
            self._reader = self._uses.reader(event)
            return []
        if isinstance(event, Said):
            self._first_ns = self._first_ns or time.monotonic_ns()
            return self._lines(self._reader.feed(event.text) if self._reader else [])
        lines = self._lines(self._reader.end() if self._reader else [])
        self._last = self._ending(event)
        return [*lines, {**self._line(Spoken("")), **self._last}]

    def whole(self) -> dict[str, Any]:
        """The answer, whole."""
        line = self._line(Spoken(self._said))
        holder = line["message"] if self._is_chat else line
        if self._thought:
            holder["thinking"] = self._thought
        if self._calls:
            holder["tool_calls"] = [_call(call) for call in self._calls]
        return {**line, **self._last}

    def _lines(self, parts: list[Part]) -> list[dict[str, Any]]:
        for part in parts:
            if isinstance(part, Thought):
                self._thought += part.text
            elif isinstance(part, Spoken):
                self._said += part.text
            else:
                self._calls.append(part)
        return [self._line(part) for part in parts]

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

    def _ending(self, ended: Ended) -> dict[str, Any]:
        now = time.monotonic_ns()
        first = self._first_ns or now
        return {
            "done": True,
            "done_reason": "length" if ended.reason in ("length", "context") else "stop",
            "total_duration": now - self._asked_ns,
            "load_duration": 0,
            "prompt_eval_count": ended.prompt_tokens,
            "prompt_eval_duration": first - self._asked_ns,
            "eval_count": ended.generated_tokens,
            "eval_duration": now - first,
        }


def _json_line(line: dict[str, Any]) -> str:
    return json_text(line) + "\n"


def _is_nothing(keep_alive: Any) -> bool:
    """Whether a duration is 0: a number of seconds, or text such as `0s`."""
    text = str(keep_alive).strip().rstrip("hms")
    return not isinstance(keep_alive, bool) and text.replace(".", "0").strip("0") == "" and text != ""


def _call(call: ToolCall) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _own_calls(messages: Any) -> Any:
    """Ollama's results of tools name the tool instead of the call, and its pictures stand beside the text."""
    if not isinstance(messages, list):
        return messages
    if any(isinstance(entry, Mapping) and entry.get("images") for entry in messages):
        raise BadRequestError("has a picture; this program answers texts only")
    return [
        {**entry, "tool_call_id": entry.get("tool_call_id") or entry.get("tool_name")}
        if isinstance(entry, Mapping) and entry.get("role") == "tool"
        else entry
        for entry in messages
    ]


def _thinking(think: Any) -> dict[str, Any]:
    """Whether to think: true, false, or how much."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"thinking": "on" if think else "off"}
    return read_sampling({"reasoning_effort": think})


def _sampling(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise BadRequestError("has options that are not an object")
    asked = {ours: options[theirs] for theirs, ours in _OPTIONS.items() if options.get(theirs) is not None}
    most = options.get("num_predict")
    if isinstance(most, int) and most > 0:
        asked["max_tokens"] = most
    return read_sampling(asked)


def _format(form: Any) -> Any:
    if form in (None, ""):
        return None
    if form == "json":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"schema": form}}


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
        "digest": "",
        "details": details,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat()
