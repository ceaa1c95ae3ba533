"""Blocks of keys and values on disk: a file for each, in the folder of its chat, named by what it holds.

A file is encrypted and authenticated (AES-256-GCM), its name is a keyed hash, and it is written under another name and
renamed: what is half written, altered, of another version, chat or key is never used, and removed once it is met.
Several programs may use one folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common.kept_context import (
    PART,
    SUFFIX,
    changing,
    folder_of,
    kept_context_key,
    kept_files,
    remove_parts,
    room_on_disk,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Key = bytes
"""16 bytes: identifies a model and all tokens up to the end of a block."""

_MAGIC = b"SWKEPT\x00\x03"
_HEADER = struct.Struct("<8s16sQI")
"""Magic and version, salt, bytes of data, of the description.  Description and data follow, encrypted."""
_PIECE = 2**20
"""Encrypted at once: a request that comes meanwhile waits for no more."""
_TAG = 16
_MOST_DESCRIPTION = 2**20
_APART_NS = 1_000
"""Between the times of two blocks of one sequence: the last ones are removed first, as they are of no use alone."""
_LOOK_AGAIN_S = 5.0
_FOR_KEY_S = 1.0
"""How long a request waits for a keyring, which may be waiting for people."""
_log = logging.getLogger(__name__)


class DamagedFileError(Exception):
    """A file does not hold what its name says."""


class SpillFiles:
    """The blocks of one folder: of chats that `keep_chat` has named, and no others.

    Args:
        room: of a folder and the bytes that it holds, the most that it may hold.
        ask_key: gives the 32 bytes to encrypt with, or raises OSError; asked once, on a thread of its own, when there
            is something to read or to write.
    """

    def __init__(
        self,
        folder: Path,
        room: Callable[[Path, int], int] = room_on_disk,
        ask_key: Callable[[], bytes] = kept_context_key,
    ) -> None:
        self._folder, self._room, self._ask_key = folder, room, ask_key
        self._counted = (float("-inf"), 0)
        self._key = b""
        self._asking: threading.Thread | None = None
        self._lock = threading.Lock()
        self.on_key: Callable[[OSError | None], None] = lambda _error: None
        """Told on any thread, once, that it can be written to from now on, or why it never can."""

    @property
    def nbytes(self) -> int:
        """What all of them take now, those of other programs too, as of a few seconds ago at most."""
        when, nbytes = self._counted
        if time.monotonic() - when > _LOOK_AGAIN_S:
            nbytes = sum(file.nbytes for file in kept_files(self._folder))
            self._counted = time.monotonic(), nbytes
        return nbytes

    def keeps(self, chat: str) -> bool:
        """Whether anything of this chat may be kept; not before `keep_chat`, nor once it is deleted."""
        return bool(chat) and folder_of(chat, self._folder).is_dir()

    def is_open(self, chat: str, patience_s: float = 0.0) -> bool:
        """Whether something of this chat can be read and written now, or after so long."""
        if not self.keeps(chat):
            return False
        with self._lock:
            if self._asking is None:
                self._asking = threading.Thread(target=self._ask, name="kept-key", daemon=True)
                self._asking.start()
        self._asking.join(patience_s)
        return bool(self._key)

    def close(self, patience_s: float) -> None:
        if self._asking is not None:
            self._asking.join(patience_s)

    def has(self, chat: str, key: Key) -> bool:
        """Whether there is a file for this block; it may turn out to be damaged."""
        return bool(chat and self._key) and self.path(chat, key).exists()

    def look(self, chat: str) -> Callable[[Key], bool]:
        """The same for many blocks, as of now."""
        names = set[str]()
        with contextlib.suppress(OSError):
            names.update(os.listdir(folder_of(chat, self._folder)) if chat else ())
        if not self.is_open(chat, _FOR_KEY_S if names else 0.0):
            names.clear()
        return lambda key: bool(names) and self.path(chat, key).name in names

    def describe(self, chat: str, key: Key) -> tuple[bytes, int] | None:
        """What was said of a block when it was written, and its bytes; None if it is of no use."""
        with self._opened(chat, key) as file:
            if file is not None:
                description, _cipher, nbytes = self._read_header(file, chat, key)
                return description, nbytes
        return None

    def read_into(self, chat: str, key: Key, target: memoryview) -> bool:
        """Fills `target`, which is as long as the block; false if the block is gone or damaged."""
        with self._opened(chat, key) as file:
            if file is not None:
                _description, cipher, nbytes = self._read_header(file, chat, key)
                if nbytes != len(target):
                    raise DamagedFileError
                for number, piece in enumerate(_pieces(target), 1):
                    piece[:] = _decrypted(cipher, number, _read(file, len(piece) + _TAG))
                return True
        return False

    def used(self, chat: str, keys: Sequence[Key]) -> None:
        """These blocks of one sequence, in order, were of use just now."""
        now = time.time_ns()
        for index, key in enumerate(keys if chat and self._key else ()):
            with contextlib.suppress(OSError):
                os.utime(self.path(chat, key), ns=(now, now - index * _APART_NS))

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
            writing = Writing(self, self._folder, self._room)
            try:
                yield writing
            finally:
                self._counted = time.monotonic(), writing.held

    def write(self, path: Path, chat: str, key: Key, description: bytes, data: memoryview) -> None:
        """Writes a block under another name than its own.

        Raises:
            OSError: some of it may have been written.
        """
        header = _HEADER.pack(_MAGIC, secrets.token_bytes(16), len(data), len(description))
        cipher = self._cipher(chat, key, header)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            _write(file, header + cipher.encrypt(_nonce(0), description, None))
            for number, piece in enumerate(_pieces(data), 1):
                _write(file, cipher.encrypt(_nonce(number), piece, None))

    def path(self, chat: str, key: Key) -> Path:
        """Of a block, whether it is there or not; only once the chat `is_open`."""
        # Keyed: who has the model could else make up texts, and see by their names whether they were read.
        folder = folder_of(chat, self._folder)
        digest = hashlib.blake2b(folder.name.encode() + key, key=self._key, digest_size=16, person=b"name")
        return folder / f"{digest.hexdigest()}{SUFFIX}"

    def _cipher(self, chat: str, key: Key, header: bytes) -> AESGCM:
        """A file's own: of its chat, its block, its salt and its lengths.  So pieces are numbered from 0 in each."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        own = folder_of(chat, self._folder).name.encode() + key + header
        return AESGCM(hashlib.blake2b(own, key=self._key, digest_size=32, person=b"file").digest())

    def _read_header(self, file: Any, chat: str, key: Key) -> tuple[bytes, AESGCM, int]:
        """(description, what decrypts the data behind it, bytes of that)."""
        header = _read(file, _HEADER.size)
        magic, _salt, nbytes, length = _HEADER.unpack(header)
        is_whole = os.fstat(file.fileno()).st_size == _file_bytes(length, nbytes)
        if magic != _MAGIC or length > _MOST_DESCRIPTION or not is_whole:
            raise DamagedFileError
        cipher = self._cipher(chat, key, bytes(header))
        return _decrypted(cipher, 0, _read(file, length + _TAG)), cipher, nbytes

    @contextlib.contextmanager
    def _opened(self, chat: str, key: Key) -> Iterator[Any]:
        """The file, or None if there is none; it is removed if it turns out to be damaged."""
        path = self.path(chat, key) if chat and self._key else None
        try:
            with contextlib.suppress(OSError), contextlib.ExitStack() as held:
                file = None
                with contextlib.suppress(OSError):
                    file = held.enter_context(open(path, "rb", buffering=0)) if path is not None else None
                yield file
        except (DamagedFileError, EOFError):
            _log.warning("a damaged block of kept context is removed")
            assert path is not None
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _ask(self) -> None:
        error: OSError | None = None
        try:
            self._key = self._ask_key()
        except OSError as failure:
            error = failure
        self.on_key(error)


