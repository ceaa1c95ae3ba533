"""One window for each data folder, whatever the window before left behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.services.data_folder import LOCK_NAME, Claim, SingleInstance

# Claims a folder, says so, and answers until it is told to stop.
HOLDER = """
import sys
from pathlib import Path
from PySide6.QtCore import QCoreApplication
from app.services.data_folder import SingleInstance
app = QCoreApplication([])
instance = SingleInstance(Path(sys.argv[1]))
instance.raise_requested.connect(lambda: print("raised", flush=True))
print(instance.claim().name, flush=True)
app.exec()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has claimed `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "OURS\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    after = SingleInstance(tmp_path)
    after.claim()  # clears away the socket that the kill left
    after.release()


def test_the_first_claim_is_ours_and_can_be_given_up(qtbot: QtBot, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    for _ in range(2):
        instance = SingleInstance(folder)
        assert instance.claim() is Claim.OURS
        instance.release()
    assert not (folder / LOCK_NAME).exists()


def test_two_folders_are_two_windows(qtbot: QtBot, tmp_path: Path) -> None:
    one, other = SingleInstance(tmp_path / "one"), SingleInstance(tmp_path / "other")
    assert one.claim() is Claim.OURS
    assert other.claim() is Claim.OURS
    one.release()
    other.release()


def test_the_second_start_raises_the_first(qtbot: QtBot, tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    second = SingleInstance(tmp_path)
    assert second.claim() is Claim.RAISED_OTHER
    assert holder.stdout is not None
    assert holder.stdout.readline() == "raised\n"
    second.release()  # harmless: the folder is not ours
    assert SingleInstance(tmp_path).claim() is Claim.RAISED_OTHER


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege there")
def test_another_name_of_the_folder_is_the_same_folder(
    qtbot: QtBot, tmp_path: Path, holder: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    alias = tmp_path_factory.mktemp("alias") / "link"
    alias.symlink_to(tmp_path)
    assert SingleInstance(alias).claim() is Claim.RAISED_OTHER


def test_what_a_killed_window_left_is_taken_over(qtbot: QtBot, tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / LOCK_NAME).exists()
    instance = SingleInstance(tmp_path)
    assert instance.claim() is Claim.OURS
    instance.release()


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP there")
def test_a_window_that_hangs_keeps_its_folder(qtbot: QtBot, tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    assert SingleInstance(tmp_path).claim(answer_ms=0) is Claim.NOT_RESPONDING


def test_a_folder_that_cannot_be_made_is_told(qtbot: QtBot, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert SingleInstance(tmp_path / "file" / "folder").claim() is Claim.NOT_WRITABLE
