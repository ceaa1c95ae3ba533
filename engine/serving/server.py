"""The HTTP server: who may talk to it and for how long, what errors look like, and its start and stop."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.batch_files.openai_requests import BadRequestError
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, write_private
from engine.common.paths import config_dir
from engine.common.plain_text import plain_line
from engine.process.failures import as_engine_error, log_failure
from engine.protocol import Served
from engine.serving import anthropic_api, ollama_api, openai_api
from engine.serving.answers import Endpoint, JSONResponse, status_of
from engine.serving.service import EXCHANGE, ClientGoneError, Exchange, Service

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
DEFAULT_PORT = 8490
LEAST_KEY_CHARACTERS = 8
MOST_HELD_BYTES = 256 * 2**20
"""Of the bodies of all requests that have come and are not answered yet; a small one is always taken."""
_SMALL_BYTES = 2**16
_LONGEST_NAME = 60
_QUIET = ("GET", "HEAD", "OPTIONS")
_CERTIFICATE_YEARS = 10
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens, and what clients must show.

    Attributes:
        key: what clients send as `Authorization: Bearer KEY` or `x-api-key`; empty asks for none.
        names: further names by which clients may call this machine.
        origins: web pages (`https://example.org`) whose scripts may use it.
        certificate: a PEM file with its certificate and key, for HTTPS; None: plain HTTP.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    key: str = ""
    names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    certificate: Path | None = None

    @property
    def is_local(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Raises EngineError `INVALID_REQUEST` if others could reach it without a key."""
        if self.is_local and not self.key:
            return
        if len(self.key) < LEAST_KEY_CHARACTERS or not self.key.isascii():
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"Other machines can reach {self.host}: give a key of at least {LEAST_KEY_CHARACTERS} plain characters "
                "(`switchyard serve --key-file FILE`), or listen on 127.0.0.1."
                if not self.is_local
                else f"The key is too short: use at least {LEAST_KEY_CHARACTERS} plain characters.",
            )


def make_app(service: Service, address: Address, on_served: Callable[[Served], None] | None = None) -> ASGIApp:
    """The application behind the address; `on_served` is told of each request that is over."""
    routes = [path.route(service) for interface in INTERFACES for path in interface.paths]
    failures = (EngineError, BadRequestError, ClientGoneError, HTTPException, Exception)
    guarded = _Guard(Starlette(routes=routes, exception_handlers=dict.fromkeys(failures, _failed)), address)
    return _Recorded(guarded, on_served) if on_served is not None else guarded


class Interface(NamedTuple):
    """What clients speak: its paths, how it writes errors, and how its paths begin where others do not."""

    paths: Sequence[Endpoint]
    error_body: Callable[[EngineError, int], dict[str, Any]]
    begins: str


INTERFACES = [
    Interface(anthropic_api.PATHS, anthropic_api.error_body, "/v1/messages"),
    Interface(ollama_api.PATHS, ollama_api.error_body, "/api"),
    Interface(openai_api.PATHS, openai_api.error_body, ""),
]


def _refusal(scope: Scope, error: EngineError, status: int) -> Response:
    path = str(scope.get("path", ""))
    interface = next(each for each in INTERFACES if path.startswith(each.begins))
    return JSONResponse(interface.error_body(error, status), status)


def _refused(scope: Scope, status: int, message: str) -> Response:
    return _refusal(scope, EngineError(ErrorCode.INVALID_REQUEST, message), status)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        what = {404: "There is nothing at this address", 405: "This address does not take this method"}
        message = what.get(error.status_code, str(error.detail))
        return _refused(request.scope, error.status_code, f"{message}: {request.method} {request.url.path[:80]}.")
    if isinstance(error, BadRequestError):
        error = EngineError(ErrorCode.INVALID_REQUEST, f"The request {error}.")
    if not isinstance(error, EngineError):
        log_failure(error, "answering a request")
        error = as_engine_error(error, "answering a request")
    return _refusal(request.scope, error, status_of(error))


class _Recorded:
    """Tells of each request that is over; of those that only look, only if they are refused."""

    def __init__(self, app: ASGIApp, on_served: Callable[[Served], None]) -> None:
        self._app, self._on_served = app, on_served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, began_s, began = Exchange(), time.time(), time.monotonic()
        EXCHANGE.set(exchange)
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


