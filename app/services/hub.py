"""What the hub has, and how it would run here: asked off the GUI thread; the latest question wins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal

from app.services.background import LatestTask
from engine.common.config import EngineConfig, KvPrecision
from engine.common.errors import CancelCheck, EngineError

if TYPE_CHECKING:
    from engine.checkpoint.hub import Candidate, Found
    from engine.checkpoint.model_directories import Room
    from engine.checkpoint.model_shape import ModelShape
    from engine.planner.plan_parts import Limits
    from engine.tuning.fit import FitCard, Recommendation
    from engine.tuning.machine_state import MachineLook

_JUDGE_MS = 60
_OTHER_ROOM_BYTES = 10**9
"""So much more or less room on the disk may change what is recommended."""
FRESH_MS = 30_000
"""A look at the machine, and a plan for each entry of the catalogue, take a second or more of a processor."""

Shaped = tuple["Candidate", "ModelShape | None"]
"""A candidate and what it is; None if it cannot run."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no answer.

    Attributes:
        sentence: for people.
        is_network: whether the hub could not be reached, or did not answer: nothing is wrong with the question.
        needs_token: whether an access token, or another, would help; `link` is the page where its terms are accepted.
    """

    sentence: str
    is_network: bool = False
    needs_token: bool = False
    link: str = ""


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    text: str
    results: tuple[Found, ...] = ()
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class RepositoryAnswer:
    """What a repository holds, as far as it has been read.

    Attributes:
        reference: as asked for.
        shaped: the candidates that were read.
        total: how many candidates there are.
    """

    reference: str
    shaped: tuple[Shaped, ...] = ()
    total: int = 0
    trouble: Trouble | None = None

    @property
    def is_whole(self) -> bool:
        return len(self.shaped) >= self.total

    @property
    def context_tokens(self) -> int:
        return max((shape.context_tokens for _candidate, shape in self.shaped if shape is not None), default=0)


class Hub(QObject):
    """Signals:
    found(SearchAnswer); opened(RepositoryAnswer), again whenever another candidate was read.
    judged(FitCard); looked: `look` and `recommendations` are new.
    """

    found = Signal(object)
    opened = Signal(object)
    judged = Signal(object)
    looked = Signal()
    _read = Signal(object, object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._searching, self._opening = _Question(self), _Question(self)
        self._judging = LatestTask(self, after_ms=_JUDGE_MS)
        self._looking = LatestTask(self)
        self._look: MachineLook | None = None
        self.offers: tuple[Recommendation, ...] = ()
        self._opened_last: object = None
        self._device = ""
        self._download_free: int | None = None
        self._fresh = QTimer(self, singleShot=True, interval=FRESH_MS)
        self._read.connect(self._on_read)

    @property
    def look(self) -> MachineLook | None:
        return self._look

    @property
    def recommendations(self) -> tuple[Recommendation, ...]:
        return tuple(one for role in ("fast", "balanced", "best") for one in self.offers if one.role == role)

    def look_at_machine(self, device: str = "auto") -> None:
        """Looks at the machine, and what of the catalogue suits it, unless it has just done so; `looked` follows.

        Args:
            device: `EngineConfig.device`.
        """
        if self._fresh.isActive() and device == self._device:
            return
        self._device = device
        self._looking.ask(partial(catalogue_here, device, self._download_free), self._on_looked)

    def look_again(self, device: str = "auto") -> None:
        """As `look_at_machine`, also if it has just done so: the catalogue is another."""
        self._fresh.stop()
        self.look_at_machine(device)

    def download_to(self, room: Room) -> None:
        """Where downloads go from now on; judges by it, and looks again if that may change what is recommended."""
        before, now = self._download_free, (room.free or 0) if room.is_elsewhere else None
        self._download_free = now
        is_other = before != now if before is None or now is None else abs(before - now) > _OTHER_ROOM_BYTES
        if self._device and is_other:
            self.look_again(self._device)

    def search(self, text: str) -> None:
        self._searching.ask(
            lambda cancelled: SearchAnswer(text, search_hub(text, cancelled)),
            self.found.emit,
            lambda trouble: self.found.emit(SearchAnswer(text, trouble=trouble)),
        )

    def open(self, reference: str) -> None:
        token = object()
        self._opened_last = token
        self._opening.ask(
            lambda cancelled: read_candidates(reference, cancelled, lambda so_far: self._read.emit(token, so_far)),
            self.opened.emit,
            lambda trouble: self.opened.emit(RepositoryAnswer(reference, trouble=trouble)),
        )

    def judge(self, shaped: Sequence[Shaped], limits: Limits) -> None:
        """How these would run on this machine; `judged` follows, for the latest question only."""
        if self._look is not None:
            look = replace(self._look, download_free=self._download_free)
            self._judging.ask(lambda: judge_candidates(tuple(shaped), look, limits), self.judged.emit)

    def limits(self, kv_precision: KvPrecision = "auto") -> Limits | None:
        look = self._look
        return look.limits(EngineConfig("", kv_precision=kv_precision)) if look is not None else None

    def close(self) -> None:
        for task in (self._searching, self._opening, self._judging, self._looking):
            task.close()

    def _on_read(self, token: object, so_far: RepositoryAnswer) -> None:
        if token is self._opened_last:
            self.opened.emit(so_far)

    def _on_looked(self, found: tuple[MachineLook, tuple[Recommendation, ...]]) -> None:
        self._look, self.offers = found
        self._fresh.start()
        self.looked.emit()


class _Question(QObject):
    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._task = LatestTask(self)
        self._cancelled = threading.Event()

    def ask(
        self,
        function: Callable[[CancelCheck], object],
        done: Callable[[object], object],
        failed: Callable[[Trouble], object],
    ) -> None:
        self._cancelled.set()
        self._cancelled = cancelled = threading.Event()
        self._task.ask(lambda: function(cancelled.is_set), done, lambda error: failed(_trouble(error)))

    def close(self) -> None:
        self._cancelled.set()
        self._task.close()


def _trouble(error: Exception) -> Trouble:
    from engine.checkpoint.hub.http import HubError, HubReason

    if not isinstance(error, EngineError):
        raise error
    if not isinstance(error, HubError):
        return Trouble(error.message)
    needs_token = error.reason in (HubReason.NEEDS_LICENCE, HubReason.WRONG_TOKEN)
    is_network = error.reason in (HubReason.OFFLINE, HubReason.TOO_MANY)
    return Trouble(error.message, is_network, needs_token, error.link)


# --- what runs in the background; the engine's modules are imported late, as they take a while to load ---------------


def search_hub(text: str, cancelled: CancelCheck) -> tuple[Found, ...]:
    from engine.checkpoint.hub import search

    return search(text, cancelled=cancelled)


def read_candidates(
    reference: str, cancelled: CancelCheck, say: Callable[[RepositoryAnswer], object]
) -> RepositoryAnswer:
    from engine.checkpoint.hub import read_repository
    from engine.checkpoint.hub.contents import candidates

    found = candidates(read_repository(reference, cancelled=cancelled), cancelled=cancelled)
    shaped: list[Shaped] = []
    for candidate in found:
        shaped.append(_shaped(candidate, cancelled))
        if len(shaped) < len(found):
            say(RepositoryAnswer(reference, tuple(shaped), len(found)))
    return RepositoryAnswer(reference, tuple(shaped), len(found))


def _shaped(candidate: Candidate, cancelled: CancelCheck) -> Shaped:
    """With what it is; a candidate whose files are damaged or unknown does not keep the others from being judged."""
    from engine.checkpoint.hub.contents import candidate_shape
    from engine.checkpoint.hub.http import HubError

    if candidate.problem:
        return candidate, None
    try:
        return candidate, candidate_shape(candidate, cancelled=cancelled)
    except HubError:
        raise
    except EngineError as error:
        return replace(candidate, problem=error.message), None


def judge_candidates(shaped: tuple[Shaped, ...], look: MachineLook, limits: Limits) -> FitCard:
    from engine.tuning.fit import fit_card

    return fit_card(shaped, look, limits)


def catalogue_here(device: str, download_free: int | None = None) -> tuple[MachineLook, tuple[Recommendation, ...]]:
    from engine.checkpoint.catalogue import read_catalogue
    from engine.tuning.fit import offers
    from engine.tuning.machine_state import look_at_machine

    look = replace(look_at_machine(device), download_free=download_free)
    return look, offers(read_catalogue(), look, look.limits(EngineConfig("")))
