"""One download from its first byte, or from where it was left, to a model in its folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.downloads import records
from engine.checkpoint.downloads.parts import Journal
from engine.checkpoint.downloads.records import (
    CANCEL,
    PAUSE,
    RUN,
    WAITING_FOR_NETWORK,
    WAITING_FOR_SERVER,
    Plan,
    Progress,
)
from engine.checkpoint.downloads.source import Client, NetworkAway
from engine.checkpoint.downloads.transfer import Transfer
from engine.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, read_manifest, write_manifest
from engine.checkpoint.model_directories import check_connected
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.common.files import disk_errors_explained

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
    last = records.read_progress(plan.key)
    try:
        if _is_in_place(plan):
            return Progress("done", plan.total_bytes, updated=time.time())
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
                return Progress(
                    "paused" if action in (PAUSE, CANCEL) else "waiting", last.done_bytes, updated=time.time()
                )
            _put_in_place(plan, journal)
    except EngineError as error:
        return Progress(
            "failed", last.done_bytes, problem=error.message, error_code=str(error.code), updated=time.time()
        )
    return Progress("done", plan.total_bytes, updated=time.time())


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
        updated=time.time(),
    )


def _is_in_place(plan: Plan) -> bool:
    """Whether an earlier run came as far as the last rename."""
    manifest = None if plan.work.exists() else read_manifest(plan.target)
    return manifest is not None and manifest.source == plan.source


def _put_in_place(plan: Plan, journal: Journal) -> None:
    """Writes the manifest and gives the folder its name."""
    found = (FileRecord(file.place, file.size, journal.of(number).verified) for number, file in enumerate(plan.files))
    write_manifest(plan.work, Manifest(plan.source, tuple(sorted(found, key=lambda file: file.path))))
    with (plan.work / MANIFEST_NAME).open("rb+") as manifest:
        os.fsync(manifest.fileno())
    os.rename(plan.work, plan.target)
    (records.folder_of(plan.key) / "journal").unlink(missing_ok=True)
