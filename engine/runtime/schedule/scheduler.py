"""Who is answered when: one model, many requests, and files in the background.

Requests of people come first.  They are sequences of one batch, which share steps where the model's layers allow that
(continuous batching), and one that has the model for itself is a batch of one.  Work in the background goes on between
two of their tokens, and takes them along: another row costs a sweep of many little.  It slows them down no more than
they do it, as measured, and does nothing before each of them has its first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Protocol

import torch

from engine.common import clock
from engine.common.errors import EngineError, RequestCancelled
from engine.common.falls import FALLS
from engine.jobs.rows import Check, never
from engine.runtime.batch.policy import BatchPolicy, PlanOutdatedError
from engine.runtime.decode.generation import BatchRequest, GenerationResult, OnEnd, Outcome
from engine.runtime.decode.sequence import Sequence, of_one
from engine.runtime.load.devices import CardLoss
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.background import Background
from engine.runtime.schedule.continuous_batch import ContinuousBatch
from engine.runtime.schedule.executor import batch_for, lane_for
from engine.runtime.schedule.request import Preparation
from engine.runtime.schedule.row import PagedRow
from engine.runtime.schedule.times import Times


class Places(Protocol):
    """What loads the model without its card, and with it again: `Engine`, which stands above this."""

    def without_card(self, *, is_lost: bool) -> LoadedModel: ...

    def may_return(self) -> bool: ...

    def with_card(self) -> LoadedModel: ...


class Scheduler:
    """The requests to one loaded model, and the jobs in its background.  Not for several threads at once.

    Args:
        on_news: called on any thread when a job wants `serve` to go on with it.
        places: loads the model without its card when this no longer responds, or others have taken its memory, and
            again with it.  Requests go on there from what they have been answered; rows of jobs under way begin again.
        on_note: told in a sentence that a device has less memory than it had, and by an empty one that this is over.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        on_news: Callable[[], None] = lambda: None,
        places: Places | None = None,
        on_note: Callable[[str], None] = lambda _note: None,
    ) -> None:
        self.on_news, self._places, self._on_note = on_news, places, on_note
        self._waiting: deque[Sequence] = deque()
        self._admitted: dict[int, Sequence] = {}
        """Those that have a place, by their numbers."""
        self._numbers = 0
        self._rests = True
        self._times = Times()
        self._is_beside = False
        """Whether somebody else computes with the model between two turns."""
        self.background = Background(self)
        self._use(loaded)

    def _use(self, loaded: LoadedModel) -> None:
        self.loaded, self._note = loaded, ""
        self.preparation = Preparation(loaded)
        self._kept = loaded.kept
        self._batch: ContinuousBatch | None = None
        with suppress(torch.OutOfMemoryError):  # of a card: the first request says what is wrong, or there is again
            self._ready()  # now, and not before somebody's first token

    def _ready(self) -> ContinuousBatch:
        if self._batch is None:
            self._batch = batch_for(self.loaded, self._kept)
        self._batch.is_short = self._are_short
        return self._batch

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._admitted)

    def _asked(self) -> list[Sequence]:
        return [*self._admitted.values(), *self._waiting]

    @property
    def kv_tokens(self) -> int:
        return self._batch.kv_tokens if self._batch is not None else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes that the held context takes, that of jobs' rows as well.  From any thread."""
        batch = self._batch
        own = batch.held_bytes if batch is not None else 0
        return own + self.background.held_bytes(batch)

    def submit(
        self, request: BatchRequest | Sequence, on_end: OnEnd, on_begin: Callable[[], None] = lambda: None
    ) -> None:
        """Takes a request; it is answered in `serve` and `share`.

        Args:
            request: prepared already if that took another thread's time.
            on_end: told how it ended, once.
            on_begin: told before its prompt is read, if nobody else shares its steps.
        """
        if not self.is_busy:
            self._times.start()
            self._rest(False)
        self._numbers += 1
        asked = Sequence(request) if isinstance(request, BatchRequest) else request
        asked.on_end, asked.on_begin, asked.on_token, asked.begun_s = on_end, on_begin, self._wrote, clock.now()
        asked.request = replace(asked.request, row=self._numbers)
        self._sees(asked)  # it was perhaps not prepared for this model
        self._waiting.append(asked)

    def _sees(self, asked: Sequence) -> None:
        """From now on this model looks at its pictures."""
        if asked.layout is not None and self.loaded.sight:
            asked.layout = asked.layout.seen_by(self.loaded.sight)

    def answer(self, request: BatchRequest) -> GenerationResult:
        """Answers a request from its beginning to its end, and goes on with others meanwhile.

        Raises:
            EngineError: what is wrong with it; see `Preparation.prepare`.
        """
        ended: list[Outcome] = []
        self.submit(request, ended.append)
        self.serve(lambda: bool(ended))
        if isinstance(ended[0], BaseException):
            raise ended[0]
        return ended[0]

    def serve(self, until: Check = never) -> None:
        """Answers requests, and goes on with jobs, until there is nothing left to do, or `until()` comes true, which is
        asked after each token and between layers."""
        while self.is_busy or self.background.is_busy:
            if not self.background.is_busy:
                self._times.rest()
                self._turn(lambda: until() or self.background.is_busy)
                self._times.leave()
            elif self.is_due():
                self._share(until)
            else:
                self.background.go_on(lambda: until() or self.is_due())
            if until():
                break
        self._rest(not self.is_busy)
        self._times.leave()

    def is_due(self) -> bool:
        """Whether what goes on in the background is to let requests have their turn now."""
        if not self.is_busy:
            return False
        # With them in its sweep it goes on to their next token.
        return self._awaited() or (self._times.is_due() and not any(lane.has_piggybacked for lane in self._beside))

    def share(self, until: Check = never) -> None:
        """Called between two steps of background work: answers for as long as that work has taken."""
        self._is_beside = True
        try:
            self._share(until)
        finally:
            self._is_beside = False

    def _share(self, until: Check) -> None:
        self._times.enter()
        awaited = self._awaited()

        def enough() -> bool:
            # Nothing is charged to those who wait for their first token.
            nonlocal awaited
            awaited, was_awaited = self._awaited(), awaited
            self._times.note(counts=not was_awaited)
            return until() or not (awaited or self._times.owes)

        while self.is_busy:
            self._turn(enough)
            if enough():
                break
        self._rest(not self.is_busy)
        self._times.leave()

    def close(self) -> None:
        """Frees the context, and all that shares it.  Requests that are under way never end; jobs do, in a sentence."""
        self.background.close()
        self.forget()

    def forget(self) -> None:
        """Frees the context of requests.  Those that are under way never end."""
        for lane in self._beside:
            lane.drop_piggybacked()
        self._waiting.clear()
        self._admitted.clear()
        batch = self._batch
        with suppress(EngineError):  # a failed device raises again on its next use
            if batch is not None and batch.below:
                batch.close()  # jobs go on in the same pages
            elif batch is not None:
                self._batch = None
                batch.free()
        self._rest(True)

    def _rest(self, rests: bool) -> None:
        """Whether nobody is answered now: what is kept is written then."""
        if self._kept is not None and rests is not self._rests:
            self._rests = rests
            self._kept.answering(-1 if rests else 1)

    def _awaited(self) -> bool:
        return any(not asked.told for asked in self._asked())

    def _turn(self, until: Check) -> None:
        """A token for everybody, at least; more for one who has the model alone, until `until()`."""
        self.return_to_card()
        try:
            with torch.inference_mode():  # all of it: what is made in this mode may be written to only in this mode
                self._has_news()
                devices = self.loaded.devices
                note = " ".join(filter(None, (devices.note if devices is not None else "", FALLS.note)))
                if note != self._note:
                    self._note = note
                    self._on_note(note)
                for lane in self._beside:
                    lane.drop_piggybacked()
                for asked in list(self._waiting):
                    self._admit(asked)
                if self._admitted:
                    self._sweep(lambda: bool(self._waiting) or self._has_news() or until())
        except BaseException as error:
            loss, places = self._loss(error), self._places
            if loss is None or places is None:
                asked_for = self._asked()
                try:
                    self.forget()
                finally:
                    for each in asked_for:
                        each.ended(error)
                raise
            self._move(lambda: places.without_card(is_lost=loss is CardLoss.CARD))

    def _has_news(self) -> bool:
        """Whether other programs have taken memory of the devices, or left it."""
        return self.loaded.devices is not None and self.loaded.devices.have_news(monotonic())

    def _loss(self, error: BaseException) -> CardLoss | None:
        """What this error says of the model's cards, if requests can go on without them."""
        devices = self.loaded.devices
        goes_on = self._places is not None and not self._is_beside
        return devices.loss(error) if goes_on and devices is not None else None

    def _are_short(self) -> bool:
        devices = self.loaded.devices
        goes_on = self._places is not None and not self._is_beside
        return goes_on and devices is not None and devices.are_short(monotonic())

    def return_to_card(self) -> None:
        """Before a request, or a job, while nothing is under way: loads the model on the card that it left, if that is
        of use again."""
        if self._places is None or self._is_beside or self._admitted:
            return
        if self.background.has_jobs or any(asked.ids for asked in self._waiting):
            return
        if self._places.may_return():
            self._move(self._places.with_card)

    def moved(self, error: Exception, loaded: LoadedModel) -> LoadedModel | None:
        """The model that a job's rows go on with after this error; None if it has other causes than a lost card, or an
        outdated plan.

        Args:
            loaded: what answered them so far.
        """
        if self.loaded is loaded and not isinstance(error, PlanOutdatedError):
            loss, places = self._loss(error), self._places
            if loss is None or places is None:
                return None
            with torch.inference_mode(False):  # which jobs are answered in, and weights must not be made in
                self._move(lambda: places.without_card(is_lost=loss is CardLoss.CARD))
        return self.loaded

    def _move(self, load: Callable[[], LoadedModel]) -> None:
        carried = self._asked()
        self.background.leave()
        self.forget()
        try:
            self._use(load())
        except BaseException as error:
            self.background.close()
            for asked in carried:
                asked.ended(error)
            raise
        for asked in carried:
            self._sees(asked)
        self._waiting.extend(carried)
        self._rest(not carried)

    def _admit(self, asked: Sequence) -> None:
        """Gives a request its place, if there is one; what is wrong with it harms no other."""
        outcome: Outcome
        try:
            if not asked.prompt:
                self.preparation.prepare(asked, asked.request.cancelled)
            if asked.request.cancelled():
                raise RequestCancelled
            batch = self._ready()
            if self._admitted:
                batch.model.packs()  # found out now that there is company
            elif not asked.ids:
                with of_one():
                    asked.on_begin()
            batch.submit(asked, self._answered)
            self._admitted[asked.request.row] = asked
            self._waiting.remove(asked)
            return
        except RequestCancelled:
            outcome = asked.result() if asked.ids else GenerationResult()  # begun on a card that was lost
        except Exception as error:
            if self._loss(error) is not None:
                raise
            outcome = error
        self._waiting.remove(asked)
        asked.ended(outcome)

    def job_lane(self, policy: BatchPolicy) -> ContinuousBatch:
        """Where jobs are answered: over the pages of requests, if these lie where the jobs' are wanted."""
        lane = lane_for(self.loaded, policy, self._ready())
        if self._batch is not None and lane.model is self._batch.model:
            lane.piggybacked = self._piggybacked
        return lane

    @property
    def _beside(self) -> list[ContinuousBatch]:
        """Where jobs are answered in the pages of requests."""
        return self._batch.below if self._batch is not None else []

    def _piggybacked(self) -> list[PagedRow]:
        """Rows of those who are writing, for a sweep of jobs."""
        if self._batch is None or not self.is_busy or self._awaited() or not self.background.is_in_one_lane:
            return []
        return self._batch.able_to_write()

    def _wrote(self) -> None:
        self._times.wrote(1 / max(1, len(self._admitted)))

    def _sweep(self, until: Check) -> None:
        """A step of those who are answered, or more until `until()`."""
        batch = self._ready()
        try:
            batch.go_on(until, by_layer=False)
        except Exception as error:
            if self._loss(error) is not None:
                raise
            for number, told in batch.give_up(error):
                if (asked := self._admitted.pop(number, None)) is not None:
                    asked.ended(told)

    def _answered(self, answer: GenerationResult) -> None:
        asked = self._admitted.pop(answer.row)
        if self.loaded.foresight is not None:
            self.loaded.foresight.learn_while_idle()
        asked.ended(answer if answer.error is None else answer.error)
