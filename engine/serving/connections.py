"""Where clients come in: how many may be connected, who makes room for whom, and how long each may keep silent."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
SLOWEST_HANDSHAKE_S = 10.0
"""An encrypted connection that is not agreed on by then is cut."""
SLOWEST_HEAD_S = 15.0
"""A connection that has sent no complete request head for so long is cut."""
IDLE_S = 20
"""A connection that sends nothing after an answer is closed then."""
BACKLOG = 1024
"""Connections that the system keeps until we take them; it may keep fewer."""
_RETRY_S = 0.1
_SLOWEST_FAREWELL_S = 5.0

_log = logging.getLogger(__name__)


def places() -> int:
    """How many connections there may be: half of the files that this process may open, if that is less."""
    if os.name == "nt":
        return MOST_CONNECTIONS
    import resource

    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(2, min(MOST_CONNECTIONS, soft // 2))


class ClientConnection(H11Protocol):
    """A connection, from when it is accepted; encryption is agreed on before it is made.

    Attributes:
        address: whom it comes from, as callers are counted.
        may_ask: whether a request of it has been let in.
        entering: what agrees on the encryption.
    """

    entering: asyncio.Task[None]

    def __init__(self, server: LimitedServer, address: str) -> None:
        super().__init__(server.config, server.server_state, {"caller": self})  # the `state` of its requests
        self.address, self.may_ask = address, False
        self._server, self._has_key = server, False
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def is_answered(self) -> bool:
        """Whether it keeps its place: it may ask, and has done so; without a key, its request must be there whole."""
        cycle = self.cycle
        return self.may_ask and not cycle.response_complete and (self._has_key or not cycle.more_body)

    def let_in(self, *, has_key: bool) -> bool:
        """Its request may be answered; returns whether there is room for that."""
        if self._server.is_full:
            return False
        self.may_ask, self._has_key = True, has_key
        return True

    def drop(self) -> None:
        """Cuts it, and makes its place free."""
        self._server.left(self)
        transport: Any = self.transport
        if transport is not None:
            transport.abort()
        else:
            self.entering.cancel()

    # --- uvicorn's and asyncio's calls ------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head(SLOWEST_HEAD_S)

    def on_response_complete(self) -> None:
        self._await_head(IDLE_S + SLOWEST_HEAD_S)
        self._server.answered(self)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._server.left(self)
        super().connection_lost(exc)

    def _await_head(self, seconds: float) -> None:
        """Cuts it unless another request begins in time."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        before = self.cycle
        self._head_timer = self.loop.call_later(seconds, lambda: self.drop() if self.cycle is before else None)


class LimitedServer(uvicorn.Server):
    """uvicorn's server, with its own way to accept connections.

    Whoever comes gets in as long as somebody is connected without being answered: the oldest of those makes room,
    strangers before those whose requests were let in, and first those of the address that most strangers come from.
    Strangers of one address have half of the places at most.
    """

    def __init__(self, app: ASGIApp, certificate: Path | None) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=2,
            server_header=False,
            ssl_certfile=certificate,
        )
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        super().__init__(config)
        self._places = places()
        self._callers: dict[ClientConnection, None] = {}
        """The longest without an answer first."""
        self._accepting: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether so many are answered that others can only be told so; a few places are kept for that."""
        return sum(caller.is_answered for caller in self._callers) >= self._places - self._places // 16 - 1

    def left(self, caller: ClientConnection) -> None:
        self._callers.pop(caller, None)

    def answered(self, caller: ClientConnection) -> None:
        """It becomes the last to make room."""
        if caller in self._callers:
            self._callers[caller] = self._callers.pop(caller)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        assert sockets is not None
        self._accepting = asyncio.create_task(self._accept(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        await super().shutdown(sockets)
        entering = [caller.entering for caller in self._callers]
        for caller in list(self._callers):
            caller.drop()
        await asyncio.gather(*entering, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:  # no more files or memory, or whoever came has gone already
                await asyncio.sleep(0 if self._makes_room(None) else _RETRY_S)
                _log.warning("A connection could not be accepted: %s", error.strerror)  # now there may be a file for it
                continue
            address = _counted(host)
            if self._makes_room(address):
                caller = ClientConnection(self, address)
                self._callers[caller] = None
                caller.entering = loop.create_task(self._enter(caller, connection))
            else:
                connection.close()
            await asyncio.sleep(0)  # those who are here are served too, however many come

    def _makes_room(self, address: str | None) -> bool:
        """Makes room for another from this address, or cuts one for want of files; returns whether there is room."""
        if address is not None and len(self._callers) < self._places // 2:
            return True
        strangers = [caller for caller in self._callers if not caller.may_ask]
        of_address = Counter(caller.address for caller in strangers)
        if address is not None and of_address[address] >= self._places // 2:
            crowd = address
        elif address is not None and len(self._callers) < self._places:
            return True
        else:
            crowd = max(of_address, key=of_address.__getitem__, default="")
        leaving = next((caller for caller in strangers if caller.address == crowd), None)
        leaving = leaving or next((caller for caller in self._callers if not caller.is_answered), None)
        if leaving is not None:
            leaving.drop()
        return leaving is not None

    async def _enter(self, caller: ClientConnection, connection: socket.socket) -> None:
        limits: dict[str, Any] = {}
        if self.config.ssl is not None:
            limits = {"ssl": self.config.ssl, "ssl_handshake_timeout": SLOWEST_HANDSHAKE_S}
            limits["ssl_shutdown_timeout"] = _SLOWEST_FAREWELL_S
        try:
            await caller.loop.connect_accepted_socket(lambda: caller, connection, **limits)
        except OSError:  # it is not of those that speak TLS, does not trust us, or says nothing
            self.left(caller)


def _counted(host: str) -> str:
    """The address that a caller counts for: all those of an IPv6 network are one's own."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 6:
        return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
    return str(address)
