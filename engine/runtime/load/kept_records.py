"""Records that were converted once: kept on disk in a bank file, which later starts read instead.

Quantising a model takes ten times as long as reading what comes of it.  The file is read into one piece of memory that
the records stay in, and reading it begins before the engine is imported (see `early_reads`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from engine.common.errors import EngineError, RequestCancelled
from engine.common.files import new_folder
from engine.common.sizes import rounded_down, rounded_up
from engine.experts.bank import BankLayer, ExpertBank
from engine.experts.bank_file import BankFile, DamagedRecordError, take_over
from engine.experts.bank_header import BankHeader, UnusableBankError
from engine.experts.bank_writer import BankWriter, part_path, preparing
from engine.experts.direct_file import bytes_of
from engine.experts.early_reads import EARLY_READS
from engine.experts.file_image import FileImage

KEEP_VARIABLE = "SWITCHYARD_KEEP_PREPARED"
"""Of the environment: 0 keeps nothing for later starts, and reads nothing that was kept."""

WORTH_KEEPING = 64 * 2**20
"""Bytes of records below which converting them takes no time to speak of."""

_LEFT_FREE = 2 * 2**30
"""Bytes of the disk that are left to others: a faster start is worth less than a full disk costs."""

_READERS = 4
_PIECE = 8 * 2**20
_LOOK_S = 0.05
_log = logging.getLogger(__name__)


class KeptRecords:
    """A bank file of records that a model holds in RAM: read where it is usable, else written.

    Both happen on threads while the rest of the model is loaded, until `wait`.

    Args:
        header: what the file must say.
        what: the records, in a word for people: `experts`, say.
        unchanged: raises an error if what they are converted from is no longer what `header` was made of.
        keeps: whether to write the file if it is not there.

    Attributes:
        is_there: whether they are read from the file; else what `write` gets is kept in it.
        done: bytes that were read or written.
        serves_next: whether the next start can read the file: this one did, or has written it.
        note: a sentence for people; empty if there is nothing to say.
    """

    def __init__(
        self, header: BankHeader, path: Path, what: str, unchanged: Callable[[BankHeader], None], *, keeps: bool
    ) -> None:
        self._header, self._path, self._what, self._unchanged, self._keeps = header, path, what, unchanged, keeps
        self._image: FileImage | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._stop, self._count = threading.Event(), threading.Lock()
        self._held = contextlib.ExitStack()
        self._file: BankFile | None = None
        self._writer: BankWriter | None = None
        self.done, self._rest = 0, (0, 0)
        self._together: Callable[[int, int], None] = lambda _done, _total: None
        self.note, self.serves_next = "", False
        take_over(path, header)
        try:
            self._file = self._held.enter_context(BankFile(path, self._header, direct=False))
        except FileNotFoundError:
            self._begin_writing()
        except UnusableBankError as error:
            _log.warning("%s", error.message)
            if self._begin_writing():
                self.note = made_again(error.reason, what)

    @property
    def is_there(self) -> bool:
        """See the class."""
        return self._file is not None

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._path

    @property
    def names(self) -> set[str]:
        """Of the layers that are read."""
        return set(self._header.index_of) if self.is_there else set()

    def counting(self, on_progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """The same for whoever reads the rest: with what is read or written here."""

        nbytes = self._header.records_nbytes if self._file is not None or self._writer is not None else 0

        def together(done: int, total: int) -> None:
            self._rest = done, total
            on_progress(min(done + self.done, total + nbytes), total + nbytes)

        self._together = together
        return together

    def read_into(self, bank: ExpertBank) -> set[str]:
        """Begins to read all records, if they are there, and gives the bank their layers.

        Returns:
            The names of these.
        """
        file = self._file
        if file is None:
            return set()
        if bank.takes_memory:
            with contextlib.suppress(OSError, MemoryError):  # then it is read piece by piece
                self._image = EARLY_READS.take(self._path)
        self._pool = ThreadPoolExecutor(_READERS, "kept-records")
        for index, spec in enumerate(file.header.layers):
            if self._image is None:
                layer = bank.add_layer(spec.name, spec.num_experts, spec.layout)
            else:
                begin = file.header.layer_offsets[index]
                records = torch.frombuffer(self._image.bytes[begin : begin + spec.nbytes], dtype=torch.uint8)
                layer = bank.adopt(spec.name, spec.layout, records.view(spec.num_experts, spec.layout.nbytes))
            together = max(_PIECE // spec.layout.nbytes, 1)
            for first in range(0, spec.num_experts, together):
                last = min(first + together, spec.num_experts)
                self._pending.append(self._pool.submit(self._read, file, index, layer, range(first, last)))
        return self.names

    def write(self, layer: BankLayer) -> None:
        """Keeps the records of a layer, which stay as they are from now on."""
        writer = self._writer
        index = self._header.index_of.get(layer.name)
        if writer is None or index is None or self._stop.is_set():
            return
        if index in writer.finished:  # by an attempt that was stopped
            self._counted(self._header.layers[index].nbytes)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "kept-records")
        self._pending.append(self._pool.submit(writer.write_layer, index, layer.records, self._counted))

    def wait(self, cancelled: Callable[[], bool]) -> None:
        """Until everything has been read or written; what cannot be written is not kept.

        Raises:
            RequestCancelled: `cancelled()` was true.
            UnusableBankError: the file is damaged: without it the experts can be converted again.
        """
        pending = set(self._pending)
        try:
            while pending:
                finished, pending = wait(pending, timeout=_LOOK_S)
                for future in finished:
                    future.result()
                if cancelled():
                    raise RequestCancelled
                self._together(*self._rest)
            self.serves_next = self._file is not None
            if self._writer is not None:
                self._finish(self._writer)
        except DamagedRecordError as error:
            raise UnusableBankError(self._path, "a part of it was damaged") from error
        except RequestCancelled:
            raise
        except (EngineError, OSError) as error:
            if self._file is not None:
                raise UnusableBankError(self._path, "it could not be read") from error
            self._give_up(error)
        finally:
            self.close()

    def _finish(self, writer: BankWriter) -> None:
        self._unchanged(self._header)
        if len(writer.finished) == len(self._header.layers):
            writer.finish()
            self.serves_next = True
        else:  # of no use: the model does not have what its headers promised
            _log.info("some %s were not converted", self._what)
            writer.finished.clear()

    def close(self) -> None:
        """Stops what is under way.  Idempotent.  Layers that were written whole are there for the next attempt."""
        self._stop.set()
        if self._image is not None:
            self._image.close()  # wakes who waits for it
        self._end_threads()
        self._held.close()
        self._file = self._writer = None

    def _end_threads(self) -> None:
        self._stop.set()
        if self._pool is not None:
            for future in self._pending:
                future.cancel()
            self._pool.shutdown()  # it uses memory that the caller takes back
            self._pool = None

    def _read(self, file: BankFile, index: int, layer: BankLayer, experts: range) -> None:
        if self._stop.is_set():
            return
        records, begin = layer.records[experts.start : experts.stop], file.header.record_offset(index, experts.start)
        if self._image is not None:
            self._image.wait_for(begin + records.nbytes)
        else:
            file.fill(begin, bytes_of(records))
        for expert, record in zip(experts, records, strict=True):
            if not file.is_intact(index, expert, bytes_of(record)):
                raise file.damaged(index, expert)
        self._counted(records.nbytes)

    def _counted(self, nbytes: int) -> None:
        with self._count:
            self.done += nbytes
        if self._stop.is_set():
            raise RequestCancelled

    def _begin_writing(self) -> bool:
        if not self._keeps:
            return False
        try:
            new_folder(self._path.parent)
            self._held.enter_context(preparing(self._path, _somebody_else))
            self._require_space()
            self._writer = self._held.enter_context(BankWriter(self._path, self._header))
        except _OtherProcessError:
            _log.info("another process keeps the %s of this model", self._what)
        except (EngineError, OSError) as error:
            self._give_up(error)
        if self._writer is None:
            self._held.close()
        return self._writer is not None

    def _require_space(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # what is in the way would be replaced
            os.unlink(self._path)
        there = part_path(self._path).stat().st_blocks * 512 if part_path(self._path).exists() else 0
        free = shutil.disk_usage(self._path.parent).free + there
        if free < self._header.nbytes + _LEFT_FREE:
            raise OSError(
                0, f"they need {rounded_up(self._header.nbytes)} of {self._path.parent}, of which {rounded_down(free)} "
                f"are free and {rounded_down(_LEFT_FREE)} are left to others"
            )  # fmt: skip

    def _give_up(self, error: EngineError | OSError) -> None:
        why = error.message if isinstance(error, EngineError) else f"{error.strerror}."
        _log.warning("the %s are not kept: %s", self._what, why)
        self.note = f"The converted {self._what} are not kept for the next start: {why}"
        self._end_threads()
        if self._writer is not None:
            self._writer.finished.clear()  # leaves nothing behind
            self._writer.close()
            self._writer = None


class _OtherProcessError(Exception):
    pass


def _somebody_else() -> None:
    raise _OtherProcessError


def made_again(reason: str, what: str = "experts") -> str:
    """A sentence for people about a bank that was not usable."""
    return f"The {what} were prepared again because {reason}."
