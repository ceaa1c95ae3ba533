"""Garbage is collected on the GUI thread, whichever thread allocates: Qt objects may be in it."""

import gc
import threading

from PySide6.QtCore import QObject, QTimer
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.main import GarbageCollection


def test_a_thread_that_allocates_collects_nothing(qapp: QApplication, qtbot: QtBot) -> None:
    destroyed_on: list[threading.Thread] = []

    class Service(QObject):
        """In a cycle with itself, its timer running: destroyed on another thread, it would leave the timer behind."""

        def __init__(self) -> None:
            super().__init__()
            self._me = self
            self._ticking = QTimer(self, interval=1)
            self._ticking.start()

        def __del__(self) -> None:
            destroyed_on.append(threading.current_thread())

    gc.enable()
    owner = QObject()
    GarbageCollection(owner)
    Service()
    kept: list[list[int]] = []
    allocating = threading.Thread(target=lambda: kept.extend([n] for n in range(20 * gc.get_threshold()[0])))
    allocating.start()
    allocating.join()
    assert destroyed_on == []
    qtbot.waitUntil(lambda: bool(destroyed_on))
    assert destroyed_on == [threading.main_thread()]
    owner.deleteLater()
