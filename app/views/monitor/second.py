"""A second timeline beneath the first: another session, or what the simulator foretells."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtWidgets import QPushButton, QWidget

from app.services.history.history import History
from app.theme import ThemeController
from app.widgets.card import Card
from app.widgets.timeline.navigator import Navigator
from app.widgets.timeline.view import TimelineView


class SecondTimeline(Card):
    """Shows as much time as the first, and as far from its own end: the two can be compared stretch by stretch."""

    def __init__(self, first: Navigator, theme: ThemeController, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._first = first
        self.view = TimelineView(theme, self)
        self.view.setAccessibleName(self.tr("Second timeline"))
        close = QPushButton(self.tr("Close"), self)
        close.setProperty("kind", "quiet")
        close.clicked.connect(self.dismiss)
        self.head.addWidget(close)
        self.body.addWidget(self.view, 1)
        first.moved.connect(self._follow)
        self.hide()

    def show_history(self, title: str, aside: str, history: History) -> None:
        """Shows a past that does not change."""
        self.heading.setText(title)
        self.aside.setText(aside)
        self.setAccessibleName(title)
        self.view.navigator.set_source(history, recorded=True)
        self.show()
        self._follow()

    def dismiss(self) -> None:
        """Hides it, and forgets what it showed."""
        self.hide()
        self.view.navigator.set_source(None, recorded=True)

    def _follow(self) -> None:
        mine, first = self.view.navigator, self._first
        theirs = first.history
        if self.isHidden() or theirs is None or theirs.end_ns is None or mine.history is None:
            return
        end_ns = mine.history.end_ns or 0
        behind = min(theirs.end_ns - first.viewport.end_ns, float(end_ns - (mine.history.start_ns or 0)))
        viewport = replace(mine.viewport, span_ns=first.viewport.span_ns)
        mine.place(viewport.ending_at(end_ns - max(behind, 0.0)))
