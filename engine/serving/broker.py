"""Where requests of all clients meet the engine: those for the loaded model are answered, many in each sweep.

Requests are handed in on any thread.  They become tokens on a thread of the broker's, so that no answer waits for
another client's long prompt, and are answered on the engine's thread: that of a `ModelBroker`, which loads models by
name, or that of the window's engine process (`engine.worker.ApiRequests`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.batch_files.openai_requests import NO_LIMIT
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.common.falls import passed_over
from engine.process.failures import as_engine_error, log_failure
from engine.protocol import Ask, Began, Failed, Finished, NamedChances, NamedToken, Progress, Prompt, Token
from engine.runtime.batch.policy import policy_for
from engine.runtime.decode.detokenizer import token_bytes
from engine.runtime.decode.generation import BatchRequest, ChanceLog, Chances, Outcome
from engine.runtime.decode.sequence import Sequence, SequenceError
from engine.runtime.schedule.scheduler import Scheduler
from engine.serving.link import CLOSING, MOST_WAITING, TOO_MANY, Event, State, Ticket
from engine.telemetry.recorder import RequestLog

if TYPE_CHECKING:
    from engine.runtime.engine import Engine

READ_S = 0.5
"""How often who waits for a long prompt is told how much of it has been read."""
MOST_READY = 64
"""Those at the head of the queue that are tokens before it is their turn."""


_OF_ONE = (
    ErrorCode.INVALID_REQUEST,
    ErrorCode.PROMPT_TOO_LONG,
    ErrorCode.MODEL_UNSUPPORTED,
    ErrorCode.NOT_ENOUGH_MEMORY,
)
"""What may be wrong with one request alone."""


class _Waiting(Ticket):
    """A request until its end.

    Attributes:
        row: it as tokens, once it is.
        began: what its client is told when it is its turn.
    """

    def __init__(self, ask: Ask, on_event: Callable[[Event], None]) -> None:
        super().__init__(ask, on_event)
        self.log = RequestLog()
        self.row: Sequence | None = None
        self.began = Began("", 0, thinks=False)


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
        self._waiting: deque[_Waiting] = deque()
        self._tokenizing: threading.Thread | None = None
        self._under_way = set[_Waiting]()
        self._submitted = 0
        """Requests that the scheduler has, those included that have been told their end."""
        self._scheduler: Scheduler | None = None
        self._most = 0
        self._failure: BaseException | None = None
        self._model: Path | None = None
        self._sampling = SamplingParams()
        self.is_closed = False

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        ticket = _Waiting(ask, on_event)
        with self.changed:
            if self.is_closed:
                raise CLOSING.error
            if len(self._waiting) >= MOST_WAITING:
                raise TOO_MANY.error
            self._waiting.append(ticket)
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

    def admit(self) -> None:
        """Lets who waits for the loaded model join those that the engine is answering, as many as there are places.

        Raises:
            BaseException: what keeps the model from answering anybody.
        """
        if self._waiting or self._under_way:
            self._join(self._opened())
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def _opened(self) -> Scheduler:
        if self._scheduler is None:
            scheduler = self._engine.scheduler
            self._scheduler, self._most = scheduler, policy_for(scheduler.loaded).rows
        return self._scheduler

    def _join(self, scheduler: Scheduler) -> None:
        while self._failure is None and self._submitted < self._most and (ticket := self._next()) is not None:
            assert ticket.row is not None
            ticket.log.reads(len(ticket.row.prompt))
            ticket.tell(ticket.began)
            self._submitted += 1
            scheduler.submit(ticket.row, partial(self._ended, ticket))

    def _next(self) -> _Waiting | None:
        """The next request for the loaded model, if it is its turn and ready."""
        with self.changed:
            gone = self._without_the_gone()
            ticket = self._waiting[0] if self._is_ready() and not self.is_closed else None
            if ticket is not None:
                self._waiting.remove(ticket)
                self._under_way.add(ticket)
            self._begin_tokenizing()
        _end(gone)
        return ticket

    def _is_ready(self) -> bool:
        return bool(self._waiting) and self._waiting[0].row is not None

    def _ended(self, ticket: _Waiting, outcome: Outcome) -> None:
        self._submitted -= 1
        is_of_one = isinstance(outcome, SequenceError)
        if isinstance(outcome, EngineError) and (is_of_one or outcome.code in _OF_ONE):
            event: Event = Failed.of(outcome)
        elif isinstance(outcome, BaseException):
            self._failure = outcome  # nobody else is answered either: `refuse` tells them all
            return
        elif outcome.finish_reason == "cancelled" and not ticket.is_cancelled():
            event = CLOSING
        else:
            event = Finished.of(outcome)
        with self.changed:
            self._under_way.discard(ticket)
        ticket.log.ends()
        ticket.tell(event)

    def free(self) -> None:
        """Ends what is under way, before the model is freed, or another needs the room."""
        with self.changed:
            scheduler, self._scheduler = self._scheduler, None
            for ticket in self._waiting:
                ticket.row = None
            preparing = self._tokenizing
        self._end_under_way(Failed("", ErrorCode.BUSY, "The model was taken away: try again later."))
        if preparing is not None:
            preparing.join()
        if scheduler is not None:
            with passed_over("Requests ended while closing"):  # everybody has been told then
                scheduler.serve(lambda: not self._submitted)
        self._submitted, self._failure = 0, None

    def refuse(self, failure: EngineError, model: Path | None = None) -> None:
        """Nobody who is being answered or waits gets an answer, unless it is for another model than this."""
        self._end_under_way(Failed.of(failure))
        self.refuse_waiting(failure, model)

    def _end_under_way(self, failure: Failed) -> None:
        with self.changed:
            left, self._under_way = self._under_way, set()
        for ticket in left:
            ticket.tell(failure)

    def refuse_waiting(self, failure: EngineError, model: Path | None = None) -> None:
        """Nobody who waits gets an answer, unless it is for another model than this."""
        with self.changed:
            refused = [ticket for ticket in self._waiting if model in (None, ticket.ask.model)]
            for ticket in refused:
                self._waiting.remove(ticket)
        for ticket in refused:
            ticket.tell(Failed.of(failure))

    def _without_the_gone(self) -> list[_Waiting]:
        """Takes out who waits no more: no model is loaded for them, and nobody waits behind them."""
        gone = [ticket for ticket in self._waiting if ticket.is_cancelled()]
        for ticket in gone:
            self._waiting.remove(ticket)
        return gone

    # --- the thread that makes tokens -------------------------------------------------------------

    def _begin_tokenizing(self) -> None:
        """Starts it, with the lock held, if there is something to do for it."""
        if self._tokenizing is None and self._scheduler is not None and self._next_text() is not None:
            work = partial(self._tokenize, self._scheduler)
            self._tokenizing = threading.Thread(target=work, name="serving-prompts", daemon=True)
            self._tokenizing.start()

    def _next_text(self) -> _Waiting | None:
        """The first of those at the head of the queue that is no tokens yet."""
        ours = takewhile(lambda ticket: ticket.ask.model == self._model, self._waiting)
        texts = (ticket for ticket in islice(ours, MOST_READY) if ticket.row is None)
        return next((ticket for ticket in texts if not ticket.is_cancelled()), None)

    def _tokenize(self, scheduler: Scheduler) -> None:
        """Ends once nobody waits whose request is a text, or the model is taken away."""
        while True:
            with self.changed:
                ticket = self._next_text() if scheduler is self._scheduler and not self.is_closed else None
                if ticket is None:
                    self._tokenizing = None
                    self.changed.notify_all()
                    return
            found: Sequence | list[Event] = []
            try:
                found = self._begin(ticket, scheduler)
            except RequestCancelled:
                if scheduler is self._scheduler and not self.is_closed:  # else it waits for the next model, or an end
                    found = [Finished("", "cancelled")]
            except BaseException as error:  # what is wrong with one request harms no other; libraries may panic
                if not isinstance(error, EngineError):
                    log_failure(error, "reading a request")
                found = [Failed.of(as_engine_error(error, "reading a request"))]
            endings = list[Event]()
            with self.changed:
                if isinstance(found, list):
                    if found and ticket in self._waiting:
                        self._waiting.remove(ticket)
                        endings = found
                elif scheduler is self._scheduler:
                    ticket.row = found
                self.changed.notify_all()
            for event in endings:
                ticket.tell(event)
            self._on_waiting()

    def _begin(self, ticket: _Waiting, scheduler: Scheduler) -> Sequence | list[Event]:
        """The request as tokens; or, if nothing else was asked for, all that its client is told."""
        ask, log, loaded, preparation = ticket.ask, ticket.log, scheduler.loaded, scheduler.preparation
        chances = ChanceLog(ask.top_chances) if ask.top_chances is not None else None
        told, said_s = 0, time.monotonic()

        def unwanted() -> bool:
            return ticket.is_cancelled() or ticket.is_over or self.is_closed

        def given_up() -> bool:
            return unwanted() or self._scheduler is not scheduler

        def on_text(text: str, generated_tokens: int) -> None:
            nonlocal told
            named: tuple[NamedChances, ...] = ()
            if chances is not None:
                named = tuple(_named(loaded.tokenizer, each) for each in chances.tokens[told:generated_tokens])
                told = generated_tokens
            log.has_written(generated_tokens)
            ticket.tell(Token("", text, generated_tokens, chances=named))

        def on_read(done: int, total: int) -> None:
            nonlocal said_s
            if done < total and time.monotonic() - said_s >= READ_S:
                said_s = time.monotonic()
                ticket.tell(Progress("", "prefill", done, total))

        request = BatchRequest(
            0,
            ask.messages,
            ask.ids,
            ask.text,
            ask.special,
            ask.tools,
            ask.choice,
            ask.end,
            replace(self._sampling, **{"max_tokens": NO_LIMIT, **ask.sampling}),
            ask.constraint,
            end_ids=frozenset() if ask.ignores_end else None,
            chances=chances,
            chat=self._chat,
            on_progress=on_read,
            on_text=on_text,
            on_reused=log.reuses,
            cancelled=unwanted,
        )
        preparation.check_known(ask.ids)
        if ask.wants == "answer":
            row = preparation.prepare(Sequence(request), given_up)
            ticket.began = Began("", len(row.prompt), row.thinks, loaded.info.family, is_call=row.is_call)
            return row
        prompt = preparation.prompt_of(request, given_up)
        events: list[Event] = [Finished("", "stop", len(prompt), 0, 0)]
        if ask.wants == "prompt":
            raw = tuple(tuple(token_bytes(loaded.tokenizer, token)) for token in prompt)
            known = prompt if loaded.sight is None else loaded.sight.text(prompt)
            text = str(loaded.tokenizer.decode(known, clean_up_tokenization_spaces=False))
            thinks = request.is_chat and preparation.thinks(prompt)
            events.insert(0, Began("", len(prompt), thinks, loaded.info.family, Prompt(text, tuple(prompt), raw)))
        return events


def _named(tokenizer: Any, chances: Chances) -> NamedChances:
    def named(token: int, logprob: float) -> NamedToken:
        return NamedToken(str(tokenizer.decode([token])), logprob, tuple(token_bytes(tokenizer, token)))

    likeliest = tuple(named(token, value) for token, value in chances.likeliest)
    return NamedChances(named(chances.token_id, chances.logprob), likeliest)


def _end(gone: list[_Waiting]) -> None:
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

    def answer(self) -> None:
        """Answers who waits for the loaded model, until nobody is left."""
        scheduler = self._opened()

        def arrive() -> bool:
            self._join(scheduler)
            return self._failure is not None

        while True:
            self.admit()
            while self._submitted:
                scheduler.serve(arrive)
                self.admit()
            with self.changed:
                self.changed.wait_for(lambda: self.is_closed or self._tokenizing is None or self._is_ready())
                if self.is_closed or not self._waiting or self._waiting[0].ask.model != self._model:
                    return

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
