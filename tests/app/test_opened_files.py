"""Files that are opened with the window: from the desktop, or by a second start."""

import json
from pathlib import Path

import pytest
from PySide6.QtNetwork import QLocalSocket
from pytestqt.qtbot import QtBot

from app.services.data_folder import Claim, SingleInstance
from app.widgets.fields import model_at
from engine.common.installed import version


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
