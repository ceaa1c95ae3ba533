"""Rows read directly from the pages of an SQLite file, for when SQLite itself rejects the file.

The format is that of sqlite.org/fileformat.html.  Pages are read one by one rather than by following the B-tree, so
that a damaged page costs only its own contents.  A row whose page is no longer consistent is `doubtful`: it may be
the remains of a deleted one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

Value = None | int | float | str | bytes

PAGE_BYTES = 4096
"""SQLite's default page size since 2016, which `schema.connect` keeps; used where the header is damaged."""

_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x0A, 0x02
_HEADER_BYTES = 100
_WAL_HEADER, _WAL_FRAME = struct.Struct(">8I"), struct.Struct(">6I")
_WAL_MAGIC = 0x377F0682
_MOST_COLUMNS = 64
_MOST_SEARCHED = 2000
"""How many damaged pages are searched byte by byte; beyond that the file is hardly worth the time."""
_INT_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a table, or an entry of an index (whose last value is the row id).

    Attributes:
        rowid: the table's row; 0 for an index entry.
        values: text with U+FFFD where it is not UTF-8.
        is_whole: False if part of it is unreadable, such as a damaged page of a long text; those values are None.
    """

    rowid: int
    values: tuple[Value, ...]
    is_whole: bool = True


class Pages:
    """The pages of the file at `path`, including what its write-ahead log has committed.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        self._size = _page_size(self._data)
        self._count = -(-len(self._data) // self._size)
        self._newer: dict[int, bytes] = {}
        with suppress(FileNotFoundError):
            self._replay(path.with_name(f"{path.name}-wal").read_bytes())
        self._free = self._free_pages()
        self._suspicious: list[int] = []

    def rows(self, is_row: Callable[[tuple[Value, ...]], bool]) -> Iterator[Record]:
        self._suspicious = []
        for number in range(1, self._count + 1):
            page, at = self._page(number), self._header_at(number)
            kind = page[at]
            if number in self._free or (kind ^ _TABLE_LEAF).bit_count() > 1:
                continue
            suspicious = kind != _TABLE_LEAF
            if not suspicious:
                begin = int.from_bytes(page[at + 5 : at + 7], "big") or 65536
                for offset in self._cells(page, at, 8):
                    record = self._row(page, offset) if offset >= begin else None
                    if record is None:
                        suspicious = True
                    elif is_row(record.values):
                        yield record
            if suspicious:
                self._suspicious.append(number)

    def doubtful_rows(self, wanted: Callable[[int], bool]) -> Iterator[Record]:
        """Rows whose id is `wanted`, at any offset of the pages that `rows` found damaged."""
        for number in self._suspicious[:_MOST_SEARCHED]:
            page = self._page(number)
            for offset in range(self._header_at(number) + 8, len(page) - 4):
                length, at = _varint(page, offset)
                rowid, _ = _varint(page, at)
                if length and wanted(rowid):
                    record = self._row(page, offset, exact=False)
                    if record is not None:
                        yield record

    def entries(self) -> Iterator[Record]:
        for number in range(1, self._count + 1):
            page, at = self._page(number), self._header_at(number)
            if page[at] not in (_INDEX_LEAF, _INDEX_INTERIOR) or number in self._free:
                continue
            interior = page[at] == _INDEX_INTERIOR
            begin = int.from_bytes(page[at + 5 : at + 7], "big") or 65536
            for offset in self._cells(page, at, 12 if interior else 8):
                if offset >= begin:
                    length, start = _varint(page, offset + 4 * interior)
                    most = (self._size - 12) * 64 // 255 - 23
                    record = self._record(0, page, start, length, most, exact=True)
                    if record is not None:
                        yield record

    # --- pages ---

    def _page(self, number: int) -> bytes:
        page = self._newer.get(number) or self._data[(number - 1) * self._size : number * self._size]
        return page if len(page) == self._size else page.ljust(self._size, b"\0")

    @staticmethod
    def _header_at(number: int) -> int:
        return _HEADER_BYTES if number == 1 else 0

    @staticmethod
    def _cells(page: bytes, at: int, header: int) -> Iterator[int]:
        count = int.from_bytes(page[at + 3 : at + 5], "big")
        first = at + header
        for place in range(first, min(first + 2 * count, len(page) - 1), 2):
            yield int.from_bytes(page[place : place + 2], "big")

    def _free_pages(self) -> set[int]:
        free: set[int] = set()
        trunk = int.from_bytes(self._page(1)[32:36], "big") if self._count else 0
        while 1 < trunk <= self._count and trunk not in free:
            page = self._page(trunk)
            if page[4] or page[0]:
                break  # more than 16 million pages, or not a freelist
            free.add(trunk)
            leaves = min(int.from_bytes(page[4:8], "big"), len(page) // 4 - 2)
            free |= {int.from_bytes(page[8 + 4 * i : 12 + 4 * i], "big") for i in range(leaves)}
            trunk = int.from_bytes(page[:4], "big")
        return free

    def _replay(self, log: bytes) -> None:
        """Apply the log's committed transactions as SQLite does: up to the first frame with a wrong checksum."""
        if len(log) < _WAL_HEADER.size:
            return
        magic, _, size, _, *salt, sum_0, sum_1 = _WAL_HEADER.unpack_from(log)
        if magic & ~1 != _WAL_MAGIC or size != self._size:
            return
        words = ">" if magic & 1 else "<"
        if _checksum(log[:24], words, 0, 0) != (sum_0, sum_1):
            return
        begun: dict[int, bytes] = {}
        for at in range(_WAL_HEADER.size, len(log) - size - _WAL_FRAME.size + 1, size + _WAL_FRAME.size):
            number, commit, *frame_salt, told_0, told_1 = _WAL_FRAME.unpack_from(log, at)
            page = log[at + _WAL_FRAME.size : at + _WAL_FRAME.size + size]
            sum_0, sum_1 = _checksum(log[at : at + 8] + page, words, sum_0, sum_1)
            if frame_salt != salt or (sum_0, sum_1) != (told_0, told_1):
                return
            begun[number] = page
            if commit:
                self._newer.update(begun)
                self._count = commit
                begun = {}

    # --- cells ---

    def _row(self, page: bytes, offset: int, *, exact: bool = True) -> Record | None:
        length, at = _varint(page, offset)
        rowid, at = _varint(page, at)
        return self._record(rowid, page, at, length, self._size - 35, exact=exact)

    def _record(self, rowid: int, page: bytes, at: int, length: int, most: int, *, exact: bool) -> Record | None:
        """The record whose payload begins at `at`; None if there is none.

        Args:
            length: of the payload, from the cell header.
            most: bytes stored on the page before the rest spills to overflow pages.
            exact: whether the record must have exactly this length.
        """
        header, first = _varint(page, at)
        end = at + header
        if not 1 < header <= min(_MOST_COLUMNS * 9, len(page) - at):
            return None
        kinds: list[int] = []
        while first < end:
            kind, first = _varint(page, first)
            kinds.append(kind)
        total = header + sum(map(_stored_bytes, kinds))
        if first != end or len(kinds) > _MOST_COLUMNS or 10 in kinds or 11 in kinds or (exact and total != length):
            return None
        payload = self._payload(page, at, total, most)
        if payload is None:
            return None
        values, place = [], header
        for kind in kinds:
            nbytes = _stored_bytes(kind)
            values.append(_value(kind, payload[place : place + nbytes], nbytes))
            place += nbytes
        return Record(rowid, tuple(values), len(payload) == total)

    def _payload(self, page: bytes, at: int, total: int, most: int) -> bytes | None:
        """The payload, as much as can be read; None if it could not fit on this page."""
        if total <= most:
            return page[at : at + total] if at + total <= len(page) else None
        fewest = (self._size - 12) * 32 // 255 - 23
        local = fewest + (total - fewest) % (self._size - 4)
        local = local if local <= most else fewest
        if at + local + 4 > len(page) or total > self._count * self._size:
            return None
        parts, missing = [page[at : at + local]], total - local
        following, seen = int.from_bytes(page[at + local : at + local + 4], "big"), set[int]()
        while missing > 0 and 1 < following <= self._count and following not in seen and following not in self._free:
            seen.add(following)
            content = self._page(following)
            parts.append(content[4 : 4 + missing])
            missing -= len(parts[-1])
            following = int.from_bytes(content[:4], "big")
        return b"".join(parts)


def _page_size(data: bytes) -> int:
    size = int.from_bytes(data[16:18], "big")
    size = 65536 if size == 1 else size
    return size if size >= 512 and size.bit_count() == 1 else PAGE_BYTES


def _checksum(data: bytes, words: str, sum_0: int, sum_1: int) -> tuple[int, int]:
    numbers = struct.unpack(f"{words}{len(data) // 4}I", data)
    for one, two in zip(numbers[::2], numbers[1::2], strict=True):
        sum_0 = sum_0 + one + sum_1 & 0xFFFFFFFF
        sum_1 = sum_1 + two + sum_0 & 0xFFFFFFFF
    return sum_0, sum_1


def _varint(page: bytes, at: int) -> tuple[int, int]:
    """A varint (one to nine bytes) and the offset after it; (0, the end) if the page ends first."""
    number = 0
    for place in range(at, min(at + 9, len(page))):
        byte = page[place]
        if place == at + 8:
            number = number << 8 | byte
            return number - (number >> 63 << 64), place + 1
        number = number << 7 | byte & 0x7F
        if byte < 0x80:
            return number, place + 1
    return 0, len(page)


def _stored_bytes(kind: int) -> int:
    if kind >= 12:
        return (kind - 12) // 2
    return 8 if kind == 7 else _INT_BYTES.get(kind, 0)


def _value(kind: int, data: bytes, nbytes: int) -> Value:
    if kind in (8, 9):
        return kind - 8
    if kind >= 12:
        return data.decode("utf-8", "replace") if kind % 2 else data
    if kind == 0 or len(data) < nbytes:
        return None
    if kind == 7:
        return float(struct.unpack(">d", data)[0])
    return int.from_bytes(data, "big", signed=True)
