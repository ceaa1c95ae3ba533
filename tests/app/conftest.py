"""What every test of the window needs: a theme and settings of its own, and no colours left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication

from app.services.settings import Settings
from app.theme import ThemeController


@pytest.fixture
def settings(qapp: QApplication, switchyard_home: Path) -> Iterator[Settings]:
    """Settings in the test's own folder, written when it ends."""
    result = Settings()
    yield result
    result.save()
    result.deleteLater()


@pytest.fixture
def theme(qapp: QApplication) -> Iterator[ThemeController]:
    """The light theme at 14 px, applied to the application, and taken off again."""
    before = (qapp.font(), qapp.palette(), qapp.style().objectName())
    qapp.setStyle("Fusion")
    controller = ThemeController("light")
    yield controller
    controller.deleteLater()
    qapp.setStyleSheet("")
    qapp.setPalette(before[1])
    qapp.setFont(before[0])
    qapp.setStyle(before[2])
    qapp.styleHints().setColorScheme(Qt.ColorScheme.Unknown)
