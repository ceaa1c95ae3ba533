"""A model folder whose disk is away: nothing is begun in the place where it was mounted."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.checkpoint.downloads import queue
from engine.checkpoint.importing import import_model
from engine.checkpoint.library import look_around
from engine.checkpoint.model_directories import add_model_folder, model_folders, note_connected, trouble_with
from engine.checkpoint.moving import move
from engine.common.errors import ErrorCode
from engine.common.paths import config_dir, models_dir
from tests.hub_server import HubServer
from tests.refusals import refused
from tests.tiny_checkpoint import write_tiny_checkpoint


class Disk:
    """A disk that is mounted at a folder, or not: then the folder is empty."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self._away = place, place.with_name(f"{place.name}-away")
        self._is_mounted = True
        real = os.path.ismount
        monkeypatch.setattr(
            os.path, "ismount", lambda path: real(path) or (self._is_mounted and Path(path) == self.place)
        )
        place.mkdir(parents=True, exist_ok=True)

    def disconnect(self, *, leave_folder: bool = True) -> None:
        self.place.rename(self._away)
        self._is_mounted = False
        if leave_folder:
            self.place.mkdir()

    def connect(self) -> None:
        if self.place.exists():
            self.place.rmdir()
        self._away.rename(self.place)
        self._is_mounted = True


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """With a model on it, in the list of model folders."""
    found = Disk(tmp_path / "usb", monkeypatch)
    write_tiny_checkpoint(found.place / "tiny")
    add_model_folder(found.place)
    assert [entry.name for entry in look_around().entries] == ["tiny"]
    return found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.mark.parametrize("leave_folder", [True, False])
def test_a_disk_that_is_away_is_said_and_nothing_begins_there(
    disk: Disk, hub: HubServer, tmp_path: Path, leave_folder: bool
) -> None:
    import_model(write_tiny_checkpoint(tmp_path / "source"), "own")
    hub.add("org/model", {"config.json": b"{}", "model.safetensors": bytes(100)})
    disk.disconnect(leave_folder=leave_folder)
    listing = look_around()
    assert [entry.name for entry in listing.entries] == ["own"]
    (said,) = listing.problems
    assert "connect" in said
    assert str(disk.place) in said
    with refused(ErrorCode.INVALID_REQUEST, "connect"):
        queue.add(hub.candidate("org/model"), folder=disk.place)
    with refused(ErrorCode.INVALID_REQUEST, "connect"):
        move("own", disk.place)
    assert not disk.place.exists() or list(disk.place.iterdir()) == []
    disk.connect()
    assert {entry.name for entry in look_around().entries} == {"own", "tiny"}
    assert move("own", disk.place).path == disk.place / "own"


def test_a_download_does_not_begin_again_in_an_empty_mount_point(disk: Disk, hub: HubServer) -> None:
    hub.add("org/model", {"config.json": b"{}", "model.safetensors": bytes(100_000)})
    shutil.rmtree(disk.place / "tiny")
    key = queue.add(hub.candidate("org/model"), folder=disk.place).key
    disk.disconnect()
    failed = queue.run(key)
    assert (failed.state, failed.error_code) == ("failed", "invalid_request")
    assert "connect that disk" in failed.problem
    assert list(disk.place.iterdir()) == []
    disk.connect()
    queue.resume(key)
    assert queue.run(key).state == "done"


def test_the_librarys_own_folder_on_a_disk_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(models_dir(), monkeypatch)
    source = write_tiny_checkpoint(tmp_path / "source")
    import_model(source, "own")
    look_around()
    disk.disconnect()
    assert str(models_dir()) in look_around().problems[0]
    with refused(ErrorCode.INVALID_REQUEST, "was on the disk at"):
        import_model(source, "second")
    assert list(models_dir().iterdir()) == []
    assert add_model_folder(models_dir()) == (models_dir(),)  # it is gone for good, and meant as it is
    assert import_model(source, "second").path == models_dir() / "second"


def test_a_folder_that_was_emptied_is_no_disk_that_is_away(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "mine" / "tiny").parent
    add_model_folder(folder)
    look_around()
    shutil.rmtree(folder / "tiny")
    assert trouble_with(folder) == ""
    folder.rmdir()
    assert "is not there" in trouble_with(folder)
    import_model(write_tiny_checkpoint(tmp_path / "source"), "own")
    look_around()
    shutil.rmtree(models_dir())
    assert trouble_with(models_dir()) == ""  # it is made when it is needed


def test_another_disk_with_something_on_it_takes_its_place(disk: Disk) -> None:
    disk.disconnect()
    write_tiny_checkpoint(disk.place / "copied")
    listing = look_around()
    assert ([entry.name for entry in listing.entries], listing.problems) == (["copied"], ())
    shutil.rmtree(disk.place / "copied")
    assert trouble_with(disk.place) == ""


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "{"])
def test_a_damaged_record_is_none(disk: Disk, content: str) -> None:
    (config_dir() / "model-folder-disks.json").write_text(content)
    note_connected(disk.place)
    assert trouble_with(disk.place) == ""


def test_a_folder_for_a_download_becomes_a_model_folder(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/model", {"config.json": b"{}", "model.safetensors": bytes(100)})
    added = queue.add(hub.candidate("org/model"), folder=tmp_path / "new")
    assert added.folder.parent == tmp_path / "new"
    assert model_folders() == (models_dir(), tmp_path / "new")
    with refused(ErrorCode.INVALID_REQUEST, "There is no folder"):
        queue.add(hub.candidate("org/model"), folder=tmp_path / "no" / "such")
    models_dir().mkdir(parents=True)
    with refused(ErrorCode.INVALID_REQUEST, "lies in"):
        queue.add(hub.candidate("org/model"), folder=models_dir() / "inside")
