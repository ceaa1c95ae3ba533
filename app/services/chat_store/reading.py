"""Files of chats, ours and other programs', read one chat at a time, so that an export of any size needs little memory.

A file may be cut off, damaged in the middle, or a different thing from what it is called. What can be read is read; the
rest is counted.
"""

from __future__ import annotations

import base64
import os
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from app.services.chat_store.json_format import NotAChatFileError, Whole, folders_in, from_json, from_markdown, is_ours
from app.services.chat_store.other_programs import (
    FindPicture,
    LeftOut,
    from_chatgpt,
    from_lm_studio,
    is_from_chatgpt,
    is_from_lm_studio,
)
from app.services.chat_store.records import Folder
from engine.common.chat import Picture
from engine.common.errors import CancelCheck
from engine.common.pictures import media_of
from engine.common.untrusted import open_untrusted, parse_json, read_untrusted, reason

LARGEST_CHAT = 256 * 2**20
"""Bytes of one chat as JSON, or of a document that cannot be read piece by piece; more is not what people wrote."""
LARGEST_UNPACKED = 64 * 2**30
LARGEST_PICTURE = 20 * 10**6
MARKDOWN = (".md", ".markdown", ".txt")
_PIECE = 4 * 2**20
_MOST_RESTARTS = 50
_TIGHTEST = 400
"""Times that text gets smaller in an archive; what claims more is made to fill a disk."""
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}"]', re.DOTALL)
_NEXT_CHAT = re.compile(rb'[,\[]\s*(?=\{\s*"(?:title|id|conversation_id|create_time)"\s*:)')
_CHATGPT_LIST = re.compile(r"conversations(?:-\d+)?\.json", re.IGNORECASE)
_CHATS = re.compile(r"^conversations(?:-\d+)?\.json$|\.conversation\.json$", re.IGNORECASE)
_ENTRY = struct.Struct("<4s2xHH8xI4xHH")
_AFTER_ENTRY = 16
_ASSET = re.compile(r"file[-_][0-9A-Za-z]+")


@dataclass(slots=True)
class Unread:
    """What an import did not take over, and why.

    Attributes:
        left: by kind, what its chats had and these cannot have.
        damaged: chats that could not be read.
        is_cut_off: a file ended in the middle.
        problems: files of which nothing was read, each with a clause that says why.
    """

    left: Counter[LeftOut] = field(default_factory=Counter)
    damaged: int = 0
    is_cut_off: bool = False
    problems: list[tuple[str, str]] = field(default_factory=list)


def read_chats(
    paths: Sequence[Path],
    unread: Unread,
    progressed: Callable[[float], object],
    cancelled: CancelCheck,
    folders: list[Folder] | None = None,
) -> Iterator[Whole]:
    """Every chat of these files, as they are read; ends early when it is cancelled.

    Args:
        unread: is told of all that is not among them.
        progressed: is told the share of the bytes that were read.
        folders: gets those that chats lie in, before these.
    """
    sizes = [_size(path) for path in paths]
    found = folders if folders is not None else []
    before, total = 0, max(sum(sizes), 1)
    for path, size in zip(paths, sizes, strict=True):
        if cancelled():
            return

        def told(share: float, at: int = before, size: int = size) -> None:
            progressed((at + share * size) / total)

        look = _Look(unread, told, cancelled, found)
        count, damaged = 0, unread.damaged
        try:
            for chat in look.chats(path):
                count += 1
                yield chat
        except NotAChatFileError as error:
            unread.problems.append((path.name, str(error)))
        except OSError as error:
            unread.problems.append((path.name, reason(error)))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError):
            if count:
                unread.is_cut_off = True
            else:
                unread.problems.append((path.name, "it is a damaged archive"))
        else:
            if not count and not cancelled():
                why = "its chats are damaged" if unread.damaged > damaged else "there are no chats in it"
                unread.problems.append((path.name, why))
        before += size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


