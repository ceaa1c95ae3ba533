"""The starter model, offered where no model is: small, and runs on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QProgressBar, QWidget

from app.services.installation import StarterDownload
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import muted_label, push_button, set_message, vbox
from engine.common.settings import STARTER

if TYPE_CHECKING:
    from app.services.library import Library


class StarterOffer(QWidget):
    """A button that gets it, then how far it is, wherever that was begun.

    Args:
        about: what is said beside the button.

    Signals: `ready`, when the starter model is there.
    """

    ready = Signal()

    def __init__(self, download: StarterDownload, about: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._download, self._about = download, about
        self.text = muted_label(self)
        self._bar = QProgressBar(self)
        self._bar.setTextVisible(False)
        self._bar.setAccessibleName(self.tr("Download of the starter model"))
        self.get_button = push_button(self, do=self.begin)
        self.cancel_button = push_button(self, self.tr("Cancel"), self._stop)
        vbox(self.text, self._bar, Flow(self.get_button, self.cancel_button, parent=self), into=self, gap=-1)
        download.began.connect(self._show_begun)
        download.progress.connect(self._on_progress)
        download.ended.connect(self._on_ended)
        self._show_offer("")
        if download.is_running:
            self._show_begun()

    def follow(self, library: Library) -> None:
        self._library = library
        library.listed.connect(self._follow)
        self._follow()

    def _follow(self) -> None:
        self.setVisible(self._library.was_listed and self._library.entry(STARTER) is None)

    def begin(self) -> None:
        self._download.start()

    def _show_offer(self, trouble: str) -> None:
        set_message(self.text, trouble or self._about)
        self.get_button.setText(self.tr("Try again") if trouble else self.tr("Get the starter (93 MB)"))
        had_focus = self.cancel_button.hasFocus()
        self._bar.hide()
        self.get_button.show()
        if had_focus:
            self.get_button.setFocus()
        self.cancel_button.hide()

    def _show_begun(self) -> None:
        set_message(self.text, self.tr("Getting the starter model…"))
        self._bar.setRange(0, 0)  # busy indicator until the first percentage
        self._bar.show()
        self.cancel_button.setEnabled(True)
        self.cancel_button.show()
        if self.get_button.hasFocus():
            self.cancel_button.setFocus()
        self.get_button.hide()

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
