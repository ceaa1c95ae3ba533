"""The downloads of models: add, watch, pause, go on, cancel, put in order, and run them.

Everything but `run` and `run_queue` only reads and writes small files, so a window may call it at any time. One process
runs a download at a time; it sees what others want of it within a third of a second. A killed one leaves a download
that waits, and the next run goes on where that one was.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from engine.checkpoint.downloads import records
from engine.checkpoint.downloads.records import (
    CANCEL,
    PAUSE,
    RUN,
    WAITING_FOR_NETWORK,
    WAITING_FOR_SERVER,
    Plan,
    PlannedFile,
    Progress,
    Wanted,
)
from engine.checkpoint.downloads.records import read_line_speed as line_speed
from engine.checkpoint.hub import Candidate
from engine.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, read_manifest, write_manifest
from engine.checkpoint.model_directories import check_connected, note_connected, take_model_folder
from engine.checkpoint.names import check_new_name, is_windows_device
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.files import disk_errors_explained, is_locked, new_folder, require_space, take_lock
from engine.common.paths import models_dir

if TYPE_CHECKING:
    from engine.checkpoint.downloads.parts import Journal
    from engine.checkpoint.downloads.transfer import Transfer

__all__ = [
    "WAITING_FOR_NETWORK", "WAITING_FOR_SERVER", "Download", "DownloadState", "add", "add_part", "cancel", "downloads",
    "line_speed", "pause", "reorder", "resume", "run", "run_queue", "set_limit",
]  # fmt: skip

_FRESH_S = 5.0
_PATIENCE_S = 2.0
"""How long to wait for a lock whose holder may be about to end."""
_LOOK_PATIENCE_S = 0.3
"""How long to wait for a lock that somebody may only have looked at."""
_MOST_NAME_BYTES = 255


class DownloadState(StrEnum):
    """`waiting` will be run in its turn; `failed` needs people first, as its problem says."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Download:
    """One download, as it is now.

    Attributes:
        key: names it everywhere; the same thing added twice has the same.
        title, reference: the model's name with its precision, and what `find_candidate` finds it by.
        bytes_per_s: of the last seconds; 0 when nothing arrives.
        problem: one sentence if it failed, or runs and waits for something.
        error_code: an `ErrorCode`, or `WAITING_FOR_NETWORK` or `WAITING_FOR_SERVER`; empty without a problem.
        is_live: whether a process, this one or another, runs it now.
    """

    key: str
    title: str
    reference: str
    state: DownloadState
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    eta_s: float | None
    problem: str
    error_code: str
    folder: Path
    order: int
    limit_bytes_per_s: int
    is_live: bool
    endpoint: str = ""

    @property
    def is_part(self) -> bool:
        return self.reference.startswith(records.PARTS)


OnProgress = Callable[[Download], None]


def add(candidate: Candidate, *, name: str = "", folder: Path | None = None) -> Download:
    """Adds a download as the last one; no byte of it is fetched yet.  Adding the same again returns the one there is.

    Args:
        name: what to call the model; by default the repository's name and the precision.
        folder: the folder of models that it goes into, which becomes a model folder if it is none; by default the
            library's own.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` (it cannot run), `CHECKPOINT_UNSAFE` (file names that lead elsewhere),
            `DISK_FULL`, `INVALID_REQUEST` (the name is taken, the folder cannot be written, its disk is away).
    """
    if candidate.problem:
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, candidate.problem)
    folder = take_model_folder(folder or models_dir())
    files = _planned_files(candidate)
    repository = candidate.repository
    identity = [
        repository.hub,
        repository.endpoint,
        repository.id,
        repository.commit,
        candidate.label,
        str(folder),
        name,
    ]
    digest = hashlib.sha256("\n".join(identity).encode("utf-8", "replace")).hexdigest()[:10]
    key = f"{_plain(repository.id.rpartition('/')[2])[:40]}-{digest}"
    with disk_errors_explained(folder), records.changing():
        if _is_new(key):
            title = f"{repository.id.rpartition('/')[2]} {candidate.label}".strip()
            new_folder(folder)
            name = name or _free_name(candidate, folder)
            _check_name(name, folder)
            plan = Plan(
                key, title, candidate.reference, repository.hub, repository.id, repository.commit, repository.endpoint,
                repository.gated, str(folder), name, time.time(), files,
            )  # fmt: skip
            _begin(plan)
            note_connected(folder)
            records.write_order([*(each for each in records.all_keys() if each != key), key])
    return _download(key)


