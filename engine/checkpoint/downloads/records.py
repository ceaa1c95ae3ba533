"""What lies on disk of each download, so that a window, a terminal and whoever comes after a crash share it.

downloads/order.json      keys, first to last
downloads/line.json       how fast the line was at last
downloads/KEY/download.json   what is fetched, from where, to where; never changes
downloads/KEY/wanted.json     what people want of it; whoever runs it looks several times a second
downloads/KEY/progress.json   how far it is; written by whoever runs it
downloads/KEY/journal         its verified parts
downloads/KEY/lock            held by the process that runs it, and gone with that process
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from engine.checkpoint.hub import RepoFile, Repository
from engine.common.errors import EngineError
from engine.common.files import holding, private_folder, replace_file, write_private
from engine.common.json_fields import from_fields
from engine.common.paths import data_dir
from engine.common.untrusted import read_record

_MAX_JSON_BYTES = 32 * 2**20
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to fetch: `path` in the repository, `place` in the model's folder, both with `/`; one that lies in no
    repository has a `url`."""

    path: str
    place: str
    size: int
    sha256: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a download fetches.  It is decided once: a repository that changes later changes nothing.

    Attributes:
        folder: the folder of models; the model becomes `folder/name`.
    """

    key: str
    title: str
    reference: str
    hub: str
    id: str
    commit: str
    endpoint: str
    gated: bool
    folder: str
    name: str
    created: float
    files: tuple[PlannedFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def target(self) -> Path:
        return Path(self.folder) / self.name

    @property
    def work(self) -> Path:
        """Where its files are until all are verified: on the same disk, so that the end is one rename."""
        return Path(self.folder) / f".download-{self.key}"

    @property
    def source(self) -> str:
        return f"{self.reference}@{self.commit}" if self.commit else self.reference

    @property
    def repository(self) -> Repository:
        files = tuple(RepoFile(file.path, file.size, file.sha256) for file in self.files)
        return Repository(self.hub, self.id, self.commit, files, "", "", self.gated, endpoint=self.endpoint)


PARTS = "switchyard:"
"""A reference that begins so is of a part of Switchyard itself, and of no model."""
RUN, PAUSE, CANCEL = "run", "pause", "cancel"
WAITING_FOR_NETWORK, WAITING_FOR_SERVER = "waiting_for_network", "waiting_for_server"
"""The `error_code` of a download that runs but reaches nobody, or nobody who gives it more; it goes on by itself."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What people want of a download.

    Attributes:
        action: `run`, `pause` or `cancel`.
        tries: how often people have let it go on; a failure counts for the try that it ended.
    """

    action: str = RUN
    limit_bytes_per_s: int = 0
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is.

    Attributes:
        state: a `DownloadState`.
        problem, error_code: a sentence and an `ErrorCode`, or what it is waiting for; empty if all is well.
        tries: as in `Wanted`, when it ended.
    """

    state: str = "waiting"
    done_bytes: int = 0
    bytes_per_s: float = 0.0
    eta_s: float | None = None
    problem: str = ""
    error_code: str = ""
    connections: int = 0
    updated: float = field(default_factory=time.time)
    tries: int = 0


@dataclass(frozen=True, slots=True)
class _Order:
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _LineSpeed:
    bytes_per_s: float = 0.0
    measured: float = 0.0


def downloads_dir() -> Path:
    return data_dir() / "downloads"


def folder_of(key: str) -> Path:
    return downloads_dir() / key


@contextlib.contextmanager
def changing() -> Iterator[None]:
    """The right to change the list of downloads or what people want of one: for moments only.

    Raises:
        EngineError: `BUSY`.
        OSError: the data folder cannot be written.
    """
    private_folder(downloads_dir())
    busy = "Another Switchyard is changing the downloads: try again in a moment."
    with holding(downloads_dir() / "lock", 10.0, busy):
        yield


def all_keys() -> list[str]:
    """All downloads, first to last; those that the list does not know, oldest first, behind the others."""
    try:
        found = [entry.name for entry in downloads_dir().iterdir() if (entry / "download.json").is_file()]
    except OSError:
        return []
    known = {key: place for place, key in enumerate((_read(downloads_dir() / "order.json", _Order) or _Order()).keys)}

    def place(key: str) -> tuple[int, float]:
        plan = read_plan(key) if key not in known else None
        return known.get(key, len(known)), plan.created if plan is not None else 0.0

    return sorted(found, key=place)


def write_order(order: list[str]) -> None:
    _write(downloads_dir() / "order.json", _Order(tuple(order)))


def read_plan(key: str) -> Plan | None:
    """What a download fetches; None if there is no such download, or its file is damaged."""
    found = _read(folder_of(key) / "download.json", Plan)
    return found if found is not None and found.key == key else None


def write_plan(plan: Plan) -> None:
    _write(folder_of(plan.key) / "download.json", plan)


def read_wanted(key: str) -> Wanted:
    return _read(folder_of(key) / "wanted.json", Wanted) or Wanted()


def write_wanted(key: str, wanted: Wanted) -> None:
    _write(folder_of(key) / "wanted.json", wanted)


def read_progress(key: str) -> Progress:
    return _read(folder_of(key) / "progress.json", Progress) or Progress()


def write_progress(key: str, progress: Progress) -> None:
    """Says how far a download is.  Only who holds its lock may.

    Without waiting for the disk: this is written all the time, and a lost one does not matter.
    """
    file = folder_of(key) / "progress.json"
    new = file.with_suffix(".new")
    text = json.dumps(asdict(progress))
    try:
        new.write_text(text, encoding="utf-8")
        replace_file(new, file)
    except OSError:
        # A full disk must not stop what has its space already. The old file's own block mostly takes the new text.
        with contextlib.suppress(OSError), file.open("r+b") as old:
            old.write(text.encode())
            old.truncate()


def read_line_speed() -> float | None:
    """Bytes per second of the last download that ran long enough to tell; None before."""
    found = _read(downloads_dir() / "line.json", _LineSpeed)
    return found.bytes_per_s or None if found is not None else None


def write_line_speed(bytes_per_s: float) -> None:
    with contextlib.suppress(OSError):
        _write(downloads_dir() / "line.json", _LineSpeed(bytes_per_s, time.time()))


def forget(plan: Plan) -> None:
    """Deletes a download and what it has fetched; the finished model stays.  The caller holds its lock."""
    shutil.rmtree(plan.work, ignore_errors=True)
    folder = folder_of(plan.key)
    (folder / "download.json").unlink(missing_ok=True)  # first: without it the rest is nothing
    for file in folder.iterdir():
        if file.name != "lock":
            with contextlib.suppress(OSError):
                file.unlink()


def sweep(key: str) -> None:
    if not (folder_of(key) / "download.json").exists():
        shutil.rmtree(folder_of(key), ignore_errors=True)


def _write(path: Path, record: Any) -> None:
    write_private(path, json.dumps(asdict(record)))


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        found: _Record = from_fields(kind, read_record(path, _MAX_JSON_BYTES))
    except (EngineError, LookupError, TypeError, ValueError):
        return None
    return found
