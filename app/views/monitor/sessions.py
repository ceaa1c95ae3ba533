"""Recorded sessions: opened instead of live data, or shown below it to compare."""

from __future__ import annotations

import time

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QMenu, QPushButton, QWidget

from app.services.background import LatestTask
from app.services.session_library import OpenedSession, SessionEntry, open_session, sessions_in
from app.widgets.quantities import memory
from engine.common.paths import sessions_dir

MOST_LISTED = 20


class SessionsButton(QPushButton):
    """Signals: `opened(OpenedSession)`, `compared(OpenedSession)`, `reported(str)`: why a session was not opened."""

    opened = Signal(object)
    compared = Signal(object)
    reported = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setText(self.tr("Sessions"))
        self._reading = LatestTask(self)
        self._menu = QMenu(self)
        self._menu.aboutToShow.connect(self._fill)
        self.setMenu(self._menu)

    def wait(self) -> None:
        """Waits for a session that is being read."""
        self._reading.close()

    def read(self, entry: SessionEntry, *, compare: bool) -> None:
        """Reads a session; one of the signals follows."""
        self.setEnabled(False)
        self.setText(self.tr("Reading…"))
        self._reading.ask(lambda: open_session(entry), lambda session: self._done(session, compare=compare), self._fail)

    def _fill(self) -> None:
        self._menu.clear()
        entries = sessions_in(sessions_dir())
        if not entries:
            self._menu.addAction(self.tr("None yet: ask something in Chat")).setEnabled(False)
            return
        self._menu.addSection(self.tr("Open"))
        for entry in entries[:MOST_LISTED]:
            action = self._menu.addAction(session_title(entry))
            action.triggered.connect(lambda _checked=False, one=entry: self.read(one, compare=False))
        compare = self._menu.addMenu(self.tr("Compare with"))
        for entry in entries[:MOST_LISTED]:
            action = compare.addAction(session_title(entry))
            action.triggered.connect(lambda _checked=False, one=entry: self.read(one, compare=True))

    def _done(self, session: OpenedSession, *, compare: bool) -> None:
        self._rest()
        (self.compared if compare else self.opened).emit(session)

    def _fail(self, error: Exception) -> None:
        self._rest()
        self.reported.emit(getattr(error, "message", None) or self.tr("The session could not be read."))

    def _rest(self) -> None:
        self.setEnabled(True)
        self.setText(self.tr("Sessions"))


def session_title(entry: SessionEntry) -> str:
    """`2026-11-21 07:20, 3 MB`, in local time."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(entry.started_s))}, {memory(entry.nbytes)}"


def session_words(session: OpenedSession) -> str:
    """How it ran: `starter · cpu · bf16`, or at which servers if no model was loaded here."""
    about = session.about
    parts = [str(about[key]) for key in ("model", "device", "precision") if about.get(key)]
    return " · ".join(parts or dict.fromkeys(session.history.places.values()))
