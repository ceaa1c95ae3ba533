"""What the interfaces share: which models there are, asking for answers, reading a request's body, and noting how it
went."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from starlette.requests import ClientDisconnect, Request

from engine.batch_files.openai_requests import (
    BadRequestError,
    Interface,
    read_constraint,
    read_sampling,
    refuse_what_is_not_given,
)
from engine.checkpoint.library import LibraryEntry, describe, list_models
from engine.common.chat import ChatMessage, PromptEnd, Tool, ToolChoice
from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import DEEPEST, parse_json, sayable
from engine.protocol import Ask, Began, Failed, Finished, Outcome, Progress, Prompt
from engine.serving.embeddings import Embedded, Embeddings, Text
from engine.serving.link import Answerer, AnswerEvent, Event, Ticket

MOST_BODY_BYTES = 32 * 2**20
SLOWEST_BODY_S = 60.0
_LARGE_BODY_BYTES = 2**16
_LISTING_S = 3.0
_MAYBE_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")

Whole = TypeVar("Whole")

Offer = tuple[tuple[Tool, ...], ToolChoice]
"""Tools that an answer may call, and which of them it may, or must."""
NO_TOOLS: Offer = (), ToolChoice()
_GONE = 499


@dataclass(slots=True)
class Exchange:
    """One request without its texts: what it is for, and how it goes."""

    model: str = ""
    read_tokens: int = 0
    written_tokens: int = 0
    status: int = 0
    breaks: Literal["", "left", "failed"] = ""

    @property
    def outcome(self) -> Outcome:
        if not self.status or self.status == _GONE:
            return "left"
        if self.status >= 400:
            return "refused" if self.status < 500 else "failed"
        return self.breaks or "answered"


EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def current_exchange() -> Exchange:
    return EXCHANGE.get() or Exchange()


class ClientGoneError(Exception):
    """The client closed the connection."""


class LibraryModels:
    """Which models clients may ask for: those of the library, and the one that is meant without a name, which may have
    further names.  The methods may read files: they are called off the event loop."""

    def __init__(self, default: Path | None = None, default_name: str = "", aliases: Sequence[str] = ()) -> None:
        self._default, self._name, self._aliases = default, default_name, ("", "default", *aliases)
        self._listed: list[LibraryEntry] = []
        self._damaged: dict[str, str] = {}
        self._listed_s = float("-inf")

    def listed(self) -> list[LibraryEntry]:
        if time.monotonic() - self._listed_s > _LISTING_S:
            found = list_models()
            listed = [entry for entry in found if not entry.problem]
            self._damaged = {entry.name: entry.problem for entry in found if entry.problem}
            if self._default is not None and all(entry.path != self._default for entry in listed):
                listed.insert(0, describe(self._default, self._name))
            self._listed, self._listed_s = listed, time.monotonic()
        return self._listed

    def find(self, name: str) -> tuple[str, Path]:
        """The name and place of the one of this name: clients may not name paths of their own."""
        if self._default is not None and (name == self._name or name in self._aliases):
            return self._name, self._default
        for entry in self.listed():
            if entry.name == name:
                return entry.name, entry.path
        if name in self._damaged:
            raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, self._damaged[name])
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND,
            f"There is no model named {name[:80]!r} here: ask for one of the models that this server lists.",
        )


class Service:
    """The models and the engine, as the interfaces use them."""

    def __init__(self, broker: Answerer, models: LibraryModels) -> None:
        self.broker, self._models = broker, models
        self._embeddings = Embeddings()
        self.started_s = int(time.time())

    async def models(self) -> list[LibraryEntry]:
        return await on_a_thread(self._models.listed)

    async def path_of(self, name: Any) -> tuple[str, Path]:
        if name is not None and not isinstance(name, str):
            raise BadRequestError("has a model that is not a name")
        short = (name or "").removesuffix(":latest")
        found = await on_a_thread(lambda: self._models.find(short))
        current_exchange().model = found[0]
        return found

    async def entry_of(self, name: Any) -> tuple[str, LibraryEntry]:
        known, path = await self.path_of(name)
        entries = await self.models()
        return known, next((entry for entry in entries if entry.path == path), LibraryEntry(known, path))

    async def ask_of(
        self,
        body: Mapping[str, Any],
        interface: Interface,
        messages: tuple[ChatMessage, ...],
        offer: Offer,
        end: PromptEnd = "answer",
    ) -> tuple[str, Ask]:
        """What a request for an answer to a conversation asks for, and the name of the model."""
        refuse_what_is_not_given(body, interface)
        name, path = await self.path_of(body.get("model"))
        constraint = read_constraint(body)
        if constraint is not None and offer[1].must:
            raise BadRequestError("wants both a form of the answer and a tool call; leave one of them out")
        return name, Ask(
            path,
            messages=messages,
            tools=offer[0],
            choice=offer[1],
            end=end,
            sampling=read_sampling(body),
            constraint=constraint,
            ignores_end=body.get("ignore_eos") is True,
        )

    async def embed(self, request: Request, model: Path, texts: Sequence[Text], **options: Any) -> Embedded:
        """The vectors of texts, unless the client goes away; see `Embeddings.embed`."""
        gone = threading.Event()
        work = on_a_thread(lambda: self._embeddings.embed(model, texts, cancelled=gone.is_set, **options))
        try:
            found = await while_connected(request, work)
        finally:
            gone.set()
        current_exchange().read_tokens += found.tokens
        return found

    def close(self) -> None:
        """Ends what the service has started; the broker is its maker's."""
        self._embeddings.close()

    async def prompts(self, request: Request, *asks: Ask) -> list[Prompt]:
        """Prompts that are not answered."""
        found = [Prompt("", (), ())] * len(asks)
        for index, event in await self._seen(request, *(replace(ask, wants="prompt") for ask in asks)):
            if isinstance(event, Began) and event.prompt is not None:
                found[index] = event.prompt
        return found

    async def prompt_length(self, request: Request, ask: Ask) -> int:
        """How many tokens a prompt has that is not answered."""
        seen = await self._seen(request, replace(ask, wants="length"))
        return sum(event.prompt_tokens for _index, event in seen if isinstance(event, Finished))

    async def _seen(self, request: Request, *asks: Ask) -> list[tuple[int, AnswerEvent | Progress]]:
        async def all_of() -> list[tuple[int, AnswerEvent | Progress]]:
            return [each async for each in self.events(*asks)]

        return await while_connected(request, all_of())

    async def events(self, *asks: Ask) -> AsyncGenerator[tuple[int, AnswerEvent | Progress], None]:
        """What happens to requests, each by its place; if nobody listens any more they are cancelled.

        Raises:
            EngineError: one of them is refused, at once or in the middle; the others are cancelled.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def follow(index: int) -> Callable[[Event], None]:
            def on_event(event: Event) -> None:
                with contextlib.suppress(RuntimeError):  # the server has stopped
                    loop.call_soon_threadsafe(queue.put_nowait, (index, event))

            return on_event

        exchange, written, left = current_exchange(), [0] * len(asks), len(asks)
        tickets = list[Ticket]()
        try:
            for index, ask in enumerate(asks):
                tickets.append(self.broker.ask(ask, follow(index)))
            while left:
                index, event = await queue.get()
                if isinstance(event, Failed):
                    exchange.breaks = "failed"
                    raise event.error
                if isinstance(event, Began):
                    exchange.read_tokens += event.prompt_tokens
                elif not isinstance(event, Progress):
                    exchange.written_tokens += event.generated_tokens - written[index]
                    written[index] = event.generated_tokens
                left -= isinstance(event, Finished)
                yield index, event
        except (GeneratorExit, asyncio.CancelledError):
            exchange.breaks = exchange.breaks or "left"
            raise
        finally:
            for ticket in tickets:
                ticket.cancel()
                if ticket.ask.keep_s is not None:
                    self.broker.release(ticket.ask.model, ticket.ask.keep_s)


async def on_a_thread(work: Callable[[], Whole]) -> Whole:
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
    # A large one would keep all others waiting while it is read.
    return await on_a_thread(lambda: _parsed(data)) if len(data) > _LARGE_BODY_BYTES else _parsed(data)


def _parsed(data: bytearray) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
        body = parse_json(text, deepest=DEEPEST)
        if _MAYBE_HALF_A_PAIR.search(text):
            body = sayable(body)
    except UnicodeDecodeError:
        raise BadRequestError("is not UTF-8") from None
    except ValueError as error:
        raise BadRequestError(f"is not JSON ({str(error)[:120]})") from None
    if not isinstance(body, dict):
        raise BadRequestError("is not a JSON object")
    return body


async def while_connected(request: Request, work: Awaitable[Whole]) -> Whole:
    """The result of `work`, which is given up when the client goes away."""

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