class _Guard:
    """Lets in who may come, by the name called, the page that asks and the key, with as much as there is room for."""

    def __init__(self, app: ASGIApp, address: Address) -> None:
        self._app, self._address = app, address
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _with_path(scope)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        app: ASGIApp = self._refusal_of(scope, headers, origin) or self._counted
        if origin is None or not self._allows(origin, scope, headers):
            await app(scope, receive, send)
            return
        allowed = {"access-control-allow-origin": origin, "vary": "origin"}  # so that a page can read refusals too
        if scope["method"] == "OPTIONS" and app == self._counted:
            # `*` stands for all headers but this one.
            headers_allowed = "Authorization, *"
            allowed |= {"access-control-allow-methods": "GET, POST", "access-control-allow-headers": headers_allowed}
            await Response(status_code=204, headers=allowed)(scope, receive, send)
            return

        async def send_allowed(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode("latin-1")) for name, value in allowed.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await app(scope, receive, send_allowed)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has a request answered as long as the bodies of all have room."""
        held_bytes = 0

        async def receive_counted() -> Any:
            nonlocal held_bytes
            message = await receive()
            more_bytes = len(message.get("body", b""))
            held_bytes += more_bytes
            self._held_bytes += more_bytes
            if held_bytes > _SMALL_BYTES and self._held_bytes > MOST_HELD_BYTES:
                words = "The server holds as many large requests as it has room for: try again in a moment."
                raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, words)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._held_bytes -= held_bytes

    def _allows(self, origin: str, scope: Scope, headers: dict[str, str]) -> bool:
        """Whether a page from there may ask: one that was named, or one of this server's own."""
        if origin in self._address.origins:
            return True
        theirs = _place(origin)
        return theirs is not None and theirs == _place(f"{scope['scheme']}://{headers.get('host', '')}")

    def _refusal_of(self, scope: Scope, headers: dict[str, str], origin: str | None) -> Response | None:
        called = _place(f"http://{headers.get('host', '')}")
        host = called[1] if called is not None else ""
        address = self._address
        # A web page can make a browser call this server by a name of its own, and would then read the answers.
        if address.is_local and host not in (*_LOCAL_NAMES, address.host, *address.names):
            return _refused(scope, 403, f"The server does not answer to the name {host[:80]!r}: use 127.0.0.1.")
        if origin is not None and not self._allows(origin, scope, headers):
            return _refused(scope, 403, "Web pages may not use this server: name them with --origin.")
        if scope["method"] == "OPTIONS" or scope["path"] in openai_api.HEALTH:
            return None
        if address.key:
            scheme, _, token = headers.get("authorization", "").strip().partition(" ")
            given = (headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else "")
            if not any(hmac.compare_digest(each.encode("utf-8", "replace"), address.key.encode()) for each in given):
                return _refused(scope, 401, "The key is missing or wrong: send it as Authorization: Bearer KEY.")
        caller: ClientConnection | None = scope.get("state", {}).get("caller")
        if caller is not None and not caller.let_in(has_key=bool(address.key)):
            return _refused(scope, 503, "The server answers as many clients as it can: try again in a moment.")
        return None


def _with_path(scope: Scope) -> None:
    """Takes a request that names its whole URL, as clients of proxies write it, for one of its path at that host."""
    scheme, _, rest = scope["raw_path"].partition(b"://")
    host, _, path = rest.partition(b"/")
    if scheme.lower() in (b"http", b"https") and host:
        scope["raw_path"], scope["path"] = b"/" + path, "/" + unquote(path.decode("latin-1"))
        scope["headers"] = [(b"host", host), *(header for header in scope["headers"] if header[0] != b"host")]


def _place(url: str) -> tuple[str, str, int | None] | None:
    """The scheme, host and port of a URL that has nothing else; None if it has."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.hostname is None or url.lower() != f"{parts.scheme}://{parts.netloc.lower()}" or "@" in parts.netloc:
        return None
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}.get(parts.scheme)


# --- where clients come in: how many, who makes room for whom, and how long each may keep silent -------


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


class Server:
    """Listens from `start` to `stop`, on a thread of its own."""

    def __init__(self, service: Service, address: Address, on_served: Callable[[Served], None] | None = None) -> None:
        self._service, self._address, self._on_served = service, address, on_served
        self._server: LimitedServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        self._address.check()
        listener = _listen(self._address)
        app = make_app(self._service, self._address, self._on_served)
        self._server = server = LimitedServer(app, self._address.certificate)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(server.serve([listener])),
            name="http-server",
            daemon=True,
        )
        self._thread.start()
        return int(listener.getsockname()[1])

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
            self._server = self._thread = None
        self._service.close()


def _listen(address: Address) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":  # on Windows it would let two programs share a port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The server cannot listen on {address.host}:{address.port} ({reason}): choose another --port or --host.",
        ) from None
    return listener


# --- its own certificate ----------------------------------------------------------------------------


def own_certificate() -> Path:
    """A PEM file with the certificate and its key, for the user alone; made now if there is none, or an old one."""
    file = config_dir() / "server-certificate.pem"
    with disk_errors_explained(file.parent):
        if not file.is_file() or _has_ended(file):
            write_private(file, _made_certificate())
    return file


def _has_ended(file: Path) -> bool:
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificates(file.read_bytes())[0]
    except (ValueError, OSError):
        return True
    return certificate.not_valid_after_utc < datetime.now(UTC) + timedelta(days=30)


def _made_certificate() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    host = socket.gethostname().partition(".")[0][:60] or "switchyard"
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"Switchyard on {host}"[:64])])
    names = [x509.DNSName(each) for each in ("localhost", *([host, f"{host}.local"] if host.isascii() else []))]
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=365 * _CERTIFICATE_YEARS))
        .add_extension(x509.SubjectAlternativeName([*names, here]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + secret
