"""The engine's part of an installed package, from the first look at this PC to an engine that answers.

What is fetched is a download like a model's; what is installed is put in place by a process of its own.  Both go on
in a later window where this one was closed or killed.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from app.services.installation import Installation
from engine.common import installed
from engine.common.errors import EngineError

if TYPE_CHECKING:
    from app.services.downloads import Downloads
    from engine.checkpoint.downloads.queue import Download
    from engine.parts.wheels import EngineChoice


class PartStage(Enum):
    THERE = "there"
    LOOKING = "looking"
    OFFERED = "offered"
    FETCHING = "fetching"
    PAUSED = "paused"
    INSTALLING = "installing"
    FAILED = "failed"


class EnginePart(QObject):
    """Signals:
    changed: anything about it.
    ready: the engine is there now.
    """

    changed = Signal()
    ready = Signal()

    def __init__(
        self, downloads: Downloads, parent: QObject | None = None, *, command: list[str] | None = None
    ) -> None:
        super().__init__(parent)
        self._installation = Installation("engine.parts.install", self, command=command)
        self._installation.step_changed.connect(self.changed)
        self._installation.ended.connect(self._on_installed)
        self._downloads = downloads
        self._looking, self._adding = LatestTask(self), False
        self._fetches = False
        self.choice: EngineChoice | None = None
        self.problem = ""
        self.wants_starter = False
        """Whether people asked for the starter model with it."""
        self.stage = PartStage.LOOKING if is_needed() else PartStage.THERE
        downloads.changed.connect(self._on_downloads)
        downloads.part_finished.connect(self._on_fetched)
        downloads.problem.connect(self._on_problem)

    @property
    def download(self) -> Download | None:
        return self._downloads.part

    @property
    def step(self) -> str:
        return self._installation.step

    @property
    def is_needed(self) -> bool:
        return self.stage is not PartStage.THERE

    # --- what people want -----------------------------------------------------------------------------

    def look(self) -> None:
        if self.stage in (PartStage.LOOKING, PartStage.FAILED) and not self._looking.is_busy:
            self._set(PartStage.LOOKING)
            self._looking.ask(_look, self._on_looked, self._on_failed)

    def fetch(self, *, starter: bool = False) -> None:
        self.wants_starter = self.wants_starter or starter
        choice = self.choice
        if choice is None or (self.stage is PartStage.FAILED and self.download is None):
            self._fetches = choice is not None  # what failed may have been fetched before it did
            self.look()
            return
        if self.download is not None:
            self._downloads.resume(self.download.key)
            self._set(PartStage.FETCHING)
            return
        self._adding = True
        self._set(PartStage.FETCHING)
        self._downloads.add_part(lambda: _begun(choice))

    def pause(self) -> None:
        if self.download is not None:
            self._downloads.pause(self.download.key)

    def cancel(self) -> None:
        self.wants_starter = False
        if self._installation.is_running:
            self._installation.stop()
        elif self.download is not None:
            self._downloads.cancel(self.download.key)

    def use_files(self, path: Path) -> None:
        """Installs from files that another computer has fetched: a zip file, or the folder that a wheel lies in."""
        if not self._installation.is_running and self.choice is not None:
            self._install(str(path.parent if path.suffix == ".whl" else path))

    def close(self) -> None:
        self._looking.close()
        self._installation.close()

    # --- following --------------------------------------------------------------------------------------

    def _set(self, stage: PartStage, problem: str = "") -> None:
        self.stage, self.problem = stage, problem
        self.changed.emit()

    def _on_looked(self, found: tuple[EngineChoice, bool]) -> None:
        self.choice, is_fetched = found
        fetches, self._fetches = self._fetches, False
        if is_fetched:
            self._install()
            return
        self._set(PartStage.OFFERED)
        self._on_downloads()
        if fetches and self.stage is PartStage.OFFERED:
            self.fetch()

    def _on_failed(self, error: Exception) -> None:
        if not isinstance(error, EngineError | OSError):
            raise error
        self._set(PartStage.FAILED, error.message if isinstance(error, EngineError) else str(error))

    def _on_problem(self, sentence: str) -> None:
        if self._adding or self.stage is PartStage.FETCHING:
            self._adding = False
            self._set(PartStage.FAILED, sentence)

    def _on_downloads(self) -> None:
        from engine.checkpoint.downloads.queue import DownloadState
        from engine.parts.wheels import part_of

        choice, download = self.choice, self.download
        if choice is None or self.stage in (PartStage.THERE, PartStage.INSTALLING):
            return
        if download is None:
            if self.stage in (PartStage.FETCHING, PartStage.PAUSED) and not self._adding:
                self._set(PartStage.OFFERED)
            return
        if part_of(download) != choice.name:  # of another version
            self._downloads.cancel(download.key)
            return
        self._adding = False
        if download.state is DownloadState.FAILED:
            self._set(PartStage.FAILED, download.problem)
        else:
            self._set(PartStage.PAUSED if download.state is DownloadState.PAUSED else PartStage.FETCHING)

    def _on_fetched(self, download: Download) -> None:
        from engine.parts.wheels import part_of

        if self.choice is not None and part_of(download) == self.choice.name:
            self._install()

    # --- installing ---------------------------------------------------------------------------------------

    def _install(self, *arguments: str) -> None:
        self._installation.start(*arguments)
        self._set(PartStage.INSTALLING)

    def _on_installed(self, last: dict[str, object]) -> None:
        if not is_needed() and "installed" in last:
            self._set(PartStage.THERE)
            self.ready.emit()
        else:
            stopped = self.tr("The installation was stopped. Nothing is lost: try again.")
            self._set(PartStage.FAILED, str(last.get("error") or stopped))


def is_needed() -> bool:
    """Whether the engine's part is missing; a damaged bundle says so when it is looked at."""
    try:
        return installed.needs_engine()
    except EngineError:
        return True


def _look() -> tuple[EngineChoice, bool]:
    from engine.parts.install import proven_partial
    from engine.parts.wheels import choose_engine, fetched_folder

    choice = choose_engine()
    return choice, choice.reused is not None or fetched_folder(choice.name) is not None or proven_partial(
        choice.name
    ) is not None


def _begun(choice: EngineChoice) -> Download:
    from engine.parts.wheels import begin_download

    return begin_download(choice)
