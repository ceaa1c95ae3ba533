"""Garbage is collected on the GUI thread, whichever thread allocates: Qt objects may be in it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PySide6.QtCore import QObject, QTimer
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.main import GarbageCollection

CHECKOUT = Path(__file__).resolve().parents[2]


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


@pytest.mark.exhaustive
def test_pictures_are_drawn_without_collecting_on_other_threads(tmp_path: Path) -> None:
    """A scene ends with Qt objects that only the collector finds, and the next one has threads that allocate."""
    script = (
        "import gc, sys, threading\n"
        "from tests.app.screenshots import main\n"
        "elsewhere = []\n"
        "def watch(phase, info):\n"
        "    here = threading.current_thread()\n"
        "    if here is not threading.main_thread(): elsewhere.append(here.name)\n"
        "gc.callbacks.append(watch)\n"
        "main([sys.argv[1], 'settings-hub', 'settings-others'])\n"
        "print(sorted(set(elsewhere)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    drawn = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=100, check=True)
    assert drawn.stdout.splitlines() == ["settings-hub", "settings-others", "[]"]
