"""What the interfaces share: which models there are, asking for answers, and reading a request's body."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.batch_files.openai_requests import BadRequestError
from engine.checkpoint.library import LibraryEntry, describe, list_models
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import DEEPEST, parse_json
from engine.serving.desk import Ask, Desk, Ended, Event, Progress, Refused

MOST_BODY_BYTES = 32 * 2**20
SLOWEST_BODY_S = 60.0
SLOWEST_READER_S = 60.0
"""A client that takes nothing of a stream for so long is gone."""
_LISTING_S = 3.0
_MAYBE_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")

Whole = TypeVar("Whole")

STATUS = {
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.PROMPT_TOO_LONG: 400,
    ErrorCode.MODEL_UNSUPPORTED: 400,
    ErrorCode.BUSY: 429,
    ErrorCode.NOT_ENOUGH_MEMORY: 503,
}
"""Of the engine's errors; the others are 500."""


def status_of(error: EngineError) -> int:
    """The HTTP status of an error."""
    return STATUS.get(error.code, 500)


class ClientGoneError(Exception):
    """The client closed the connection."""


class Service:
    """The models and the desk, as the interfaces use them.

    Args:
        default: the model for requests that name none, or the name that this server was started with.
    """

    def __init__(self, desk: Desk, default: Path, default_name: str) -> None:
        self.desk, self._default, self.default_name = desk, default, default_name
        self._listed: list[LibraryEntry] = []
        self._listed_s = float("-inf")
        self.started_s = int(time.time())

    async def models(self) -> list[LibraryEntry]:
        """The models that can be asked for by name."""
        if time.monotonic() - self._listed_s > _LISTING_S:
            self._listed = await _on_a_thread(self._look)
            self._listed_s = time.monotonic()
        return self._listed

    def _look(self) -> list[LibraryEntry]:
        listed = [entry for entry in list_models() if not entry.problem]
        if all(entry.path != self._default for entry in listed):
            listed.insert(0, describe(self._default, self.default_name))
        return listed

    async def path_of(self, name: Any) -> tuple[str, Path]:
        """A model's name and place.

        Raises:
            EngineError: `MODEL_NOT_FOUND`; clients may not name paths of their own.
            BadRequestError: it is not a name.
        """
        if name is None or name == "":
            return self.default_name, self._default
        if not isinstance(name, str):
            raise BadRequestError("has a model that is not a name")
        short = name.removesuffix(":latest")
        if short in (self.default_name, "default"):
            return self.default_name, self._default
        for entry in await self.models():
            if entry.name == short:
                return entry.name, entry.path
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND,
            f"There is no model named {name[:80]!r} here: ask for one of the models that this server lists.",
        )

    async def events(self, ask: Ask) -> AsyncIterator[Progress]:
        """What happens to a request; if nobody listens any more it is cancelled.

        Raises:
            EngineError: it is refused, at once or in the middle.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def on_event(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(queue.put_nowait, event)

        ticket = self.desk.ask(ask, on_event)
        try:
            while True:
                event = await queue.get()
                if isinstance(event, Refused):
                    raise event.error
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            ticket.cancel()


async def _on_a_thread(work: Callable[[], Whole]) -> Whole:
    """The result of `work`, which reads files; the thread ends with it, so that none is left when the server stops."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Whole] = loop.create_future()

    def tell(settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(lambda: None if done.done() else settle())

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            tell(lambda: done.set_exception(failure))
        else:
            tell(lambda: done.set_result(result))

    threading.Thread(target=run, name="model-list", daemon=True).start()
    return await done


async def body_of(request: Request) -> dict[str, Any]:
    """A request's JSON object.

    Raises:
        BadRequestError: it is none, or too large, or does not arrive.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(SLOWEST_BODY_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MOST_BODY_BYTES:
                    raise BadRequestError(f"has a body of more than {MOST_BODY_BYTES // 2**20} MiB")
    except TimeoutError:
        raise BadRequestError(f"did not arrive within {SLOWEST_BODY_S:.0f} seconds") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    try:
        text = data.decode("utf-8")
        body = parse_json(text, deepest=DEEPEST)
        if _MAYBE_HALF_A_PAIR.search(text):
            body = _encodable(body)
    except UnicodeDecodeError:
        raise BadRequestError("is not UTF-8") from None
    except ValueError as error:
        raise BadRequestError(f"is not JSON ({str(error)[:120]})") from None
    if not isinstance(body, dict):
        raise BadRequestError("is not a JSON object")
    return body


def _encodable(value: Any) -> Any:
    """The same JSON without half surrogate pairs, which can be escaped in it but not be written again."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_encodable(entry) for entry in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(entry) for key, entry in value.items()}
    return value


async def together(works: Sequence[Coroutine[Any, Any, Whole]]) -> list[Whole]:
    """The results of all; the first failure ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(request: Request, work: Awaitable[Whole]) -> Whole:
    """The result of `work`, which is given up when the client goes away.

    Raises:
        ClientGoneError: it did.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class Streamed(StreamingResponse):
    """A stream whose client must keep reading, and which is given up when the client goes away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Any) -> None:
            async with asyncio.timeout(SLOWEST_READER_S):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().__call__(scope, receive, send_in_time)


Lines = AsyncIterator[str]


def server_sent(lines: Lines) -> Streamed:
    """A stream of server-sent events."""
    return Streamed(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def event_line(data: Any, name: str = "") -> str:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def opened(request: Request, lines: Lines) -> Lines:
    """The same lines, after the first of them exists: what is refused at once can still be answered with a status.

    Raises:
        EngineError: the request was refused before its first line.
        ClientGoneError: the client closed the connection before it.
    """
    first = await while_connected(request, anext(lines))

    async def again() -> Lines:
        try:
            yield first
            async for line in lines:
                yield line
        finally:
            close: Callable[[], Awaitable[None]] | None = getattr(lines, "aclose", None)
            if close is not None:
                await close()

    return again()
