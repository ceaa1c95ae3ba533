"""Downloads of models: done by a process of their own, and followed through the small files that it writes.

They belong to no page and to no process: the window starts one that works through the queue whenever something waits,
stops it when it closes, and shows downloads that a terminal runs as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QProcess, Signal

from app.services.background import LatestTask, TaskQueue, sentence_of, timer
from app.services.child_process import ask_to_end, child, delete_child
from app.services.settings import Settings
from engine.common.errors import EngineError
from engine.common.paths import python_module

if TYPE_CHECKING:
    from engine.checkpoint.downloads.queue import Download
    from engine.checkpoint.hub import Candidate

LOOK_MS = 500
IDLE_LOOK_MS = 3000
"""While nothing is to be done: a terminal may begin a download at any time."""
START_AGAIN_MS = 5000
LIMIT_KEY = "download_limit"
"""Setting: bytes a second for each download that is added in the window."""
FOLDER_KEY = "download_folder"
"""Setting: the model folder that downloads of the window go into; empty for the library's own."""
MOST_STARTS = 5
"""In a row, of a process that ends with something left to do."""
TERMINATE_MS = 3000


class Downloads(QObject):
    """Signals:
    changed: `entries` or `part` are new.
    finished(Download): a model is complete.
    part_finished(Download): the engine's part has arrived.
    problem(str): something that was asked for could not be done, or the process does not run.
    """

    changed = Signal()
    finished = Signal(object)
    part_finished = Signal(object)
    problem = Signal(str)

    def __init__(self, settings: Settings, parent: QObject | None = None, *, command: list[str] | None = None) -> None:
        super().__init__(parent)
        own, self._variables = python_module("engine.cli")
        self._command = command or [*own, "models", "pull", "--queue", "--json"]
        self._entries: tuple[Download, ...] | None = None
        self._looking, self._asking = LatestTask(self), TaskQueue(self)
        self._tokens = LatestTask(self)  # a locked keyring waits for its owner: nothing else waits with it
        self._process: QProcess | None = None
        self._starts = 0
        self._forgotten: set[str] = set()
        self._settings = settings
        self._is_watched = False
        self._closing = threading.Event()
        self._timer = timer(self, self._look, IDLE_LOOK_MS)
        self._again = timer(self, self._look, once=True)

    @property
    def entries(self) -> tuple[Download, ...]:
        return tuple(one for one in self._entries or () if not one.is_part)

    @property
    def part(self) -> Download | None:
        return next((one for one in self._entries or () if one.is_part), None)

    @property
    def limit(self) -> int:
        return max(0, self._settings.get(LIMIT_KEY, 0))

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def begin(self) -> None:
        self._look()

    def watch(self, *, on: bool) -> None:
        self._is_watched = on
        if on:
            self._look()

    def entry(self, key: str) -> Download | None:
        return next((one for one in self._entries or () if one.key == key), None)

    # --- what people want -----------------------------------------------------------------------------

    def add(self, candidate: Candidate, then: Callable[[Download], object] = lambda _download: None) -> None:
        def doing() -> Download:
            from engine.checkpoint.downloads.queue import add

            return _limited(add(candidate, folder=_listed(folder)), limit)

        self._starts, limit, folder = 0, self.limit, self._settings.get(FOLDER_KEY, "")
        self._ask(doing, then)

    def add_reference(self, reference: str, then: Callable[[Download], object] = lambda _download: None) -> None:
        """As `add`, for what a reference such as `ORG/NAME:Q4_K_M` means; asks the hub first."""

        def doing() -> Download:
            from engine.checkpoint.downloads.queue import add
            from engine.checkpoint.hub.contents import find_candidate

            found = find_candidate(reference, cancelled=self._closing.is_set)
            return _limited(add(found, folder=_listed(folder)), limit)

        self._starts, limit, folder = 0, self.limit, self._settings.get(FOLDER_KEY, "")
        self._ask(doing, then)

    def add_part(self, adding: Callable[[], Download]) -> None:
        self._starts, limit = 0, self.limit
        self._ask(lambda: _limited(adding(), limit))

    def pause(self, key: str) -> None:
        def doing() -> None:
            from engine.checkpoint.downloads.queue import pause

            pause(key)

        self._ask(doing)

    def resume(self, key: str) -> None:
        def doing() -> None:
            from engine.checkpoint.downloads.queue import resume

            resume(key)

        self._starts = 0
        self._ask(doing)

    def cancel(self, key: str) -> None:
        def doing() -> None:
            from engine.checkpoint.downloads.queue import cancel

            cancel(key)

        self._ask(doing)

    def forget(self, key: str) -> None:
        if key not in self._forgotten:
            self._forgotten.add(key)
            self.cancel(key)

    def move(self, key: str, place: int) -> None:
        if not 0 <= place < len(self.entries):
            return
        among_all = self.entries[place].order  # of all, the engine's part with them

        def doing() -> None:
            from engine.checkpoint.downloads.queue import reorder

            reorder(key, among_all)

        self._ask(doing)

    def set_limit(self, bytes_per_s: int) -> None:
        self._settings.set(LIMIT_KEY, bytes_per_s)
        keys = [one.key for one in self._entries or ()]
        if not keys:
            return

        def doing() -> None:
            from engine.checkpoint.downloads.queue import set_limit

            for key in keys:
                set_limit(key, bytes_per_s)

        self._ask(doing)

    def ask_token(self, host: str, then: Callable[[bool], object]) -> None:
        """`then` gets whether there is a token for a hub, for the latest question only: a keyring may be slow."""

        def doing() -> bool:
            from engine.checkpoint.hub.http import read_token

            return bool(read_token(host))

        self._tokens.ask(doing, then)

    def save_token(self, host: str, token: str, then: Callable[[bool], object]) -> None:
        def doing() -> bool:
            from engine.checkpoint.hub.http import save_token

            return save_token(host, token)

        def done(stays: bool) -> None:
            self.use_new_tokens()
            then(stays)

        self._ask(doing, done)

    def use_new_tokens(self) -> None:
        if self._process is not None:
            self._starts = 0
            ask_to_end(self._process)  # it has the old ones; another is started

    def close(self) -> None:
        self._closing.set()
        self._timer.stop()
        self._again.stop()
        process = self._process
        if process is not None:
            ask_to_end(process)
        for task in (self._looking, self._asking, self._tokens):
            task.close()
        if process is not None and not process.waitForFinished(TERMINATE_MS):
            process.kill()
            process.waitForFinished(TERMINATE_MS)

    # --- following --------------------------------------------------------------------------------------

    def _ask(self, doing: Callable[[], object], then: Callable[..., object] = lambda _result: None) -> None:
        def done(result: object) -> None:
            self._look()
            then(result)

        self._asking.add(doing, done, self._on_failed)

    def _on_failed(self, error: Exception) -> None:
        self.problem.emit(sentence_of(error))
        self._look()

    def _look(self) -> None:
        if not self._looking.is_busy and not self._closing.is_set():
            self._looking.ask(read_downloads, self._on_read, self._on_failed_look)

    def _on_failed_look(self, error: Exception) -> None:
        if not isinstance(error, EngineError | OSError):
            raise error  # a folder that cannot be read now is looked at again

    def _on_read(self, found: tuple[Download, ...]) -> None:
        from engine.checkpoint.downloads.queue import DownloadState

        before = {one.key: one for one in self._entries or ()}
        known = self._entries is not None
        unfinished = tuple(one for one in found if one.state is not DownloadState.DONE)
        if unfinished != self._entries:
            self._entries = unfinished
            self.changed.emit()
        for one in found:
            if one.state is DownloadState.DONE:
                self.forget(one.key)
                if known and one.key in before:
                    (self.part_finished if one.is_part else self.finished).emit(one)
        waits = any(one.state in (DownloadState.WAITING, DownloadState.RUNNING) for one in unfinished)
        if waits and not any(one.is_live for one in unfinished):
            self._start()
        if waits or self._is_watched or self._process is not None:
            self._timer.start(LOOK_MS if waits else IDLE_LOOK_MS)
        else:
            self._timer.stop()

    # --- the process --------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._process is not None or self._again.isActive() or self._closing.is_set():
            return
        if self._starts >= MOST_STARTS:
            return
        from engine.checkpoint.hub.http import for_child

        self._starts += 1
        variables = self._variables | for_child()
        self._process = child(  # its files say everything
            self, self._command, variables, ended=self._on_ended, not_started=self._on_not_started
        )
        self._process.start()

    def _on_not_started(self) -> None:
        self._forget()
        self._timer.stop()
        self.problem.emit(self.tr("Downloads could not be started: reinstall Switchyard."))

    def _on_ended(self, code: int, _status: QProcess.ExitStatus) -> None:
        self._forget()
        if self._closing.is_set():
            return
        if code == 0 or not self._starts:
            self._starts = 0
            self._again.start(LOOK_MS)
        elif self._starts < MOST_STARTS:
            self._again.start(START_AGAIN_MS)
        else:
            self.problem.emit(self.tr("The downloads stopped and could not be started again; try Resume."))

    def _forget(self) -> None:
        if self._process is not None:
            delete_child(self._process)
            self._process = None


def read_downloads() -> tuple[Download, ...]:
    from engine.checkpoint.downloads.queue import downloads

    return tuple(downloads())


def _listed(folder: str) -> Path | None:
    from engine.checkpoint.model_directories import model_folders

    return next((each for each in model_folders() if str(each) == folder), None)


def _limited(download: Download, bytes_per_s: int) -> Download:
    """With the limit that holds for all; runs in the background."""
    from engine.checkpoint.downloads.queue import set_limit

    if bytes_per_s:
        set_limit(download.key, bytes_per_s)
    return download
