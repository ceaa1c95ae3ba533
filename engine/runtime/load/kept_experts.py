"""Experts in RAM that were converted once: kept on disk in a bank file, which later starts read instead.

Quantising a model takes ten times as long as reading what comes of it.  The file is that of `prepare_bank`: the same
bank serves whether its experts fit into RAM or not.
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

from engine.checkpoint.library import bank_path
from engine.common.errors import EngineError, RequestCancelled
from engine.common.files import new_folder
from engine.common.sizes import rounded_down, rounded_up
from engine.experts.bank import BankLayer, ExpertBank
from engine.experts.bank_file import BankFile, DamagedRecordError
from engine.experts.bank_header import BankHeader, UnusableBankError
from engine.experts.bank_writer import BankWriter, part_path, preparing
from engine.experts.direct_file import bytes_of
from engine.experts.disk_backed import can_be_disk_backed
from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.sites import ExpertsSite
from engine.kernels.native.library import NativeKernels
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.decision import Decision
from engine.runtime.load.fill_bank import is_repacked
from engine.runtime.load.prepare_bank import BankSource

KEEP_VARIABLE = "SWITCHYARD_KEEP_PREPARED"
"""Of the environment: 0 keeps nothing for later starts, and reads nothing that was kept."""

WORTH_KEEPING = 64 * 2**20
"""Bytes of experts below which converting them takes no time to speak of."""

_LEFT_FREE = 2 * 2**30
"""Bytes of the disk that are left to others: a faster start is worth less than a full disk costs."""

_READERS = 4
_PIECE = 8 * 2**20
_LOOK_S = 0.05
_log = logging.getLogger(__name__)


class KeptExperts:
    """The bank file of the experts that a model holds in RAM: read where it is usable, else written.

    Both happen on threads while the rest of the model is loaded, until `wait`.

    Args:
        source: of these experts alone.
        keeps: whether to write the file if it is not there.

    Attributes:
        is_there: whether they are read from the file; else what `write` gets is kept in it.
        done: bytes that were read or written.
        note: a sentence for people; empty if there is nothing to say.
    """

    def __init__(self, source: BankSource, path: Path, *, keeps: bool) -> None:
        self._source, self._path, self._keeps = source, path, keeps
        self._header: BankHeader = source.header()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._stop, self._count = threading.Event(), threading.Lock()
        self._held = contextlib.ExitStack()
        self._file: BankFile | None = None
        self._writer: BankWriter | None = None
        self.done, self._rest = 0, (0, 0)
        self._together: Callable[[int, int], None] = lambda _done, _total: None
        self.note = ""
        try:
            self._file = self._held.enter_context(BankFile(path, self._header, direct=False))
        except FileNotFoundError:
            self._begin_writing()
        except UnusableBankError as error:
            _log.warning("%s", error.message)
            if self._begin_writing():
                self.note = made_again(error.reason)

    @property
    def is_there(self) -> bool:
        """See the class."""
        return self._file is not None

    @property
    def names(self) -> set[str]:
        """Of the experts modules that are read."""
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
        """Begins to read all experts, if they are there, into memory that the bank allocates for them.

        Returns:
            The names of their modules.
        """
        file = self._file
        if file is None:
            return set()
        self._pool = ThreadPoolExecutor(_READERS, "kept-experts")
        for index, spec in enumerate(file.header.layers):
            layer = bank.add_layer(spec.name, spec.num_experts, spec.layout)
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
            self._pool = ThreadPoolExecutor(1, "kept-experts")
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
            if self._writer is not None:
                self._source.require_unchanged(self._header)
                self._writer.finish()
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

    def close(self) -> None:
        """Stops what is under way.  Idempotent.  Layers that were written whole are there for the next attempt."""
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
        records = layer.records[experts.start : experts.stop]
        file.fill(file.header.record_offset(index, experts.start), bytes_of(records))
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
            _log.info("another process keeps the experts of this model")
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
        _log.warning("the experts are not kept: %s", why)
        self.note = f"The converted experts are not kept for the next start: {why}"
        self._end_threads()
        if self._writer is not None:
            self._writer.finished.clear()  # leaves nothing behind
            self._writer.close()
            self._writer = None


class _OtherProcessError(Exception):
    pass


def _somebody_else() -> None:
    raise _OtherProcessError


def made_again(reason: str) -> str:
    """A sentence for people about a bank that was not usable."""
    return f"The experts were prepared again because {reason}."


def kept_experts(
    opened: OpenedCheckpoint, decision: Decision, bank: ExpertBank | None, kernels: NativeKernels | None
) -> KeptExperts | None:
    """Where the experts of this model are kept that are held in RAM; None if they need not be converted.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if a file of the model is gone.
    """
    if bank is None or bank.device.type != "cpu" or os.environ.get(KEEP_VARIABLE) == "0":
        return None
    sites = [site for site in decision.resident if can_be_disk_backed(site)]
    if sum(site.nbytes for site in sites) < WORTH_KEEPING:
        return None
    path = bank_path(opened.directory, decision.precision)
    keeps = all(_takes_long(site, opened) for site in sites)
    if not keeps and not path.exists():
        return None
    source = BankSource(opened.directory, opened.model, sites, opened.plan, decision.precision, kernels)
    return KeptExperts(source, path, keeps=keeps)


def _takes_long(site: ExpertsSite, opened: OpenedCheckpoint) -> bool:
    return isinstance(site.layout, QuantisedLayout) and not is_repacked(site, opened.plan)
