"""A model of the catalogue: what it is, how it would run here, and the button that fetches it."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.views.models.phrases import ability_words, offer_facts
from app.widgets.fit_words import Presence, range_words, speed_words, verdict_words
from app.widgets.flow_layout import Flow
from app.widgets.quantities import translate
from app.widgets.recommendations import VerdictMark, figures_words, role_words, show_presence
from app.widgets.scaffold import STRETCH, hbox, muted_label, push_button, set_message, text_label, vbox
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
        self.speed = text_label(self, tone="head", tabular=True)
        self.range = muted_label(self)
        self.why = muted_label(self)
        self.figures = muted_label(self)
        self.unchecked = muted_label(self, self.tr("≈ Size from the catalogue, not checked with the hub."))
        self.get = push_button(self, self.tr("Download"), lambda: self.wanted.emit(self._offer), kind="primary")
        self.files = push_button(self, self.tr("All files…"), self._ask_for_files)
        vbox(
            self.name,
            self.facts,
            self.labels,
            self.strengths,
            hbox(self._mark, self.speed, (self.range, 1), gap=6),
            self.why,
            self.figures,
            Flow(self.get, self.files, parent=self),
            self.unchecked,
            STRETCH,
            into=self,
        )

    @property
    def offer(self) -> Recommendation | None:
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
                label = text_label(self.labels, words, role="pill")
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
