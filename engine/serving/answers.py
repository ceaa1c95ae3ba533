"""What the interfaces make their requests and answers of: tools, an answer's parts, errors, and streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal, NamedTuple

from starlette import responses
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.batch_files.openai_requests import BadRequestError
from engine.common.chat import Tool, ToolCall, ToolChoice
from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import json_text
from engine.families.replies.reader import Part, ReplyReader, Spoken, Thought, reply_reader
from engine.process.failures import as_engine_error, log_failure
from engine.protocol import Ask, Began, Finished, Progress, Token
from engine.serving.link import AnswerEvent
from engine.serving.service import Offer, Service, body_of, current_exchange, while_connected

PING_S = 10.0
"""A stream in which nothing has happened for so long says that it is still there."""
SLOWEST_READER_S = 60.0
"""A client that takes nothing of a stream for so long is gone."""
MOST_TOOLS = 128
_STATUS = {
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.PICTURES_NOT_READ: 400,
    ErrorCode.PROMPT_TOO_LONG: 400,
    ErrorCode.MODEL_UNSUPPORTED: 400,
    ErrorCode.CHECKPOINT_DAMAGED: 400,
    ErrorCode.BUSY: 429,
    ErrorCode.NOT_ENOUGH_MEMORY: 503,
    ErrorCode.ENGINE_DIED: 503,
}

Lines = AsyncGenerator[str, None]


def status_of(error: EngineError) -> int:
    return _STATUS.get(error.code, 500)


class JSONResponse(responses.JSONResponse):
    """An answer that can be sent whatever a client or a model wrote into it."""

    def render(self, content: Any) -> bytes:
        return json_text(content).encode()


def event_line(data: Any, name: str = "") -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json_text(data)}\n\n"


class Reply:
    """What a client gets, in the form of its interface: what has come of it, and what a stream says of each event.

    Attributes:
        error_body: an error, with its status of HTTP, in the form of the interface.
        beat: says in a stream that it is still there.
        closes: the end of a stream.
    """

    error_body: ClassVar[staticmethod[[EngineError, int], dict[str, Any]]]
    headers: ClassVar[dict[str, str]] = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-cache",
    }
    beat = ": waiting\n\n"
    closes = ""

    def take(self, event: AnswerEvent, index: int = 0) -> list[dict[str, Any]]:
        """What a stream says of an event of the answer at this place."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """All of it, once it has ended."""
        raise NotImplementedError

    def wire(self, line: dict[str, Any]) -> str:
        return event_line(line, line["type"])

    def reads(self, read: Progress, _index: int) -> str:
        """What a stream says of a prompt that is being read."""
        return f": {read.done} of {read.total} tokens of the prompt read\n\n"

    def breaks(self, error: EngineError) -> str:
        """What a stream says at last when it fails in the middle."""
        return self.wire(self.error_body(error, status_of(error)))


class Answer(Reply):
    """One answer, taken apart.

    Attributes:
        thought_tokens: those of its tokens that are reasoning, and the mark behind it.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.parts: list[Part] = []
        self.ended = Finished("", "stop", 0, 0, 0)
        self.thought_tokens = self._written = 0
        self._reader: ReplyReader | None = None

    def take(self, event: AnswerEvent, _index: int = 0) -> list[dict[str, Any]]:
        if isinstance(event, Began):
            self._reader = reply_reader(
                event.family,
                self.ask.tools,
                thinks=event.thinks,
                is_call=event.is_call,
                several=self.ask.choice.several,
            )
            return self.begins(event)
        lines, thought = [], self._reader is not None and self._reader.thinks
        parts = self._read(event)
        if parts:  # and not only a mark, or what may become a call
            thought = any(isinstance(part, Thought) for part in parts)
        self.thought_tokens += thought * (event.generated_tokens - self._written)
        self._written = event.generated_tokens
        for part in parts:
            self.parts.append(part)
            lines += self.says(part)
        if isinstance(event, Finished):
            self.ended = event
            lines += self.ends()
        return lines

    def _read(self, event: Token | Finished) -> list[Part]:
        if self._reader is None:
            return []
        return self._reader.feed(event.text) if isinstance(event, Token) else self._reader.end()

    def begins(self, began: Began) -> list[dict[str, Any]]:
        raise NotImplementedError

    def says(self, part: Part) -> list[dict[str, Any]]:
        raise NotImplementedError

    def ends(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def text(self, kind: type[Spoken] | type[Thought]) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, kind))


