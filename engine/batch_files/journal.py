"""The journal of a job's answers: one SQLite file per output; a kill at any moment loses nothing.

A row's outcome is written once: the row's index is the primary key. A committed transaction is on disk (write-ahead
log, synchronous). A lock, which dies with its holder, keeps a second process from writing to the same job. The manifest
is what the answers depend on: a resume that would mix two different jobs is refused. A full disk delays answers but
loses none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from engine.batch_files.opening import file_digest
from engine.batch_files.rows import CUT_OFF, Answer
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import NewFile, is_full, is_locked, private_file, private_folder, restrict_files, take_lock
from engine.common.paths import jobs_dir

if TYPE_CHECKING:
    from filelock import FileLock

_MOST_NAMES = 1000

WrittenKind = Literal["result", "errors", "replaceable"]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as a job left it, or one that the user allowed it to replace.

    Attributes:
        path: absolute.
        kind: `replaceable` existed before the job, and the user asked to replace it.
        size, time_ns: bytes and modification time; of the link itself, if it is one.
        digest: of its content; empty if unread.
    """

    path: str
    kind: WrittenKind
    size: int
    time_ns: int
    digest: str = ""

    @classmethod
    def as_it_is(cls, path: Path) -> WrittenFile:
        """The file at this path, which may be replaced; its content is not read."""
        status = os.lstat(path)
        return cls(absolute(path), "replaceable", status.st_size, status.st_mtime_ns)

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is this one; an identical copy counts, as replacing it loses nothing."""
        if self.path != absolute(path):
            return False
        try:
            status = os.lstat(path)
            if status.st_size != self.size:
                return False
            return status.st_mtime_ns == self.time_ns or (bool(self.digest) and file_digest(path) == self.digest)
        except OSError:
            return False


class NothingWritten:
    """Stands for the journal of a job that keeps no records of what it wrote."""

    def written(self) -> Sequence[WrittenFile]:
        return ()

    def remember(self, file: WrittenFile) -> None:
        pass

    def keep_only(self, files: Sequence[WrittenFile]) -> None:
        pass


def absolute(path: Path) -> str:
    """The canonical path of a file; a link in its last component is not resolved."""
    return str(path.parent.resolve() / path.name)


def is_there(path: Path) -> bool:
    """Whether the name is taken: by a file, a folder, or a possibly dangling link."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path} cannot be written ({why}): choose another output."
        ) from None
    return True


def is_own(path: Path, written: Sequence[WrittenFile]) -> bool:
    return any(file.is_at(path) for file in written)


def put_in_place(new: NewFile, path: Path, kind: WrittenKind, ledger: Journal | NothingWritten) -> WrittenFile:
    """Renames a completely written file into place, and records it.

    That is `path`, if it is free or the ledger knows its file; otherwise `path` with a number: files that others wrote
    or changed are never touched.

    Raises:
        OSError, EngineError: it failed; the old file is unchanged.
    """
    new.finish()
    status, digest = new.path.stat(), file_digest(new.path)
    for candidate in itertools.islice(_names(path), _MOST_NAMES):
        own = is_own(candidate, ledger.written())
        if not own and is_there(candidate):
            continue
        file = WrittenFile(absolute(candidate), kind, status.st_size, status.st_mtime_ns, digest)
        ledger.remember(file)
        try:
            if own:
                new.path.replace(candidate)
            else:
                new.take_free_name(candidate)
        except FileExistsError:
            continue
        except PermissionError:  # a program has it open, on Windows
            if not own:
                raise
            continue
        return file
    raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} and its numbered variants all exist: move some of them away.")


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


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


VERSION = 1

_SHOWN = {
    "input_hash": "another input",
    "template": "another template",
    "system": "another system prompt",
    "model": "another model",
    "precision": "weights in {0}, which are now in {1}",
    "sampling": "other sampling settings",
    "constraint": "another schema or other choices",
    "form": "another way to read the input",
    "version": "another version of Switchyard",
}


@dataclass(frozen=True, slots=True)
class JobManifest:
    """Everything that the answers depend on, as text; equal manifests give equal answers.

    Attributes:
        input_hash: see `fingerprint.content_hash`.
        template, system: of the prompts; empty if rows have their own.
        model: the model's fingerprint.
        precision: of its weights.
        sampling, constraint, form: as JSON.
    """

    input_hash: str
    template: str
    system: str
    model: str
    precision: str
    sampling: str
    constraint: str
    form: str
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def parse_manifest(text: str) -> JobManifest | None:
    """A manifest as `to_json` wrote it; None if it is from another version or invalid."""
    try:
        values = json.loads(text)
        manifest = JobManifest(**values)
    except (ValueError, TypeError):
        return None
    return manifest if manifest.version == VERSION else None


