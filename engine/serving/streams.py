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
from engine.common.foreign import json_text
from engine.serving.asking import Progress
from engine.serving.service import while_connected

PING_S = 10.0
"""A stream of events in which nothing has happened for so long says that it is still there."""
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


async def lines_of(
    events: AsyncIterator[Progress],
    take: Callable[[Progress], Iterable[str]],
    failed: Callable[[EngineError], Iterable[str]],
) -> Lines:
    """The lines that each event makes, and those of an error once there were any.

    Raises:
        EngineError: the request was refused before its first line.
    """
    has_begun = False
    try:
        async for event in events:
            for line in take(event):
                has_begun = True
                yield line
    except EngineError as error:
        if not has_begun:
            raise
        for line in failed(error):
            yield line
    finally:
        await _closed(events)


async def with_pings(lines: Lines, ping: str) -> Lines:
    """The same lines, with a ping after the first, and whenever none comes for `PING_S`."""
    coming = asyncio.ensure_future(anext(lines, None))
    is_first = True
    try:
        while True:
            done, _pending = await asyncio.wait({coming}, timeout=PING_S)
            if not done:
                yield ping
                continue
            line = coming.result()
            if line is None:
                return
            yield line
            if is_first:
                yield ping
            is_first = False
            coming = asyncio.ensure_future(anext(lines, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await _closed(lines)


async def _closed(generator: object) -> None:
    close: Callable[[], Awaitable[None]] | None = getattr(generator, "aclose", None)
    if close is not None:
        await close()


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
            await _closed(lines)

    return again()
