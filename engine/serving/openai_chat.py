"""OpenAI's interface: models, chat completions and completions; embeddings are refused in a sentence."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.batch_files.openai_requests import (
    BadRequestError,
    read_constraint,
    read_messages,
    read_sampling,
)
from engine.common.chat import FinishReason, ToolCall
from engine.common.errors import EngineError, ErrorCode
from engine.families.replies.reader import Part, ReplyReader, Spoken, Thought, reply_reader
from engine.process.failures import as_engine_error, log_failure
from engine.serving.asking import Ask, Began, Ended, NamedChances, NamedToken, Progress, Said
from engine.serving.service import (
    Lines,
    Service,
    body_of,
    event_line,
    opened,
    server_sent,
    status_of,
    together,
    while_connected,
)
from engine.serving.tools import ToolUse, openai_tools

MOST_ANSWERS = 16
_FINISH: dict[FinishReason, str] = {
    "stop": "stop",
    "stop_string": "stop",
    "length": "length",
    "context": "length",
    "cancelled": "stop",
}
_CODES = {ErrorCode.MODEL_NOT_FOUND: "model_not_found", ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded"}

_KINDS = {401: "authentication_error", 403: "permission_error"}


def openai_error(error: EngineError | BadRequestError, status: int | None = None) -> Response:
    """An error in OpenAI's form, with a status that is its own or this."""
    if isinstance(error, BadRequestError):
        error = EngineError(ErrorCode.INVALID_REQUEST, f"The request {error}.")
    status = status or status_of(error)
    return JSONResponse({"error": _error(error, status)}, status)


def _error(error: EngineError, status: int | None = None) -> dict[str, Any]:
    status = status or status_of(error)
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    kind = _KINDS.get(status, kind)
    code = "invalid_api_key" if status == 401 else _CODES.get(error.code)
    return {"message": error.message, "type": kind, "param": None, "code": code}


