"""The data folder is planned, moved at the next start, and told where that cannot be."""

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication, QMessageBox, QPushButton
from pytestqt.qtbot import QtBot

import app.main
from app.services.chat_store import ChatStore
from app.services.data_folder import (
    Claim,
    FolderChange,
    SingleInstance,
    cancel_change,
    carry_out,
    holds_our_data,
    plan_change,
    planned_change,
    use_folder,
    what_is_no_file,
)
from app.views import data_folder_start
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import data_dir, models_dir, standard_data_dir
from tests.refusals import refused


@pytest.fixture
def data() -> Path:
    """A data folder with a chat database and a model in it."""
    folder = data_dir()
    (folder / "models" / "tiny").mkdir(parents=True)
    (folder / "models" / "tiny" / "weights.safetensors").write_bytes(b"w" * 1000)
    (folder / "chats.sqlite3").write_bytes(b"chats")
    (folder / "window.lock").write_text("")
    return folder


def _carry_out(change: FolderChange) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    assert carry_out(change, lambda done, total: told.append((done, total)), lambda: False)
    return told


def test_a_copy_is_whole_and_the_old_folder_stays(data: Path, tmp_path: Path) -> None:
    change = FolderChange(tmp_path / "new", copy=True)
    plan_change(change)
    assert planned_change() == change
    assert data_dir() == data  # nothing happens before the next start
    told = _carry_out(change)
    assert told[-1] == (1005, 1005)
    assert data_dir() == tmp_path / "new"
    assert (models_dir() / "tiny" / "weights.safetensors").read_bytes() == b"w" * 1000
    assert sorted(path.name for path in data_dir().iterdir()) == ["chats.sqlite3", "models"]
    assert (data / "chats.sqlite3").read_bytes() == b"chats"
    assert planned_change() is None


def test_starting_empty_copies_nothing(data: Path, tmp_path: Path) -> None:
    _carry_out(FolderChange(tmp_path / "new", copy=False))
    assert data_dir() == tmp_path / "new"
    assert not (data_dir() / "models").exists()


def test_a_folder_with_our_data_is_used_as_it_is(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "models").mkdir(parents=True)
    (other / "chats.sqlite3").write_bytes(b"others")
    assert holds_our_data(other)
    _carry_out(FolderChange(other, copy=True))
    assert (data_dir() / "chats.sqlite3").read_bytes() == b"others"


def test_a_copy_that_was_stopped_changes_nothing_and_can_be_done_again(data: Path, tmp_path: Path) -> None:
    change = FolderChange(tmp_path / "new", copy=True)
    assert not carry_out(change, lambda *_: None, lambda: True)
    assert data_dir() == data
    assert not holds_our_data(change.target)
    _carry_out(change)
    assert (data_dir() / "chats.sqlite3").read_bytes() == b"chats"


def test_too_little_room_is_told_before_anything_is_copied(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 9, 1))
    with refused(ErrorCode.DISK_FULL):
        carry_out(FolderChange(tmp_path / "new", copy=True), lambda *_: None, lambda: False)
    assert data_dir() == data


def test_a_folder_that_cannot_be_written_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot be written"):
        plan_change(FolderChange(tmp_path / "file" / "folder", copy=False))
    assert planned_change() is None


def test_a_folder_inside_the_present_one_is_refused(data: Path) -> None:
    with pytest.raises(EngineError, match="inside"):
        plan_change(FolderChange(data / "inner", copy=True))


def test_back_to_the_present_folder_is_no_change(data: Path, tmp_path: Path) -> None:
    plan_change(FolderChange(tmp_path / "new", copy=False))
    plan_change(FolderChange(data, copy=False))
    assert planned_change() is None


def test_a_change_can_be_undone(tmp_path: Path) -> None:
    plan_change(FolderChange(tmp_path / "new", copy=False))
    cancel_change()
    cancel_change()
    assert planned_change() is None


@pytest.fixture
def answer(qtbot: QtBot) -> Callable[[str, list[str]], None]:
    """Presses a button of the next message box and keeps what the box said."""

    def prepare(button_text: str, said: list[str]) -> None:
        def press() -> None:
            box = QApplication.activeModalWidget()
            if not isinstance(box, QMessageBox):
                QTimer.singleShot(20, press)
                return
            said.append(box.text())
            (button,) = [b for b in box.findChildren(QPushButton) if b.text().replace("&", "") == button_text]
            button.click()

        QTimer.singleShot(0, press)

    return prepare


def test_a_planned_copy_is_carried_out(qtbot: QtBot, tmp_path: Path) -> None:
    data_dir().mkdir(parents=True)
    (data_dir() / "chats.sqlite3").write_bytes(b"chats")
    change = FolderChange(tmp_path / "new", copy=True)
    plan_change(change)
    data_folder_start.carry_out_change(change)
    assert data_dir() == change.target
    assert (data_dir() / "chats.sqlite3").read_bytes() == b"chats"
    assert planned_change() is None


