"""The process that talks to MCP servers: `python -m engine.tools.host`, lines of JSON in, lines out.

    {"id": N, "server": {...}, "seconds": S}                        lists the server's tools
    {"id": N, "server": {...}, "seconds": S, "tool": T, "arguments": {...}}
    {"id": N, "cancel": true}        {"stop": "name of a server"}

Each of the first two is answered once: {"id": N, "tools": [...]}, {"id": N, "text": T, "failed": B} or
{"id": N, "problem": sentence}.  Servers are others' programs: what they send is limited here, before the window sees
it.  Nothing of Qt is imported here, and the window imports nothing of the SDK.  When stdin ends, all servers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from engine.common.untrusted import reason, sayable
from engine.tools.built_in import shortened

MOST_TOOLS = 128
MOST_DESCRIPTION = 2_000
MOST_SCHEMA = 20_000
MOST_BYTES = 8 * 2**20
"""That a server may send for one request, all it says meanwhile included."""
START_S, CALL_S, LIST_S = 30.0, 120.0, 30.0
"""That a server's start, a call, and a list of tools may take."""
MOST_LINE = 4 * 2**20
"""Of the window's."""


class TroubleError(Exception):
    """What is wrong with a server, completing a sentence that begins with its name."""


class _Budget:
    """How much a server may still send."""

    def __init__(self, on_spent: Callable[[], None]) -> None:
        self.left, self.is_spent, self._on_spent = MOST_BYTES, False, on_spent

    def spend(self, nbytes: int) -> bool:
        self.left -= nbytes
        if self.left < 0 and not self.is_spent:
            self.is_spent = True
            self._on_spent()
        return not self.is_spent


@dataclass
class _Server:
    """One server: the task that keeps its connection, and what it is asked."""

    entry: dict[str, Any]
    ready: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    said: str = ""
    """The last of what it wrote to its standard error."""
    budget: _Budget = field(init=False)

    def __post_init__(self) -> None:
        # The SDK reads the rest of what a server says before it lets go of it: that may have no end.
        self.budget = _Budget(self.closing.set)

    @property
    def name(self) -> str:
        return str(self.entry.get("name", ""))

    async def run(self) -> None:
        """Keeps the connection until it is to be closed, or breaks."""
        try:
            async with contextlib.AsyncExitStack() as opened:
                session = await self._connected(opened)
                if not self.ready.done():
                    self.ready.set_result(session)
                await self.closing.wait()
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(error if isinstance(error, Exception) else TroubleError("was stopped."))
                self.ready.exception()  # whoever asked may have gone
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self.closing.set()

    async def _connected(self, opened: contextlib.AsyncExitStack) -> Any:
        from mcp import ClientSession

        streams = await opened.enter_async_context(self._transport())
        session = await opened.enter_async_context(ClientSession(*streams))
        await session.initialize()
        return session

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if url := self.entry.get("url"):
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            headers = {str(k): str(v) for k, v in (self.entry.get("headers") or {}).items()}
            transport = _limited(httpx2.AsyncHTTPTransport(), self.budget)
            timeout = httpx2.Timeout(30.0, read=None)
            async with (
                httpx2.AsyncClient(headers=headers, transport=transport, timeout=timeout) as client,
                streamable_http_client(str(url), http_client=client) as streams,
            ):
                yield streams
            return
        import mcp.client.stdio as stdio

        _limit_lines(stdio, self.budget)
        parameters = stdio.StdioServerParameters(
            command=str(self.entry.get("command", "")),
            args=[str(each) for each in self.entry.get("args") or ()],
            env={str(k): str(v) for k, v in (self.entry.get("env") or {}).items()} or None,
            encoding_error_handler="replace",
        )
        with _tail_of(self._hear) as errors:
            async with stdio.stdio_client(parameters, errlog=errors) as streams:
                yield streams

    def _hear(self, said: bytes) -> None:
        self.said = (self.said + said.decode("utf-8", "replace"))[-2000:]


@contextlib.contextmanager
def _tail_of(hear: Callable[[bytes], None]) -> Any:
    """A file that a program may write to without end; `hear` gets it in pieces."""
    reading, writing = os.pipe()

    def listen() -> None:
        with contextlib.suppress(OSError), open(reading, "rb", buffering=0) as pipe:
            while said := pipe.read(4096):
                hear(said)

    threading.Thread(target=listen, name="server-errors", daemon=True).start()
    with open(writing, "w", encoding="utf-8") as file:
        yield file


def _limit_lines(stdio: Any, budget: _Budget) -> None:
    """The SDK's reader of a server's output takes all that comes: this one ends when the budget is spent."""
    import anyio
    from anyio.streams.text import TextReceiveStream

    class Limited(TextReceiveStream):
        async def receive(self) -> str:
            text = await super().receive()
            if not budget.spend(len(text)):
                raise anyio.BrokenResourceError
            return text

    stdio.TextReceiveStream = Limited  # read when the next server starts, which is this one


