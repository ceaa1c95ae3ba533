"""Where requests of all clients meet the engine: one thread loads models by name and answers whoever asks.

HTTP runs on another thread.  A request is handed in with a callback, which the engine's thread calls with what happens;
exactly one of `Ended` and `Refused` comes last.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, FinishReason, Tool
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.common.model_info import ModelInfo
from engine.process.failures import as_engine_error, log_failure
from engine.runtime.batch.live import LiveRows
from engine.runtime.batch.request import BatchAnswer, BatchRequest
from engine.runtime.decode.generation import ChanceLog, Chances

MOST_WAITING = 1000
LONGEST_ANSWER = 2**31
"""Where a request names no limit: the context ends it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that a client wants.

    Attributes:
        model: its path.
        messages, tools: a conversation; or `text`, to be continued as it stands.
        sampling: fields of `SamplingParams` that differ from what the model's makers suggest.
        top_chances: how many likely tokens to name for each token; `None` logs nothing.
        counts_only: nothing is generated; the prompt's length is the answer.
    """

    model: Path
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Tool, ...] = ()
    text: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    top_chances: int | None = None
    counts_only: bool = False


@dataclass(frozen=True, slots=True)
class Began:
    """The prompt is known; `thinks` if it ends by opening the model's reasoning."""

    prompt_tokens: int
    thinks: bool


@dataclass(frozen=True, slots=True)
class NamedChances:
    """`Chances` with the tokens' texts."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Said:
    """More text of the answer; it may be empty."""

    text: str
    generated_tokens: int
    chances: tuple[NamedChances, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete.

    `reused_tokens` of the prompt did not have to be read; `stopped_by` is the stop string that ended it, if one did.
    """

    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    reused_tokens: int
    stopped_by: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no answer, or no more of it."""

    error: EngineError


Progress = Began | Said | Ended
Event = Progress | Refused


class Ticket:
    """A request that was handed in."""

    def __init__(self, ask: Ask, on_event: Callable[[Event], None]) -> None:
        self.ask, self._on_event = ask, on_event
        self._is_cancelled = threading.Event()
        self._is_over = False
        self.queued_s = time.monotonic()

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_cancelled.set()

    def is_cancelled(self) -> bool:
        """Whether nobody does."""
        return self._is_cancelled.is_set()

    def tell(self, event: Event) -> None:
        """Reports to the client, unless it has been told how it ended."""
        if self._is_over:
            return
        self._is_over = isinstance(event, Ended | Refused)
        self._on_event(event)


class DeskEngine(Protocol):
    """The engine as it is used here; `engine.runtime.engine.Engine` is one."""

    @property
    def info(self) -> ModelInfo | None: ...
    def default_sampling(self) -> SamplingParams: ...
    def live_rows(self) -> LiveRows: ...
    def unload(self) -> None: ...


@dataclass(frozen=True, slots=True)
class State:
    """What is going on now: the loaded model's path, requests being answered, and requests waiting."""

    model: Path | None
    under_way: int
    waiting: int


