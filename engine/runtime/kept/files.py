"""Blocks of keys and values on disk: a file for each, named by what it holds.

A file is written under another name and renamed, and its content has a checksum: what is half written, damaged or of
another version is never used, and removed once it is met.  Several programs may use one folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.common.kept_context import PART, SUFFIX, changing, kept_files, remove_parts, room_on_disk
from engine.experts.checksums import BEST_CHECKSUM, CHECKSUMS

Key = bytes
"""16 bytes: identifies a model and all tokens up to the end of a block."""

_MAGIC = b"SWKEPT\x00\x01"
_HEADER = struct.Struct("<8s16s16s8sQI")
"""Magic and version, key, name of the checksum, checksum of description and data, bytes of data, of the description."""
_MOST_DESCRIPTION = 2**20
_APART_NS = 1_000
"""Between the times of two blocks of one sequence: the last ones are removed first, as they are of no use alone."""
_LOOK_AGAIN_S = 5.0
_log = logging.getLogger(__name__)


class DamagedFileError(Exception):
    """A file does not hold what its name says."""


class KeptFiles:
    """The blocks of one folder.

    Args:
        room: of a folder and the bytes that it holds, the most that it may hold.
    """

    def __init__(self, folder: Path, room: Callable[[Path, int], int] = room_on_disk) -> None:
        self._folder, self._room = folder, room
        self._counted = (float("-inf"), 0)

    @property
    def nbytes(self) -> int:
        """What all of them take now, those of other programs too, as of a few seconds ago at most."""
        when, nbytes = self._counted
        if time.monotonic() - when > _LOOK_AGAIN_S:
            nbytes = sum(file.nbytes for file in kept_files(self._folder))
            self._counted = time.monotonic(), nbytes
        return nbytes

    def has(self, key: Key) -> bool:
        """Whether there is a file for this block; it may turn out to be damaged."""
        return self._path(key).exists()

    def keys(self) -> frozenset[str]:
        """The keys of all that there is, in hexadecimal digits."""
        try:
            return frozenset(name.removesuffix(SUFFIX) for name in os.listdir(self._folder) if name.endswith(SUFFIX))
        except OSError:
            return frozenset()

    def describe(self, key: Key) -> tuple[bytes, int] | None:
        """What was said of a block when it was written, and its bytes; None if it is of no use."""
        with contextlib.suppress(OSError), self._checked(key), open(self._path(key), "rb", buffering=0) as file:
            description, _, _, nbytes = _read_header(file, key)
            return description, nbytes
        return None

    def read_into(self, key: Key, target: memoryview) -> bool:
        """Fills `target`, which is as long as the block; false if the block is gone or damaged."""
        with contextlib.suppress(OSError), self._checked(key), open(self._path(key), "rb", buffering=0) as file:
            description, name, expected, nbytes = _read_header(file, key)
            if nbytes != len(target):
                raise DamagedFileError
            _fill(file, target)
            if _checksum(name, description, target) != expected:
                raise DamagedFileError
            return True
        return False

    def used(self, keys: Sequence[Key]) -> None:
        """These blocks of one sequence, in order, were of use just now."""
        now = time.time_ns()
        for index, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(now, now - index * _APART_NS))

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writing | None]:
        """To add blocks, one after the other; None if another program is writing all the time.

        Raises:
            OSError: the folder cannot be written to.
        """
        with changing(self._folder) as is_alone:
            if not is_alone:
                yield None
                return
            remove_parts(self._folder)
            writing = Writing(self._folder, self._room)
            try:
                yield writing
            finally:
                self._counted = time.monotonic(), writing.held

    def _path(self, key: Key) -> Path:
        return self._folder / f"{key.hex()}{SUFFIX}"

    @contextlib.contextmanager
    def _checked(self, key: Key) -> Iterator[None]:
        try:
            yield
        except (DamagedFileError, EOFError, struct.error):
            _log.warning("a damaged block of kept context is removed")
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)


class Writing:
    """Adds blocks to a folder that nobody else changes meanwhile.

    Attributes:
        held: bytes of all blocks there.
    """

    def __init__(self, folder: Path, room: Callable[[Path, int], int]) -> None:
        self._folder, self._room = folder, room
        self._begun_ns = time.time_ns()
        self._others = sorted(kept_files(folder), key=lambda file: file.used_ns, reverse=True)
        """Those that may give way, the one of no use for longest last."""
        self.held = sum(file.nbytes for file in self._others)

    def spare(self, keys: Iterable[Key]) -> None:
        """None of these gives way from now on."""
        names = {f"{key.hex()}{SUFFIX}" for key in keys}
        self._others = [file for file in self._others if file.path.name not in names]

    def add(self, key: Key, index: int, description: bytes, data: memoryview) -> bool:
        """Keeps a block, the one with this index in its sequence; blocks of no use for longest give way.

        Returns:
            False, and nothing was done, if there is no room for it.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        path = self._folder / f"{key.hex()}{SUFFIX}"
        if path.exists():
            return True
        size = _HEADER.size + len(description) + len(data)
        while self.held + size > self._room(self._folder, self.held):
            if not self._others:
                return False
            oldest = self._others.pop()
            with contextlib.suppress(PermissionError):  # on Windows, while another program reads it
                oldest.path.unlink(missing_ok=True)
                self.held -= oldest.nbytes
        part = path.with_suffix(PART)
        try:
            _write(part, key, description, data)
            when = self._begun_ns - index * _APART_NS
            os.utime(part, ns=(when, when))
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self.held += size
        return True


def _write(path: Path, key: Key, description: bytes, data: memoryview) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    checksum = _checksum(BEST_CHECKSUM, description, data)
    header = _HEADER.pack(_MAGIC, key, BEST_CHECKSUM.encode(), checksum, len(data), len(description))
    with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        for piece in (header + description, data):
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]


def _read_header(file: Any, key: Key) -> tuple[bytes, str, bytes, int]:
    """(description, name of the checksum, checksum, bytes of data)."""
    header = bytearray(_HEADER.size)
    _fill(file, memoryview(header))
    magic, named, checksum, expected, nbytes, length = _HEADER.unpack(header)
    name = checksum.rstrip(b"\x00").decode("ascii", "replace")
    if magic != _MAGIC or named != key or name not in CHECKSUMS or length > _MOST_DESCRIPTION:
        raise DamagedFileError
    if os.fstat(file.fileno()).st_size != _HEADER.size + length + nbytes:
        raise DamagedFileError
    description = bytearray(length)
    _fill(file, memoryview(description))
    return bytes(description), name, expected, nbytes


def _checksum(name: str, description: bytes, data: memoryview) -> bytes:
    checksum = CHECKSUMS[name]
    return checksum(checksum(description) + checksum(data))


def _fill(file: Any, target: memoryview) -> None:
    while target:
        count = file.readinto(target)
        if not count:
            raise EOFError
        target = target[count:]