def routes(service: Service) -> list[Route]:
    """The paths of this interface."""
    api = _OpenAi(service)
    found = []
    for path, method, endpoint in (
        ("/models", "GET", api.models),
        ("/models/{name:path}", "GET", api.model),
        ("/chat/completions", "POST", api.chat),
        ("/completions", "POST", api.completions),
        ("/embeddings", "POST", api.embeddings),
    ):
        # Some clients are told the address without the version.
        found += [Route(f"{version}{path}", endpoint, methods=[method]) for version in ("/v1", "")]
    return found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request, read.

    Attributes:
        asks: one for each answer.
        uses: tools that may be called.
        is_chat: or else a text is continued.
        streams, counts: whether it wants a stream, and in it the tokens used.
    """

    model: str
    asks: tuple[Ask, ...]
    uses: ToolUse
    is_chat: bool
    streams: bool
    counts: bool

    def reader(self, began: Began) -> ReplyReader:
        """What takes one of its answers apart."""
        is_call = self.uses.constraint is not None
        tools, several = self.uses.tools, self.uses.is_parallel
        return reply_reader(began.family, tools, thinks=began.thinks, is_call=is_call, several=several)


class _OpenAi:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, _request: Request) -> Response:
        listed = [self._described(entry.name) for entry in await self._service.models()]
        return JSONResponse({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        name, _path = await self._service.path_of(request.path_params["name"])
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._service.started_s, "owned_by": "switchyard"}

    async def embeddings(self, _request: Request) -> Response:
        raise BadRequestError("asks for embeddings, which chat models do not give; use an embedding model's server")

    async def chat(self, request: Request) -> Response:
        body = await body_of(request)
        uses = openai_tools(body)
        constraint = read_constraint(body)
        if constraint is not None and uses.constraint is not None:
            raise BadRequestError("has both a response_format and a required tool call; leave one of them out")
        top = None
        if body.get("logprobs"):
            top = _whole(body, "top_logprobs", 0, 0, 20)
        asked = Ask(
            (await self._service.path_of(body.get("model")))[1],
            messages=read_messages(body.get("messages")),
            tools=uses.tools,
            sampling=read_sampling(body),
            constraint=uses.constraint or constraint,
            top_chances=top,
        )
        return await self._answer(request, body, asked, uses, is_chat=True)

    async def completions(self, request: Request) -> Response:
        body = await body_of(request)
        prompts = body.get("prompt", "")
        prompts = prompts if isinstance(prompts, list) and len(prompts) == 1 else [prompts]
        if not isinstance(prompts[0], str):
            raise BadRequestError("has a prompt that is not one text")
        if body.get("suffix") or body.get("echo"):
            raise BadRequestError("asks for suffix or echo, which this server does not give")
        asked = Ask(
            (await self._service.path_of(body.get("model")))[1],
            text=prompts[0],
            sampling=read_sampling({"max_tokens": 16, **body}),
            constraint=read_constraint(body),
            top_chances=_whole(body, "logprobs", 0, 0, 20) if body.get("logprobs") is not None else None,
        )
        return await self._answer(request, body, asked, ToolUse(), is_chat=False)

    async def _answer(
        self, request: Request, body: Mapping[str, Any], asked: Ask, uses: ToolUse, *, is_chat: bool
    ) -> Response:
        count = _whole(body, "n", 1, 1, MOST_ANSWERS)
        seed = asked.sampling.get("seed")
        asks = [asked]
        for number in range(1, count):
            sampling = {**asked.sampling, **({"seed": seed + number} if seed is not None else {})}
            asks.append(replace(asked, sampling=sampling))
        options = body.get("stream_options")
        wanted = _Wanted(
            (await self._service.path_of(body.get("model")))[0],
            tuple(asks),
            uses,
            is_chat,
            bool(body.get("stream")),
            isinstance(options, Mapping) and bool(options.get("include_usage")),
        )
        if wanted.streams:
            return server_sent(await opened(request, self._stream(wanted)))
        answers = await while_connected(request, together([self._whole(wanted, ask) for ask in wanted.asks]))
        choices = [answer.choice(index) for index, answer in enumerate(answers)]
        return JSONResponse({**_head(wanted), "choices": choices, "usage": _usage([each.ended for each in answers])})

    async def _whole(self, wanted: _Wanted, ask: Ask) -> _Answer:
        answer = _Answer(wanted)
        async for event in self._service.events(ask):
            answer.take(event)
        return answer

    async def _stream(self, wanted: _Wanted) -> Lines:
        head = _head(wanted, chunk=True)
        queue, endings = asyncio.Queue[tuple[int, Any]](), list[Ended]()

        async def follow(index: int, ask: Ask) -> None:
            try:
                async for event in self._service.events(ask):
                    queue.put_nowait((index, event))
            except Exception as error:  # nobody may wait for ever
                if not isinstance(error, EngineError):
                    log_failure(error, "answering a request")
                queue.put_nowait((index, as_engine_error(error, "answering a request")))

        tasks = [asyncio.create_task(follow(index, ask)) for index, ask in enumerate(wanted.asks)]
        answers = [_Answer(wanted) for _ in wanted.asks]
        has_begun = False
        try:
            while len(endings) < len(answers):
                index, event = await queue.get()
                if isinstance(event, EngineError):
                    if not has_begun:
                        raise event
                    yield event_line({"error": _error(event)})
                    return
                has_begun = True
                for delta in answers[index].take(event):
                    yield event_line({**head, "choices": [{"index": index, **delta}]})
                if isinstance(event, Ended):
                    endings.append(event)
            if wanted.counts:
                yield event_line({**head, "choices": [], "usage": _usage(endings)})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Answer:
    """One answer: what has come of it, and what to send for each event."""

    def __init__(self, wanted: _Wanted) -> None:
        self._wanted = wanted
        self._reader: ReplyReader | None = None
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[ToolCall] = []
        self._chances: list[NamedChances] = []
        self._named_characters = 0
        self.ended = Ended("stop", 0, 0, 0)

    def take(self, event: Progress) -> list[dict[str, Any]]:
        """The deltas of a stream that an event makes."""
        if isinstance(event, Began):
            self._reader = self._wanted.reader(event) if self._wanted.is_chat else None
            return [_delta({"role": "assistant", "content": ""})] if self._wanted.is_chat else []
        if isinstance(event, Said):
            self._chances += event.chances
            parts: list[Part] = self._reader.feed(event.text) if self._reader else [Spoken(event.text)]
            deltas = self._deltas(parts)
            if event.chances:
                deltas = deltas or [_delta({"content": ""}) if self._wanted.is_chat else _text_delta("")]
                deltas[0]["logprobs"] = self._logprobs(list(event.chances), self._named_characters)
                self._named_characters += sum(len(each.token.text) for each in event.chances)
            return deltas
        self.ended = event
        deltas = self._deltas(self._reader.end() if self._reader else [])
        last: dict[str, Any] = {"delta": {}} if self._wanted.is_chat else {"text": ""}
        return [*deltas, {**last, "logprobs": None, "finish_reason": self._reason}]

    def choice(self, index: int) -> dict[str, Any]:
        """The answer, whole."""
        said = "".join(self._said)
        logprobs = self._logprobs(self._chances, 0) if self._chances else None
        chosen: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": self._reason}
        if not self._wanted.is_chat:
            return {**chosen, "text": said}
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            message["content"] = said.strip() or None
            message["tool_calls"] = [_call(call) for call in self._calls]
        return {**chosen, "message": message}

    def _logprobs(self, chances: list[NamedChances], before: int) -> dict[str, Any]:
        if self._wanted.is_chat:
            return {"content": [_logprob(each) for each in chances], "refusal": None}
        return _completion_logprobs(chances, before)

    @property
    def _reason(self) -> str:
        return "tool_calls" if self._calls else _FINISH[self.ended.reason]

    def _deltas(self, parts: list[Part]) -> list[dict[str, Any]]:
        deltas = []
        for part in parts:
            if isinstance(part, ToolCall):
                self._calls.append(part)
                deltas.append(_delta({"tool_calls": [{"index": len(self._calls) - 1, **_call(part)}]}))
            elif isinstance(part, Thought):
                self._thought.append(part.text)
                deltas.append(_delta({"reasoning_content": part.text}))
            elif part.text:
                self._said.append(part.text)
                is_chat = self._wanted.is_chat
                deltas.append(_delta({"content": part.text}) if is_chat else _text_delta(part.text))
        return deltas


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"delta": delta, "logprobs": None, "finish_reason": None}


def _text_delta(text: str) -> dict[str, Any]:
    return {"text": text, "logprobs": None, "finish_reason": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprob(chances: NamedChances) -> dict[str, Any]:
    def entry(token: NamedToken) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}

    return {**entry(chances.token), "top_logprobs": [entry(token) for token in chances.likeliest]}


def _completion_logprobs(chances: list[NamedChances], at: int) -> dict[str, Any]:
    offsets = []
    for each in chances:
        offsets.append(at)
        at += len(each.token.text)
    return {
        "tokens": [each.token.text for each in chances],
        "token_logprobs": [each.token.logprob for each in chances],
        "top_logprobs": [{token.text: token.logprob for token in each.likeliest} for each in chances],
        "text_offset": offsets,
    }


def _head(wanted: _Wanted, *, chunk: bool = False) -> dict[str, Any]:
    kind = "chat.completion" if wanted.is_chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if wanted.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": f"{kind}.chunk" if chunk and wanted.is_chat else kind,
        "created": int(time.time()),
        "model": wanted.model,
        "system_fingerprint": None,
    }


def _usage(endings: list[Ended]) -> dict[str, Any]:
    prompt, generated = endings[0].prompt_tokens, sum(each.generated_tokens for each in endings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": endings[0].reused_tokens},
    }


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if value is True and name == "logprobs":
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadRequestError(f"has {str(value)[:20]!r} as {name}; use a whole number from {least} to {most}")
    return value
