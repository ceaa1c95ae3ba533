"""What the interfaces share: answers that are sent while they are written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from starlette import responses
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.common.errors import EngineError
from engine.common.untrusted import json_text
from engine.protocol import Progress
from engine.serving.asking import AnswerEvent
from engine.serving.service import while_connected

PING_S = 10.0
"""A stream in which nothing has happened for so long says that it is still there."""
WAITS = ": waiting\n\n"
"""A comment of server-sent events, which their readers skip."""
SLOWEST_READER_S = 60.0
"""A client that takes nothing of a stream for so long is gone."""


class JSONResponse(responses.JSONResponse):
    """An answer that can be sent whatever a client or a model wrote into it."""

    def render(self, content: Any) -> bytes:
        return json_text(content).encode()


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
    return f"{head}data: {json_text(data)}\n\n"


def read_comment(read: Progress) -> str:
    """How much of a prompt has been read, as a comment."""
    return f": {read.done} of {read.total} tokens of the prompt read\n\n"


async def lines_of(
    events: AsyncIterator[AnswerEvent | Progress],
    take: Callable[[AnswerEvent], Iterable[str]],
    read: Callable[[Progress], str],
) -> Lines:
    """The lines that each event makes.

    Raises:
        EngineError: the request is refused, at once or in the middle.
    """
    try:
        async for event in events:
            for line in [read(event)] if isinstance(event, Progress) else take(event):
                yield line
    finally:
        await _closed(events)


async def opened(request: Request, lines: Lines, beat: str, failed: Callable[[EngineError], Iterable[str]]) -> Lines:
    """The same lines, with a heartbeat whenever none comes for `PING_S`, and those of an error that comes later.

    It returns once the first line exists, so that what is refused at once can still be answered with a status, or when
    its model takes long to load: programs give up a request of which they hear nothing.

    Raises:
        EngineError: the request was refused at once.
        ClientGoneError: the client closed the connection before that.
    """
    coming = asyncio.ensure_future(anext(lines, None))

    async def end() -> None:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await _closed(lines)

    async def beating() -> Lines:
        nonlocal coming
        try:
            while True:
                while not coming.done():
                    yield beat
                    await asyncio.wait({coming}, timeout=PING_S)
                try:
                    line = coming.result()
                except EngineError as error:
                    for each in failed(error):
                        yield each
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


async def _closed(generator: object) -> None:
    close: Callable[[], Awaitable[None]] | None = getattr(generator, "aclose", None)
    if close is not None:
        await close()