def test_a_copy_that_fails_is_told_and_not_tried_at_every_start(
    answer: Callable[[str, list[str]], None], tmp_path: Path
) -> None:
    data_dir().mkdir(parents=True)
    (data_dir() / "chats.sqlite3").write_bytes(b"chats")
    change = FolderChange(tmp_path / "new", copy=True)
    plan_change(change)
    (tmp_path / "new").rmdir()
    (tmp_path / "new").write_text("a file has taken the folder's place")
    said: list[str] = []
    answer("OK", said)
    data_folder_start.carry_out_change(change)
    assert "stays in use" in said[0]
    assert data_dir() == standard_data_dir()
    assert planned_change() is None


def test_a_folder_that_is_not_there_is_asked_about(answer: Callable[[str, list[str]], None], tmp_path: Path) -> None:
    assert not data_folder_start.chosen_folder_is_missing()
    use_folder(tmp_path / "unplugged")
    assert data_folder_start.chosen_folder_is_missing()
    said: list[str] = []
    answer("Quit", said)
    assert not data_folder_start.ask_about_missing_folder()
    assert str(tmp_path / "unplugged") in said[0]
    assert data_dir() == tmp_path / "unplugged"  # nothing was decided
    (tmp_path / "unplugged").mkdir()
    assert data_folder_start.ask_about_missing_folder()  # it is there: nothing to ask


def test_the_standard_folder_can_take_its_place(answer: Callable[[str, list[str]], None], tmp_path: Path) -> None:
    use_folder(tmp_path / "unplugged")
    said: list[str] = []
    answer("Use the default folder", said)
    assert data_folder_start.ask_about_missing_folder()
    assert data_dir() == standard_data_dir()


@pytest.mark.parametrize(
    ("tell", "words"),
    [
        (data_folder_start.warn_not_responding, "already open"),
        (data_folder_start.warn_not_writable, "cannot be written to"),
    ],
)
def test_a_start_that_must_end_says_why(
    answer: Callable[[str, list[str]], None], tell: Callable[[], None], words: str
) -> None:
    said: list[str] = []
    answer("OK", said)
    tell()
    assert words in said[0]
    assert str(data_dir()) in said[0]


@pytest.mark.parametrize("has_chats", [False, True])
def test_a_folder_that_cannot_be_written_to_is_opened_if_there_are_chats_to_read(
    monkeypatch: pytest.MonkeyPatch, has_chats: bool
) -> None:
    from app import main

    told: list[str] = []
    monkeypatch.setattr(SingleInstance, "claim", lambda _self, **_options: Claim.NOT_WRITABLE)
    monkeypatch.setattr(data_folder_start, "warn_not_writable", lambda: told.append("not writable"))
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    data_dir().mkdir(parents=True, exist_ok=True)
    if has_chats:
        (data_dir() / "chats.sqlite3").touch()
    claimed = main._claim_data_folder()
    assert isinstance(claimed, SingleInstance) == has_chats
    assert told == ([] if has_chats else ["not writable"])


@pytest.mark.parametrize(
    "where", ["data/chats.sqlite3", "config/settings.json", "data/jobs/x", "data/downloads/x.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_told_before_anything_waits_for_it(
    answer: Callable[[str, list[str]], None],
    switchyard_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    kind: str,
) -> None:
    path = switchyard_home / where
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe" and hasattr(os, "mkfifo"):
        os.mkfifo(path)
    elif kind == "device" and Path("/dev/zero").exists():
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
        if path.parent.name in ("jobs", "downloads"):
            assert what_is_no_file() is None  # a folder there may be called as it likes
            return
    monkeypatch.setattr(app.main, "_application", lambda _words: None)
    said: list[str] = []
    answer("OK", said)
    assert app.main.main(["switchyard"]) == 2
    assert said == [f"{path} is not a file, and Switchyard keeps one there: move it away, then start again."]
    for each in (path.unlink,) if not path.is_dir() else (path.rmdir,):
        each()
    assert what_is_no_file() is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders here")
@pytest.mark.parametrize("name", ["chats.sqlite3", "chats.sqlite3-wal"])
def test_the_chats_go_on_in_memory_where_a_pipe_has_come_in_their_place(
    qtbot: QtBot, tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / name)
    store = ChatStore(tmp_path / "chats.sqlite3", retry_s=0.01)
    with qtbot.waitSignal(store.trouble) as told:
        pass
    assert f"{name} is not a file" in told.args[0]
    (tmp_path / name).unlink()
    qtbot.waitUntil(lambda: store.unsaved == 0)
    assert store.close() == 0
