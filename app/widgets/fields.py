"""Fields whose value the mouse wheel leaves alone.

The wheel is for the page: Qt's own fields take it while the pointer passes over them, and a page that was only scrolled
would come back with other settings.  Keys, the field's buttons and its list change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QComboBox, QDoubleSpinBox, QSlider, QSpinBox, QWidget

if TYPE_CHECKING:
    _Widget = QWidget
else:
    _Widget = object  # Qt takes one class of its own among the bases: the field's


class _WheelPasses(_Widget):
    """Stands before a field's own class."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # so that what it lies in gets it


class ComboBox(_WheelPasses, QComboBox):
    """A choice from a list."""


class SpinBox(_WheelPasses, QSpinBox):
    """A whole number."""


class DoubleSpinBox(_WheelPasses, QDoubleSpinBox):
    """A number."""


class Slider(_WheelPasses, QSlider):
    """A number on a horizontal line."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setOrientation(Qt.Orientation.Horizontal)
