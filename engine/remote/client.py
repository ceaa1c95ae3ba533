"""Asks one endpoint: which models it has, and for answers, many at a time.

Connections live on a thread of this module's own; who asks waits on its own thread, looks now and then whether its
answer is still wanted, and if not the connection is closed. Every answer has limits of bytes and of time. Certificates
are verified as the system does; nobody is followed to another address; the key goes nowhere but below the endpoint's
own address.

How much may be asked of an endpoint: so much a minute, and as many at once as make it faster.

Bookkeeping alone; `now` is any monotonic clock in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import httpx2

from engine.common.errors import CancelCheck, RequestCancelled, never_cancelled
from engine.common.http import HEADERS
from engine.common.plain_text import plain_line
from engine.common.untrusted import parse_json
from engine.protocol import Token
from engine.remote.chat_form import Gathered, RemoteAnswer, RemoteRequest, chosen, request_body
from engine.remote.endpoint import Endpoint, Found, Lack, Server, called, check_key, read_key
from engine.remote.failures import (
    RemoteError,
    Trouble,
    connection_error,
    is_about_pictures,
    no_such_server,
    pictures_not_read,
    refusal,
    room_for_answer,
    said_in_stream,
    unreachable,
)
from engine.remote.trust import trust_of

MINUTE_S = 60.0


@dataclass(slots=True, eq=False)
class Spent:
    """Something that counts for a minute; its amount may be corrected once it is known."""

    at_s: float
    amount: float


class MinuteLimit:
    """At most so much within any minute: whoever keeps it keeps a token bucket of the same size and rate as well.

    Args:
        most: None for no limit.
    """

    def __init__(self, most: float | None) -> None:
        self.most = most
        self._spent: deque[Spent] = deque()

    def free_at(self, now: float, amount: float) -> float:
        """The first moment at which this amount may be spent; more than the limit may be once nothing else counts."""
        if self.most is None:
            return now
        while self._spent and self._spent[0].at_s + MINUTE_S <= now:
            self._spent.popleft()
        left = sum(spent.amount for spent in self._spent)
        moment = now
        for spent in self._spent:
            if left + amount <= self.most:
                break
            left -= spent.amount
            moment = spent.at_s + MINUTE_S
        return moment

    def spend(self, now: float, amount: float) -> Spent:
        spent = Spent(now, amount)
        if self.most is not None:
            self._spent.append(spent)
        return spent


_START = 2
"""Rows at first: with one that is read while the other is written, most small servers are busy already."""
_WORTH = 1.1
"""So much faster must twice as many rows be."""
_SHORTEST_S, _LEAST_S = 0.25, 2.0
"""How long a place is watched: the shorter only where its rows are short."""
_TELLING_TOKENS = 24
"""Of each row: enough to know the rate where answers are long."""
_HOLD = 16
"""Windows after which a place is tried with more rows again: others may have left it."""


class Width:
    """How many rows a place has at once.

    It doubles while that makes the place faster, and goes back where it does not; it halves where the place says that
    it is too many.

    Args:
        most: never more than these.
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self.rows = min(_START, self.most)
        self._enough = self.rows
        self._rate = 0.0
        self._tries_more = False
        self._holds = 0
        self._begun: tuple[float, float] | None = None
        self._answers = 0

    def starve(self) -> None:
        """It does not have as many rows as it may have: its rate says nothing at present."""
        self._begun = None

    def look(self, now: float, tokens: float, *, has_answered: bool = False) -> None:
        """Called whenever something has come from the place.

        Args:
            tokens: all that came from it so far.
            has_answered: whether this was the end of a row.
        """
        if self._begun is None:
            self._begun, self._answers = (now, tokens), 0
            return
        self._answers += has_answered
        begun_s, before = self._begun
        seconds = now - begun_s
        if seconds < _SHORTEST_S:
            return
        if seconds < _LEAST_S:
            tells = self._answers >= 2 * self.rows
        else:
            tells = self._answers >= self.rows or tokens - before >= _TELLING_TOKENS * self.rows
        if not tells:
            return
        self._begun = None
        self._decide((tokens - before) / seconds)

    def halve(self) -> None:
        """The place says that it has too many."""
        self.rows = self._enough = max(1, self.rows // 2)
        self._tries_more, self._begun = False, None
        self._holds = _HOLD

    def _decide(self, rate: float) -> None:
        if self._tries_more and rate < self._rate * _WORTH:
            # A few more than it works on: the next one is there when one ends.
            self.rows = min(self.most, self._enough + self._enough // 4)
            self._tries_more, self._holds = False, _HOLD
            return
        if self._tries_more:
            self._enough = self.rows
        self._rate = rate
        if self._holds > 0 and not self._tries_more:
            self._holds -= 1
            return
        self._tries_more = self._enough < self.most
        if self._tries_more:
            self.rows = min(self.most, self._enough * 2)


MOST_LINE_BYTES = 4 * 2**20
MOST_ANSWER_BYTES = 64 * 2**20
MOST_MODELS = 10_000
_MOST_ERROR_BYTES = 2**16
_LOOK_S = 0.1
_LONGEST_ID = 300

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait: for a connection, for the beginning of an answer (a model may be loaded first, a long prompt
    read), for more of it, and for the whole of what is no answer of a model."""

    connect_s: float = 10.0
    first_s: float = 900.0
    next_s: float = 120.0
    look_s: float = 15.0


class Client:
    """One endpoint's client, for any thread; close it in the end.

    Args:
        key: None: the one that is kept for it, for which the keyring may wait for people.
    """

    def __init__(self, endpoint: Endpoint, key: str | None = None, patience: Patience | None = None) -> None:
        self.endpoint = endpoint
        self._key = check_key(endpoint, read_key(endpoint) if key is None else key)
        # Behind a longer path there may be others on the same host; before /v1 there is the same server.
        is_alone = endpoint.url == f"{endpoint.root}/v1"
        self._base = endpoint.root if is_alone else endpoint.url
        self._patience = patience or Patience()
        self._trust = trust_of(endpoint)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._http: httpx2.AsyncClient | None = None
        self._is_closed = False
        self.found = endpoint.found
        """What requests are made for."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What can be asked

    def models(self, cancelled: CancelCheck = never_cancelled) -> Found:
        """Which models it has, and which server it seems to be; what it lacks stays as it was.

        Raises:
            RemoteError, RequestCancelled.
        """
        said = self.get(f"{self.endpoint.url}/models", cancelled)
        listed = said.get("data", said.get("models")) if isinstance(said, dict) else None
        if not isinstance(listed, list):
            raise no_such_server(self.endpoint, "it does not list its models")
        entries = [each for each in listed[:MOST_MODELS] if isinstance(each, dict) and _id_of(each)]
        server, version = _server_of(self.endpoint, entries), plain_line(str(said.get("version") or ""))[:60]
        known = self.found
        if server == "other":
            server, version = known.server or server, known.version
        models = tuple(map(_id_of, entries))
        said_blind = {_id_of(each) for each in (*entries, *_details_in(said)) if _reads_pictures(each) is False}
        blind = tuple(model for model in models if model in said_blind or model in known.blind)
        found = Found(server, version, models, tuple(map(_context_of, entries)), known.lacks, blind)
        self.found = found
        return found

    def get(self, url: str, cancelled: CancelCheck = never_cancelled) -> Any:
        """The JSON document at an address of the endpoint's host; the key goes along to the endpoint's own part only.

        Raises:
            RemoteError, RequestCancelled.
        """
        return self._run(lambda _tell: self._get(url), lambda _delta: None, cancelled)

    def ask(
        self,
        request: RemoteRequest,
        on_delta: Callable[[Token], None] = lambda _delta: None,
        cancelled: CancelCheck = never_cancelled,
    ) -> RemoteAnswer:
        """The answer, of which `on_delta` is told on this thread as it comes."""
        model = request.model or self.endpoint.model or self.only_model(cancelled)
        if not self.found.server:
            with contextlib.suppress(RemoteError):  # it may answer all the same
                self.models(cancelled)
        context = dict(zip(self.found.models, self.found.contexts, strict=False)).get(model) or math.inf
        most = request.sampling.max_tokens
        while True:
            # Some refuse more than they have room for, where others answer as far as there is.
            most = int(min(most, context))
            fitting = replace(request, sampling=replace(request.sampling, max_tokens=most))
            try:
                return self._run(partial(self._ask, fitting, model), on_delta, cancelled)
            except RemoteError as error:
                room = room_for_answer(error)
                if room is None or room >= most:
                    raise
                most = room

    def only_model(self, cancelled: CancelCheck = never_cancelled) -> str:
        """The model to ask where nobody named one."""
        models = self.models(cancelled).models
        if len(models) == 1:
            return models[0]
        there = f"has {len(models):,}: name one of {', '.join(models[:5])}" if models else "has none loaded"
        raise RemoteError(Trouble.WRONG_MODEL, f"No model was named, and {called(self.endpoint)} {there}.")

    def close(self) -> None:
        """Closes the connections; who still waits is told that they broke off.  May be called again."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # it has stopped already
                loop.call_soon_threadsafe(loop.stop)
            thread.join()

    # The thread of connections

    def _run(
        self,
        work: Callable[[Callable[[Token], None]], Coroutine[Any, Any, _Result]],
        on_delta: Callable[[Token], None],
        cancelled: CancelCheck,
    ) -> _Result:
        told: queue.SimpleQueue[Token | None] = queue.SimpleQueue()
        with self._lock:
            if self._is_closed:
                raise unreachable(self.endpoint, "its connections are closed")
            future = asyncio.run_coroutine_threadsafe(work(told.put), self._started())
        future.add_done_callback(lambda _future: told.put(None))
        try:
            while True:
                if cancelled():
                    raise RequestCancelled
                try:
                    delta = told.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                if delta is None:
                    break
                on_delta(delta)
        finally:
            future.cancel()
        if future.cancelled():
            raise unreachable(self.endpoint, "its connections are closed")
        try:
            return future.result()
        except httpx2.HTTPError as error:
            raise connection_error(self.endpoint, error) from None
        except OSError as error:
            raise connection_error(self.endpoint, error) from None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="endpoint", daemon=True)
            self._thread.start()
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            if self._http is not None:
                loop.run_until_complete(self._http.aclose())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def _connected(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._http = httpx2.AsyncClient(
                verify=self._trust,
                follow_redirects=False,
                trust_env=not self.endpoint.is_here,  # a proxy could not reach this machine's own servers
                timeout=httpx2.Timeout(None, connect=self._patience.connect_s),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            )
        return self._http

    def _headers(self, url: str) -> dict[str, str]:
        if self._key and url.startswith(f"{self._base}/"):
            return {**HEADERS, "Authorization": f"Bearer {self._key}"}
        return HEADERS

    async def _get(self, url: str) -> Any:
        try:
            async with (
                asyncio.timeout(self._patience.look_s),
                self._connected().stream("GET", url, headers=self._headers(url)) as response,
            ):
                await self._check(response, "")
                content = await self._whole(response)
        except TimeoutError:
            raise unreachable(self.endpoint, f"nothing within {self._patience.look_s:.0f} seconds") from None
        return self._document(content)

    async def _ask(self, request: RemoteRequest, model: str, tell: Callable[[Token], None]) -> RemoteAnswer:
        try:
            return await self._answer(request, model, tell)
        except RemoteError as error:
            if any(message.parts for message in request.messages) and is_about_pictures(error):
                raise pictures_not_read(self.endpoint, model, error) from None
            raise

    async def _answer(self, request: RemoteRequest, model: str, tell: Callable[[Token], None]) -> RemoteAnswer:
        body, left_out = request_body(request, model, self.found.server, self.found.lacks)
        url, begun, first_s = f"{self.endpoint.url}/chat/completions", time.monotonic(), None
        gathered = Gathered()
        async with contextlib.AsyncExitStack() as opened:
            try:
                async with asyncio.timeout(self._patience.first_s):
                    asked = self._connected().stream("POST", url, json=body, headers=self._headers(url))
                    response = await opened.enter_async_context(asked)
                    await self._check(response, model)
            except TimeoutError:
                raise unreachable(self.endpoint, f"nothing within {self._patience.first_s:.0f} seconds") from None
            chunks = await opened.enter_async_context(contextlib.aclosing(self._chunks(response, gathered)))
            async for chunk in chunks:
                if chunk.get("error"):
                    raise said_in_stream(self.endpoint, chunk["error"], model=model, key=self._key)
                try:
                    delta = gathered.take(chunk)
                except (LookupError, TypeError, ValueError, AttributeError):
                    raise unreachable(self.endpoint, "its answer makes no sense") from None
                if gathered.pieces and first_s is None:
                    first_s = time.monotonic() - begun
                if delta is not None:
                    tell(delta)
        if not gathered.finish and not gathered.has_ended:
            raise unreachable(self.endpoint, "its answer broke off in the middle")
        if (rest := gathered.end()) is not None:
            tell(rest)
        if gathered.finish == "content_filter" and not gathered.text:
            raise RemoteError(Trouble.REFUSED, f"{called(self.endpoint)} withholds the answer: change the prompt.")
        text = "".join(gathered.text)
        return RemoteAnswer(
            text if request.constraint is None else chosen(request.constraint, text),
            "".join(gathered.reasoning),
            gathered.calls(),
            gathered.reason,
            gathered.prompt_tokens,
            gathered.generated_tokens,
            gathered.reused_tokens,
            gathered.pieces,
            first_s,
            time.monotonic() - begun,
            gathered.model[:_LONGEST_ID],
            left_out,
        )

    async def _chunks(self, response: httpx2.Response, gathered: Gathered) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream of server-sent events, or the one of an answer that came whole."""
        if "text/event-stream" not in response.headers.get("content-type", ""):
            try:
                async with asyncio.timeout(self._patience.first_s):
                    content = await self._whole(response)
            except TimeoutError:
                raise unreachable(self.endpoint, "its answer took too long") from None
            yield self._object(content)
            return
        async with contextlib.aclosing(self._lines(response, gathered)) as lines:
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue  # comments keep the connection open; nothing else is of use
                data = line[5:].strip()
                if data == b"[DONE]":
                    gathered.has_ended = True
                    return
                if data:
                    yield self._object(data)

    async def _lines(self, response: httpx2.Response, gathered: Gathered) -> AsyncGenerator[bytes, None]:
        held, total, parts = bytearray(), 0, response.aiter_raw()
        # The first one may take long: a server can begin its stream before it reads the prompt.
        patience_s = self._patience.first_s
        pieces, since = 0, time.monotonic()
        while True:
            if gathered.pieces > pieces:
                pieces, since = gathered.pieces, time.monotonic()
            # What keeps the connection open is no answer: it does not do so for ever.
            most_s = self._patience.next_s if gathered.finish else self._patience.first_s
            left_s = max(0.0, since + most_s - time.monotonic())
            try:
                async with asyncio.timeout(min(patience_s, left_s)):
                    part = await anext(parts)
            except StopAsyncIteration:
                break
            except TimeoutError:
                if gathered.finish:
                    return
                passed = f"{min(patience_s, most_s):.0f}"
                raise unreachable(self.endpoint, f"nothing more for {passed} seconds") from None
            total += len(part)
            if len(held) > MOST_LINE_BYTES or total > MOST_ANSWER_BYTES:
                raise unreachable(self.endpoint, "its answer has no end")
            *lines, rest = part.split(b"\n")
            for line in lines:
                held += line
                patience_s = self._patience.next_s if held.startswith(b"data:") else patience_s
                yield bytes(held)
                held.clear()
            held += rest
        if held.strip():
            yield bytes(held)

    async def _whole(self, response: httpx2.Response) -> bytes:
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            if len(content) > MOST_ANSWER_BYTES:
                raise unreachable(self.endpoint, "its answer has no end")
        return bytes(content)

    async def _check(self, response: httpx2.Response, model: str) -> None:
        if response.status_code < 300:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise unreachable(self.endpoint, "its answer is compressed, which it was asked not to be")
            return
        body = bytearray()
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(self._patience.look_s):
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > _MOST_ERROR_BYTES:
                        break
        headers = {name.lower(): value for name, value in response.headers.items()}
        status, key = response.status_code, self._key
        raise refusal(self.endpoint, status, headers, bytes(body), model=model, key=key)

    def _object(self, content: bytes) -> dict[str, Any]:
        document = self._document(content)
        if not isinstance(document, dict):
            raise unreachable(self.endpoint, "its answer makes no sense")
        return document

    def _document(self, content: bytes) -> Any:
        try:
            return parse_json(content, deepest=100)
        except ValueError:
            is_page = content.lstrip()[:1] == b"<"
            if is_page:
                raise no_such_server(self.endpoint, "it answers with a page") from None
            raise unreachable(self.endpoint, "its answer is no whole JSON") from None


def _id_of(entry: dict[str, Any]) -> str:
    name = entry.get("id") or entry.get("name")
    return name if isinstance(name, str) and len(name) <= _LONGEST_ID and plain_line(name) == name else ""


def _context_of(entry: dict[str, Any]) -> int:
    """The longest context, where vLLM and SGLang, llama.cpp, or routers name it."""
    meta = entry.get("meta")
    for value in (
        entry.get("max_model_len"),
        entry.get("context_length"),
        meta.get("n_ctx") or meta.get("n_ctx_train") if isinstance(meta, dict) else None,
    ):
        if type(value) is int and 0 < value < 2**31:
            return value
    return 0


def _details_in(said: dict[str, Any]) -> list[dict[str, Any]]:
    """What llama.cpp's server says of its models beside OpenAI's list."""
    details = said.get("models")
    return [each for each in details[:MOST_MODELS] if isinstance(each, dict)] if isinstance(details, list) else []


def _reads_pictures(entry: dict[str, Any]) -> bool | None:
    """Whether a model does, as llama.cpp's server, Mistral or routers name it; None if nobody says."""
    able, architecture = entry.get("capabilities"), entry.get("architecture")
    if isinstance(able, list):
        return bool({"multimodal", "vision"} & set(map(str, able)))
    if isinstance(able, dict) and isinstance(able.get("vision"), bool):
        return bool(able["vision"])
    taken = architecture.get("input_modalities") if isinstance(architecture, dict) else None
    return "image" in taken if isinstance(taken, list) else None


_OWNERS: dict[str, Server] = {
    "switchyard": "switchyard",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "library": "ollama",
}


def _server_of(endpoint: Endpoint, entries: list[dict[str, Any]]) -> Server:
    if endpoint.host == "api.openai.com":
        return "openai"
    owners = {str(each.get("owned_by")) for each in entries}
    return next((server for owner, server in _OWNERS.items() if owner in owners), "other")


def lacking(found: Found, lacks: set[Lack]) -> Found:
    order: tuple[Lack, ...] = ("stream", "usage", "tools", "schema", "sampling")
    return replace(found, lacks=tuple(each for each in order if each in lacks))
