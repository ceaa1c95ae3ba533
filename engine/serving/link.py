"""Between the HTTP server's process and the engine's: requests one way, what happens to them the other.

The HTTP server outlives the engine.  If the engine ends, however it does, each request under way is refused, and later
ones wait for the next engine.  Only a process that was given the secret can connect.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Protocol

from engine.common.channel import Channel, LinkFolder, forget_link
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import fields_of
from engine.protocol import (
    Ask,
    Began,
    Cancel,
    Failed,
    Finished,
    Message,
    ModelIs,
    Progress,
    Release,
    Remark,
    Submit,
    Token,
    decode,
    encode,
)

_log = logging.getLogger(__name__)
MOST_WAITING = 1000
AnswerEvent = Began | Token | Finished
Event = AnswerEvent | Progress | Failed


class Ticket:
    """A request that was handed in.

    Args:
        on_cancel: called once when nobody waits for the answer any more, unless it has ended.
    """

    def __init__(
        self, ask: Ask, on_event: Callable[[Event], None], on_cancel: Callable[[], None] | None = None
    ) -> None:
        self.ask, self._on_event, self._on_cancel = ask, on_event, on_cancel
        self._is_cancelled = threading.Event()
        self.is_over = False

    def cancel(self) -> None:
        if not self._is_cancelled.is_set():
            self._is_cancelled.set()
            if self._on_cancel is not None and not self.is_over:
                self._on_cancel()

    def is_cancelled(self) -> bool:
        return self._is_cancelled.is_set()

    def tell(self, event: Event) -> None:
        """Reports to the client, unless it has been told how it ended."""
        if self.is_over:
            return
        self.is_over = isinstance(event, Finished | Failed)
        self._on_event(event)


@dataclass(frozen=True, slots=True)
class State:
    """What is going on now: the loaded model's path, requests being answered, and requests waiting."""

    model: Path | None
    under_way: int
    waiting: int


class Answerer(Protocol):
    """Takes requests and reports to who asked: a broker in this process, or the channel to one in another."""

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """Hands in a request.  `on_event` is called on another thread, last with `Finished` or `Failed`, exactly once.

        Raises:
            EngineError: `BUSY`, if too many wait.
        """
        ...

    def release(self, model: Path, after_s: float = 0) -> None:
        """Frees the model, if it is this one, once nobody has asked for it for so long; never, if that is negative."""
        ...

    @property
    def state(self) -> State: ...


CLOSING = Failed("", ErrorCode.BUSY, "The server is closing: try again later.")
TOO_MANY = Failed(
    "", ErrorCode.BUSY, f"The server takes no request now: {MOST_WAITING:,} requests are waiting; try again later."
)