def _limited(transport: Any, budget: _Budget) -> Any:
    """The same transport, whose answers end when the budget is spent."""
    import httpx2

    class Stream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for part in self._stream:
                if not budget.spend(len(part)):
                    raise httpx2.ReadError("too much")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Limited(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any:
            answer = await transport.handle_async_request(request)
            answer.stream = Stream(answer.stream)
            return answer

        async def aclose(self) -> None:
            await transport.aclose()

    return Limited()


class Host:
    """All servers, and the requests to them.

    Args:
        tell: takes answers.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._servers: dict[str, _Server] = {}
        self._requests: dict[int, asyncio.Task[None]] = {}

    def take(self, asked: dict[str, Any]) -> None:
        number = asked.get("id")
        if "stop" in asked:
            self._stop(str(asked["stop"]))
        elif asked.get("cancel"):
            if (task := self._requests.get(number)) is not None:  # type: ignore[arg-type]
                task.cancel()
        elif isinstance(number, int):
            task = asyncio.ensure_future(self._answer(number, asked))
            self._requests[number] = task
            task.add_done_callback(lambda task: self._ended(number, task))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._requests.pop(number, None)
        if task.cancelled():
            self._tell({"id": number, "problem": "The call was stopped."})

    async def close(self) -> None:
        """Ends all servers."""
        for task in list(self._requests.values()):
            task.cancel()
        tasks = [server.task for server in self._servers.values() if server.task is not None]
        for name in list(self._servers):
            self._stop(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self, name: str) -> None:
        server = self._servers.pop(name, None)
        if server is not None:
            server.closing.set()
            if not server.ready.done() and server.task is not None:
                server.task.cancel()

    async def _answer(self, number: int, asked: dict[str, Any]) -> None:
        name = str(asked["server"].get("name", ""))
        seconds = float(asked.get("seconds", 60.0))
        is_call = "tool" in asked
        try:
            server = await self._started(asked["server"], float(asked.get("start", START_S)))
            session = await server.ready
            server.budget.left = MOST_BYTES
            async with asyncio.timeout(seconds):
                work = self._call(session, asked) if is_call else self._list(session)
                found = await self._unless_it_ends(server, work)
            self._tell({"id": number, **found})
        except TimeoutError:
            self._stop(name)
            self._tell({"id": number, "problem": f"{name} did not answer within {seconds:.0f} seconds."})
        except Exception as error:
            self._tell({"id": number, "problem": f"{name} {self._why(name, error)}"})

    async def _started(self, entry: dict[str, Any], seconds: float) -> _Server:
        name = str(entry.get("name", ""))
        known = self._servers.get(name)
        if known is not None and (known.entry != entry or known.closing.is_set()):
            self._stop(name)
            known = None
        if known is None:
            known = self._servers[name] = _Server(entry)
            known.task = asyncio.ensure_future(known.run())
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(known.ready)
        except TimeoutError:
            self._stop(name)
            raise TroubleError(
                f"did not speak MCP within {seconds:.0f} seconds of its start: check its command or address."
            ) from None
        return known

    async def _unless_it_ends(self, server: _Server, work: Any) -> dict[str, Any]:
        """The result of `work`, or that the server ended meanwhile."""
        working, ending = asyncio.ensure_future(work), asyncio.ensure_future(server.closing.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise TroubleError("ended in the middle of it.")
            return dict(working.result())
        finally:
            for task in (working, ending):
                task.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    def _why(self, name: str, error: BaseException) -> str:
        """Completes a sentence."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        server = self._servers.get(name)
        if server is not None and server.budget.is_spent:
            self._stop(name)
            return f"sent more than {MOST_BYTES // 2**20} MB at once, and was stopped."
        if isinstance(error, TroubleError):
            return str(error)
        said = " ".join(reason(error).split())[:200].rstrip(".") if isinstance(error, Exception) else ""
        if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
            return f"could not be started ({said}): check its command."
        if "onnection closed" in said or "closed" in type(error).__name__.lower():
            self._stop(name)
            lines = server.said.strip().splitlines() if server is not None else []
            if not lines:
                return "ended, or does not speak MCP."
            return f"ended, or does not speak MCP. It wrote: {lines[-1][:200]}"
        return f"failed: {said or type(error).__name__}."

    async def _list(self, session: Any) -> dict[str, Any]:
        tools: list[dict[str, Any]] = []
        cursor = None
        while len(tools) < MOST_TOOLS:
            from mcp_types import PaginatedRequestParams

            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
            for tool in page.tools:
                schema = sayable(json.dumps(tool.input_schema, ensure_ascii=False))
                if len(schema) <= MOST_SCHEMA:
                    named, described = sayable(tool.name[:200]), sayable((tool.description or "")[:MOST_DESCRIPTION])
                    tools.append({"name": named, "description": described, "parameters": schema})
            cursor = page.next_cursor
            if not cursor:
                break
        return {"tools": sorted(tools[:MOST_TOOLS], key=lambda each: str(each["name"]))}

    async def _call(self, session: Any, asked: dict[str, Any]) -> dict[str, Any]:
        result = await session.call_tool(str(asked["tool"]), asked.get("arguments") or {})
        parts = []
        for block in result.content:
            if block.type == "text":
                parts.append(block.text)
            elif block.type == "resource" and getattr(block.resource, "text", None):
                parts.append(block.resource.text)
            else:
                parts.append(f"[{block.type}, which is not shown]")
        text = "\n".join(parts)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return {"text": shortened(sayable(text)), "failed": bool(result.is_error)}


async def _serve() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    lock = threading.Lock()
    out = sys.stdout.buffer

    def tell(answer: dict[str, Any]) -> None:
        with lock:
            out.write(json.dumps(answer).encode("ascii") + b"\n")
            out.flush()

    host = Host(tell)

    def listen() -> None:
        while line := sys.stdin.buffer.readline(MOST_LINE):
            with contextlib.suppress(ValueError, RuntimeError):
                loop.call_soon_threadsafe(host.take, json.loads(line))
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, name="window", daemon=True).start()
    await ended.wait()
    await host.close()


if __name__ == "__main__":
    logging.disable()
    asyncio.run(_serve())