class Writing:
    """Adds blocks to a folder that nobody else changes meanwhile.

    Attributes:
        held: bytes of all blocks there.
    """

    def __init__(self, files: SpillFiles, folder: Path, room: Callable[[Path, int], int]) -> None:
        self._files, self._folder, self._room = files, folder, room
        self._begun_ns = time.time_ns()
        self._others = sorted(kept_files(folder), key=lambda file: file.used_ns, reverse=True)
        """Those that may give way, the one of no use for longest last."""
        self.held = sum(file.nbytes for file in self._others)

    def spare(self, chat: str, keys: Iterable[Key]) -> None:
        """None of these gives way from now on."""
        paths = {self._files.path(chat, key) for key in keys}
        self._others = [file for file in self._others if file.path not in paths]

    def add(self, chat: str, key: Key, index: int, description: bytes, data: memoryview) -> bool:
        """Keeps a block, the one with this index in its sequence; blocks of no use for longest give way.

        Returns:
            False, and nothing was done, if there is no room for it, or the chat is gone.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        path = self._files.path(chat, key)
        if path.exists():
            return True
        if not path.parent.is_dir():
            return False
        size = _file_bytes(len(description), len(data))
        while self.held + size > self._room(self._folder, self.held):
            if not self._others:
                return False
            oldest = self._others.pop()
            with contextlib.suppress(PermissionError):  # on Windows, while another program reads it
                oldest.path.unlink(missing_ok=True)
                self.held -= oldest.nbytes
        part = path.with_suffix(PART)
        try:
            self._files.write(part, chat, key, description, data)
            when = self._begun_ns - index * _APART_NS
            os.utime(part, ns=(when, when))
            part.replace(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
                return False  # the chat was deleted meanwhile
            raise
        self.held += size
        return True


def _file_bytes(description: int, data: int) -> int:
    """With a tag behind the description, and behind each piece of the data."""
    return _HEADER.size + description + _TAG + data + -(-data // _PIECE) * _TAG


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), _PIECE):
        yield data[begin : begin + _PIECE]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _decrypted(cipher: AESGCM, number: int, piece: bytearray) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(_nonce(number), piece, None)
    except InvalidTag:
        raise DamagedFileError from None


def _read(file: Any, nbytes: int) -> bytearray:
    found = bytearray(nbytes)
    left = memoryview(found)
    while left:
        count = file.readinto(left)
        if not count:
            raise EOFError
        left = left[count:]
    return found


def _write(file: Any, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[file.write(view) :]
