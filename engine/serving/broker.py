"""Where requests of all clients meet the engine: those for the loaded model are answered, many in each sweep.

Requests are handed in on any thread.  They become tokens on a thread of the broker's, so that no answer waits for
another client's long prompt, and are answered on the engine's thread: that of a `ModelBroker`, which loads models by
name, or that of the window's engine process (`engine.serving.other_programs`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from engine.batch_files.openai_requests import NO_LIMIT
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.process.failures import as_engine_error, log_failure
from engine.protocol import Ask, Began, Failed, Finished, NamedChances, NamedToken, Progress, Prompt, Token
from engine.runtime.decode.generation import ChanceLog, Chances, GenerationResult
from engine.runtime.decode.split_answer import thinking_for
from engine.runtime.schedule.live import LiveRows
from engine.runtime.schedule.request import BatchRequest
from engine.serving.link import CLOSING, MOST_WAITING, TOO_MANY, Event, State, Ticket
from engine.telemetry.recorder import RequestLog

if TYPE_CHECKING:
    from engine.runtime.engine import Engine

READ_S = 0.5
"""How often who waits for a long prompt is told how much of it has been read."""
MOST_READY = 64
"""Those at the head of the queue that are tokens before it is their turn."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A request as tokens, and what its client is told when it is its turn."""

    request: BatchRequest
    began: Began