def _is_new(key: str) -> bool:
    """Whether there is no such download, or what it fetched is gone."""
    plan = records.read_plan(key)
    return plan is None or (_describe(plan, 0).state is DownloadState.DONE and not plan.target.exists())


def _begin(plan: Plan) -> None:
    require_space(Path(plan.folder), plan.total_bytes)
    plan.work.mkdir(exist_ok=True)
    records.write_plan(plan)
    records.write_wanted(plan.key, Wanted())
    (records.folder_of(plan.key) / "progress.json").unlink(missing_ok=True)


def add_part(name: str, title: str, files: Sequence[PlannedFile], folder: Path) -> Download:
    """Adds the files of a part of Switchyard as the first one, as `add` does a model's; they become `folder/name`.

    Raises:
        EngineError: `DISK_FULL`, `INVALID_REQUEST` (the folder cannot be written).
    """
    pinned = "\n".join(sorted(f"{file.place} {file.sha256}" for file in files))
    key = f"{name}-{hashlib.sha256(f'{folder}|{pinned}'.encode()).hexdigest()[:10]}"
    with disk_errors_explained(folder), records.changing():
        plan = records.read_plan(key)
        if plan is None or _is_new(key):
            plan = Plan(
                key, title, records.PARTS + name, "", name, "", "", gated=False,
                folder=str(folder), name=name, created=time.time(), files=tuple(files),
            )  # fmt: skip
            new_folder(folder)
            _begin(plan)
            records.write_order([key, *(each for each in records.all_keys() if each != key)])
        elif plan.files != tuple(files):  # the same content, from another place
            records.write_plan(replace(plan, files=tuple(files)))
    return _download(key)


def downloads() -> list[Download]:
    """All of them in their order, finished ones with them until they are cancelled."""
    plans = [plan for key in records.all_keys() if (plan := records.read_plan(key)) is not None]
    return [_describe(plan, place) for place, plan in enumerate(plans)]


def pause(key: str) -> None:
    """Lets it rest until `resume`; what it has stays.

    Raises:
        EngineError: `MODEL_NOT_FOUND` (there is no such download), `BUSY`.
    """
    _want(key, action=records.PAUSE)


def resume(key: str) -> None:
    """Lets a paused or failed one wait for its turn again.  Raises as `pause`."""
    _want(key, action=records.RUN)


def cancel(key: str) -> None:
    """Drops it with all that it has fetched; of a finished one only the record, the model stays.  Raises as `pause`.

    One that is being run is dropped by whoever runs it, in a moment.
    """
    _want(key, action=records.CANCEL)
    folder = records.folder_of(key)
    with disk_errors_explained(folder), contextlib.suppress(FileNotFoundError):  # dropped just now
        lock = take_lock(folder / "lock", _LOOK_PATIENCE_S)
        if lock is not None:
            try:
                plan = records.read_plan(key)
                if plan is not None:
                    records.forget(plan)
            finally:
                lock.release()
            records.sweep(key)


def reorder(key: str, place: int) -> None:
    """Moves it to a place among all downloads, from 0.  What runs already goes on.  Raises as `pause`."""
    _plan(key)
    with disk_errors_explained(records.downloads_dir()), records.changing():
        order = [each for each in records.all_keys() if each != key]
        order.insert(max(0, place), key)
        records.write_order(order)


def set_limit(key: str, bytes_per_s: int) -> None:
    """Limits its speed, at once; 0 lifts the limit.  Raises as `pause`."""
    _want(key, limit=max(0, bytes_per_s))


