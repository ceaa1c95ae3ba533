"""What there is to say of a request without its texts: who asked, for what, and how it went."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.common.plain_text import plain_line
from engine.protocol import Outcome, Served

_LONGEST_NAME = 60
_QUIET = ("GET", "HEAD", "OPTIONS")


@dataclass(slots=True)
class Exchange:
    """The same while it goes on."""

    model: str = ""
    read_tokens: int = 0
    written_tokens: int = 0
    status: int = 0
    breaks: Literal["", "left", "failed"] = ""

    @property
    def outcome(self) -> Outcome:
        """How it went."""
        if not self.status or self.status == _GONE:
            return "left"
        if self.status >= 400:
            return "refused" if self.status < 500 else "failed"
        return self.breaks or "answered"


_GONE = 499
_CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def current_exchange() -> Exchange:
    """That of the request which is being answered here."""
    return _CURRENT.get() or Exchange()


class Noted:
    """Tells of each request that is over; of those that only look, only if they are refused."""

    def __init__(self, app: ASGIApp, on_served: Callable[[Served], None]) -> None:
        self._app, self._on_served = app, on_served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, began_s, began = Exchange(), time.time(), time.monotonic()
        _CURRENT.set(exchange)
        is_whole = False

        async def note(message: Any) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            await send(message)
            is_whole |= message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, note)
        finally:
            if exchange.status and not is_whole:
                # What reads the engine's events may hear only later that nobody listens any more.
                exchange.breaks = exchange.breaks or "left"
            if scope["method"] not in _QUIET or exchange.status >= 400:
                agent = dict(scope["headers"]).get(b"user-agent", b"").decode("latin-1")
                self._on_served(
                    Served(
                        began_s,
                        plain_line(agent)[:_LONGEST_NAME],
                        plain_line(str(scope["path"]))[:_LONGEST_NAME],
                        exchange.model,
                        exchange.read_tokens,
                        exchange.written_tokens,
                        time.monotonic() - began,
                        exchange.status,
                        exchange.outcome,
                    )
                )
