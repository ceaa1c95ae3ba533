"""A window in which nothing happens does nothing: a layout that asks for itself again would take a whole core."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, QObject, QSize
from PySide6.QtWidgets import QApplication

from app.services.settings import Settings
from app.theme import ThemeController
from tests.app.stage import SCENES, staged

ROUNDS = 50
SIZES = (QSize(1280, 800), QSize(720, 450))


class Requests(QObject):
    """Counts how often a window is asked to be laid out or painted again."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.LayoutRequest, QEvent.Type.UpdateRequest):
            self.counted[type(watched).__name__] += 1
        return False


@pytest.mark.parametrize("name", SCENES)
def test_no_layout_asks_for_itself_again(
    qapp: QApplication, settings: Settings, theme: ThemeController, tmp_path: Path, name: str
) -> None:
    requests = Requests()
    with staged(settings, theme, tmp_path) as stage:
        stage.show(SIZES[0])
        SCENES[name](stage)
        for size in SIZES:
            stage.window.resize(size)
            stage.settle()
            # Layouts ask upwards, to the window.
            top = stage.window if stage.dialog is None else stage.dialog
            top.installEventFilter(requests)
            for _ in range(ROUNDS):
                qapp.processEvents()
            top.removeEventFilter(requests)
            # A second may pass meanwhile, at whose end a clock or a sensor's figure changes.
            assert max(requests.counted.values(), default=0) < ROUNDS / 5, (size, requests.counted)
