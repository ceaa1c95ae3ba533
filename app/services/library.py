"""The models on this PC: listed, worked on off the GUI thread (verify, move, import, remove), and their speeds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask, sentence_of, timer
from app.services.settings import Settings
from engine.common.errors import EngineError, RequestCancelled
from engine.common.settings import kept_settings

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry, Listing


SOON_MS = 50
"""What shows speeds waits so long for further ones: those that are known come all at once."""


class ModelSpeeds(QObject):
    """Predicts each model once; what was timed here by Tune is taken as it is.

    Signals: `found(str, float, bool)`: a checkpoint's path, decode tokens per second, whether they were measured.
    """

    found = Signal(str, float, bool)

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self._task = LatestTask(self)
        self._stopping = threading.Event()
        self._known: dict[str, tuple[float, bool]] = {}
        self.found.connect(self._keep)
        settings.changed.connect(self._on_setting)

    def ask(self, paths: Iterable[str]) -> None:
        """Emits the speeds of these models as they become known; nothing for those that cannot be planned."""
        wanted = list(paths)
        for path in wanted:
            if path in self._known:
                self.found.emit(path, *self._known[path])
        missing = [path for path in wanted if path not in self._known]
        if missing:
            self._stopping.set()  # an older request ends after the model that it is at
            self._stopping = stopping = threading.Event()
            self._task.ask(lambda: self._predict(missing, stopping))

    def close(self) -> None:
        self._stopping.set()
        self._task.close()

    def _on_setting(self, key: str) -> None:
        setting = kept_settings().get(key)
        if setting is not None and setting.applies == "load":
            self._known.clear()

    def _keep(self, path: str, tokens_per_s: float, is_measured: bool) -> None:
        self._known[path] = (tokens_per_s, is_measured)

    def _predict(self, paths: list[str], stopping: threading.Event) -> None:
        from app.services.planning import PlanQuestion, answer  # imports the planner, too slow for start-up
        from engine.tuning.machine_state import look_at_machine

        look = look_at_machine(self._settings.engine("").device)
        for path in paths:
            if stopping.is_set():
                return
            plan = answer(PlanQuestion(look, self._settings.engine(path))).plan
            if plan is not None:
                self.found.emit(path, plan.speed.decode_tokens_per_s, bool(plan.speed.timed_at))


PROGRESS_MS = 200

WorkKind = Literal["verify", "move", "export", "import", "remove", "converted"]
OnProgress = Callable[[int, int], None]
Doing = Callable[[OnProgress, Callable[[], bool]], object]
"""Runs in the background; it gets a function for (done, total) bytes, and one that says whether it was cancelled."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work on one model.

    Attributes:
        name: of the model, or of the file or folder that is imported.
        done, total: bytes; a total of 0 is unknown.
        result: what the work returned; None while it runs.
        problem: a sentence if it failed; empty while it runs, if it went well, or if it was cancelled.
        was_cancelled: by the user, or because the window closed.
    """

    kind: WorkKind
    name: str
    done: int = 0
    total: int = 0
    result: object = None
    problem: str = ""
    was_cancelled: bool = False


class Library(QObject):
    """One of them for the window; work is done in the order in which it is asked for.

    Signals:
        listed: `entries` and `problems` are new.
        work_changed: `work` is another, or has got on.
        ended(Work): work has come to its end.
    """

    listed = Signal()
    work_changed = Signal()
    ended = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._entries: tuple[LibraryEntry, ...] | None = None
        self.problems: tuple[str, ...] = ()
        self._closing = threading.Event()
        self._listing = LatestTask(self)
        self._working = LatestTask(self)  # given its next function only when it is idle
        self._waiting: deque[tuple[Work, Doing]] = deque()
        self.work: Work | None = None
        self._so_far = (0, 0)
        self._cancelled = threading.Event()
        self._timer = timer(self, self._on_timer, PROGRESS_MS)

    @property
    def entries(self) -> tuple[LibraryEntry, ...]:
        """The models as last listed: our own first, then those of other programs."""
        return self._entries or ()

    @property
    def was_listed(self) -> bool:
        """Whether `entries` says anything yet."""
        return self._entries is not None

    def entry(self, name: str) -> LibraryEntry | None:
        return next((one for one in self.entries if name in (one.name, str(one.path))), None)

    def entry_from(self, reference: str) -> LibraryEntry | None:
        """The model that was downloaded from there: `ORG/NAME:Q4_K_M`."""
        return next((one for one in self.entries if one.source.startswith(f"{reference}@")), None)

    def look(self) -> None:
        self._listing.ask(lambda: _look_around(self._closing.is_set), self._on_listed, self._on_not_listed)

    # --- work ---------------------------------------------------------------------------------------

    def verify(self, model: LibraryEntry) -> None:
        def doing(said: OnProgress, cancelled: Callable[[], bool]) -> object:
            from engine.checkpoint.library import verify

            return verify(str(model.path), said, cancelled)

        self._ask("verify", model.name, doing)

    def bring_in(self, path: Path) -> None:
        def doing(said: OnProgress, cancelled: Callable[[], bool]) -> object:
            from engine.checkpoint.importing import import_model

            return import_model(path, None, said, cancelled)

        self._ask("import", path.name, doing)

    def move(self, model: LibraryEntry, folder: Path) -> None:
        def doing(said: OnProgress, cancelled: Callable[[], bool]) -> object:
            from engine.checkpoint.moving import move

            return move(str(model.path), folder, said, cancelled)

        self._ask("move", model.name, doing)

    def export(self, model: LibraryEntry, folder: Path) -> None:
        def doing(said: OnProgress, cancelled: Callable[[], bool]) -> object:
            from engine.checkpoint.moving import export

            return export(str(model.path), folder, said, cancelled)

        self._ask("export", model.name, doing)

    def remove(self, model: LibraryEntry) -> None:
        def doing(_said: OnProgress, _cancelled: Callable[[], bool]) -> object:
            from engine.checkpoint.ownership import remove

            return remove(str(model.path))  # the name may be another's by now

        self._ask("remove", model.name, doing)

    def remove_converted(self, model: LibraryEntry) -> None:
        def doing(_said: OnProgress, _cancelled: Callable[[], bool]) -> object:
            from engine.checkpoint.library import converted_of, remove_converted

            return remove_converted(converted_of(model.path))

        self._ask("converted", model.name, doing)

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self._waiting.clear()
        self._closing.set()
        self._cancelled.set()
        self._timer.stop()
        self._listing.close()
        self._working.close()

    # --- inside -------------------------------------------------------------------------------------

    def _ask(self, kind: WorkKind, name: str, doing: Doing) -> None:
        self._waiting.append((Work(kind, name), doing))
        if self.work is None:
            self._begin()

    def _begin(self) -> None:
        self.work, doing = self._waiting.popleft()
        work = self.work
        self._so_far = (0, 0)
        self._cancelled = cancelled = threading.Event()

        def on_progress(done: int, total: int) -> None:
            self._so_far = (done, total)  # shown by the timer: a signal for each chunk would flood the window

        self._working.ask(
            lambda: doing(on_progress, cancelled.is_set),
            lambda result: self._end(replace(work, result=result)),
            lambda error: self._on_failed(work, error),
        )
        self._timer.start()
        self.work_changed.emit()

    def _on_failed(self, work: Work, error: Exception) -> None:
        was_cancelled = isinstance(error, RequestCancelled)
        problem = "" if was_cancelled else error.message if isinstance(error, EngineError) else str(error)
        self._end(replace(work, problem=problem, was_cancelled=was_cancelled))
        if not isinstance(error, RequestCancelled | EngineError):
            raise error

    def _end(self, work: Work) -> None:
        self.work = None
        self._timer.stop()
        if self._waiting:
            self._begin()
        else:
            self.work_changed.emit()
        self.ended.emit(work)
        self.look()

    def _on_timer(self) -> None:
        done, total = self._so_far
        if self.work is not None and (done, total) != (self.work.done, self.work.total):
            self.work = replace(self.work, done=done, total=total)
            self.work_changed.emit()

    def _on_listed(self, listing: Listing) -> None:
        self._entries, self.problems = listing.entries, listing.problems
        self.listed.emit()

    def _on_not_listed(self, error: Exception) -> None:
        self._entries, self.problems = (), (sentence_of(error),)
        self.listed.emit()


def _look_around(cancelled: Callable[[], bool]) -> Listing:
    from engine.checkpoint.library import look_around  # imported late: it is slow to load

    return look_around(cancelled=cancelled)
