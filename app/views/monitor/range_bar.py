"""The timeline's length, and the Freeze button."""

from __future__ import annotations

from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QPushButton, QWidget

from app.widgets.timeline.navigator import WHOLE, Navigator

_SECOND = 1_000_000_000


class RangeBar(QWidget):
    """10 s, 60 s, 5 min, the whole session; and freeze."""

    def __init__(self, navigator: Navigator, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._navigator = navigator
        self._is_narrow = False
        self._group = QButtonGroup(self)
        self._group.setExclusive(True)
        row = QHBoxLayout(self)
        row.setContentsMargins(8, 0, 0, 0)
        row.setSpacing(6)
        self._spans: dict[QPushButton, int] = {}
        for text, spoken, span_ns in (
            (self.tr("10 s"), self.tr("Show 10 seconds"), 10 * _SECOND),
            (self.tr("60 s"), self.tr("Show 60 seconds"), 60 * _SECOND),
            (self.tr("5 min"), self.tr("Show 5 minutes"), 300 * _SECOND),
            (self.tr("Session"), self.tr("Show the whole session"), WHOLE),
        ):
            button = QPushButton(text, self)
            button.setProperty("kind", "chip")
            button.setCheckable(True)
            button.setAccessibleName(spoken)
            button.setToolTip(spoken)
            self._group.addButton(button)
            self._spans[button] = span_ns
            row.addWidget(button)
        self._group.buttonClicked.connect(self._choose)
        row.addSpacing(10)
        self.freeze = QPushButton(self)
        self.freeze.setProperty("kind", "chip")
        self.freeze.setCheckable(True)
        self.freeze.clicked.connect(lambda: navigator.toggle())
        row.addWidget(self.freeze)
        navigator.moved.connect(self._show)
        navigator.live_changed.connect(self._show)
        self._show()

    def set_narrow(self, is_narrow: bool) -> None:
        """Whether space is short: the last button then has a short label, and a tooltip with the rest."""
        if is_narrow != self._is_narrow:
            self._is_narrow = is_narrow
            self._show()

    def _choose(self, button: QPushButton) -> None:
        self._navigator.set_preset(self._spans[button])

    def _show(self, *_news: object) -> None:
        self._group.setExclusive(False)  # after zooming, none is checked
        for button, span_ns in self._spans.items():
            button.setChecked(span_ns == self._navigator.preset_ns)
        self._group.setExclusive(True)
        live = self._navigator.is_live
        self.freeze.setChecked(not live)
        if self._is_narrow:
            self.freeze.setText(self.tr("Freeze") if live else self.tr("Frozen"))
        else:
            self.freeze.setText(self.tr("Space freezes") if live else self.tr("Frozen: Home follows"))
        self.freeze.setToolTip(
            self.tr("Space freezes the view; recording continues") if live else self.tr("Home follows live data")
        )
        self.freeze.setAccessibleName(
            self.tr("Freeze the view; recording continues") if live else self.tr("Follow live data")
        )