def require_same(begun: JobManifest | None, now: JobManifest, answers: int) -> None:
    """Refuses to continue with another job's answers.

    Args:
        answers: number of existing answers.
    """
    names = [field.name for field in fields(JobManifest)]
    differing = [name for name in names if begun is None or getattr(begun, name) != getattr(now, name)]
    if differing:
        if begun is None:
            what = _SHOWN["version"]
        else:
            what = " and ".join(_SHOWN[name].format(getattr(begun, name), getattr(now, name)) for name in differing)
        whose = "1 answer of this job was" if answers == 1 else f"{answers:,} answers of this job were"
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The {whose} made with {what}: go back to that, choose another output, or start over, which "
            f"discards its answers.",
        )


_SCHEMA = """
CREATE TABLE IF NOT EXISTS manifest (
    only_one INTEGER PRIMARY KEY CHECK (only_one = 1), content TEXT NOT NULL, settings TEXT NOT NULL,
    begun_s REAL NOT NULL, finished_s REAL
);
CREATE TABLE IF NOT EXISTS answers (
    row INTEGER PRIMARY KEY, text TEXT NOT NULL, finish_reason TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, generated_tokens INTEGER NOT NULL, problem TEXT NOT NULL,
    reasoning TEXT NOT NULL DEFAULT '', answered_by TEXT NOT NULL DEFAULT '',
    tool_calls TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS again (row INTEGER PRIMARY KEY, tokens INTEGER);
CREATE TABLE IF NOT EXISTS written (
    path TEXT NOT NULL, kind TEXT NOT NULL, size INTEGER NOT NULL, time_ns INTEGER NOT NULL, digest TEXT NOT NULL
);
"""
COUNTS = f"""SELECT COUNT(*), COALESCE(SUM(problem != ''), 0), COALESCE(SUM(generated_tokens), 0),
    COALESCE(SUM(finish_reason = '{CUT_OFF}'), 0) FROM answers"""
NOT_AGAIN = "row NOT IN (SELECT row FROM again)"
"""Answers that stand; the others are kept until their rows are answered again."""
LATER_COLUMNS = ("reasoning", "answered_by", "tool_calls")
"""Those of answers that jobs of earlier versions lack."""
_LOCK_S = 1.0
"""Lock timeout: listing jobs takes a lock briefly, and a killed worker may outlive its window a little."""
_COLUMNS = "row, text, finish_reason, prompt_tokens, generated_tokens, problem, reasoning, answered_by, tool_calls"


def journal_path(output: Path) -> Path:
    """The journal of the job with this output: one per output, in the data folder."""
    place = str(output.resolve())
    return jobs_dir() / f"{output.stem[:40]}-{xxhash.xxh3_64_hexdigest(place.encode('utf-8', 'surrogatepass'))}.sqlite"


