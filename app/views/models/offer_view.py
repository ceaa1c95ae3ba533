"""A model of the catalogue: what it is, how it would run here, and the button that fetches it."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.theme import use_tabular_figures
from app.views.models.phrases import ability_words, offer_facts
from app.widgets.fit_words import Presence, range_words, speed_words, verdict_words
from app.widgets.flow_layout import Flow
from app.widgets.quantities import translate
from app.widgets.recommendations import VerdictMark, figures_words, role_words, show_presence
from app.widgets.scaffold import muted_label, set_message
from engine.tuning.fit import Recommendation


class OfferView(QWidget):
    """Signals: `wanted(Recommendation)`: download it, or load it if it is here; `files_wanted(str)`, a repository."""

    wanted = Signal(object)
    files_wanted = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._offer: Recommendation | None = None
        self.name = muted_label(self, role="heading")
        self.facts = muted_label(self)
        self.labels = Flow(parent=self)
        self.strengths = muted_label(self, role="")
        self._mark = VerdictMark("works", self)
        self.speed = QLabel(self)
        self.speed.setProperty("tone", "head")
        use_tabular_figures(self.speed)
        self.range = muted_label(self)
        self.why = muted_label(self)
        self.figures = muted_label(self)
        self.unchecked = muted_label(self, self.tr("≈ Size from the catalogue, not checked with the hub."))
        self.get = QPushButton(self.tr("Download"), self)
        self.get.setProperty("kind", "primary")
        self.files = QPushButton(self.tr("All files…"), self)
        self.get.clicked.connect(lambda: self.wanted.emit(self._offer))
        self.files.clicked.connect(self._ask_for_files)
        speed = QHBoxLayout()
        speed.setSpacing(6)
        speed.addWidget(self._mark)
        speed.addWidget(self.speed)
        speed.addWidget(self.range, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        for widget in (self.name, self.facts, self.labels, self.strengths):
            column.addWidget(widget)
        column.addLayout(speed)
        for widget in (self.why, self.figures, Flow(self.get, self.files, parent=self), self.unchecked):
            column.addWidget(widget)
        column.addStretch(1)

    @property
    def offer(self) -> Recommendation | None:
        """The one that is shown."""
        return self._offer

    def show_offer(self, offer: Recommendation, bytes_per_s: float | None, presence: Presence | None) -> None:
        """Shows it; `bytes_per_s` is the line's measured speed, if it is known."""
        entry, speed = offer.entry, offer.speed
        if offer != self._offer:
            self._offer = offer
            self.name.setText(entry.name)
            self.facts.setText(offer_facts(offer))
            self.labels.clear()
            for words in filter(None, (role_words(offer.role), *map(ability_words, entry.abilities))):
                label = QLabel(words, self.labels)
                label.setProperty("role", "pill")
                self.labels.add(label)
            self.labels.setVisible(bool(offer.role or entry.abilities))
            self.strengths.setText(translate("Catalogue", entry.strengths))
            self._mark.set_verdict(offer.verdict)
            self.speed.setText(speed_words(speed) if speed is not None else verdict_words(offer.verdict))
            self.range.setText(f"({range_words(speed)})" if speed is not None else "")
            set_message(self.why, "" if speed is not None else offer.sentence)
            self.unchecked.setVisible("bytes" in entry.unchecked)
            self.files.setAccessibleName(self.tr("All files of {0}").format(entry.name))
        self.figures.setText(figures_words(offer, bytes_per_s, presence))
        show_presence(self.get, entry.name, presence)
        self.get.setVisible(speed is not None or presence is not None)

    def _ask_for_files(self) -> None:
        if self._offer is not None:
            self.files_wanted.emit(self._offer.reference.rpartition(":")[0])
