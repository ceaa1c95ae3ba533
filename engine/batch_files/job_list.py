"""Batch jobs as other processes see them: their answers, read-only, and a file that asks a job to stop."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.batch_files.journal import COUNTS, LATER_COLUMNS, NOT_AGAIN, parse_manifest, written_files
from engine.batch_files.own_files import WrittenFile
from engine.batch_files.rows import CUT_OFF, Answer
from engine.common.files import is_locked
from engine.common.paths import jobs_dir

_LOOK_S = 0.5


def stop_path(journal: Path) -> Path:
    """The file whose existence requests the stop."""
    return journal.with_name(journal.name + ".stop")


def ask_to_stop(journal: Path) -> None:
    """Asks the process running this journal's job to stop; it does within a second, and all answers are kept."""
    stop_path(journal).touch(0o600)


class StopRequest:
    """The stop request of the job that this process runs; earlier requests are deleted."""

    def __init__(self, journal: Path) -> None:
        self._path = stop_path(journal)
        self._path.unlink(missing_ok=True)
        self._looked_s = time.monotonic()
        self._is_made = False

    def is_made(self) -> bool:
        """Whether a stop was requested; cheap enough to call for every layer."""
        now = time.monotonic()
        if not self._is_made and now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            self._is_made = self._path.exists()
        return self._is_made

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A job, read from its journal.

    Attributes:
        journal: the file.
        settings: `BatchJob` and the model, from JSON.
        begun_s, finished_s: seconds since 1970; None while rows are missing.
        done, failed, cut_off: rows completed, those of them that failed, and those that ended at their limit of tokens.
        generated_tokens: of all of them.
        kept: answers, including those whose rows are to be answered again.
        running: whether a process is working on it.
        digest, precision: of the model that it started with, and of its weights; see `JobManifest`.
        endpoints: rows and generated tokens of each endpoint that answered any; empty for this machine.
        output, errors: files of its result and of failed OpenAI requests; empty while nothing is written.
    """

    journal: Path
    settings: dict[str, Any]
    begun_s: float
    finished_s: float | None
    done: int
    failed: int
    generated_tokens: int
    running: bool
    precision: str = ""
    output: str = ""
    errors: str = ""
    digest: str = ""
    endpoints: tuple[tuple[str, int, int], ...] = ()
    cut_off: int = 0
    kept: int = 0


def known_jobs() -> list[KnownJob]:
    """All jobs, the newest first; unreadable journals are left out."""
    jobs = [job for path in jobs_dir().glob("*.sqlite") if (job := read_job(path)) is not None]
    return sorted(jobs, key=lambda job: -job.begun_s)


def read_job(journal: Path) -> KnownJob | None:
    """One job; None if it does not exist or is unreadable."""
    try:
        with _read_only(journal) as connection:
            manifest, settings, begun, finished = connection.execute(
                "SELECT content, settings, begun_s, finished_s FROM manifest"
            ).fetchone()
            has_again = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'again'").fetchone()
            chosen = f"WHERE {NOT_AGAIN}" if has_again else ""  # as jobs of earlier versions lack it
            done, failed, tokens, cut_off = connection.execute(f"{COUNTS} {chosen}").fetchone()
            (kept,) = connection.execute("SELECT COUNT(*) FROM answers").fetchone()
            content = json.loads(settings)
            began_as = parse_manifest(manifest)
            by = _there(connection)[LATER_COLUMNS.index("answered_by")]
            each = f"SELECT {by} AS name, COUNT(*), SUM(generated_tokens) FROM answers GROUP BY name ORDER BY name"
            endpoints = tuple((str(name), int(rows), int(sum_)) for name, rows, sum_ in connection.execute(each))
            files = {file.kind: file.path for file in written_files(connection)}
    except (sqlite3.Error, ValueError, TypeError):
        return None
    if not isinstance(content, dict):
        return None
    return KnownJob(
        journal,
        content,
        begun,
        finished,
        int(done),
        int(failed),
        int(tokens),
        _is_running(journal),
        precision=began_as.precision if began_as is not None else "",
        output=files.get("result", ""),
        errors=files.get("errors", ""),
        digest=began_as.model if began_as is not None else "",
        endpoints=endpoints if any(name for name, *_ in endpoints) else (),
        cut_off=int(cut_off),
        kept=int(kept),
    )


def read_written(journal: Path) -> list[WrittenFile]:
    """The files that a job owns; none if there is no such job."""
    try:
        with _read_only(journal) as connection:
            return written_files(connection)
    except (sqlite3.Error, ValueError, TypeError):
        return []


Ended = Literal["any", "failed", "cut_off"]
"""How rows ended: `cut_off` at their limit of tokens, among them those that failed for that."""
_ENDED: dict[Ended, str] = {"any": "", "failed": "AND problem != ''", "cut_off": f"AND finish_reason = '{CUT_OFF}'"}


def read_answers(journal: Path, *, after: int = -1, limit: int = 200, ended: Ended = "any") -> list[Answer]:
    """Some outcomes of a job in row order; none if it cannot be read."""
    try:
        with _read_only(journal) as connection:
            later = ", ".join(_there(connection))
            query = f"""SELECT row, text, finish_reason, prompt_tokens, generated_tokens, problem, {later}
                FROM answers WHERE row > ? {_ENDED[ended]} ORDER BY row LIMIT ?"""
            return [Answer(*values) for values in connection.execute(query, (after, limit))]
    except sqlite3.Error:
        return []


def _there(connection: sqlite3.Connection) -> list[str]:
    """The columns of answers that jobs of earlier versions lack, or nothing in their place."""
    known = {name for _, name, *_ in connection.execute("PRAGMA table_info(answers)")}
    return [name if name in known else "''" for name in LATER_COLUMNS]


def _is_running(journal: Path) -> bool:
    return is_locked(journal.with_name(journal.name + ".lock"))


@contextmanager
def _read_only(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        yield connection
    finally:
        connection.close()