Kind = Literal["text", "thinking"]


class Blocks(Answer):
    """One answer as a list of blocks: each run of thoughts or of words is one, and each call."""

    _open: Literal["", "text", "thinking", "call"] = ""

    def says(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, ToolCall):
            lines = [*self.closed(), *self.called(part)]
            self._open = "call"
            return lines
        kind: Kind = "thinking" if isinstance(part, Thought) else "text"
        lines = []
        if self._open != kind:
            if kind == "text" and not part.text.strip():
                return []
            lines = [*self.closed(), *self.opened(kind)]
            self._open = kind
        return [*lines, self.more(kind, part.text)]

    def opened(self, kind: Kind) -> list[dict[str, Any]]:
        """A block begins."""
        raise NotImplementedError

    def more(self, kind: Kind, text: str) -> dict[str, Any]:
        """The open block goes on."""
        raise NotImplementedError

    def called(self, call: ToolCall) -> list[dict[str, Any]]:
        """A block that is a call."""
        raise NotImplementedError

    def closed(self) -> list[dict[str, Any]]:
        """The open block ends, if there is one."""
        raise NotImplementedError


class Call(NamedTuple):
    service: Service
    request: Request
    body: dict[str, Any]


class Endpoint(NamedTuple):
    """What an interface does at a path: the answer is a response, or what one has as JSON."""

    method: Literal["GET", "POST"]
    path: str
    does: Callable[[Call], Awaitable[Any]]

    def route(self, service: Service) -> Route:
        async def endpoint(request: Request) -> Response:
            body = await body_of(request) if self.method == "POST" else {}
            found = await self.does(Call(service, request, body))
            return found if isinstance(found, Response) else JSONResponse(found)

        return Route(self.path, endpoint, methods=[self.method])


def counted(asked: Callable[[Call], Awaitable[tuple[str, Ask]]], **head: str) -> Callable[[Call], Awaitable[Any]]:
    """Says how many tokens the prompt has that is asked for so."""

    async def count(call: Call) -> Any:
        _name, ask = await asked(call)
        return {**head, "input_tokens": await call.service.prompt_length(call.request, ask)}

    return count


def versioned(paths: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """Each below `/v1` and, as some clients are told the address without the version, at the top."""
    return tuple(each._replace(path=f"{version}{each.path}") for each in paths for version in ("/v1", ""))


async def respond(call: Call, asks: Sequence[Ask], reply: Reply, *, streams: object) -> Any:
    """Has these answered, whole or as a stream."""
    events = call.service.events(*asks)
    if streams:
        return _Streamed(await _opened(call.request, _lines(events, reply), reply), headers=reply.headers)

    async def take_all() -> None:
        async for index, event in events:
            if not isinstance(event, Progress):
                reply.take(event, index)

    await while_connected(call.request, take_all())
    return reply.whole()


async def _lines(events: AsyncGenerator[tuple[int, AnswerEvent | Progress], None], reply: Reply) -> Lines:
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Progress):
                yield reply.reads(event, index)
                continue
            for line in reply.take(event, index):
                yield reply.wire(line)
    if reply.closes:
        yield reply.closes