class RequestBroker:
    """Requests that wait, and those that the loaded model is answering.

    Those that wait for a model when it is loaded are answered first; then one for another model keeps later ones from
    starting, so that everybody waits for no more than one turn of each other model.

    Args:
        engine: used on the engine's thread only.
        on_waiting: called on any thread when a request has come, or has become tokens.
        chat: what is computed of requests may be kept on disk as this chat's; empty: none of it.
    """

    def __init__(self, engine: Engine, on_waiting: Callable[[], None] = lambda: None, chat: str = "") -> None:
        self._engine, self._on_waiting, self._chat = engine, on_waiting, chat
        self.changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._ready: dict[Ticket, _Ready] = {}
        self._tokenizing: threading.Thread | None = None
        self._under_way: dict[int, Ticket] = {}
        self._rows: LiveRows | None = None
        self._model: Path | None = None
        self._sampling = SamplingParams()
        self._logs: WeakKeyDictionary[Ticket, RequestLog] = WeakKeyDictionary()
        self._numbers = 0
        self.is_closed = False

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        ticket = Ticket(ask, on_event)
        log = RequestLog()
        with self.changed:
            if self.is_closed:
                raise CLOSING.error
            if len(self._waiting) >= MOST_WAITING:
                raise TOO_MANY.error
            self._waiting.append(ticket)
            self._logs[ticket] = log
            self._begin_tokenizing()
            self.changed.notify_all()
        self._on_waiting()
        return ticket

    def release(self, model: Path, after_s: float = 0) -> None:
        """See `Answerer`; nothing here: whoever has the engine's thread frees models."""

    @property
    def state(self) -> State:
        with self.changed:
            return State(self._model, len(self._under_way), len(self._waiting))

    @property
    def next_model(self) -> Path | None:
        """The model that whoever comes first asks for; None if nobody waits."""
        with self.changed:
            gone = self._without_the_gone()
            first = self._waiting[0].ask.model if self._waiting else None
        _end(gone)
        return first

    def is_wanted(self, model: Path) -> bool:
        with self.changed:
            return any(ticket.ask.model == model and not ticket.is_cancelled() for ticket in self._waiting)

    def shut(self) -> None:
        """Takes no more requests; what is under way breaks off."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    # --- the engine's thread ----------------------------------------------------------------------

    def model_is(self, model: Path | None) -> None:
        """This model is loaded now, or none; the one before must have been left with `free`."""
        if model is not None:
            self._sampling = self._engine.default_sampling()
        with self.changed:
            self._model = model
            # Who already waits for it is answered before another is loaded: a turn costs one load, not each request.
            self._waiting = deque(sorted(self._waiting, key=lambda ticket: ticket.ask.model != model))

    def answer(self) -> None:
        """Answers who waits for the loaded model, until nobody is left.

        Raises:
            BaseException: the model cannot be run.
        """
        rows = self._rows_now()
        while True:
            rows.run(self, self._ended)
            with self.changed:
                self.changed.wait_for(lambda: self.is_closed or self._tokenizing is None or self._is_ready())
                if self.is_closed or not self._waiting or self._waiting[0].ask.model != self._model:
                    return

    def _is_ready(self) -> bool:
        return bool(self._waiting) and self._waiting[0] in self._ready

    def admit(self) -> None:
        """Lets who waits for the loaded model join those that the engine is answering.

        Raises:
            BaseException: the model cannot be run.
        """
        if self._waiting or self._under_way:
            self._rows_now().take(self, self._ended)

    def _rows_now(self) -> LiveRows:
        if self._rows is None:
            self._rows = self._engine.live_rows()
        return self._rows

    def free(self) -> None:
        """Frees keys and values before the model is freed, or another needs the room; ends what is under way."""
        with self.changed:
            left = list(self._under_way.values())
            self._under_way.clear()
            self._ready.clear()
            rows, self._rows = self._rows, None
            preparing = self._tokenizing
        for ticket in left:
            ticket.tell(Failed("", ErrorCode.BUSY, "The model was taken away: try again later."))
        if preparing is not None:
            preparing.join()
        if rows is not None:
            rows.close()

    def refuse(self, failure: EngineError, model: Path | None = None) -> None:
        """Nobody who is being answered or waits gets an answer, unless it is for another model than this."""
        with self.changed:
            under_way = list(self._under_way.values())
            self._under_way.clear()
        for ticket in under_way:
            ticket.tell(Failed.of(failure))
        self.refuse_waiting(failure, model)

    def refuse_waiting(self, failure: EngineError, model: Path | None = None) -> None:
        """Nobody who waits gets an answer, unless it is for another model than this."""
        with self.changed:
            refused = [ticket for ticket in self._waiting if model in (None, ticket.ask.model)]
            for ticket in refused:
                self._take_out(ticket)
        for ticket in refused:
            ticket.tell(Failed.of(failure))

    def _without_the_gone(self) -> list[Ticket]:
        """Takes out who waits no more: no model is loaded for them, and nobody waits behind them."""
        gone = [ticket for ticket in self._waiting if ticket.is_cancelled()]
        for ticket in gone:
            self._take_out(ticket)
        return gone

    def _take_out(self, ticket: Ticket) -> bool:
        """Whether it was still waiting; who takes it out tells it what becomes of it."""
        self._ready.pop(ticket, None)
        if ticket not in self._waiting:
            return False
        self._waiting.remove(ticket)
        return True

    def __iter__(self) -> Iterator[BatchRequest]:
        return self

    def __next__(self) -> BatchRequest:
        """The next request for the loaded model, if it is its turn and ready: they may end now and go on later."""
        with self.changed:
            gone = self._without_the_gone()
            ticket = self._waiting[0] if self._is_ready() and not self.is_closed else None
            if ticket is not None:
                ready = self._ready[ticket]
                self._take_out(ticket)
                self._under_way[ready.request.row] = ticket
            self._begin_tokenizing()
        _end(gone)
        if ticket is None:
            raise StopIteration
        self._logs[ticket].reads(len(ready.request.ids))
        ticket.tell(ready.began)
        return ready.request

    # --- the thread that makes tokens -------------------------------------------------------------

    def _begin_tokenizing(self) -> None:
        """Starts it, with the lock held, if there is something to do for it."""
        if self._tokenizing is None and self._rows is not None and self._next_text() is not None:
            work = self._tokenize
            self._tokenizing = threading.Thread(target=work, args=(self._rows,), name="serving-prompts", daemon=True)
            self._tokenizing.start()

    def _next_text(self) -> Ticket | None:
        """The first of those at the head of the queue that is no tokens yet."""
        ours = takewhile(lambda ticket: ticket.ask.model == self._model, self._waiting)
        texts = (ticket for ticket in islice(ours, MOST_READY) if ticket not in self._ready)
        return next((ticket for ticket in texts if not ticket.is_cancelled()), None)

    def _tokenize(self, rows: LiveRows) -> None:
        """Ends once nobody waits whose request is a text, or the model is taken away."""
        while True:
            with self.changed:
                ticket = self._next_text() if rows is self._rows and not self.is_closed else None
                if ticket is None:
                    self._tokenizing = None
                    self.changed.notify_all()
                    return
            ready, endings = None, list[Event]()
            try:
                ready, endings = self._begin(ticket, rows)
            except RequestCancelled:
                if rows is self._rows and not self.is_closed:  # if not, it waits for the next model, or for its refusal
                    endings = [Finished("", "cancelled")]
            except BaseException as error:  # what is wrong with one request harms no other; libraries may panic
                if not isinstance(error, EngineError):
                    log_failure(error, "reading a request")
                endings = [Failed.of(as_engine_error(error, "reading a request"))]
            with self.changed:
                if ready is not None and rows is self._rows and ticket in self._waiting:
                    self._ready[ticket] = ready
                is_told = bool(endings) and self._take_out(ticket)
                self.changed.notify_all()
            for event in endings if is_told else ():
                ticket.tell(event)
            self._on_waiting()

    def _begin(self, ticket: Ticket, rows: LiveRows) -> tuple[_Ready | None, list[Event]]:
        """The request as tokens; or, if nothing else was asked for, all that its client is told."""
        ask = ticket.ask

        def unwanted() -> bool:
            return ticket.is_cancelled() or self.is_closed

        def given_up() -> bool:
            return unwanted() or self._rows is not rows

        stops: tuple[str, ...] = ()
        shown: tuple[int, ...] = ()
        family = info.family if (info := self._engine.info) else ""
        most = rows.context_tokens if ask.wants == "answer" else None
        sampling = replace(self._sampling, **{"max_tokens": NO_LIMIT, **ask.sampling})
        thinking = thinking_for(sampling, constrained=ask.constraint is not None or ask.choice.must)
        if ask.ids:
            prompt, thinks = rows.known(ask.ids), False
        elif ask.text is not None:
            prompt, thinks = rows.text_prompt(ask.text, given_up, most, special=ask.special), False
        else:
            prompt = rows.prompt(ask.messages, ask.tools, given_up, thinking, ask.end, most)
            stops, thinks, shown = rows.implied_stops, rows.thinks(prompt), rows.shown(calls=bool(ask.tools))
        if ask.wants != "answer":
            events: list[Event] = [Finished("", "stop", len(prompt), 0, 0)]
            if ask.wants == "prompt":
                raw = tuple(tuple(rows.token_bytes(token)) for token in prompt)
                seen = Prompt(rows.text_of(prompt), tuple(prompt), raw)
                events.insert(0, Began("", len(prompt), thinks, family, seen))
            return None, events
        rows.check_room(prompt)
        constraint, is_call = None, False
        if ask.constraint is not None:
            constraint = rows.constrained(ask.constraint, prompt if ask.messages else None, thinking)
        elif ask.tools:
            constraint, is_call = rows.held_calls(ask.tools, ask.choice, prompt, thinking)
        log = ChanceLog(ask.top_chances) if ask.top_chances is not None else None
        self._numbers += 1
        told, said_s = 0, time.monotonic()
        following = self._logs[ticket]

        def on_text(text: str, generated_tokens: int) -> None:
            nonlocal told
            chances: tuple[NamedChances, ...] = ()
            if log is not None:
                chances = tuple(self._named(each) for each in log.tokens[told:generated_tokens])
                told = generated_tokens
            following.has_written(generated_tokens)
            ticket.tell(Token("", text, generated_tokens, chances=chances))

        def on_read(done: int, total: int) -> None:
            nonlocal said_s
            if done < total and time.monotonic() - said_s >= READ_S:
                said_s = time.monotonic()
                ticket.tell(Progress("", "prefill", done, total))

        request = BatchRequest(
            self._numbers,
            ids=tuple(prompt),
            sampling=replace(sampling, stop=(*sampling.stop, *stops)),
            constraint=constraint,
            end_ids=frozenset() if ask.ignores_end else None,
            chances=log,
            chat=self._chat,
            shown=shown,
            on_progress=on_read,
            on_text=on_text,
            on_reused=following.reuses,
            cancelled=unwanted,
        )
        return _Ready(request, Began("", len(prompt), thinks, family, is_call=is_call)), []

    def _named(self, chances: Chances) -> NamedChances:
        rows = self._rows
        assert rows is not None

        def named(token: int, logprob: float) -> NamedToken:
            return NamedToken(rows.token_text(token), logprob, tuple(rows.token_bytes(token)))

        likeliest = tuple(named(token, value) for token, value in chances.likeliest)
        return NamedChances(named(chances.token_id, chances.logprob), likeliest)

    def _ended(self, answer: GenerationResult) -> None:
        with self.changed:
            ticket = self._under_way.pop(answer.row, None)
        if ticket is None:  # told already that the model was taken away
            return
        self._logs[ticket].ends()
        if answer.error is not None:
            ticket.tell(Failed.of(answer.error))
            return
        if answer.finish_reason == "cancelled" and not ticket.is_cancelled():
            ticket.tell(CLOSING)
            return
        lengths = answer.prompt_tokens, answer.reused_tokens, answer.generated_tokens
        ticket.tell(Finished("", answer.finish_reason, *lengths, stopped_by=answer.stopped_by))


def _end(gone: list[Ticket]) -> None:
    for ticket in gone:
        ticket.tell(Finished("", "cancelled"))


class ModelBroker(RequestBroker):
    """Answers requests for any model, by loading it once those for the model before have ended.

    Args:
        load: loads a model into `engine`, unless the check that it is given comes true; raises EngineError, or
            RequestCancelled then.
        idle_s: a model that nobody has asked for so long is unloaded; `None` keeps it.
        on_model: told on the engine's thread which model is loaded now.
        chat: see `RequestBroker`.
    """

    def __init__(
        self,
        engine: Engine,
        load: Callable[[Path, CancelCheck], None],
        idle_s: float | None = None,
        on_model: Callable[[Path | None], None] = lambda _model: None,
        chat: str = "",
    ) -> None:
        super().__init__(engine, chat=chat)
        self._load_model, self.idle_s, self._on_model = load, idle_s, on_model
        self._released: tuple[Path, float] | None = None
        self._thread = threading.Thread(target=self._work, name="serving-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def release(self, model: Path, after_s: float = 0) -> None:
        """See `Answerer`; it holds in the place of `idle_s` until the model is freed."""
        with self.changed:
            if self._model in (None, model):  # while it is loaded there is none
                self._released = model, after_s
                self.changed.notify_all()

    def close(self) -> None:
        """Ends all answers, frees the model and waits for the thread."""
        self.shut()
        if self._thread.is_alive():
            self._thread.join()

    # --- the engine's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (model := self._awaited()) is not None:
                try:
                    self._make_ready(model)
                    self.answer()
                except BaseException as error:
                    self._failed(model, error)
        finally:
            self.shut()  # nobody is answered without this thread, however it ended
            self.refuse(CLOSING.error)
            self._free()

    def _awaited(self) -> Path | None:
        """The model that is wanted next; None once the broker is closed.  Frees an unused one meanwhile."""
        while True:
            with self.changed:
                is_unused = False
                while not (self._waiting or self.is_closed or is_unused):
                    idle_s = None if self._model is None else self.idle_s
                    if self._released is not None and self._released[0] == self._model:
                        idle_s = self._released[1]
                    can_wait = idle_s is not None and 0 <= idle_s <= threading.TIMEOUT_MAX  # on Windows 49 days
                    is_unused = not self.changed.wait(idle_s if can_wait else None)
            first = self.next_model
            if self.is_closed or first is not None:
                return None if self.is_closed else first
            if is_unused:
                self._free()

    def _make_ready(self, model: Path) -> None:
        if self._model != model or self._engine.info is None:
            self._free()
            self._load_model(model, lambda: self.is_closed or not self.is_wanted(model))
            self.model_is(model)
            self._on_model(model)

    def _free(self) -> None:
        with self.changed:
            if self._released is not None and self._released[0] == self._model:
                self._released = None  # what was said of one that is about to be loaded holds
        self.free()
        self.model_is(None)
        self._on_model(None)
        self._engine.unload()

    def _failed(self, model: Path, error: BaseException) -> None:
        """Nobody who waits for this model gets an answer; the next request may."""
        if isinstance(error, RequestCancelled):  # closed, or all have gone, while the model was loaded
            failure = CLOSING.error
        else:
            log_failure(error, "answering a request")
            failure = as_engine_error(error, "answering a request")
        self.refuse(failure, model)
        try:
            self._free()
        except BaseException as again:
            log_failure(again, "freeing the model")
