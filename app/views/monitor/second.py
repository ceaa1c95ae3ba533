"""A second timeline below the first, for comparison: another session, or the simulator's prediction."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QPushButton, QWidget

from app.services.history.aligning import aligned_ns
from app.services.history.history import History
from app.services.predicted_timeline import Predicted
from app.views.monitor.predicted_words import assumptions, speeds
from app.widgets.card import Card, muted_label
from app.widgets.timeline.view import TimelineView


class SecondTimeline(Card):
    """Shows the same range as the first timeline.

    Another session is aligned at its end, a prediction at the same step of the request.

    Signals: `dismissed`, when the user has closed it.
    """

    dismissed = Signal()

    def __init__(self, first: TimelineView, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._first = first
        self._predicted: Predicted | None = None
        self.view = TimelineView(self)
        self.view.setAccessibleName(self.tr("Second timeline"))
        close = QPushButton(self.tr("Close"), self)
        close.setProperty("kind", "quiet")
        close.clicked.connect(self._close)
        self.head.addWidget(close)
        self.said = muted_label(self)
        self.body.setContentsMargins(16, 10, 12, 10)  # so that the lanes of both line up
        self.body.setSpacing(4)
        self.body.addWidget(self.said)
        self.body.addWidget(self.view, 1)
        first.navigator.moved.connect(self._follow)
        first.pointed.connect(self._point)
        self.hide()

    def show_history(self, title: str, caption: str, history: History) -> None:
        """Shows another, fixed history."""
        self._predicted = None
        self.said.hide()
        self._show(title, caption, history)

    def show_predicted(self, predicted: Predicted, measured_tokens_per_s: float | None) -> None:
        """Shows the prediction for the request in the first timeline."""
        self._predicted = predicted
        self.said.setText(assumptions(predicted))
        self.said.setAccessibleName(self.said.text())
        self.said.show()
        self._show(self.tr("Predicted"), speeds(predicted, measured_tokens_per_s), predicted.history)

    @property
    def predicted(self) -> Predicted | None:
        """The prediction, if it shows one."""
        return self._predicted

    def dismiss(self) -> None:
        """Hides it and clears its data."""
        self.hide()
        self._predicted = None
        self.view.navigator.set_source(None, recorded=True)

    def _close(self) -> None:
        self.dismiss()
        self.dismissed.emit()

    def _show(self, title: str, caption: str, history: History) -> None:
        self.heading.setText(title)
        self.caption.setText(caption)
        self.setAccessibleName(f"{title}. {caption}")
        self.view.navigator.set_source(history, recorded=True)
        self.show()
        self._follow()

    def _follow(self) -> None:
        mine, first = self.view.navigator, self._first.navigator
        theirs = first.history
        if self.isHidden() or theirs is None or theirs.end_ns is None or mine.history is None:
            return
        viewport = replace(mine.viewport, span_ns=first.viewport.span_ns)
        if self._predicted is not None:
            start_ns = aligned_ns(theirs, first.viewport.start_ns, first.viewport.end_ns, self._predicted.steps_ns)
            mine.place(replace(viewport, start_ns=start_ns or 0.0))
            return
        end_ns = mine.history.end_ns or 0
        behind = min(theirs.end_ns - first.viewport.end_ns, float(end_ns - (mine.history.start_ns or 0)))
        mine.place(viewport.ending_at(end_ns - max(behind, 0.0)))

    def _point(self, at_ns: float | None) -> None:
        """Mirrors the first timeline's crosshair."""
        if not self.isHidden():
            theirs, mine = self._first.navigator.viewport, self.view.navigator.viewport
            self.view.set_cursor(None if at_ns is None else mine.start_ns + at_ns - theirs.start_ns)
