"""The export menu: the visible range as a trace, as tables, or as a picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFileDialog, QMenu, QPushButton, QWidget

from app.services.background import TaskQueue
from app.services.timeline_export import export_tables, export_trace
from app.widgets.timeline.view import TimelineView


class ExportButton(QPushButton):
    """Signals: `reported(str)`, a sentence on what was written or why not."""

    reported = Signal(str)

    def __init__(self, view: TimelineView, about: Callable[[], dict[str, str]], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setText(self.tr("Export"))
        self.setToolTip(self.tr("Contains no text of prompts or answers"))
        self._view, self._about = view, about
        self._writing = TaskQueue(self)
        menu = QMenu(self)
        menu.addAction(self.tr("Trace for Perfetto and Chrome (JSON)…")).triggered.connect(
            lambda: self._records("json")
        )
        menu.addAction(self.tr("Tables of spans and steps (CSV)…")).triggered.connect(lambda: self._records("csv"))
        menu.addAction(self.tr("Picture (PNG)…")).triggered.connect(lambda: self._picture("png"))
        menu.addAction(self.tr("Drawing (SVG)…")).triggered.connect(lambda: self._picture("svg"))
        self.setMenu(menu)

    def wait(self) -> None:
        """Waits for a running export."""
        self._writing.close()

    def write_records(self, path: Path) -> None:
        """Writes the visible range as a trace, or as tables if the name ends in `.csv`; `reported` follows."""
        history = self._view.navigator.history
        if history is None or not history.has_engine:
            self.reported.emit(self.tr("Nothing to export yet: ask something in Chat first."))
            return
        past, about = history.copy(), self._about()

        def write() -> int:
            return export_tables(past, path) if path.suffix == ".csv" else export_trace(past, path, about)

        self._writing.add(
            write,
            lambda count: self.reported.emit(self.tr("{0} spans written to {1}").format(count, path)),
            lambda error: self._fail(path, error),
        )

    def write_picture(self, path: Path) -> None:
        """Writes the view as PNG, or as SVG if the name ends in `.svg`."""
        done = self._view.write_picture(path)
        self.reported.emit(
            self.tr("Written to {0}").format(path)
            if done
            else self.tr("{0} could not be written; choose another folder.").format(path)
        )

    def _records(self, suffix: str) -> None:
        if path := self._ask(suffix):
            self.write_records(path)

    def _picture(self, suffix: str) -> None:
        if path := self._ask(suffix):
            self.write_picture(path)

    def _ask(self, suffix: str) -> Path | None:
        self._view.navigator.freeze()
        name = time.strftime(f"switchyard-%Y%m%d-%H%M%S.{suffix}")
        chosen, _ = QFileDialog.getSaveFileName(self, self.tr("Export"), name, f"*.{suffix}")
        return Path(chosen).with_suffix(f".{suffix}") if chosen else None

    def _fail(self, path: Path, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or type(error).__name__
        self.reported.emit(self.tr("{0} could not be written ({1}); choose another folder.").format(path, reason))