def run(key: str, *, on_progress: OnProgress = lambda _: None, cancelled: CancelCheck = never_cancelled) -> Download:
    """Fetches it, in this thread and others, until it is done, paused, cancelled or needs people.

    It waits for a network that is away and for a server that is busy; it does not give up by itself.

    Args:
        on_progress: called about twice a second.
        cancelled: stop here as after a kill: it stays a waiting download.

    Returns:
        The download as it is then.  A cancelled one is `PAUSED` with nothing done, and gone.

    Raises:
        EngineError: `MODEL_NOT_FOUND` (there is no such download), `BUSY` (another process runs it).
    """
    plan = _plan(key)
    folder = records.folder_of(key)
    with disk_errors_explained(folder):
        lock = take_lock(folder / "lock", _PATIENCE_S)
        if lock is None:
            raise EngineError(ErrorCode.BUSY, f"{plan.title} is being downloaded by another Switchyard already.")
    try:

        def report(progress: Progress) -> None:
            records.write_progress(key, progress)
            on_progress(_download(key))

        ended = None
        wanted = records.read_wanted(key)
        if wanted.action == records.RUN:
            ended = replace(fetch(plan, report, cancelled), tries=wanted.tries)
            records.write_progress(key, ended)
        if records.read_wanted(key).action == records.CANCEL:
            return _dropped(plan, ended)
    finally:
        lock.release()
        records.sweep(key)
    # Not as the files tell it: a full disk may not have taken it, and others may have forgotten it meanwhile.
    return _download(key, plan, ended)


def run_queue(*, on_progress: OnProgress = lambda _: None) -> list[Download]:
    """Runs all that wait, in their order and one at a time, also those that are added meanwhile; returns what it ran.

    One that fails is left for people, one that another process runs to that process.
    """
    ran: list[Download] = []
    over: dict[str, int] = {}  # key -> the try that ended for good, which a full disk may not have taken
    while True:
        waiting = [each.key for each in downloads() if each.state is DownloadState.WAITING]
        key = next((each for each in waiting if over.get(each) != records.read_wanted(each).tries), None)
        if key is None:
            break
        tries = records.read_wanted(key).tries
        try:
            ran.append(run(key, on_progress=on_progress))
        except EngineError as error:
            if error.code is not ErrorCode.BUSY:  # taken by another process just now
                over[key] = tries
        else:
            if ran[-1].state in (DownloadState.FAILED, DownloadState.DONE):
                over[key] = tries
    return ran


def _dropped(plan: Plan, ended: Progress | None) -> Download:
    """Deletes a cancelled one; what it was without what it had, unless it was done in time."""
    found = replace(_describe(plan, 0, ended), is_live=False)
    if ended is None or ended.state != DownloadState.DONE:
        found = replace(found, state=DownloadState.PAUSED, done_bytes=0)
    records.forget(plan)
    return found


def _plan(key: str) -> Plan:
    plan = records.read_plan(key)
    if plan is None:
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"There is no download {key!r}: it was finished or cancelled.")
    return plan


def _download(key: str, plan: Plan | None = None, progress: Progress | None = None) -> Download:
    order = records.all_keys()
    return _describe(plan or _plan(key), order.index(key) if key in order else len(order), progress)


def _want(key: str, *, action: str | None = None, limit: int | None = None) -> None:
    _plan(key)
    with disk_errors_explained(records.downloads_dir()), records.changing():
        now = records.read_wanted(key)
        tries = now.tries + (action == records.RUN)
        limit = now.limit_bytes_per_s if limit is None else limit
        records.write_wanted(key, Wanted(action or now.action, limit, tries))


