"""Recorded sessions on disk: append-only files of checksummed chunks, in a folder with a size limit.

    file   magic, then chunks
    chunk  kind (1 byte), length of the payload (4), CRC-32 of all three but itself (4), payload

The first chunk is JSON about the session. Readers stop at the first truncated or damaged chunk: everything before it is
valid, however the writer ended. Numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import private_folder
from engine.common.untrusted import open_untrusted, parse_json
from engine.telemetry.lanes import ALL_LANES, NAMES
from engine.telemetry.records import SPAN, STEP, Records

SUFFIX = ".swytrace"
MAGIC = b"SWYTRC2\n"
FILE_BYTES = 32 * 2**20
"""Most bytes of one file; a longer session continues in another."""
RING_BYTES = 512 * 2**20
"""Most bytes of all files in a folder: the oldest are deleted."""
_CHUNK = struct.Struct("<BII")
_CHECKED = struct.Struct("<BI")
_MOST_CHUNK = 64 * 2**20


class Chunk(IntEnum):
    """What a chunk holds."""

    ABOUT = 0  # JSON: names, dtypes, the model
    CLOCK = 1  # two doubles: nanoseconds of the engine's clock, seconds since 1970
    SPANS = 2  # deflated `SPAN` records
    STEPS = 3  # deflated `STEP` records
    NOTE = 4  # JSON: an expert map, a cache report, a sample of the machine


class SessionWriter:
    """Appends to a session's files.  Every chunk is written when a call returns, so a killed writer loses none.

    Args:
        folder: of all sessions; created if missing.
        about: about this session: the model's name and settings; JSON.
        ring_bytes: limit of all sessions in the folder; the oldest files are deleted beyond it.

    Raises:
        OSError: a file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        about: dict[str, Any],
        *,
        ring_bytes: int = RING_BYTES,
        file_bytes: int = FILE_BYTES,
        started_s: float | None = None,
    ) -> None:
        self._folder, self._ring_bytes, self._file_bytes = folder, ring_bytes, min(file_bytes, max(ring_bytes // 2, 1))
        self._about = {**about, "names": NAMES, "lanes": ALL_LANES, "span": _fields(SPAN), "step": _fields(STEP)}
        moment = time.time() if started_s is None else started_s
        # Another session may have started in the same millisecond.
        self._name = time.strftime("%Y%m%d-%H%M%S", time.gmtime(moment)) + f"-{int(moment * 1000) % 1000:03d}"
        while list(folder.glob(f"{self._name}.*")):
            self._name += "x"
        self._part = 0
        self._clock: tuple[int, float] | None = None
        private_folder(folder)
        self._fd = self._open_part()

    @property
    def name(self) -> str:
        return self._name

    def clock(self, clock_ns: int, wall_s: float) -> None:
        """Writes the same moment on the engine's clock and in seconds since 1970."""
        self._clock = clock_ns, wall_s
        self._append(Chunk.CLOCK, struct.pack("<qd", clock_ns, wall_s))

    def spans(self, spans: Records) -> None:
        if len(spans):
            self._append(Chunk.SPANS, _deflated(spans))

    def steps(self, steps: Records) -> None:
        if len(steps):
            self._append(Chunk.STEPS, _deflated(steps))

    def note(self, kind: str, clock_ns: int, content: dict[str, Any]) -> None:
        """Writes other timestamped data: an expert map, a cache report, a sample of the machine."""
        text = json.dumps({"kind": kind, "clock_ns": clock_ns, "content": content}, separators=(",", ":"))
        self._append(Chunk.NOTE, zlib.compress(text.encode("utf-8"), 1))

    def close(self) -> None:
        """Ends the session; idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # disk full: what was written is still readable
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _append(self, kind: Chunk, payload: bytes) -> None:
        if self._fd < 0:
            raise ValueError("the session has ended")
        if self._written + len(payload) + _CHUNK.size > self._file_bytes and self._written > self._head:
            self.close()
            self._fd = self._open_part()
        self._write(kind, payload)

    def _open_part(self) -> int:
        self._part += 1
        path = self._folder / f"{self._name}.{self._part:04d}{SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600)
        self._written = self._head = 0
        os.write(self._fd, MAGIC)
        self._write(Chunk.ABOUT, json.dumps({**self._about, "part": self._part}).encode("utf-8"))
        if self._clock is not None:
            self._write(Chunk.CLOCK, struct.pack("<qd", *self._clock))
        self._head = self._written
        keep_within(self._folder, self._ring_bytes - self._file_bytes, keep=path)
        return self._fd

    def _write(self, kind: Chunk, payload: bytes) -> None:
        data = _CHUNK.pack(kind, len(payload), _checksum(kind, payload)) + payload
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._written += len(data)


@dataclass
class RecordedSession:
    """A session read from disk.

    Attributes:
        about: written about it.
        spans, steps: records in this version's dtypes, in order of writing.
        clocks: (nanoseconds of the engine's clock, seconds since 1970).
        notes: (kind, nanoseconds, content).
        is_whole: false if a file was truncated or damaged.
    """

    about: dict[str, Any]
    spans: Records
    steps: Records
    clocks: list[tuple[int, float]] = field(default_factory=list)
    notes: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    is_whole: bool = True

    def wall_s(self, clock_ns: int) -> float:
        """Seconds since 1970 at a moment of the engine's clock, by the latest clock pair before it."""
        if not self.clocks:
            return 0.0
        before = [pair for pair in self.clocks if pair[0] <= clock_ns] or self.clocks[:1]
        return before[-1][1] + (clock_ns - before[-1][0]) / 1e9


def list_sessions(folder: Path) -> dict[str, list[Path]]:
    """Sessions by name, oldest first, and their files in order."""
    sessions: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []:
        sessions.setdefault(path.name.partition(".")[0], []).append(path)
    return sessions


def model_of(path: Path) -> str:
    """The name of the model that a session's first file begins with; empty if it cannot be read."""
    try:
        kind, payload = next(_chunks(path, must_be_one=True))
        return str(_object(payload).get("model", "")) if kind == Chunk.ABOUT else ""
    except (EngineError, StopIteration, ValueError, TypeError):
        return ""


def read_session(paths: list[Path]) -> RecordedSession:
    session: RecordedSession | None = None
    spans: list[NDArray[Any]] = []
    steps: list[NDArray[Any]] = []
    for path in paths:
        own: dict[str, Any] = {}
        for kind, payload in _chunks(path, must_be_one=session is None):
            if kind is None:
                if session is not None:
                    session.is_whole = False
                continue
            try:
                if kind == Chunk.ABOUT:
                    own = _object(payload)
                    session = session or RecordedSession(own, np.empty(0, SPAN), np.empty(0, STEP))
                    continue
                if session is None:
                    break
                if kind == Chunk.CLOCK:
                    clock_ns, wall_s = struct.unpack("<qd", payload)
                    session.clocks.append((clock_ns, wall_s))
                elif kind == Chunk.SPANS:
                    spans.append(_renamed(_read_records(payload, own["span"], SPAN), own))
                elif kind == Chunk.STEPS:
                    steps.append(_read_records(payload, own["step"], STEP))
                elif kind == Chunk.NOTE:
                    note = _object(_inflated(payload))
                    session.notes.append((str(note["kind"]), int(note["clock_ns"]), dict(note["content"])))
            except (ValueError, KeyError, TypeError, struct.error, zlib.error):
                if session is not None:
                    session.is_whole = False  # the checksum is right, so another program wrote it
    if session is None:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{paths[0] if paths else 'Nothing'} is not a recorded session.")
    session.spans = np.concatenate(spans) if spans else session.spans
    session.steps = np.concatenate(steps) if steps else session.steps
    return session


def keep_within(folder: Path, limit: int, keep: Path | None = None) -> None:
    """Deletes the oldest session files until the rest fits into `limit` bytes; never `keep`."""
    files = [(path, path.stat().st_size) for paths in list_sessions(folder).values() for path in paths if path != keep]
    total = sum(size for _, size in files)
    for path, size in files:
        if total <= limit:
            return
        with contextlib.suppress(OSError):  # open in another program, on systems where that prevents deletion
            path.unlink()
            total -= size


def _chunks(path: Path, *, must_be_one: bool) -> Iterator[tuple[int | None, bytes]]:
    """Valid chunks, then (None, b"") if the file is truncated or damaged."""
    try:
        with open_untrusted(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                if must_be_one:
                    raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} is not a recorded session.")
                yield None, b""
                return
            while head := file.read(_CHUNK.size):
                kind, length, checksum = _CHUNK.unpack(head) if len(head) == _CHUNK.size else (0, _MOST_CHUNK + 1, 0)
                payload = file.read(length) if length <= _MOST_CHUNK else b""
                if len(payload) != length or _checksum(kind, payload) != checksum:
                    yield None, b""
                    return
                yield kind, payload
    except OSError as error:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} cannot be read: {error.strerror or error}.") from error


def _checksum(kind: int, payload: bytes) -> int:
    """Over the kind and the length too: one chunk taken for another kind would leave a gap that nobody sees."""
    return zlib.crc32(payload, zlib.crc32(_CHECKED.pack(kind, len(payload))))


def _read_records(payload: bytes, fields: list[list[str]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Records of any version of this program: unknown fields are dropped, missing ones are 0."""
    theirs = np.dtype([(str(name), str(kind)) for name, kind in fields])
    written = np.frombuffer(_inflated(payload), theirs)
    if theirs == dtype:
        return written
    records = np.zeros(len(written), dtype)
    for name in set(theirs.names or ()) & set(dtype.names or ()):
        records[name] = written[name]
    return records


def _renamed(spans: NDArray[Any], about: dict[str, Any]) -> NDArray[Any]:
    """Spans with this version's numbers for lanes and names."""
    if tuple(about["names"]) == NAMES and tuple(about["lanes"]) == ALL_LANES:
        return spans
    spans = spans.copy()
    for column, theirs, ours in (("name", about["names"], NAMES), ("lane", about["lanes"], ALL_LANES)):
        numbers = [ours.index(name) if name in ours else np.iinfo(spans.dtype[column]).max for name in theirs]
        spans[column] = np.array(numbers, spans.dtype[column])[spans[column].clip(0, len(numbers) - 1)]
    return spans


def _fields(dtype: np.dtype[Any]) -> list[tuple[str, str]]:
    return [(name, dtype[name].str) for name in dtype.names or ()]


def _deflated(records: Records) -> bytes:
    return zlib.compress(np.ascontiguousarray(records).tobytes(), 1)


def _inflated(payload: bytes) -> bytes:
    inflate = zlib.decompressobj()
    data = inflate.decompress(payload, _MOST_CHUNK)
    if not inflate.eof:
        raise ValueError("cut short, or too long")
    return data


def _object(payload: bytes) -> dict[str, Any]:
    content = parse_json(payload)
    if not isinstance(content, dict):
        raise TypeError("not an object")
    return content