class EngineLink:
    """The HTTP server's end: an `Answerer` whose engine may come and go.

    Attributes:
        address, secret: what the engine's process needs to connect.
        wake: called when somebody asks and no engine is connected; raises EngineError if none can be expected.
        on_remark: told what the engine has to say for people.
        on_model: told that another model is loaded, or none, and which one is being loaded.
        knows_model: set while an engine is there that has said which model is loaded.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_hex(32)
        self._folder = LinkFolder()
        self._listener = Listener(self._folder.place, authkey=self.secret.encode())
        self.address = str(self._listener.address)
        self.wake: Callable[[], None] = lambda: None
        self.on_remark: Callable[[str], None] = lambda _text: None
        self.on_model: Callable[[Path | None, Path | None], None] = lambda _model, _loading: None
        self._lock = threading.RLock()
        self._channel: Channel | None = None
        self._open: dict[str, Ticket] = {}
        self._unsent: list[Message] = []
        self._noted = set[tuple[str | None, str]]()
        self._model: Path | None = None
        self.knows_model = threading.Event()
        self._numbers = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._take_engines, name="engine-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    @property
    def state(self) -> State:
        """See `Answerer`; all that have not ended count as under way."""
        with self._lock:
            return State(self._model, len(self._open), 0)

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        with self._lock:
            if self._is_closed:
                raise CLOSING.error
            if len(self._open) >= MOST_WAITING:
                raise TOO_MANY.error
            self._numbers += 1
            name = str(self._numbers)
            ticket = Ticket(ask, on_event, lambda: self._send(Cancel(name)))
            self._open[name] = ticket
            self._send(asked := Submit(name, ask))
        if not self.is_connected:  # only now: an engine that ends meanwhile refuses this one too
            try:
                self.wake()
            except EngineError:
                with self._lock:
                    self._open.pop(name, None)
                    self._unsent = [message for message in self._unsent if message is not asked]
                raise
        return ticket

    def release(self, model: Path, after_s: float = 0) -> None:
        if self.is_connected:
            self._send(Release(model, after_s))

    def _disconnected(self) -> bool:
        """Lets the engine end, unless it is answering; returns whether it does."""
        with self._lock:
            channel = self._channel
            if channel is None or self._open:
                return False
            self._channel, self._model = None, None
            self.knows_model.clear()
        channel.close()
        return True

    def refuse_all(self, error: EngineError) -> None:
        with self._lock:
            refused = self._forget_all()
        for ticket in refused:
            ticket.tell(Failed.of(error))

    def _forget_all(self) -> list[Ticket]:
        self._model = None
        self._unsent.clear()
        forgotten = list(self._open.values())
        self._open.clear()
        return forgotten

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # wakes the thread that waits for engines
                Client(self.address).close()
            self._thread.join()
        self._listener.close()
        forget_link(self.address)
        self._folder.leave()
        if (channel := self._channel) is not None:
            channel.close()
        self.refuse_all(CLOSING.error)

    def _send(self, message: Message) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.send(encode(message))
            elif not self._is_closed:
                self._unsent.append(message)

    def _take_engines(self) -> None:
        while not self._has_closed():
            try:
                connection = self._listener.accept()
            except Exception as error:  # whoever it was did not know the secret, or is gone already
                _log.info("an engine could not connect: %s", type(error).__name__)
                continue
            if self._has_closed():
                connection.close()
            else:
                self._connected(connection)

    def _has_closed(self) -> bool:
        return self._is_closed

    def _connected(self, connection: Connection) -> None:
        if self._channel is not None:
            self._channel.close()  # an engine that was left behind
        channel = Channel(connection, self._on_message, lambda: self._on_lost(channel))
        with self._lock:
            self._channel = channel
            for message in self._unsent:
                channel.send(encode(message))
            self._unsent.clear()
        channel.start()

    def _on_lost(self, channel: Channel) -> None:
        with self._lock:
            if self._channel is not channel:
                return
            self._channel = None
            self.knows_model.clear()
            refused = self._forget_all()  # before another engine can connect
        for ticket in refused:
            words = "The engine stopped in the middle: try again in a moment."
            ticket.tell(Failed("", ErrorCode.ENGINE_DIED, words))

    def _on_message(self, line: bytes) -> None:
        message = decode(line)
        if isinstance(message, ModelIs):
            self._model = message.model
            self.knows_model.set()
            self.on_model(message.model, message.loading)
        elif isinstance(message, Remark):
            note = message.about, message.text
            if message.about is None or note not in self._noted:
                self._noted.add(note)
                self.on_remark(message.text)
        elif isinstance(message, Event):
            with self._lock:
                is_over = isinstance(message, Finished | Failed)
                name = message.request_id
                ticket = self._open.pop(name, None) if is_over else self._open.get(name)
            if ticket is not None:
                ticket.tell(message)


class BrokerLink:
    """The engine's end: hands what clients ask to the broker, and reports back.

    Args:
        on_lost: called once when the server has gone.
    """

    def __init__(self, address: str, secret: str, broker: Answerer, on_lost: Callable[[], None] = lambda: None) -> None:
        self._broker, self._tickets = broker, dict[str, Ticket]()
        self._on_lost = on_lost
        try:
            connection = Client(address, authkey=secret.encode())
        except Exception as error:
            raise EngineError(ErrorCode.PROTOCOL, "The server for other programs cannot be reached.") from error
        self._channel = Channel(connection, self._on_message, self._lost)
        self._channel.start()

    def model_is(self, model: Path | None, loading: Path | None = None) -> None:
        self._channel.send(encode(ModelIs(model, loading)))

    def remark(self, text: str, about: str | None = None) -> None:
        if text:
            self._channel.send(encode(Remark(text, about)))

    def close(self) -> None:
        self._channel.close()

    def _lost(self) -> None:
        for ticket in list(self._tickets.values()):
            ticket.cancel()
        self._on_lost()

    def _on_message(self, line: bytes) -> None:
        message = decode(line)
        if isinstance(message, Submit):
            self._ask(message.request_id, message.ask)
        elif isinstance(message, Cancel):
            if (ticket := self._tickets.get(message.request_id)) is not None:
                ticket.cancel()
        elif isinstance(message, Release):
            self._broker.release(message.model, message.after_s)

    def _ask(self, name: str, ask: Ask) -> None:
        def on_event(event: Event) -> None:
            self._channel.send(encode(replace(event, request_id=name)))
            if isinstance(event, Finished | Failed):
                over.set()
                self._tickets.pop(name, None)

        over = threading.Event()
        try:
            # What JSON made of the fields becomes what they are declared as.
            ask = replace(ask, sampling=fields_of(SamplingParams, ask.sampling))
            self._tickets[name] = self._broker.ask(ask, on_event)
        except EngineError as error:
            on_event(Failed.of(error))
        except (TypeError, LookupError, ValueError):
            on_event(Failed("", ErrorCode.INVALID_REQUEST, "The request cannot be read."))
        if over.is_set():
            self._tickets.pop(name, None)