@dataclass(slots=True)
class _Look:
    """At one file."""

    unread: Unread
    progressed: Callable[[float], object]
    cancelled: CancelCheck
    folders: list[Folder]
    _is_in_damage: bool = False

    def chats(self, path: Path) -> Iterator[Whole]:
        if path.suffix.lower() in MARKDOWN:
            text = read_untrusted(path, LARGEST_CHAT)
            yield self._markdown(text)
            return
        with open_untrusted(path) as file:
            is_archive = file.read(4) == b"PK\x03\x04"
            file.seek(0)
            if is_archive and zipfile.is_zipfile(file):
                yield from self._archive(file)
            elif is_archive:
                yield from self._cut_off_archive(file)
            else:
                yield from self._document(file, os.fstat(file.fileno()).st_size, path.name, _assets_beside(path))

    def _markdown(self, data: bytes) -> Whole:
        try:
            return from_markdown(data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise NotAChatFileError("it is not text in UTF-8") from error

    def _archive(self, file: BinaryIO) -> Iterator[Whole]:
        with zipfile.ZipFile(file) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            wanted = _chats_among(entries)
            if not wanted:
                raise NotAChatFileError("there are no chats in this archive")
            if any(entry.flag_bits & 1 for entry in wanted):
                raise NotAChatFileError("it is encrypted: unpack it first")
            total = sum(entry.file_size for entry in wanted)
            packed = sum(entry.compress_size for entry in wanted)
            if total > LARGEST_UNPACKED or total > max(packed, 2**20) * _TIGHTEST:
                raise NotAChatFileError(f"it claims to hold {total / 2**30:,.0f} GiB of chats")
            find, done, outer = _assets_in(archive, entries), 0, self.progressed
            for entry in wanted:
                if self.cancelled():
                    return
                name, size = PurePosixPath(entry.filename).name, entry.file_size

                def inside(share: float, done: int = done, size: int = size) -> None:
                    outer((done + share * size) / max(total, 1))

                look = _Look(self.unread, inside, self.cancelled, self.folders)
                with archive.open(entry) as stream:
                    try:
                        if name.lower().endswith(MARKDOWN):
                            yield look._markdown(stream.read(LARGEST_CHAT))
                        else:
                            yield from look._document(stream, size, name, find)  # type: ignore[arg-type]
                    except NotAChatFileError:
                        self.unread.damaged += 1
                done += size

    def _cut_off_archive(self, file: BinaryIO) -> Iterator[Whole]:
        """Its table of contents is at its end, which is missing; but each entry says before itself what it is."""
        size = os.fstat(file.fileno()).st_size
        self.unread.is_cut_off = True
        file.seek(0)
        while not self.cancelled() and len(head := file.read(_ENTRY.size)) == _ENTRY.size:
            sign, flags, method, packed, name_size, more_size = _ENTRY.unpack(head)
            name = PurePosixPath(file.read(name_size).decode("utf-8", "replace")).name
            file.seek(more_size, os.SEEK_CUR)
            if sign != b"PK\x03\x04" or flags & 1 or method != zipfile.ZIP_DEFLATED:
                return
            if not _CHATS.search(name) and not flags & 8:
                file.seek(packed, os.SEEK_CUR)
                continue
            stream = _Inflated(file)
            if _CHATS.search(name):
                with suppress(NotAChatFileError, zlib.error):
                    yield from self._document(stream, size, name, lambda _id: None)  # type: ignore[arg-type]
            with suppress(zlib.error):
                stream.finish()
            if flags & 8:  # its sizes follow it
                file.seek(_AFTER_ENTRY, os.SEEK_CUR)

    def _document(self, stream: BinaryIO, size: int, name: str, find: FindPicture) -> Iterator[Whole]:
        head = stream.read(_PIECE)
        begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if begins == b"[":
            for raw in self._elements(head, stream, size):
                yield from self._found(raw, name, find)
            return
        content = head + stream.read(LARGEST_CHAT - len(head) + 1)
        if len(content) > LARGEST_CHAT:
            raise NotAChatFileError(f"it is larger than {LARGEST_CHAT // 2**20} MiB")
        try:
            raw = parse_json(content.removeprefix(b"\xef\xbb\xbf"))
        except UnicodeDecodeError as error:
            raise NotAChatFileError("it is not text in UTF-8") from error
        except ValueError as error:
            raise NotAChatFileError("it is not JSON, or it is cut off") from error
        if is_ours(raw):
            chats, damaged = from_json(raw)
            self.unread.damaged += damaged
            self.folders += folders_in(raw)
            yield from chats
        elif is_from_lm_studio(raw) or is_from_chatgpt(raw):
            yield from self._found(raw, name, find)
        elif isinstance(raw, dict) and isinstance(raw.get("conversations"), list):
            for each in raw["conversations"]:
                yield from self._found(each, name, find)
        else:
            raise NotAChatFileError("it is JSON, but not an export of chats")
        self.progressed(1.0)

    def _found(self, raw: Any, name: str, find: FindPicture) -> Iterator[Whole]:
        try:
            if is_from_chatgpt(raw):
                chat, left = from_chatgpt(raw, find)
            elif is_from_lm_studio(raw):
                chat, left = from_lm_studio(raw, name.split(".")[0])
            else:
                self._note_damage()
                return
        except NotAChatFileError:  # nothing was ever said in it
            self.unread.left[LeftOut.EMPTY] += 1
            return
        self.unread.left += left
        self._is_in_damage = False
        yield chat

    def _elements(self, head: bytes, stream: BinaryIO, size: int) -> Iterator[Any]:
        """What a list holds, one after the other; what is damaged is counted."""
        buffer, at, read = head, head.index(b"[") + 1, len(head)
        start, depth, restarts, at_end = -1, 0, 0, False
        while not self.cancelled():
            broken_at = -1
            for token in _TOKEN.finditer(buffer, at):
                sign = token[0]
                if sign == b'"':  # a text that goes on in what was not read yet
                    at = token.start()
                    break
                at = token.end()
                if sign in (b"{", b"["):
                    start = token.start() if depth == 0 else start
                    depth += 1
                elif sign in (b"}", b"]"):
                    if depth == 0:
                        if sign == b"]" and not buffer[at:].strip():
                            return
                        broken_at = at - 1
                        break
                    depth -= 1
                    if depth == 0:
                        raw = self._parsed(buffer[start:at])
                        if raw is None:
                            broken_at = start
                            break
                        start, restarts = -1, 0
                        yield raw
                        if self.cancelled():
                            return
            if broken_at < 0 and start >= 0 and (at_end or len(buffer) - start > LARGEST_CHAT):
                broken_at = start
            if broken_at >= 0:
                # Cut off, or a quote is missing somewhere: goes on with what looks like the next chat.
                self._note_damage()
                following = _NEXT_CHAT.search(buffer, broken_at + 1) if restarts < _MOST_RESTARTS else None
                restarts += 1
                start, depth = -1, 0
                at = following.end() if following is not None else len(buffer)
                if following is not None:
                    continue
            if at_end:
                self.unread.is_cut_off = True
                return
            keep = start if start >= 0 else min(at, len(buffer))
            piece = stream.read(_PIECE)
            at_end = not piece
            read += len(piece)
            buffer, at = buffer[keep:] + piece, at - keep
            start = 0 if start >= 0 else -1
            self.progressed(min(read / max(size, 1), 1.0))

    @staticmethod
    def _parsed(element: bytes) -> Any:
        try:
            return parse_json(element)
        except (ValueError, MemoryError):
            return None

    def _note_damage(self) -> None:
        """One chat less; where nothing good came since the last, it is the same damage."""
        if not self._is_in_damage:
            self._is_in_damage = True
            self.unread.damaged += 1


class _Inflated:
    """What is packed at a file's place; at its end the file is behind it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unpacking = zlib.decompressobj(-15)

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count > 0 and not self._unpacking.eof:
            packed = self._unpacking.unconsumed_tail or self._file.read(64 * 1024)
            if not packed:
                break
            parts.append(self._unpacking.decompress(packed, count))
            count -= len(parts[-1])
        return b"".join(parts)

    def finish(self) -> None:
        while self.read(_PIECE):
            pass
        self._file.seek(-len(self._unpacking.unused_data), os.SEEK_CUR)


def _chats_among(entries: Sequence[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """What holds the chats of an archive: ChatGPT's lists, or any JSON, or else Markdown."""

    def named(fits: Callable[[str], object]) -> list[zipfile.ZipInfo]:
        return [entry for entry in entries if fits(PurePosixPath(entry.filename).name)]

    return (
        named(_CHATGPT_LIST.fullmatch)
        or named(lambda name: name.lower().endswith(".json") and not name.startswith("."))
        or named(lambda name: name.lower().endswith(MARKDOWN))
    )


def _assets_in(archive: zipfile.ZipFile, entries: Sequence[zipfile.ZipInfo]) -> FindPicture:
    named: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        if found := _ASSET.match(PurePosixPath(entry.filename).name):
            named.setdefault(found[0], entry)

    def find(asset: str) -> Picture | None:
        entry = named.get(asset)
        if entry is None or entry.file_size > LARGEST_PICTURE or entry.flag_bits & 1:
            return None
        try:
            with archive.open(entry) as file:
                return _picture(file.read(LARGEST_PICTURE + 1))
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError):
            return None

    return find


def _assets_beside(path: Path) -> FindPicture:
    """In the folder of an export that was unpacked; looked for when the first picture is."""
    named: dict[str, Path] = {}
    looked: list[bool] = []

    def find(asset: str) -> Picture | None:
        if not looked:
            looked.append(True)
            try:
                with os.scandir(path.parent) as entries:
                    for entry in entries:
                        if found := _ASSET.match(entry.name):
                            named.setdefault(found[0], Path(entry.path))
            except OSError:
                return None
        try:
            return _picture(read_untrusted(named[asset], LARGEST_PICTURE)) if asset in named else None
        except OSError:
            return None

    return find


def _picture(data: bytes) -> Picture | None:
    media = media_of(data) if len(data) <= LARGEST_PICTURE else ""
    return Picture(media, base64.b64encode(data).decode("ascii")) if media else None