async def _opened(request: Request, lines: Lines, reply: Reply) -> Lines:
    """The same lines, with a heartbeat whenever none comes for `PING_S`, and with an error that comes later.

    It returns once the first line exists, so that what is refused at once can still be answered with a status, or when
    its model takes long to load: programs give up a request of which they hear nothing.
    """
    coming = asyncio.ensure_future(anext(lines, None))

    async def end() -> None:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await lines.aclose()

    async def beating() -> Lines:
        nonlocal coming
        try:
            while True:
                while not coming.done():
                    yield reply.beat
                    await asyncio.wait({coming}, timeout=PING_S)
                try:
                    line = coming.result()
                except Exception as error:  # whoever reads is told, rather than cut off
                    current_exchange().breaks = "failed"
                    if not isinstance(error, EngineError):
                        log_failure(error, "answering a request")
                    yield reply.breaks(as_engine_error(error, "answering a request"))
                    return
                if line is None:
                    return
                yield line
                coming = asyncio.ensure_future(anext(lines, None))
                await asyncio.wait({coming}, timeout=PING_S)
        finally:
            await end()

    try:
        await while_connected(request, asyncio.wait({coming}, timeout=PING_S))
        if coming.done() and (error := coming.exception()) is not None:
            raise error
    except BaseException:
        await end()
        raise
    return beating()


class _Streamed(StreamingResponse):
    """A stream whose client must keep reading, and which is given up when the client goes away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Any) -> None:
            async with asyncio.timeout(SLOWEST_READER_S):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().__call__(scope, receive, send_in_time)


# --- tools ------------------------------------------------------------------------------------------


def listed_tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    offered = body.get("tools") or []
    if not isinstance(offered, list) or not all(isinstance(entry, Mapping) for entry in offered):
        raise BadRequestError("has tools that are not a list of objects")
    return offered


def read_tool(name: Any, description: Any, parameters: Any) -> Tool:
    """A tool by its name, its description and the JSON schema of its arguments."""
    if not isinstance(name, str) or not name:
        raise BadRequestError("has a tool without a name")
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(schema, Mapping):
        raise BadRequestError(f"has a tool {name[:40]!r} whose parameters are not a JSON schema")
    return Tool(name, description if isinstance(description, str) else "", json_text(schema))


def read_offer(tools: list[Tool], choice: str, named: str = "", *, several: bool) -> Offer:
    """What `choice` makes of the tools: `none`, `auto`, `required`, or `named` for the tool of that name."""
    if len(tools) > MOST_TOOLS:
        raise BadRequestError(f"offers {len(tools):,} tools; at most {MOST_TOOLS} are taken")
    if choice in ("none", "auto"):
        return tuple(tools) if choice == "auto" else (), ToolChoice(several=several)
    if not tools:
        raise BadRequestError("requires a tool call, but offers no tools")
    if choice == "named" and named not in [tool.name for tool in tools]:
        raise BadRequestError(f"requires a call of {named[:40]!r}, which is not among its tools")
    return tuple(tools), ToolChoice(must=True, names=(named,) if choice == "named" else (), several=several)


def openai_tools(body: Mapping[str, Any], *, flat: bool = False) -> Offer:
    """What a request in OpenAI's format offers.

    Args:
        flat: in the form of the responses interface, where a tool's fields are not under `function`, and where tools
            of other types than functions are skipped: they are offers to servers that can run them.
    """
    functions, call = body.get("functions"), body.get("function_call")
    if functions or call not in (None, "none", "auto"):
        if body.get("tools") or not isinstance(functions, list):
            raise BadRequestError("has functions that are not a list, or tools as well; leave one of them out")
        offered = [{"type": "function", "function": function} for function in functions]
        named = {"function": call} if isinstance(call, Mapping) else call
        return openai_tools({"tools": offered, "tool_choice": named, "parallel_tool_calls": False})
    tools = []
    for entry in listed_tools(body):
        function = entry if flat else entry.get("function")
        if entry.get("type") == "function" and isinstance(function, Mapping):
            tools.append(read_tool(function.get("name"), function.get("description"), function.get("parameters")))
        elif not flat or not isinstance(entry.get("type"), str):
            kind = str(entry.get("type"))[:40]
            raise BadRequestError(f"offers a tool of the type {kind!r}; only functions can be called")
    several = body.get("parallel_tool_calls") is not False
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, Mapping):
        function = choice if flat else choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise BadRequestError("has a tool_choice that names no function")
        return read_offer(tools, "named", name, several=several)
    if choice not in ("none", "auto", "required"):
        raise BadRequestError(f"has the tool_choice {str(choice)[:40]!r}; use none, auto, required or a function")
    return read_offer(tools, choice, several=several)
