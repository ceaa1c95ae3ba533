"""Switches between the versions of a turn: ‹ 2 of 3 ›."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.views.chat.icon_button import IconButton
from app.widgets.scaffold import hbox, text_label


class VersionSwitch(QWidget):
    """Hidden while there is only one version.

    Signals: `step`, -1 or 1.
    """

    step = Signal(int)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._back = IconButton("chevron-left", self.tr("Earlier version"), lambda: self.step.emit(-1), self)
        self._on = IconButton("chevron-right", self.tr("Later version"), lambda: self.step.emit(1), self)
        self._label = text_label(self, role="secondary")
        hbox(self._back, self._label, self._on, into=self, margins=(0, 0, 6, 0), gap=2)
        self.hide()

    @property
    def text(self) -> str:
        return self._label.text()

    def show_version(self, version: int, versions: int) -> None:
        """Show which version of how many."""
        self._label.setText(self.tr("{0} of {1}").format(version, versions))
        self._back.setEnabled(version > 1)
        self._on.setEnabled(version < versions)
        self.setVisible(versions > 1)