def _describe(plan: Plan, place: int, progress: Progress | None = None) -> Download:
    """A download as its files tell it, or as a run of it ended."""
    wanted, live = records.read_wanted(plan.key), progress is None and is_locked(records.folder_of(plan.key) / "lock")
    progress = progress or records.read_progress(plan.key)
    if live:
        state = DownloadState.RUNNING
    elif progress.state == DownloadState.DONE:
        state = DownloadState.DONE
    elif progress.state == DownloadState.FAILED and progress.tries == wanted.tries:
        state = DownloadState.FAILED
    else:
        state = DownloadState.WAITING if wanted.action == records.RUN else DownloadState.PAUSED
    moves = live and time.time() - progress.updated < _FRESH_S
    has_problem = live or state is DownloadState.FAILED
    return Download(
        key=plan.key,
        title=plan.title,
        reference=plan.reference,
        state=state,
        done_bytes=min(progress.done_bytes, plan.total_bytes),
        total_bytes=plan.total_bytes,
        bytes_per_s=progress.bytes_per_s if moves else 0.0,
        eta_s=progress.eta_s if moves else None,
        problem=progress.problem if has_problem else "",
        error_code=progress.error_code if has_problem else "",
        folder=plan.target,
        order=place,
        limit_bytes_per_s=wanted.limit_bytes_per_s,
        is_live=live,
        endpoint=plan.endpoint,
    )


def _planned_files(candidate: Candidate) -> tuple[PlannedFile, ...]:
    """Where each file goes: as in the repository, but a folder that holds all weights becomes the model's own."""
    weights = [
        PurePosixPath(file.path).parent
        for file in candidate.files
        if file.path.lower().endswith((".gguf", ".safetensors"))
    ]
    shared = weights[0] if weights and all(parent == weights[0] for parent in weights) else PurePosixPath()
    planned: dict[str, PlannedFile] = {}
    for file in candidate.files:
        path = PurePosixPath(file.path)
        place = path.relative_to(shared) if path.is_relative_to(shared) else path
        if not _is_safe(file.path) or file.size < 0:
            raise EngineError(
                ErrorCode.CHECKPOINT_UNSAFE,
                f"{candidate.repository.id} holds a file with an unusable name ({file.path[:80]!r}): choose another "
                "repository.",
            )
        if _folded(str(place)) in planned:
            raise EngineError(
                ErrorCode.CHECKPOINT_UNSAFE,
                f"{candidate.repository.id} holds two files whose names ({str(place)[:80]!r}) are one on some systems: "
                "choose another repository.",
            )
        planned[_folded(str(place))] = PlannedFile(file.path, str(place), file.size, file.sha256.lower())
    return tuple(planned.values())


def _is_safe(path: str) -> bool:
    """Whether it is a relative path that stays inside its folder on every system."""
    parts = path.split("/")
    return not (
        re.search(r'[\x00-\x1f\\:*?"<>|]', path)
        or any(part in ("", ".", "..") or part != part.rstrip(". ") for part in parts)
        or any(len(part.encode("utf-8", "replace")) > _MOST_NAME_BYTES for part in parts)
        or any(is_windows_device(part) for part in parts)
        or _folded(parts[0]).startswith(".download-")
        or _folded(parts[-1]) == MANIFEST_NAME
    )


def _folded(path: str) -> str:
    """The same for all that a file system which ignores case, or the encoding of accents, takes for one name."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _free_name(candidate: Candidate, folder: Path) -> str:
    label = _plain(candidate.label)
    name = _plain(candidate.repository.id.rpartition("/")[2])[: 90 - len(label)].rstrip("-.") or "model"
    if label and not name.casefold().endswith(label.casefold()):
        name = f"{name}-{label}"
    source = f"{candidate.reference}@{candidate.repository.commit}"
    number, free = 1, name
    while (folder / free).exists():
        manifest = read_manifest(folder / free)
        if manifest is not None and manifest.source == source:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{candidate.reference} is on this PC already, as {free}.")
        number += 1
        free = f"{name}-{number}"
    return free


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")


def _check_name(name: str, folder: Path) -> None:
    check_new_name(name)
    if (folder / name).exists():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder / name} exists already: choose another name.")
    others = [
        plan for each in records.all_keys() if (plan := records.read_plan(each)) is not None and plan.work.exists()
    ]
    if any(plan.target == folder / name for plan in others):
        raise EngineError(ErrorCode.INVALID_REQUEST, f"Another download will be called {name!r}: choose another name.")


_LOOK_S, _REPORT_S = 0.3, 0.5
_SPEED_S, _SPEED_BYTES = 2.0, 4 * 10**6
"""A line's speed is kept once it was measured for so long, over so much."""


