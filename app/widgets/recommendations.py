"""Models that suit this machine: what each is good at, how long it takes to get and how fast it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import QCoreApplication, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QFrame, QPushButton, QSizePolicy, QWidget

from app.theme import set_look
from app.widgets.fit_table import Presence, draw_verdict_mark, range_words, speed_words, verdict_words
from app.widgets.quantities import SEPARATOR, duration, file_size
from app.widgets.scaffold import MIDDLE, add_items, hbox, muted_label, push_button, text_label, vbox
from engine.tuning.fit import ASSUMED_LINE_BYTES_PER_S, Recommendation

translate = QCoreApplication.translate


def role_words(role: str) -> str:
    return {
        "fast": translate("Recommendations", "Fast"),
        "balanced": translate("Recommendations", "Balanced"),
        "best": translate("Recommendations", "Best that fits"),
    }.get(role, role)


def figures_words(one: Recommendation, bytes_per_s: float | None, presence: Presence | None) -> str:
    size = f"≈ {file_size(one.bytes)}" if "bytes" in one.entry.unchecked else file_size(one.bytes)
    if presence == "here":
        return SEPARATOR.join((size, translate("Recommendations", "on this PC")))
    if one.speed is None:
        return size
    words = (
        translate("Recommendations", "first answer in about {0}")
        if bytes_per_s
        else translate("Recommendations", "first answer in about {0} at 100 Mbit/s")
    )
    seconds = one.seconds_to_first_answer(bytes_per_s or ASSUMED_LINE_BYTES_PER_S)
    return SEPARATOR.join((size, words.format(duration(seconds))))


def show_presence(button: QPushButton, name: str, presence: Presence | None) -> None:
    text = {
        None: translate("Recommendations", "Download"),
        "downloading": translate("Recommendations", "Downloading"),
        "here": translate("Recommendations", "Load"),
    }[presence]
    button.setText(text)
    button.setEnabled(presence != "downloading")
    button.setAccessibleName(f"{text}: {name}")


class RecommendationList(QWidget):
    wanted = Signal(object)

    def __init__(self, parent: QWidget | None = None, *, primary: str = "") -> None:
        """`primary` is the role whose button is filled, if any."""
        super().__init__(parent)
        self._primary = primary
        self.rows: tuple[RecommendationRow, ...] = ()
        self.unchecked = muted_label(self, self.tr("≈ Size from the catalogue, not checked with the hub."))
        self.unchecked.setContentsMargins(0, 8, 0, 0)
        self.unchecked.hide()
        self._column = vbox(self.unchecked, into=self, gap=0)

    def show_recommendations(
        self,
        recommendations: Sequence[Recommendation],
        bytes_per_s: float | None,
        presence: Mapping[str, Presence] | None = None,
    ) -> None:
        if [row.recommendation for row in self.rows] != list(recommendations):
            for old in self.rows:
                self._column.removeWidget(old)
                old.hide()
                old.deleteLater()
            self.rows = tuple(self._make(one, last=one is recommendations[-1]) for one in recommendations)
        self.unchecked.setVisible(any("bytes" in one.entry.unchecked for one in recommendations))
        for row in self.rows:
            row.show_state(bytes_per_s, (presence or {}).get(row.recommendation.reference))

    def _make(self, recommendation: Recommendation, *, last: bool) -> RecommendationRow:
        row = RecommendationRow(recommendation, last=last, parent=self)
        if recommendation.role == self._primary:
            set_look(row.button, "kind", "primary")
        row.button.clicked.connect(lambda: self.wanted.emit(recommendation))
        self._column.insertWidget(self._column.count() - 1, row)
        return row


class RecommendationRow(QWidget):
    def __init__(self, recommendation: Recommendation, *, last: bool, parent: QWidget) -> None:
        super().__init__(parent)
        self.recommendation = one = recommendation
        role = muted_label(
            self, SEPARATOR.join(filter(None, (role_words(one.role), one.entry.licence))), role="caption"
        )
        name = muted_label(self, one.entry.name, role="heading")
        self._sentence = muted_label(self, translate("Catalogue", one.entry.strengths))  # the speed stands below
        mark = VerdictMark(one.verdict, self)
        self._speed = text_label(self, speed_words(one.speed), tone="head", tabular=True)
        self._range = text_label(self, f"({range_words(one.speed)})", role="secondary")
        self.figures = muted_label(self)
        self.button = push_button(self, self.tr("Download"))
        self.button.setAccessibleDescription(f"{one.entry.name}. {one.sentence}")
        column = vbox(
            hbox((vbox(role, name, gap=0), 1), (self.button, MIDDLE), gap=10),
            self._sentence,
            hbox(mark, self._speed, (self._range, 1), gap=6),
            self.figures,
            into=self,
            margins=(0, 10, 0, 0),
            gap=3,
        )
        if not last:
            line = QFrame(self)
            line.setProperty("line", "true")
            add_items(column, 8, line)
        self.setAccessibleName(f"{role_words(one.role)}: {one.entry.name}")

    def show_state(self, bytes_per_s: float | None, presence: Presence | None) -> None:
        self.figures.setText(figures_words(self.recommendation, bytes_per_s, presence))
        show_presence(self.button, self.recommendation.entry.name, presence)


class VerdictMark(QWidget):
    """The mark of a verdict; its word is in the tooltip, and for screen readers."""

    def __init__(self, verdict: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setFixedSize(14, 14)
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.set_verdict(verdict)

    def set_verdict(self, verdict: str) -> None:
        self._verdict = verdict
        self.setToolTip(verdict_words(verdict))
        self.setAccessibleName(verdict_words(verdict))
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        draw_verdict_mark(painter, self.rect().toRectF(), self._verdict)
        painter.end()
