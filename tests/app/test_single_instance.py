"""One window for each data folder, and the files that it is opened with."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtNetwork import QLocalSocket
from pytestqt.qtbot import QtBot

from app.services.data_folder import LOCK_NAME, Claim, SingleInstance
from app.widgets.fields import model_at
from engine.common.installed import version

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


def ask(instance: SingleInstance, said: bytes, qtbot: QtBot) -> bytes:
    """What the window that has the folder responds to these bytes, which come in two pieces."""
    socket = QLocalSocket()
    socket.connectToServer(instance._address)
    assert socket.waitForConnected(2000)
    for piece in (said[:4], said[4:]):
        socket.write(piece)
        socket.flush()
        qtbot.wait(20)
    qtbot.wait(50)
    answer = bytes(socket.readAll().data())
    socket.abort()
    return answer


@pytest.mark.parametrize("files", [[], ["/a b/ü.gguf"], ["/x.csv", "/y.jsonl"]])
@pytest.mark.parametrize("theirs", ["", version(), "9.0.0"])
def test_a_second_start_hands_its_files_and_another_version_over(
    qtbot: QtBot, tmp_path: Path, files: list[str], theirs: str
) -> None:
    first = SingleInstance(tmp_path)
    assert first.claim() is Claim.OURS
    asked: list[list[str]] = []
    others: list[str] = []
    first.raise_requested.connect(lambda paths: asked.append(paths))
    first.other_version.connect(others.append)
    said = b"raise" + (f"@{theirs}".encode() if theirs else b"")
    said += (b" " + json.dumps(files).encode() if files else b"") + b"\n"
    assert ask(first, said, qtbot) == b"raised\n"
    assert asked == [files]
    assert others == (["9.0.0"] if theirs == "9.0.0" else [])
    first.release()


@pytest.mark.parametrize("said", [b"lower\n", b"raise", b"raise [1, 2\n", b'raise {"a": 1}\n', b"raise [3]\n"])
def test_what_is_no_request_opens_nothing(qtbot: QtBot, tmp_path: Path, said: bytes) -> None:
    first = SingleInstance(tmp_path)
    assert first.claim() is Claim.OURS
    asked: list[list[str]] = []
    first.raise_requested.connect(lambda paths: asked.append(paths))
    ask(first, said, qtbot)
    assert asked in ([], [[]])
    first.release()


def test_a_model_is_a_file_or_a_folder_with_one(tmp_path: Path) -> None:
    file, folder, other = tmp_path / "A.GGUF", tmp_path / "checkpoint", tmp_path / "rows.csv"
    file.touch()
    other.touch()
    folder.mkdir()
    (folder / "config.json").touch()
    assert model_at(file) == file
    assert model_at(folder) == folder
    assert model_at(other) is None
    assert model_at(tmp_path / "missing") is None
