"""Who is answered when: one model, many requests, and files in the background.

Requests of people come first.  They are sequences over pages that share steps (continuous batching), and one that has
the model for itself is a batch of one.  What pages cannot hold has a cache of its own, and takes turns with the others:
the first request of a model on a card, from disk, or whose layers keep what pages do not; encoder-decoders.  Work in
the background goes on between two of their tokens, and takes them along: another row costs a sweep of many little.  It
slows them down no more than they do it, as measured, and does nothing before each of them has its first token.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Protocol

import torch

from engine.common import clock
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.falls import FALLS
from engine.common.footprint import pages_for
from engine.devices.failures import is_out_of_memory
from engine.jobs.rows import Check, never
from engine.planner.schedules import HYBRID
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy, PlanOutdatedError, policy_for, why_not_packed
from engine.runtime.batch.session_rows import SessionRows
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.paged_steps import PagedSteps
from engine.runtime.decode.sequence import SequenceError, of_one
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.background import Background
from engine.runtime.schedule.continuous_batch import ContinuousBatch
from engine.runtime.schedule.executor import lane_for
from engine.runtime.schedule.request import (
    Asked,
    BatchRequest,
    OnEnd,
    Outcome,
    Preparation,
)
from engine.runtime.schedule.row import PagedRow
from engine.runtime.schedule.times import Times

_log = logging.getLogger(__name__)

_MOST_SESSIONS = 8
"""Requests with caches of their own that take turns."""
AHEAD_TOKENS = 256
"""Tokens of an answer for which a request reserves memory at a time: few answers are as long as they may be."""


class Places(Protocol):
    """Where else a model can run."""

    def without_card(self, *, is_lost: bool) -> LoadedModel:
        """Frees the model, and loads it without its card.

        Args:
            is_lost: whether the card does not respond; otherwise others have taken its memory.
        """

    def may_return(self) -> bool:
        """Whether the card that the model left is of use again; asked before a request while nothing is under way."""

    def with_card(self) -> LoadedModel:
        """Frees the model, and loads it where it was at first, or once more without its card."""


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
        self._on_news, self._places, self._on_note = on_news, places, on_note
        self._is_lost = False
        self._waiting: deque[Asked] = deque()
        self._admitted: dict[int, Asked] = {}
        """Those that have a place, by their numbers."""
        self._numbers = 0
        self._rests = True
        self._times = Times()
        self._is_beside = False
        """Whether somebody else computes with the model between two turns."""
        self.background = Background(loaded, self._job_lane, self._on_news)
        self._use(loaded)

    def _use(self, loaded: LoadedModel) -> None:
        """Answers with this model from now on."""
        self.loaded, self._note = loaded, ""
        self._preparation = Preparation(loaded)
        self._kept = loaded.kept
        # Keys and values of several would take a card's memory from its experts.
        policy = replace(policy_for(loaded), rows=1 if loaded.devices is not None else _MOST_SESSIONS)
        rows = SessionRows(loaded, policy, kept=self._kept)
        self._sessions = ContinuousBatch(rows, replace(policy, ahead=AHEAD_TOKENS), exact=True)
        """Where requests have caches of their own."""
        self._sessions.is_short = self._are_short
        self._together: ContinuousBatch | None = None
        self._are_exact = PagedSteps.are_likely(loaded)
        self._apart = why_not_packed(loaded.model)
        """Why no two of them share a sweep, as the end of a sentence; empty if they do."""
        if self._are_exact:  # now, and not before somebody's first token
            with suppress(torch.OutOfMemoryError):  # of a card: the first request says what is wrong, or there is again
                self._shared()
        else:
            rows.prepare()

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or are being answered."""
        return bool(self._waiting or self._admitted)

    def _asked(self) -> list[Asked]:
        """All requests that are being answered, or wait."""
        return [*self._admitted.values(), *self._waiting]

    @property
    def note(self) -> str:
        """Why requests are answered one by one, for the user; empty if they share sweeps."""
        return f"Requests are answered one by one: {self._apart}." if self._apart else ""

    @property
    def kv_tokens(self) -> int:
        """Tokens of context now held."""
        return sum(batch.kv_tokens for batch in self._batches())

    @property
    def kv_bytes(self) -> int:
        """Bytes that the held context takes."""
        return sum(batch.held_bytes for batch in self._batches())

    def _batches(self) -> list[ContinuousBatch]:
        return [self._sessions, self._together] if self._together is not None else [self._sessions]

    def submit(self, request: BatchRequest, on_end: OnEnd, on_begin: Callable[[], None] = lambda: None) -> None:
        """Takes a request; it is answered in `serve` and `share`.

        Args:
            on_end: told how it ended, once.
            on_begin: told before its prompt is read, if nobody else shares its steps.
        """
        if not self.is_busy:
            self._times.start()
            self._rest(False)
        self._numbers += 1
        asked = Asked(replace(request, row=self._numbers), _told(on_end), on_begin, clock.now(), self._wrote)
        self._waiting.append(asked)

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
        return self._awaited() or (self._times.is_due() and not any(lane.has_piggybacked for lane in self._beside()))

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
        for lane in self._beside():
            lane.drop_piggybacked()
        self._waiting.clear()
        self._admitted.clear()
        together = self._together
        with suppress(EngineError):  # a failed device raises again on its next use
            if together is not None and together.below:
                together.close()  # jobs go on in the same pages
            elif together is not None:
                self._together = None
                together.free()
        with suppress(EngineError):
            self._sessions.free()
        self._rest(True)

    def _rest(self, rests: bool) -> None:
        """Whether nobody is answered now: what is kept is written then."""
        if self._kept is not None and rests is not self._rests:
            self._rests = rests
            self._kept.answering(-1 if rests else 1)

    def _awaited(self) -> bool:
        """Whether anybody waits for a first token."""
        return any(not asked.tokens for asked in self._asked())

    def _turn(self, until: Check) -> None:
        """A token for everybody, at least; more for one who has the model alone, until `until()`."""
        self.return_to_card()
        try:
            self._advance(until)
        except BaseException as error:
            if not self._has_lost_card(error):
                asked = self._asked()
                try:
                    self.forget()
                finally:
                    for each in asked:
                        each.end(error)
                raise
            places = self._places
            assert places is not None
            self._move(lambda: places.without_card(is_lost=self._is_lost))

    def _has_news(self) -> bool:
        """Whether other programs have taken memory of the devices, or left it."""
        return self.loaded.devices is not None and self.loaded.devices.have_news(monotonic())

    def _heed(self) -> None:
        devices = self.loaded.devices
        if self._has_news():
            assert devices is not None
            devices.heed()
        note = " ".join(filter(None, (devices.note if devices is not None else "", FALLS.note)))
        if note != self._note:
            self._note = note
            self._on_note(note)

    @torch.inference_mode()  # all of it: what is made in this mode may be written to only in this mode
    def _advance(self, until: Check) -> None:
        self._heed()
        for lane in self._beside():
            lane.drop_piggybacked()
        self._admit()
        batches = [batch for batch in self._batches() if self._has_any(batch)]
        for batch in batches:
            self._sweep(batch, lambda: len(batches) > 1 or bool(self._waiting) or self._has_news() or until())

    def _has_any(self, batch: ContinuousBatch) -> bool:
        """Whether any request has its place there."""
        return any(asked.place is batch for asked in self._admitted.values())

    def _has_lost_card(self, error: BaseException) -> bool:
        """Whether a card of the model has stopped responding, or others have taken what it needs of its memory, and
        requests can go on without it."""
        devices = self.loaded.devices
        if self._places is None or self._is_beside or devices is None or not isinstance(error, Exception):
            return False
        if isinstance(error, RequestCancelled):
            return False
        code = error.code if isinstance(error, EngineError) else ErrorCode.INTERNAL
        if is_out_of_memory(error) or code is ErrorCode.NOT_ENOUGH_MEMORY:
            self._is_lost = False
            return devices.are_short(monotonic())
        self._is_lost = True
        if code not in (ErrorCode.INTERNAL, ErrorCode.DEVICE_UNAVAILABLE):
            return False
        return not all(device.responds() for device in devices.devices)

    def _are_short(self) -> bool:
        devices = self.loaded.devices
        goes_on = self._places is not None and not self._is_beside
        return goes_on and devices is not None and devices.are_short(monotonic())

    def return_to_card(self) -> None:
        """Before a request, or a job, while nothing is under way: loads the model on the card that it left, if that is
        of use again."""
        if self._places is None or self._is_beside or self._admitted:
            return
        if self.background.has_jobs or any(asked.begun is not None for asked in self._waiting):
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
            places = self._places
            if places is None or not self._has_lost_card(error):
                return None
            with torch.inference_mode(False):  # which jobs are answered in, and weights must not be made in
                self._move(lambda: places.without_card(is_lost=self._is_lost))
        return self.loaded

    def _move(self, load: Callable[[], LoadedModel]) -> None:
        """Goes on with the model as `load` loads it."""
        carried = self._carried()
        self.background.leave()
        self.forget()
        try:
            self._use(load())
            self.background.use(self.loaded)
        except BaseException as error:
            self.background.close()
            for asked in carried:
                asked.end(error)
            raise
        for asked in carried:
            if asked.begun is not None:
                asked.begun.move(self.loaded.device)
            if (prepared := asked.prepared) is not None and prepared.layout is not None and self.loaded.sight:
                asked.prepared = replace(prepared, layout=prepared.layout.seen_by(self.loaded.sight))
        self._waiting.extend(carried)
        self._rest(not carried)

    def _carried(self) -> list[Asked]:
        """Requests that are under way, each with its answer so far."""
        rows = [row for batch in self._batches() for row in batch.in_progress]
        answers = {row.request.row: row.sequence for row in rows if row.sequence.ids}
        carried = self._asked()
        for asked in carried:
            asked.begun = answers.get(asked.request.row, asked.begun)
        return carried

    def _admit(self) -> None:
        """Finds a place for those who wait, as far as there is one."""
        for asked in list(self._waiting):
            outcome: Outcome
            try:
                self._place(asked)
                self._waiting.remove(asked)
                continue
            except RequestCancelled:
                outcome = GenerationResult()
            except Exception as error:  # what is wrong with one request harms no other
                if self._has_lost_card(error):
                    raise
                outcome = error
            self._waiting.remove(asked)
            asked.end(outcome)

    def _place(self, asked: Asked) -> None:
        """Gives a request its place.

        Raises:
            RequestCancelled: nobody wants the answer any more.
        """
        request = asked.request
        if asked.prepared is None:
            prepared = self._preparation.prepare(replace(request, on_text=asked.on_text), request.cancelled)
            asked.prepared = replace(prepared, begun_s=asked.begun_s)
        if asked.prepared.request.cancelled():
            raise RequestCancelled
        has_beams = request.sampling.beams > 1
        # On a card no answer can be the same another time.
        is_read_alone = request.repeats and self.loaded.device.type == "cpu" and self.loaded.devices is None
        packs = not (has_beams or asked.begun is not None or is_read_alone) and self._has_any(self._sessions)
        place, together = self._sessions, self._shared() if self._are_exact or packs else None
        if together is not None and (packs or together.exact is not None) and together.has_room_for(asked.prepared):
            place = together
        if asked.begun is None and place.exact is not None and not self._has_any(place):
            with of_one():
                asked.on_begin()
        place.submit(asked.prepared, self._answered, asked.begun)
        asked.place, self._admitted[request.row] = place, asked

    def _shared(self) -> ContinuousBatch | None:
        """Where requests share sweeps; None if they cannot."""
        if self._together is None and not self._apart:
            policy = replace(policy_for(self.loaded), ahead=AHEAD_TOKENS)
            try:
                self._together = self._on_device(policy) or self._over_pages(policy)
            except LookupError as error:
                self._apart = str(error)
        if self._together is not None:
            sizes = self._together.model.sizes
            of_page = sizes.page + sizes.window
            self._together.pool.elsewhere = lambda: pages_for(self._sessions.kv_tokens) * of_page
            self._together.make_room = self._sessions.model.lighten
            self._together.is_short = self._are_short
        return self._together

    def _on_device(self, policy: BatchPolicy) -> ContinuousBatch | None:
        """Over pages of the model's devices; None if these do not hold what its layers keep."""
        if not self._are_exact or self.loaded.devices is None:
            return None
        with suppress(LookupError):
            found = self._over_pages(replace(policy, on_device=True, schedule=HYBRID))
            if found.exact is not None:
                return found
            found.free()
        return None

    def _over_pages(self, policy: BatchPolicy) -> ContinuousBatch:
        model = PackedModel(self.loaded, policy)
        return ContinuousBatch(model, policy, kept=self._kept, keeps=True, exact=True)

    def _job_lane(self, policy: BatchPolicy) -> tuple[ContinuousBatch, str]:
        """Where jobs are answered: over the pages of requests.

        On a card each has its own: sweeps of both would be under way in the same memory at once.
        """
        together = self._shared() if self.loaded.devices is None else None
        if together is None or not isinstance(together.model, PackedModel):
            return lane_for(self.loaded, policy)
        is_alike = not policy.window and policy.kv_type is self.loaded.kv_type
        model = together.model if is_alike else PackedModel(self.loaded, policy)
        lane = ContinuousBatch(model, policy, above=together, kept=self._kept)
        if is_alike:
            lane.piggybacked = self._piggybacked
        return lane, ""

    def _beside(self) -> list[ContinuousBatch]:
        """Where jobs are answered in the pages of requests."""
        return self._together.below if self._together is not None else []

    def _piggybacked(self) -> list[PagedRow]:
        """Rows of those who are writing, for a sweep of jobs."""
        if self._together is None or not self.is_busy or self._awaited() or not self.background.is_in_one_lane:
            return []
        return self._together.able_to_write()

    def _wrote(self) -> None:
        self._times.wrote(1 / max(1, len(self._admitted)))

    def _sweep(self, batch: ContinuousBatch, until: Check) -> None:
        """A step of those who have their places there, or more until `until()`."""
        try:
            batch.sweep(until)
        except Exception as error:
            if self._has_lost_card(error):
                raise
            for number in batch.give_up():
                if (asked := self._admitted.pop(number, None)) is not None:
                    asked.end(error)

    def _answered(self, answer: GenerationResult) -> None:
        asked = self._admitted.pop(answer.row)
        if self.loaded.foresight is not None:
            self.loaded.foresight.learn_while_idle()
        asked.end(asked.timed(answer) if answer.error is None else answer.error)


def _told(on_end: OnEnd) -> OnEnd:
    """The same, where it harms nobody else if there is nobody who can be told."""

    def told(outcome: Outcome) -> None:
        try:
            with of_one():
                on_end(outcome)
        except SequenceError as error:
            _log.warning("the end of a request could not be told: %s", error.code)

    return told