class Desk:
    """Answers requests in the order in which they come, as many at once as there is room for.

    A request for another model waits until those before it have ended, and keeps later ones from starting.

    Args:
        load: loads a model into `engine`, unless the check that it is given comes true; raises EngineError, or
            RequestCancelled then.
        idle_s: a model that nobody has asked for so long is unloaded; `None` keeps it.
    """

    def __init__(
        self, engine: DeskEngine, load: Callable[[Path, CancelCheck], None], idle_s: float | None = None
    ) -> None:
        self._engine, self._load_model, self.idle_s = engine, load, idle_s
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._under_way: dict[int, Ticket] = {}
        self._rows: LiveRows | None = None
        self._model: Path | None = None
        self._wanted: Path | None = None
        self._sampling = SamplingParams()
        self._numbers = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="serving-engine", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def prepare(self, model: Path) -> None:
        """Has a model loaded before anybody asks for it; a failure is reported to who asks first."""
        with self._changed:
            self._wanted = model
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all answers, frees the model and waits for the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """Hands in a request.

        Raises:
            EngineError: `BUSY`, if too many wait.
        """
        ticket = Ticket(ask, on_event)
        with self._changed:
            if self._is_closed or len(self._waiting) >= MOST_WAITING:
                why = "it is closing" if self._is_closed else f"{MOST_WAITING:,} requests are waiting"
                raise EngineError(ErrorCode.BUSY, f"The server takes no request now: {why}; try again later.")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    @property
    def state(self) -> State:
        """What is going on now."""
        with self._changed:
            return State(self._model, len(self._under_way), len(self._waiting))

    # --- the engine's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (model := self._awaited()) is not None:
                try:
                    self._make_ready(model)
                    assert self._rows is not None
                    self._rows.run(_Arriving(self._next), self._ended)
                except BaseException as error:
                    self._failed(model, error)
        finally:
            with self._changed:
                self._is_closed = True  # nobody is answered without this thread, however it ended
                left = [*self._waiting, *self._under_way.values()]
                self._waiting.clear()
                self._under_way.clear()
            for ticket in left:
                ticket.tell(_closing())
            self._free()
            self._engine.unload()

    def _awaited(self) -> Path | None:
        """The model that is wanted next, once one is; frees an unused one meanwhile.  None once the desk is closed."""
        while True:
            with self._changed:
                is_loaded = self._model is not None
                timed_out = False
                while not (self._waiting or self._wanted or self._is_closed or timed_out):
                    timed_out = not self._changed.wait(self.idle_s if is_loaded else None)
                wanted, self._wanted = self._wanted, None
                if self._is_closed:
                    return None
                gone = self._without_the_gone()
                first = self._waiting[0].ask.model if self._waiting else wanted
            _end(gone)
            if first is not None:
                return first
            if timed_out:
                self._free()
                self._engine.unload()

    def _without_the_gone(self) -> list[Ticket]:
        """Takes out who waits no more: no model is loaded for them, and nobody waits behind them."""
        gone = [ticket for ticket in self._waiting if ticket.is_cancelled()]
        for ticket in gone:
            self._waiting.remove(ticket)
        return gone

    def _make_ready(self, model: Path) -> None:
        if self._model != model or self._engine.info is None:
            self._free()
            self._load_model(model, lambda: self._is_closed)
            self._sampling = self._engine.default_sampling()
            with self._changed:
                self._model = model
        if self._rows is None:
            self._rows = self._engine.live_rows()

    def _free(self) -> None:
        rows, self._rows = self._rows, None
        with self._changed:
            self._model = None
        if rows is not None:
            rows.close()

    def _failed(self, model: Path, error: BaseException) -> None:
        """Nobody who waits for this model gets an answer; the next request may."""
        if isinstance(error, RequestCancelled):  # the desk was closed while the model was loaded
            failure = _closing().error
        else:
            log_failure(error, "answering a request")
            failure = as_engine_error(error, "answering a request")
        with self._changed:
            under_way = list(self._under_way.values())
            self._under_way.clear()
            refused = [ticket for ticket in self._waiting if ticket.ask.model == model]
            self._waiting = deque(ticket for ticket in self._waiting if ticket.ask.model != model)
        try:
            self._free()
            self._engine.unload()
        except BaseException as again:
            log_failure(again, "freeing the model")
        for ticket in [*under_way, *refused]:
            ticket.tell(Refused(failure))

    def _next(self) -> BatchRequest | None:
        """The next request for the loaded model, if it is its turn."""
        while True:
            ticket = None
            with self._changed:
                gone = self._without_the_gone()
                if not self._is_closed and self._waiting and self._waiting[0].ask.model == self._model:
                    ticket = self._waiting.popleft()
            _end(gone)
            if ticket is None:
                return None
            try:
                request = self._begin(ticket)
            except RequestCancelled:
                ticket.tell(_closing() if self._is_closed else Ended("cancelled", 0, 0, 0))
            except Exception as error:  # what is wrong with one request harms no other
                if not isinstance(error, EngineError):
                    log_failure(error, "reading a request")
                ticket.tell(Refused(as_engine_error(error, "reading a request")))
            else:
                if request is not None:
                    return request

    def _begin(self, ticket: Ticket) -> BatchRequest | None:
        rows, ask = self._rows, ticket.ask
        assert rows is not None

        def unwanted() -> bool:
            return ticket.is_cancelled() or self._is_closed

        stops: tuple[str, ...] = ()
        if ask.text is not None:
            prompt, thinks = rows.text_prompt(ask.text, unwanted), False
        else:
            prompt, stops = rows.prompt(ask.messages, ask.tools, unwanted), rows.implied_stops
            thinks = rows.ends_with(prompt, "<think>")
        if ask.counts_only:
            ticket.tell(Ended("stop", len(prompt), 0, 0))
            return None
        sampling = replace(self._sampling, **{"max_tokens": LONGEST_ANSWER, **ask.sampling})
        constraint = rows.constrained(ask.constraint) if ask.constraint is not None else None
        log = ChanceLog(ask.top_chances) if ask.top_chances is not None else None
        self._numbers += 1
        number, told = self._numbers, 0

        def on_text(text: str, generated_tokens: int) -> None:
            nonlocal told
            chances: tuple[NamedChances, ...] = ()
            if log is not None:
                chances = tuple(self._named(each) for each in log.tokens[told:generated_tokens])
                told = generated_tokens
            ticket.tell(Said(text, generated_tokens, chances))

        ticket.tell(Began(len(prompt), thinks))
        with self._changed:
            self._under_way[number] = ticket
        return BatchRequest(
            number,
            ids=tuple(prompt),
            sampling=replace(sampling, stop=(*sampling.stop, *stops)),
            constraint=constraint,
            chances=log,
            on_text=on_text,
            cancelled=unwanted,
        )

    def _named(self, chances: Chances) -> NamedChances:
        rows = self._rows
        assert rows is not None
        likeliest = tuple((rows.token_text(token), value) for token, value in chances.likeliest)
        return NamedChances(rows.token_text(chances.token_id), chances.logprob, likeliest)

    def _ended(self, answer: BatchAnswer) -> None:
        with self._changed:
            ticket = self._under_way.pop(answer.row)
        if answer.error is not None:
            ticket.tell(Refused(answer.error))
            return
        assert answer.finish_reason != "failed"
        if answer.finish_reason == "cancelled" and not ticket.is_cancelled():
            ticket.tell(_closing())
            return
        lengths = answer.prompt_tokens, answer.generated_tokens, answer.shared_tokens
        ticket.tell(Ended(answer.finish_reason, *lengths, answer.stopped_by))


def _closing() -> Refused:
    return Refused(EngineError(ErrorCode.BUSY, "The server is closing: try again later."))


def _end(gone: list[Ticket]) -> None:
    for ticket in gone:
        ticket.tell(Ended("cancelled", 0, 0, 0))


class _Arriving:
    """Requests as they come: it may have ended now and go on later."""

    def __init__(self, take: Callable[[], BatchRequest | None]) -> None:
        self._take = take

    def __iter__(self) -> Iterator[BatchRequest]:
        return self

    def __next__(self) -> BatchRequest:
        request = self._take()
        if request is None:
            raise StopIteration
        return request
