"""Newer versions of an installed package: looked for only if people want it, and used from the next start on.

Nothing is unpacked or tested while an answer is written or a job runs; what runs goes on as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask, TaskQueue, timer
from app.services.installation import Installation
from app.services.settings import Settings
from engine.common import installed
from engine.common.errors import EngineError

if TYPE_CHECKING:
    from app.services.downloads import Downloads
    from engine.checkpoint.downloads.queue import Download
    from engine.parts.updates import Update

LOOKED_KEY = "looked_for_updates"
"""Settings: whether to look when a window opens, and when that was last done, in seconds since the epoch."""
_DAY_S = 86_400
_BUSY_MS = 3000


class UpdateStage(Enum):
    IDLE = "idle"
    LOOKING = "looking"
    NEWEST = "newest"
    OFFERED = "offered"
    FETCHING = "fetching"
    WAITING = "waiting"
    INSTALLING = "installing"
    READY = "ready"
    FAILED = "failed"


class Updates(QObject):
    """Signals:
    changed: anything about it.
    offered(str): a newer version was found.
    """

    changed = Signal()
    offered = Signal(str)

    def __init__(
        self,
        settings: Settings,
        downloads: Downloads,
        is_busy: Callable[[], bool],
        parent: QObject | None = None,
        *,
        command: list[str] | None = None,
    ) -> None:
        """`is_busy`: whether an answer is written or a job runs; `command` replaces what installs."""
        super().__init__(parent)
        self.settings, self._downloads, self._is_busy = settings, downloads, is_busy
        self._looking, self._doing = LatestTask(self), TaskQueue(self)
        self._installation = Installation("engine.parts.updates", self, command=command)
        self._installation.step_changed.connect(self.changed)
        self._installation.ended.connect(self._on_installed)
        self._again = timer(self, self._install, _BUSY_MS, once=True)
        self.stage = UpdateStage.IDLE
        self.update: Update | None = None
        self.problem = ""
        self._is_fetched = False
        downloads.changed.connect(self._on_downloads)
        downloads.part_finished.connect(self._on_fetched)
        downloads.problem.connect(self._on_problem)

    @property
    def step(self) -> str:
        return self._installation.step

    @property
    def download(self) -> Download | None:
        return self._downloads.part

    @property
    def previous(self) -> str:
        before = installed.previous_parts()
        found = installed.part(before["engine"]) if before is not None else None
        return found.version if found is not None and found.version != installed.next_version() else ""

    # --- what people want -----------------------------------------------------------------------------

    def begin(self) -> None:
        if self.settings.look_for_updates and time.time() - self.settings.get(LOOKED_KEY, 0) > _DAY_S:
            self.look()

    def look(self) -> None:
        """Asks for the newest version."""
        if self.stage in (UpdateStage.IDLE, UpdateStage.NEWEST, UpdateStage.OFFERED, UpdateStage.FAILED):
            self.settings.set(LOOKED_KEY, int(time.time()))
            self._set(UpdateStage.LOOKING)
            self._looking.ask(_look, self._on_looked, self._on_failed)

    def fetch(self) -> None:
        update = self.update
        if update is None:
            self.look()
        elif self._is_fetched:
            self._install()
        elif self.download is not None:
            self._downloads.resume(self.download.key)
            self._set(UpdateStage.FETCHING)
        else:
            self._set(UpdateStage.FETCHING)
            self._downloads.add_part(lambda: _begun(update))

    def cancel(self) -> None:
        self._again.stop()
        if self._installation.is_running:
            self._installation.stop()
        elif self.download is not None:
            self._downloads.cancel(self.download.key)
        self._set(UpdateStage.OFFERED if self.update is not None else UpdateStage.IDLE)

    def go_back(self) -> None:
        self._doing.add(_back, lambda _version: self._set(UpdateStage.READY), self._on_failed)

    def close(self) -> None:
        self._again.stop()
        self._looking.close()
        self._doing.close()
        self._installation.close()

    # --- following --------------------------------------------------------------------------------------

    def _set(self, stage: UpdateStage, problem: str = "") -> None:
        self.stage, self.problem = stage, problem
        self.changed.emit()

    def _on_looked(self, looked: tuple[Update | None, bool]) -> None:
        found, self._is_fetched = looked
        self.update = found
        self._set(UpdateStage.NEWEST if found is None else UpdateStage.OFFERED)
        if found is not None:
            self.offered.emit(found.version)

    def _on_failed(self, error: Exception) -> None:
        if not isinstance(error, EngineError | OSError):
            raise error
        self._set(UpdateStage.FAILED, error.message if isinstance(error, EngineError) else str(error))

    def _on_problem(self, sentence: str) -> None:
        if self.stage is UpdateStage.FETCHING:
            self._set(UpdateStage.FAILED, sentence)

    def _on_downloads(self) -> None:
        from engine.checkpoint.downloads.queue import DownloadState

        download = self.download
        if self.stage is UpdateStage.FETCHING and download is not None:
            if download.state is DownloadState.FAILED:
                self._set(UpdateStage.FAILED, download.problem)
            else:
                self.changed.emit()

    def _on_fetched(self, _download: Download) -> None:
        if self.stage is UpdateStage.FETCHING:
            self._install()

    def _install(self) -> None:
        if self.update is None:
            return
        if self._is_busy():
            self._set(UpdateStage.WAITING)
            self._again.start()
            return
        self._is_fetched = False  # if it was damaged, it is gone
        self._installation.start(self.update.version)
        self._set(UpdateStage.INSTALLING)

    def _on_installed(self, last: dict[str, object]) -> None:
        update = self.update
        if "installed" in last:
            self._set(UpdateStage.READY)
        elif "needs" in last and update is not None:
            self._set(UpdateStage.FETCHING)
            self._downloads.add_part(lambda: _begun_engine(update))
        elif self.stage is UpdateStage.INSTALLING:
            stopped = self.tr("The installation was stopped. Nothing has changed: try again.")
            self._set(UpdateStage.FAILED, str(last.get("error") or stopped))


def can_update() -> bool:
    """Whether this is an installed package that knows where newer ones are and how to tell them from others."""
    try:
        if installed.bundle() is None:
            return False
    except EngineError:
        return False
    from engine.parts import updates

    return updates.can_update()


def _look() -> tuple[Update | None, bool]:
    from engine.parts.updates import look_for_update
    from engine.parts.wheels import fetched_folder

    found = look_for_update()
    is_here = found is not None and (fetched_folder(found.name) or installed.part(found.name)) is not None
    return found, is_here


def _begun(update: Update) -> Download:
    from engine.parts.updates import begin_update

    return begin_update(update)


def _begun_engine(update: Update) -> Download:
    from engine.parts.updates import begin_engine

    return begin_engine(update.version)


def _back() -> str:
    from engine.parts.updates import go_back

    return go_back()
