"""A finished bank file: opening, validating, reading records, and rewriting a damaged one."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts.bank_header import PREAMBLE, BankHeader, UnusableBankError, parse_header, parse_preamble
from engine.experts.checksums import CHECKSUM_BYTES, CHECKSUMS
from engine.experts.direct_file import DirectFile, bytes_of

_NAMED = re.compile(r".+-(?P<place>[0-9a-f]{12})\.bank")
"""Names of banks that belong to a model, with what stands for its place: see `engine.checkpoint.library.bank_path`."""


class DamagedRecordError(EngineError):
    """A record that fails its checksum.  It can be rebuilt from the source.

    Attributes:
        layer, expert: of the record; `layer` is an index into the bank's layers.
    """

    def __init__(self, path: Path, name: str, layer: int, expert: int) -> None:
        super().__init__(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"Expert {expert} of {name} is damaged in {path}: prepare the model again, and check the disk.",
        )
        self.layer = layer
        self.expert = expert


class BankFile:
    """An open bank file.  Any thread may read from it.

    Args:
        path: of the file.
        wanted: header that the bank must match, apart from the kind of checksum; `None` accepts any.
        direct: whether to try to bypass the page cache.

    Raises:
        FileNotFoundError: the file does not exist.
        UnusableBankError: it is truncated, damaged, or does not match `wanted`; the message says which.
    """

    def __init__(self, path: Path, wanted: BankHeader | None = None, *, direct: bool = True) -> None:
        self.path = path
        try:
            self.file = DirectFile(path, direct=direct)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UnusableBankError(path, f"it cannot be opened ({error.strerror})") from error
        try:
            self.header, self._table = self._check(wanted)
        except BaseException:
            self.file.close()
            raise
        self._checksum = CHECKSUMS[self.header.checksum]

    def __enter__(self) -> BankFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return self.file.is_direct

    def is_intact(self, layer: int, expert: int, record: memoryview) -> bool:
        """Whether these bytes match the checksum of the record."""
        return bool(self._checksum(record) == self._table[layer][expert])

    def read(self, layer: int, expert: int, into: torch.Tensor) -> None:
        """Reads one record, uint8 [nbytes], and checks it.

        Raises:
            DamagedRecordError: the checksum does not match.
            EngineError: `CHECKPOINT_DAMAGED`, the disk cannot read them.
        """
        target = bytes_of(into)
        self.fill(self.header.record_offset(layer, expert), target)
        if not self.is_intact(layer, expert, target):
            raise self.damaged(layer, expert)

    def fill(self, offset: int, target: memoryview) -> None:
        """Reads bytes from anywhere in the file, unchecked.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`, the disk cannot read them or the file has become shorter.
        """
        try:
            self.file.read_into(offset, target)
        except (OSError, EOFError) as error:
            why = error.strerror if isinstance(error, OSError) else "the file is cut short"
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"The prepared experts in {self.path} cannot be read ({why}): check the disk, or prepare them again.",
            ) from error

    def damaged(self, layer: int, expert: int) -> DamagedRecordError:
        """The error for a record that is not intact."""
        return DamagedRecordError(self.path, self.header.layers[layer].name, layer, expert)

    def rewrite(self, layer: int, expert: int, record: torch.Tensor) -> None:
        """Overwrites a damaged record with one rebuilt from the source.

        Raises:
            UnusableBankError: the new record does not match the checksum either, so the whole bank is out of date.
            EngineError: `CHECKPOINT_DAMAGED`, the write failed.
        """
        data = bytes_of(record)
        if not self.is_intact(layer, expert, data):
            raise UnusableBankError(self.path, "the model that it was made from has changed")
        try:
            writable = DirectFile(self.path, writable=True, direct=self.file.is_direct)
            try:
                writable.write(self.header.record_offset(layer, expert), data)
                writable.sync()
            finally:
                writable.close()
        except OSError as error:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED, f"{self.path} cannot be repaired ({error.strerror}): check the disk."
            ) from error

    def close(self) -> None:
        """Closes the file.  Idempotent."""
        self.file.close()

    def _check(self, wanted: BankHeader | None) -> tuple[BankHeader, list[list[bytes]]]:
        header = read_header(self.path, self.file)
        if header.checksum not in CHECKSUMS:
            raise UnusableBankError(self.path, f"its checksums ({header.checksum}) cannot be computed here")
        if wanted is not None and (reason := wanted.difference(header)) is not None:
            raise UnusableBankError(self.path, reason)
        size = os.fstat(self.file.descriptor).st_size
        if size != header.nbytes:
            raise UnusableBankError(self.path, f"it has {size} bytes instead of {header.nbytes}")
        rows = read_table(self.file, header)
        if any(row is None for row in rows):
            raise UnusableBankError(self.path, "its table of checksums is damaged")
        if wanted is not None:  # its layouts describe quantised matrices, of which the file stores only the bytes
            header = replace(header, layers=wanted.layers)
        return header, [
            [row[at : at + CHECKSUM_BYTES] for at in range(0, len(row), CHECKSUM_BYTES)]
            for row in rows
            if row is not None
        ]


def take_over(path: Path, wanted: BankHeader) -> None:
    """Renames a bank that is as wanted to `path`, if there is none: of the very same model where it was before.

    A data folder that comes from another machine, or with a model that was moved by hand, would otherwise keep banks
    that nobody finds.
    """
    own = _NAMED.fullmatch(path.name)
    if own is None or path.exists():
        return
    for other in sorted(path.parent.glob(f"*{path.suffix}")):
        named = _NAMED.fullmatch(other.name)
        if named is None or named["place"] == own["place"]:
            continue
        with contextlib.suppress(OSError, UnusableBankError):  # in use, or something else
            BankFile(other, wanted).close()
            other.rename(path)
            return


def read_header(path: Path, file: DirectFile) -> BankHeader:
    """The header of an open bank file, finished or not.

    Raises:
        UnusableBankError: it is missing or damaged.
    """
    raw = bytearray(PREAMBLE.size)
    try:
        file.read_into(0, memoryview(raw))
        length, expected = parse_preamble(path, bytes(raw))
        body = bytearray(length)
        file.read_into(PREAMBLE.size, memoryview(body))
    except EOFError as error:
        raise UnusableBankError(path, "the file is cut short") from error
    except OSError as error:
        raise UnusableBankError(path, f"it cannot be read ({error.strerror})") from error
    return parse_header(path, bytes(body), expected)


def read_table(file: DirectFile, header: BankHeader) -> list[bytes | None]:
    """The concatenated checksums of each layer's records; `None` for a layer that is not finished.

    Raises:
        OSError, EOFError: it cannot be read.
    """
    rows: list[bytes | None] = []
    for index, layer in enumerate(header.layers):
        raw = bytearray((layer.num_experts + 1) * CHECKSUM_BYTES)
        file.read_into(header.table_rows[index], memoryview(raw))
        checksums, seal = bytes(raw[:-CHECKSUM_BYTES]), bytes(raw[-CHECKSUM_BYTES:])
        rows.append(checksums if seal == header.seal(index, checksums) else None)
    return rows
