"""The mouse wheel over a field of a page."""

from PySide6.QtCore import QPoint, QPointF
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QWidget

from app.widgets.fields import ComboBox, DoubleSpinBox, Slider, SpinBox

Field = ComboBox | SpinBox | DoubleSpinBox | Slider


def value_of(field: Field) -> float:
    """What the wheel would change."""
    return field.currentIndex() if isinstance(field, ComboBox) else field.value()


def turn_wheel(field: QWidget, steps: int) -> None:
    """Turns the wheel over the middle of a field, as the system tells the window of it."""
    window = field.window()
    at = field.mapTo(window, field.rect().center())
    QTest.wheelEvent(window.windowHandle(), QPointF(at), QPoint(0, 120 * steps))
