"""Another data folder: carried out at the next start, copied whole or not at all, the old one left alone."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from app.services.data_folder import (
    FolderChange,
    cancel_change,
    carry_out,
    holds_our_data,
    plan_change,
    planned_change,
    use_folder,
)
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import data_dir, models_dir, standard_data_dir


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


def test_without_a_choice_it_is_the_standard_folder() -> None:
    assert data_dir() == standard_data_dir()
    assert planned_change() is None


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
    with pytest.raises(EngineError) as caught:
        carry_out(FolderChange(tmp_path / "new", copy=True), lambda *_: None, lambda: False)
    assert caught.value.code is ErrorCode.DISK_FULL
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


def test_back_to_the_standard_folder(tmp_path: Path) -> None:
    use_folder(tmp_path)
    assert data_dir() == tmp_path
    use_folder(standard_data_dir())
    assert data_dir() == standard_data_dir()
