"""Prepares a model: converts its experts, layer by layer, into a bank file that can be read as it is needed.

The source is a checkpoint, read by the library's own conversion, one layer's experts at a time.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.checkpoint.expert_index import ExpertIndex
from engine.checkpoint.library import bank_path
from engine.checkpoint.shards import fingerprint
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.files import new_folder
from engine.devices.host_memory import available_ram
from engine.experts.bank import BankLayer, ExpertBank
from engine.experts.bank_file import BankFile, take_over
from engine.experts.bank_header import CONVERTER, BankHeader, BankLayerSpec, UnusableBankError
from engine.experts.bank_writer import BankWriter, preparing
from engine.experts.checksums import BEST_CHECKSUM
from engine.experts.record import RecordLayout, allocate_records
from engine.experts.sites import ExpertsSite
from engine.formats import GROUP, format_of
from engine.kernels.native.library import NativeKernels
from engine.planner.placement import Budgets, require_ram
from engine.runtime.load.checkpoint import read_headers
from engine.runtime.load.fill_bank import fill_bank, working_bytes
from engine.runtime.load.library_conversion import LoadingPlan
from engine.runtime.load.library_models import (
    quiet_library,
)
from engine.runtime.load.stored import sites_in
from engine.runtime.load.tensor_reader import TensorReader

_CONVERTER = "transformers " + ".".join(transformers.__version__.split(".")[:2])
"""Part of the fingerprint: another version may convert otherwise."""
_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_REPORT_S = 0.1
_ONE_BUFFER_BELOW = 2**30
"""Bytes of RAM to leave to others: with less, one layer is converted and then written, not two at once."""


@dataclass(frozen=True)
class BankSource:
    """A checkpoint whose experts can be converted.

    Attributes:
        directory: of the checkpoint.
        model: its skeleton, on meta, with its expert parameters.
        sites: its experts modules, at least one, in the order in which the bank has them.
        plan: where their tensors are.
        precision: of the records, a name of `engine.formats`.
        kernels: quantise, where there are any.
        guesses: whether the layer that guesses tokens is part of the model.
    """

    directory: Path
    model: Any
    sites: list[ExpertsSite]
    plan: LoadingPlan
    precision: str
    kernels: NativeKernels | None = None
    guesses: bool = False

    @classmethod
    def open(
        cls,
        directory: Path,
        precision: str = "bf16",
        kernels: NativeKernels | None = None,
        *,
        guesses: bool = False,
    ) -> BankSource:
        """Reads headers and builds the skeleton; seconds, and no weights.

        Raises:
            EngineError: as `load_model`; `INVALID_REQUEST` for a model without experts.
        """
        with torch.no_grad(), quiet_library():
            opened = read_headers(directory, precision, guesses=guesses)
        if not opened.sites:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{directory.name} has no experts, so there is nothing to prepare."
            )
        sites = sites_in(opened, precision)
        return cls(directory, opened.model, sites, opened.plan, precision, kernels, opened.guesses)

    @property
    def bank(self) -> Path:
        """Where its bank file is kept."""
        return bank_path(self.directory, kept_as(self.precision, guesses=self.guesses))

    def only(self, names: Collection[str]) -> BankSource:
        """The same, for a bank of these experts modules alone."""
        return replace(self, sites=[site for site in self.sites if site.name in names])

    def header(self) -> BankHeader:
        """What a bank made of the checkpoint as it is now would say.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED` if a file is gone.
        """
        source = source_of(self.directory)
        layers = tuple(BankLayerSpec(site.name, site.num_experts, site.layout) for site in self.sites)
        group = GROUP if format_of(self.precision).is_tiled else None
        return BankHeader(self.precision, group, BEST_CHECKSUM, source, layers)

    def require_unchanged(self, header: BankHeader) -> None:
        """See the function."""
        require_unchanged(self.directory, header)

    def nbytes(self, layer: int) -> int:
        """Bytes to read for one layer."""
        return sum(part.nbytes for part in self._parts(layer).values())

    def convert(self, layer: int, records: torch.Tensor, reader: TensorReader) -> None:
        """Fills the records of one layer, uint8 [E, nbytes], page-aligned; bytes between parts are left as they are.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED` if expert weights are missing, damaged or do not fit.
            RequestCancelled: the reader's `cancelled()` was true.
        """
        site = self.sites[layer]
        plan = replace(self.plan, index=ExpertIndex({site.name: self._parts(layer)}), rest={})
        with torch.no_grad(), quiet_library():
            fill_bank(self.model, [site], plan, reader, _GivenMemory(records), self.kernels)

    def _parts(self, layer: int) -> dict[str, Any]:
        return self.plan.index.modules.get(self.sites[layer].name, {})


def kept_as(precision: str, *, guesses: bool) -> str:
    """Under which converted weights are kept: a model with the layer that guesses tokens has more of them."""
    return f"{precision}-heads" if guesses else precision


def source_of(directory: Path) -> dict[str, Any]:
    """The fingerprint of what is converted, and of what converts it.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if a file is gone.
    """
    return {**fingerprint(directory), CONVERTER: _CONVERTER}


def require_unchanged(directory: Path, header: BankHeader) -> None:
    """Raises `CHECKPOINT_DAMAGED` if the files are no longer those that `header` was made of."""
    if source_of(directory) != header.source:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The files in {directory} changed while they were being prepared: try again once they are there.",
        )


class _GivenMemory(ExpertBank):
    """A bank of one layer in memory that the caller owns."""

    def __init__(self, records: torch.Tensor) -> None:
        super().__init__(records.device)
        self._records = records

    def add_layer(self, name: str, num_experts: int, layout: RecordLayout) -> BankLayer:
        if self._records.shape != (num_experts, layout.nbytes):
            raise ValueError(f"{name} needs records of [{num_experts}, {layout.nbytes}], not {self._records.shape}")
        layer = BankLayer(name, layout, self._records)
        self.layers[name] = layer
        return layer


@dataclass(frozen=True)
class PreparedBank:
    """What came of preparing.

    Attributes:
        path: of the bank file.
        made: whether it had to be made; else it was there.
        reason: why an existing one was not usable, in words that follow `because`; `None` if there was none or
            it was usable.
        resumed_bytes: of records that an earlier attempt had finished.
    """

    path: Path
    made: bool
    reason: str | None = None
    resumed_bytes: int = 0


def prepare_bank(
    source: BankSource,
    path: Path,
    *,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    direct: bool = True,
) -> PreparedBank:
    """Makes the bank file of a model unless it is there and up to date.

    A layer is converted while the one before it is written.  Killed or cancelled, it goes on where it was the next
    time.  If another process makes the same bank, this one waits and uses that.

    Args:
        on_progress: called with (bytes of records written, in all), by the calling thread.
        cancelled: asked often.
        direct: whether to try to read and write past the page cache.

    Raises:
        EngineError: `DISK_FULL`, `NOT_ENOUGH_MEMORY`, `CHECKPOINT_DAMAGED` or `MODEL_UNSUPPORTED`; says what to do.
        RequestCancelled: `cancelled()` was true.
    """

    def check() -> None:
        if cancelled():
            raise RequestCancelled

    header = source.header()
    take_over(path, header)
    usable, why_not = _is_usable(path, header)
    if usable:
        return PreparedBank(path, made=False)
    if why_not is not None:
        _log.warning("%s It is made again.", why_not.message)
    try:
        new_folder(path.parent)
        with preparing(path, check):
            if _is_usable(path, header)[0]:  # another process has just made it
                return PreparedBank(path, made=False)
            with BankWriter(path, header, direct=direct) as writer:
                resumed = sum(header.layers[layer].nbytes for layer in writer.finished)
                _write(source, writer, on_progress, check, direct=direct)
                source.require_unchanged(header)
                writer.finish()
            return PreparedBank(path, True, why_not.reason if why_not is not None else None, resumed)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise EngineError(
            ErrorCode.DISK_FULL if full else ErrorCode.INVALID_REQUEST,
            f"{path.parent} cannot be written ({error.strerror}): free it, or choose another data folder.",
        ) from error


def rebuild_record(source: BankSource, path: Path, layer: int, expert: int) -> None:
    """Makes one damaged record again and puts it in its place in the bank.

    Raises:
        UnusableBankError: the model has changed since: the whole bank has to be made again.
        EngineError: the model's files cannot be read, or the bank cannot be written.
    """
    rebuild_layer(source, path, layer, only=expert)


def rebuild_layer(source: BankSource, path: Path, layer: int, only: int | None = None) -> int:
    """Makes the damaged records of one layer again (or `only` this one).

    Returns:
        How many were damaged.

    Raises:
        As `rebuild_record`.
    """
    with BankFile(path, source.header()) as bank:
        spec = bank.header.layers[layer]
        made = allocate_records(spec.num_experts, spec.layout, _CPU)
        made.zero_()
        with TensorReader(
            lambda _done, _total: None, lambda: False, 0, dtype=source.plan.dtype, kernels=source.kernels
        ) as reader:
            source.convert(layer, made, reader)
        there, damaged = allocate_records(1, spec.layout, _CPU)[0], 0
        for expert in range(spec.num_experts) if only is None else [only]:
            try:
                bank.read(layer, expert, there)
            except EngineError:
                bank.rewrite(layer, expert, made[expert])
                damaged += 1
    return damaged


def _is_usable(path: Path, header: BankHeader) -> tuple[bool, UnusableBankError | None]:
    try:
        BankFile(path, header).close()
    except FileNotFoundError:
        return False, None
    except UnusableBankError as error:
        return False, error
    return True, None


def _write(
    source: BankSource,
    writer: BankWriter,
    on_progress: Callable[[int, int], None],
    check: Callable[[], None],
    *,
    direct: bool,
) -> None:
    """Converts into one piece of memory while another is being written; with little RAM there is only one."""
    header, stop = writer.header, threading.Event()
    todo = [layer for layer in range(len(header.layers)) if layer not in writer.finished]
    if not todo:
        return
    buffers = _buffers(source, header, todo)
    pending: list[Future[None] | None] = [None] * len(buffers)
    done = sum(header.layers[layer].nbytes for layer in writer.finished)

    def written(count: int) -> None:
        nonlocal done
        done += count
        if stop.is_set():
            raise RequestCancelled

    def report() -> None:
        on_progress(done, header.records_nbytes)
        check()

    def wait_for(future: Future[None] | None) -> None:
        while future is not None and not future.done():
            report()
            wait([future], timeout=_REPORT_S)
        if future is not None:
            future.result()

    expected = sum(source.nbytes(layer) for layer in todo)
    with ThreadPoolExecutor(1, "bank-writer") as pool:
        try:
            with TensorReader(
                lambda _done, _total: report(),
                lambda: False,
                expected,
                direct=direct,
                dtype=source.plan.dtype,
                kernels=source.kernels,
            ) as reader:
                for turn, layer in enumerate(todo):
                    at = turn % len(buffers)
                    wait_for(pending[at])
                    spec = header.layers[layer]
                    records = buffers[at][: spec.nbytes].view(spec.num_experts, spec.layout.nbytes)
                    source.convert(layer, records, reader)
                    report()
                    pending[at] = pool.submit(writer.write_layer, layer, records, written)
            for future in pending:
                wait_for(future)
        except BaseException:
            stop.set()
            raise
    on_progress(done, header.records_nbytes)


def _buffers(source: BankSource, header: BankHeader, todo: list[int]) -> list[torch.Tensor]:
    """Memory for one or two layers, page-aligned."""
    most = max(header.layers[layer].nbytes for layer in todo)
    working = working_bytes(source.plan, source.sites)
    free = available_ram()
    require_ram(source.directory.name, most + working, Budgets(free))
    count = 2 if len(todo) > 1 and free - _ONE_BUFFER_BELOW > 2 * most + working else 1
    return [allocate_records(1, RecordLayout((), most), _CPU)[0] for _ in range(count)]