class Journal:
    """The outcomes of a job's rows, for the process that runs it, one thread at a time; others use `job_list`.

    Args:
        settings: the job as JSON, for lists of jobs.
    """

    def __init__(self, path: Path, manifest: JobManifest, settings: str = "{}") -> None:
        self._path = path
        with self._explained():
            private_folder(path.parent)
            self._lock = _locked(path)
        try:
            with self._explained():
                # One thread at a time: while a background thread writes a result, the waiting one does not use it.
                private_file(path)
                restrict_files(path.with_name(path.name + side) for side in ("-wal", "-shm"))
                self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.executescript(_SCHEMA)
                known = {name for _, name, *_ in self._connection.execute("PRAGMA table_info(answers)")}
                for name in LATER_COLUMNS:
                    if name not in known:  # the job was begun before there was this column
                        self._connection.execute(f"ALTER TABLE answers ADD COLUMN {name} TEXT NOT NULL DEFAULT ''")
                self._take_over(manifest, settings)
        except BaseException:
            self._lock.release()
            raise

    def _take_over(self, manifest: JobManifest, settings: str) -> None:
        row = self._connection.execute("SELECT content FROM manifest").fetchone()
        if row is None:
            values = (manifest.to_json(), settings, time.time())
            self._connection.execute("INSERT INTO manifest VALUES (1, ?, ?, ?, NULL)", values)
            return
        done = self.kept
        if done:  # without answers, nothing can be mixed up
            try:
                require_same(parse_manifest(row[0]), manifest, done)
            except EngineError:
                self._connection.close()
                raise
        now = (manifest.to_json(), settings)
        self._connection.execute("UPDATE manifest SET content = ?, settings = ?, finished_s = NULL", now)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def begun_s(self) -> float:
        """When the job started, seconds since 1970."""
        return float(self._connection.execute("SELECT begun_s FROM manifest").fetchone()[0])

    def record(self, answers: Iterable[Answer]) -> None:
        """Commits outcomes to disk, all or none.

        Raises:
            EngineError: `DISK_FULL`: none of them was written; the journal stays usable.
        """
        values = [
            (
                *(a.row, _sound(a.text), a.finish_reason, a.prompt_tokens, a.generated_tokens),
                *(_sound(a.problem), _sound(a.reasoning), _sound(a.by), _sound(a.tool_calls)),
            )
            for a in answers
        ]
        if not values:
            return
        rows = [values[:1] for values in values]
        with self._explained(), self._transaction():
            again = "row = ? AND row IN (SELECT row FROM again)"
            self._connection.executemany(f"DELETE FROM answers WHERE {again}", rows)
            self._connection.executemany("DELETE FROM again WHERE row = ?", rows)
            self._connection.executemany(f"INSERT INTO answers ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def has(self, row: int) -> bool:
        query = f"SELECT 1 FROM answers WHERE row = ? AND {NOT_AGAIN}"
        return self._connection.execute(query, (row,)).fetchone() is not None

    def counts(self) -> tuple[int, int, int, int]:
        """Rows completed, those that failed, all their generated tokens, and those that ended at their limit."""
        done, failed, tokens, cut_off = self._connection.execute(f"{COUNTS} WHERE {NOT_AGAIN}").fetchone()
        return int(done), int(failed), int(tokens), int(cut_off)

    @property
    def kept(self) -> int:
        """Answers, including those whose rows are to be answered again."""
        return int(self._connection.execute("SELECT COUNT(*) FROM answers").fetchone()[0])

    @property
    def has_reasoning(self) -> bool:
        return self._connection.execute("SELECT 1 FROM answers WHERE reasoning != '' LIMIT 1").fetchone() is not None

    def answers(self) -> Iterator[Answer]:
        """All outcomes so far, in row order."""
        for values in self._connection.execute(f"SELECT {_COLUMNS} FROM answers ORDER BY row"):
            yield Answer(*values)

    def written(self) -> list[WrittenFile]:
        """The files that the job may replace: its own, and those that the user allowed it to replace."""
        return written_files(self._connection)

    def remember(self, file: WrittenFile) -> None:
        """Records a file before it is renamed into place, so that it is known even after a kill in between.

        Raises:
            EngineError: `DISK_FULL`; the file is not recorded.
        """
        with self._explained():
            self._connection.execute("INSERT INTO written VALUES (?, ?, ?, ?, ?)", _values(file))

    def keep_only(self, files: Sequence[WrittenFile]) -> None:
        """Removes all other records."""
        with self._explained(), self._transaction():
            self._connection.execute("DELETE FROM written")
            self._connection.executemany("INSERT INTO written VALUES (?, ?, ?, ?, ?)", map(_values, files))

    def redo_failed(self) -> int:
        """Has failed rows answered again, with the tokens that `redo_cut_off` gave them; returns how many it added."""
        with self._explained():
            query = "INSERT OR IGNORE INTO again SELECT row, NULL FROM answers WHERE problem != ''"
            return self._connection.execute(query).rowcount

    def redo_cut_off(self, most_tokens: int = 0) -> None:
        """Has rows that were cut off answered again with more tokens.

        Args:
            most_tokens: their new limit, for those that had less; 0: twice what each had.
        """
        limit = f"{most_tokens}" if most_tokens else "2 * generated_tokens"
        had_less = f"generated_tokens < {most_tokens}" if most_tokens else "TRUE"
        cut = f"answers WHERE finish_reason = '{CUT_OFF}'"
        with self._explained():
            found = self._connection.execute(
                f"INSERT OR REPLACE INTO again SELECT row, {limit} FROM {cut} AND {had_less}"
            ).rowcount
            had = self._connection.execute(f"SELECT MIN(generated_tokens) FROM {cut}").fetchone()[0]
        if not found and had is not None:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"All rows that were cut off had at least {had:,} tokens: give more than that with --max-tokens.",
            )

    @property
    def most_tokens_again(self) -> int:
        """The highest limit of rows that are answered again because they were cut off."""
        return int(self._connection.execute("SELECT COALESCE(MAX(tokens), 0) FROM again").fetchone()[0])

    def tokens_again(self, row: int) -> int | None:
        """The limit of a row that is answered again because it was cut off, 0 if that is not known; otherwise None."""
        found = self._connection.execute("SELECT tokens FROM again WHERE row = ?", (row,)).fetchone()
        return None if found is None else found[0]

    def finish(self) -> None:
        """Marks the job as finished: all rows are complete and the result is written."""
        with self._explained():
            self._connection.execute("UPDATE manifest SET finished_s = ?", (time.time(),))

    def close(self) -> None:
        if self._lock.is_locked:
            self._connection.close()
            self._lock.release()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_full(error):
                raise self._full() from error
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{self._path} cannot be written ({error.strerror}): check the folder and its permissions.",
            ) from error
        except sqlite3.OperationalError as error:
            if "full" in str(error) or "disk I/O" in str(error):
                raise self._full() from error
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{self._path} cannot be written ({error}): check its folder's permissions."
            ) from error
        except sqlite3.DatabaseError as error:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{self._path} is damaged ({error}): start the job over, which discards its answers.",
            ) from error

    def _full(self) -> EngineError:
        return EngineError(
            ErrorCode.DISK_FULL, f"The disk of {self._path.parent} is full: free some space, and the job continues."
        )


