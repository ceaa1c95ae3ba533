"""Jobs known at start-up: from their journals, and from the window's own notes.

A journal knows the answers, but neither the total of rows nor why a job stopped, and a job that has not started has
none.  These facts are in a small file beside the journals; if the two disagree, the journal is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from PySide6.QtCore import QCoreApplication

from app.services.batch_job import JobEntry, JobState, key_of
from engine.batch_files.job_list import KnownJob, known_jobs
from engine.common.config import BatchJob, SamplingParams
from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.paths import jobs_dir

translate = QCoreApplication.translate

_WAS_WAITING = frozenset({JobState.QUEUED, JobState.RUNNING, JobState.STOPPING, JobState.ELSEWHERE})


def save_jobs(entries: Iterable[JobEntry]) -> None:
    """Saves what journals do not contain.

    Raises:
        OSError: the file is unchanged.
    """
    content = [
        {
            "job": asdict(entry.job),
            "state": entry.state.value,
            "created_s": entry.created_s,
            "model": entry.model,
            "total": entry.total,
            "reason": entry.reason,
        }
        for entry in entries
    ]
    write_private(_path(), json.dumps({"jobs": content}, ensure_ascii=False, indent=1))


def load_jobs() -> list[JobEntry]:
    """All jobs, newest first; slow with many journals: not for the GUI thread."""
    noted = {entry.key: entry for entry in _noted()}
    entries: dict[str, JobEntry] = {}
    for known in known_jobs():
        entry = _from_journal(known, noted.get(known.journal.name))
        if entry is not None:
            entries[entry.key] = entry
    for key, entry in noted.items():
        entries.setdefault(key, _at_rest(entry))
    return sorted(entries.values(), key=lambda entry: -entry.created_s)


def job_of(values: Any) -> BatchJob | None:
    """A job from its JSON; None if it is invalid."""
    if not isinstance(values, Mapping):
        return None
    try:
        sampling = dict(values.get("sampling") or {})
        sampling["stop"] = tuple(sampling.get("stop") or ())
        fields = {**values, "sampling": SamplingParams(**sampling), "choices": tuple(values.get("choices") or ())}
        fields["endpoints"] = tuple(values.get("endpoints") or ())
        return BatchJob(**fields)
    except (TypeError, ValueError, EngineError):
        return None


def _from_journal(known: KnownJob, noted: JobEntry | None) -> JobEntry | None:
    job = job_of(known.settings.get("job"))
    if job is None or key_of(job.output) != known.journal.name:
        return None
    entry = JobEntry(
        key=known.journal.name,
        job=replace(job, start="resume"),
        state=JobState.PAUSED,
        created_s=known.begun_s if noted is None else noted.created_s,
        model=str(known.settings.get("model", "")),
        done=known.done,
        failed=known.failed,
        cut_off=known.cut_off,
        result=known.output,
        errors=known.errors,
        begun_model=str(known.settings.get("model", "")) if known.kept else "",
        begun_precision=known.precision if known.kept else "",
    )
    if known.running:
        return replace(entry, state=JobState.ELSEWHERE, total=noted.total if noted else None)
    if known.finished_s is not None:
        return replace(entry, state=JobState.FINISHED, total=known.done)
    if noted is None:
        return entry
    rested = _at_rest(noted)
    return replace(entry, state=rested.state, reason=rested.reason, total=noted.total)


def _at_rest(entry: JobEntry) -> JobEntry:
    """The job's state when a window opens: none starts automatically."""
    if entry.state not in _WAS_WAITING:
        return entry
    if entry.state is JobState.QUEUED:
        reason = translate("BatchJobs", "Switchyard was closed before the job started.")
    else:
        reason = translate("BatchJobs", "Switchyard was closed while the job ran; no answered row is lost.")
    return replace(entry, state=JobState.PAUSED, reason=reason)


def _noted() -> list[JobEntry]:
    try:
        content = json.loads(_path().read_text(encoding="utf-8"))
        listed = content["jobs"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [entry for values in listed if (entry := _entry(values)) is not None] if isinstance(listed, list) else []


def _entry(values: Any) -> JobEntry | None:
    job = job_of(values.get("job")) if isinstance(values, Mapping) else None
    if job is None:
        return None
    total = values.get("total")
    try:
        return JobEntry(
            key=key_of(job.output),
            job=job,
            state=JobState(values.get("state")),
            created_s=float(values.get("created_s", 0.0)),
            model=str(values.get("model", "")),
            total=total if isinstance(total, int) else None,
            reason=str(values.get("reason", "")),
        )
    except (ValueError, TypeError):
        return None


def _path() -> Path:
    return jobs_dir() / "window.json"
