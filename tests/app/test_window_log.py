"""What Qt complains of is kept in a file that stays small."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import qWarning
from PySide6.QtWidgets import QApplication

from app.services.crash_reports import close_window_log, open_window_log


@pytest.fixture
def log(qapp: QApplication, tmp_path: Path) -> Iterator[Path]:
    open_window_log(tmp_path / "logs")
    yield tmp_path / "logs" / "window.log"
    close_window_log()


@pytest.mark.no_qt_log
def test_a_warning_of_qt_is_kept(log: Path) -> None:
    qWarning("something is odd")
    assert "WARNING switchyard.qt" in log.read_text()
    assert "something is odd" in log.read_text()


@pytest.mark.no_qt_log
def test_it_stays_small(log: Path) -> None:
    for _ in range(3000):
        logging.getLogger("switchyard.window").info("x" * 1000)
    assert sum(path.stat().st_size for path in log.parent.iterdir()) < 2 * 2**20


@pytest.mark.no_qt_log
def test_a_folder_that_cannot_be_made_is_no_trouble(qapp: QApplication, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    open_window_log(tmp_path / "file" / "logs")
    qWarning("nobody hears this")
    close_window_log()