def _locked(path: Path) -> FileLock:
    lock = take_lock(path.with_name(path.name + ".lock"), _LOCK_S)
    if lock is None:
        raise EngineError(
            ErrorCode.BUSY, f"Another run is working on the job of {path.stem}: wait for it or stop it first."
        )
    return lock


def discard(path: Path) -> None:
    """Removes a journal and its side files, if they exist."""
    if not path.exists():
        return
    lock = _locked(path)
    try:
        for suffix in ("", "-wal", "-shm", ".stop"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        with contextlib.suppress(PermissionError):  # of Windows, where the release removes it
            path.with_name(path.name + ".lock").unlink(missing_ok=True)
    finally:
        lock.release()


def written_files(connection: sqlite3.Connection) -> list[WrittenFile]:
    """The files recorded in a journal as its job's own, in order of writing."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'written'").fetchone() is None:
        return []  # started by a version that did not record them
    rows = connection.execute("SELECT path, kind, size, time_ns, digest FROM written ORDER BY rowid")
    return [WrittenFile(json.loads(path), *values) for path, *values in rows]


def _values(file: WrittenFile) -> tuple[str, str, int, int, str]:
    return json.dumps(file.path), file.kind, file.size, file.time_ns, file.digest


def _sound(text: str) -> str:
    """Text that SQLite accepts: lone surrogates replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


_FLUSH_S = 0.5
_MOST_WAITING = 64


class SafeKeeping:
    """Writes answers in groups, each flushed to disk. It never blocks: while it has a `problem`, its caller waits and
    starts no new rows.
    """

    def __init__(self, journal: Journal, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._clock = clock
        self._waiting: list[Answer] = []
        self._flushed_s = clock()
        self.problem = ""
        """Why answers cannot be written, as a sentence; empty if they can."""

    @property
    def waiting(self) -> int:
        """Answers not yet on disk."""
        return len(self._waiting)

    def keep(self, answer: Answer) -> None:
        """Adds an answer, and writes the buffered ones when due."""
        self._waiting.append(answer)
        due = len(self._waiting) >= _MOST_WAITING or self._clock() - self._flushed_s >= _FLUSH_S
        if due and not self.problem:
            self.flush()

    def flush(self) -> bool:
        """Writes all buffered answers; returns whether that worked; if not, `problem` says why."""
        try:
            self._journal.record(self._waiting)
        except EngineError as error:
            if error.code != ErrorCode.DISK_FULL:
                raise
            self.problem = error.message
            return False
        self._waiting.clear()
        self.problem = ""
        self._flushed_s = self._clock()
        return True