def fetch(plan: Plan, report: Callable[[Progress], None], cancelled: CancelCheck) -> Progress:
    """Fetches what is missing.  The caller holds the download's lock.

    Args:
        report: called about twice a second, and not at the end.

    Returns:
        The end: `done`, `failed`, `paused` (or cancelled), or `waiting` where `cancelled()` stopped it.
    """
    from engine.checkpoint.downloads.parts import Journal  # these bring what asks the network
    from engine.checkpoint.downloads.source import Client
    from engine.checkpoint.downloads.transfer import Transfer

    last = records.read_progress(plan.key)
    try:
        manifest = None if plan.work.exists() else read_manifest(plan.target)
        if manifest is not None and manifest.source == plan.source:  # an earlier run came as far as the last rename
            return Progress("done", plan.total_bytes)
        _check_disk(plan)
        with disk_errors_explained(Path(plan.folder)):
            plan.work.mkdir(exist_ok=True)
            journal = Journal(records.folder_of(plan.key) / "journal")
            client = Client()
            transfer = Transfer(plan, journal, client)
            try:
                transfer.start()
                action = _tended(plan, transfer, report, cancelled)
            finally:
                transfer.stop()
                last = replace(last, done_bytes=transfer.done_bytes)
                client.close()
                journal.close()
            if transfer.error is not None:
                raise transfer.error
            if not transfer.is_complete:
                return Progress("paused" if action in (PAUSE, CANCEL) else "waiting", last.done_bytes)
            _put_in_place(plan, journal)
    except EngineError as error:
        return Progress("failed", last.done_bytes, problem=error.message, error_code=str(error.code))
    return Progress("done", plan.total_bytes)


def _check_disk(plan: Plan) -> None:
    """Raises where the disk of the model's folder is away: begun again, all that was fetched would be lost."""
    folder = Path(plan.folder)
    if not folder.is_dir():
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The folder {folder} is not there: connect its disk, or create it, and let the download go on.",
        )
    if not plan.work.is_dir():
        check_connected(folder)


def _tended(plan: Plan, transfer: Transfer, report: Callable[[Progress], None], cancelled: CancelCheck) -> str:
    """Waits for the transfer and does what people want meanwhile; returns what they want at the end."""
    reported = 0.0
    while True:
        wanted = records.read_wanted(plan.key)
        transfer.limit.set(wanted.limit_bytes_per_s)
        if wanted.action != RUN or cancelled() or transfer.is_over:
            return wanted.action
        transfer.tend()
        if time.monotonic() - reported >= _REPORT_S:
            reported = time.monotonic()
            report(_progress(plan, transfer))
            meter = transfer.meter
            if not transfer.limit.bytes_per_s and meter.seconds > _SPEED_S and meter.total > _SPEED_BYTES:
                records.write_line_speed(meter.rate(meter.LONG_S))
        transfer.wait(_LOOK_S)


def _progress(plan: Plan, transfer: Transfer) -> Progress:
    from engine.checkpoint.downloads.source import NetworkAway

    done = transfer.done_bytes
    trouble = transfer.trouble
    code = "" if trouble is None else WAITING_FOR_NETWORK if isinstance(trouble, NetworkAway) else WAITING_FOR_SERVER
    return Progress(
        state="running",
        done_bytes=done,
        bytes_per_s=transfer.meter.rate(),
        eta_s=transfer.meter.eta_s(plan.total_bytes - done),
        problem="" if trouble is None else trouble.message,
        error_code=code,
        connections=transfer.connections,
    )


def _put_in_place(plan: Plan, journal: Journal) -> None:
    found = (FileRecord(file.place, file.size, journal.of(number).verified) for number, file in enumerate(plan.files))
    write_manifest(plan.work, Manifest(plan.source, tuple(sorted(found, key=lambda file: file.path))))
    with (plan.work / MANIFEST_NAME).open("rb+") as manifest:
        os.fsync(manifest.fileno())
    os.rename(plan.work, plan.target)
    (records.folder_of(plan.key) / "journal").unlink(missing_ok=True)
