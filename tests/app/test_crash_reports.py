"""What is written down when something goes wrong: reports of crashes, the log, what a diagnosis collects."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import qWarning
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.crash_reports import CrashReports, close_window_log, describe, open_window_log
from app.services.installation import Diagnosis
from app.views.settings.few_rows import AboutCard
from engine.common.errors import EngineError, ErrorCode

SECRET = "the user's secret prompt"

NATIVE_CRASH = """
import faulthandler, sys
from pathlib import Path
from app.services.crash_reports import CrashReports
CrashReports(Path(sys.argv[1])).install()
faulthandler._sigabrt()
"""
MERELY_KILLED = """
import os, signal, sys
from pathlib import Path
from app.services.crash_reports import CrashReports
CrashReports(Path(sys.argv[1])).install()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[CrashReports]:
    result = CrashReports(tmp_path / "logs")
    before = (sys.excepthook, threading.excepthook)
    result.install()
    yield result
    result.uninstall()
    assert (sys.excepthook, threading.excepthook) == before


def _raise_with_secret() -> None:
    raise ValueError(SECRET)


def test_an_unhandled_error_is_pending_without_its_message(reports: CrashReports) -> None:
    try:
        _raise_with_secret()
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    text = reports.pending()
    assert "ValueError" in text
    assert "_raise_with_secret" in text
    assert SECRET not in text
    assert str(Path.home()) not in text
    reports.dismiss()
    assert reports.pending() == ""


def test_an_error_in_a_thread_is_pending(reports: CrashReports) -> None:
    thread = threading.Thread(target=_raise_with_secret)
    thread.start()
    thread.join()
    assert "ValueError" in reports.pending()


def test_one_error_again_and_again_does_not_fill_the_disk(reports: CrashReports, tmp_path: Path) -> None:
    for _ in range(50):
        sys.excepthook(ValueError, ValueError(), None)
    assert len(list((tmp_path / "logs").glob("crash-*"))) <= 5


def test_a_native_crash_is_pending_at_the_next_start(reports: CrashReports, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NATIVE_CRASH, str(tmp_path / "logs")], check=False)
    assert done.returncode != 0
    assert "Fatal Python error" in reports.pending()


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
def test_a_window_that_was_merely_killed_leaves_nothing_to_tell(reports: CrashReports, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", MERELY_KILLED, str(tmp_path / "logs")], check=False)
    assert reports.pending() == ""
    assert len(list((tmp_path / "logs").iterdir())) == 1  # the file of this process


def test_the_code_of_an_engine_error_and_its_cause_are_told() -> None:
    try:
        try:
            _raise_with_secret()
        except ValueError as cause:
            raise EngineError(ErrorCode.DISK_FULL, SECRET) from cause
    except EngineError as error:
        text = describe(error, error.__traceback__)
    assert "EngineError [disk_full]" in text
    assert "caused by:" in text
    assert SECRET not in text


def test_a_folder_that_cannot_be_written_is_no_crash_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reports = CrashReports(tmp_path / "file" / "logs")
    reports.install()
    sys.excepthook(ValueError, ValueError(), None)
    assert reports.pending() == ""
    reports.uninstall()


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


WRITES = "import sys; open(sys.argv[-1], 'w').write('all of it'); sys.exit(2)"


def test_a_report_is_saved_whatever_is_wrong_with_this_pc(qtbot: QtBot, tmp_path: Path) -> None:
    card = AboutCard()
    qtbot.addWidget(card)
    card.diagnosis._command = [sys.executable, "-c", WRITES]
    file = tmp_path / "report.txt"
    with qtbot.waitSignal(card.diagnosis.written):
        card._write(file)
        assert not card.save_report.isEnabled()
    assert file.read_text() == "all of it"
    assert str(file) in card.report_words.text()
    assert card.save_report.isEnabled()


@pytest.mark.parametrize("command", [["/no/such/program"], [sys.executable, "-c", "raise SystemExit(1)"]])
def test_one_that_cannot_be_written_is_told(qtbot: QtBot, tmp_path: Path, command: list[str]) -> None:
    diagnosis = Diagnosis(command=command)
    with qtbot.waitSignal(diagnosis.problem) as told:
        diagnosis.write(tmp_path / "report.txt")
    assert "another folder" in told.args[0]
    diagnosis.close()
    diagnosis.deleteLater()


def test_closing_stops_it(qtbot: QtBot, tmp_path: Path) -> None:
    diagnosis = Diagnosis(command=[sys.executable, "-c", "import time; time.sleep(60)"])
    diagnosis.write(tmp_path / "report.txt")
    diagnosis.close()
    diagnosis.deleteLater()
