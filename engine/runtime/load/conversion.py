"""What of a checkpoint must be converted is converted once, into one file in the data folder (`experts.container`).

That is experts and linear layers in our own tiles, made of the checkpoint's numbers or of the codes that it stores, and
experts that no range of its files holds and that do not fit into RAM.  The file is made before anything else is read,
tensor by tensor: killed or cancelled, it goes on after the last one that was finished.  Little is converted anew in
memory each time, and so is everything where the file cannot be kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.checkpoint.library import converted_path, remove_leftovers
from engine.checkpoint.shards import fingerprint
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled, never_cancelled
from engine.common.files import new_folder
from engine.common.sizes import about
from engine.devices.host_memory import available_ram
from engine.experts.container import (
    CONVERTER,
    Container,
    ContainerWriter,
    Contents,
    UnusableContainerError,
    making,
    open_container,
    reopen,
)
from engine.experts.dispatch import ExpertsSite, empty_modules
from engine.experts.record import LayerSpec, allocate_records
from engine.formats import TiledFormat
from engine.formats.tiles import Pairing, RecordLayout, TiledMatrix
from engine.kernels.native.library import NativeKernels
from engine.planner.placement import Budgets, require_ram
from engine.runtime.load.checkpoint import OpenedCheckpoint, read_headers
from engine.runtime.load.forms import Forms
from engine.runtime.load.library_conversion import load_rest
from engine.runtime.load.library_models import quiet_library
from engine.runtime.load.records import RecordMaker, working_bytes
from engine.runtime.load.tensor_reader import TensorReader

KEEP_VARIABLE = "SWITCHYARD_KEEP_PREPARED"
"""Of the environment: 0 keeps nothing for later starts, and reads nothing that was kept."""
_LEFT_FREE = 2 * 2**30
"""Bytes of the disk that are left to others: a faster start is worth less than a full disk costs."""
_CONVERTER = "transformers " + ".".join(transformers.__version__.split(".")[:2])
"""Part of the fingerprint: another version may convert otherwise."""
_NAMED = re.compile(r".+-(?P<place>[0-9a-f]{12})\.gguf")
_WEIGHT = "weight"
_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]


@dataclass
class Conversion:
    """What of a checkpoint is converted to.

    Attributes:
        forms: of its weights; the file holds the linear layers that are in tiles in them.
        sites: experts modules with the records that they get, in the order of the file.
        kernels: quantise, where there are any.
    """

    forms: Forms
    sites: list[ExpertsSite]
    kernels: NativeKernels | None = None
    _rest: Any = None

    @property
    def opened(self) -> OpenedCheckpoint:
        return self.forms.file

    @cached_property
    def linears(self) -> Mapping[str, RecordLayout]:
        return {name: self._layout(name, target) for name, target in self.forms.tiled.items()}

    def _layout(self, name: str, target: TiledFormat) -> RecordLayout:
        rows, columns = self.opened.model.get_submodule(name).weight.shape
        plain = RecordLayout.of({_WEIGHT: ((rows, columns), torch.bfloat16)}, transposed=False)
        return RecordLayout.in_tiles(plain, lambda _name: target, Pairing.PLAIN)

    @property
    def path(self) -> Path:
        """Where its file is kept: a model with the layer that guesses tokens has more weights."""
        return converted_path(self.opened.directory, f"{self.forms.precision}{'-heads' * self.opened.guesses}")

    @cached_property
    def contents(self) -> Contents:
        """What a file made of the checkpoint as it is now would hold."""
        linears = [LayerSpec(name, 1, layout) for name, layout in self.linears.items()]
        source = {**fingerprint(self.opened.directory), CONVERTER: _CONVERTER}
        return Contents(self.opened.name, self.forms.precision, source, (*self.sites, *linears))

    @property
    def nbytes(self) -> int:
        """Of what is made, without asking for the checkpoint's fingerprint."""
        return sum(site.nbytes for site in self.sites) + sum(layout.nbytes for layout in self.linears.values())

    @property
    def is_needed(self) -> bool:
        return not isinstance(_usable(self.path, self.contents), Container)

    def make(self, index: int, records: torch.Tensor, reader: TensorReader) -> None:
        """Fills the records of one tensor of the file, uint8 [count, nbytes], page-aligned."""
        spec, opened = self.contents.tensors[index], self.opened
        with torch.no_grad(), quiet_library():
            if index < len(self.sites):
                RecordMaker(opened.model, opened.plan, reader, self.kernels).fill(self.sites[index], records)
                return
            for begin, end in spec.layout.padding:
                records[:, begin:end] = 0  # so that the same model gives the same file
            matrix = self.matrix(spec.name, records)
            self.forms.fill(spec.name, matrix, lambda: self._weight(spec.name, reader), reader, self.kernels)

    def matrix(self, name: str, record: torch.Tensor) -> TiledMatrix:
        layout = self.linears[name]
        return layout.matrix(layout.views(record), _WEIGHT, 0)

    def record(self, name: str, expert: int) -> torch.Tensor:
        """Makes one expert's record again, of the model as it was opened: its weights have been filled in since."""
        with torch.no_grad(), quiet_library():
            again = Conversion(self._reopened(), self.sites, self.kernels)
        layer = next(index for index, spec in enumerate(self.contents.tensors) if spec.name == name)
        spec = self.contents.tensors[layer]
        made = allocate_records(spec.num_experts, spec.layout, _CPU)
        with TensorReader(
            lambda _done, _total: None, never_cancelled, 0, dtype=again.opened.plan.dtype, kernels=self.kernels
        ) as reader:
            again.make(layer, made, reader)
        return made[expert]

    def _reopened(self) -> Forms:
        opened, precision = self.opened, self.forms.precision
        again = read_headers(opened.directory, precision, guesses=opened.guesses)
        return Forms(again, precision, has_kernels=bool(self.linears))

    def _weight(self, name: str, reader: TensorReader) -> torch.Tensor:
        entry = self.opened.weight_of(name)
        if entry is not None:
            return reader.read(entry).to(self.opened.dtype)
        if self._rest is None:  # made by the library, together with everything that it makes something else of
            again = self._reopened()
            empty_modules(again.file.model, again.file.sites)
            load_rest(again.file.model, again.file.plan, reader, {"": _CPU}, again.apart(converted=True))
            self._rest = again.file.model
        found: torch.Tensor = self._rest.get_submodule(name).weight.detach()
        return found


@dataclass(frozen=True)
class Converted:
    conversion: Conversion
    container: Container
    note: str = ""
    made: bool = False
    resumed_bytes: int = 0


def keep_converted(conversion: Conversion, on_progress: OnProgress, cancelled: CancelCheck) -> Converted | str:
    """As `convert`, for weights that may as well be converted in memory: if the file cannot be kept, a sentence why."""
    try:
        return convert(conversion, on_progress, cancelled, left_free=_LEFT_FREE)
    except EngineError as error:
        if error.code not in (ErrorCode.DISK_FULL, ErrorCode.INVALID_REQUEST, ErrorCode.NOT_ENOUGH_MEMORY):
            raise
        _log.warning("nothing converted is kept: %s", error.message)
        return f"What was converted is not kept for the next start. {error.message}"


def convert(
    conversion: Conversion,
    on_progress: OnProgress,
    cancelled: CancelCheck,
    *,
    path: Path | None = None,
    left_free: int = 0,
) -> Converted:
    """Makes the file unless it is there and up to date.

    If another process makes the same file, this one waits and uses that.
    """

    def check() -> None:
        if cancelled():
            raise RequestCancelled

    contents, path = conversion.contents, path or conversion.path
    _take_over(path, contents)
    found = _usable(path, contents)
    if isinstance(found, Container):
        return Converted(conversion, found)
    try:
        new_folder(path.parent)
        with making(path, check):
            again = _usable(path, contents)
            if isinstance(again, Container):  # another process has just made it
                return Converted(conversion, again)
            freed = remove_leftovers()
            if again is not None:
                reopen(again)
            # What fits into half of the memory that is free stays cached: it is there at once when it is mapped.
            dropped = conversion.nbytes >= available_ram() // 2
            with ContainerWriter(path, contents, left_free=left_free, direct=dropped) as writer:
                resumed = sum(contents.tensors[index].nbytes for index in writer.finished)
                try:
                    _write(conversion, writer, resumed, on_progress, check)
                    _check_unchanged(conversion)
                except EngineError as error:
                    if error.code is ErrorCode.CHECKPOINT_DAMAGED or (left_free and error.code is ErrorCode.DISK_FULL):
                        writer.discard()
                    raise
                writer.finish()
            notes = [made_again(found.reason) if found is not None else "", removed(freed)]
            made = open_container(path, contents)
            return Converted(conversion, made, " ".join(filter(None, notes)), made=True, resumed_bytes=resumed)
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path.parent} cannot be written ({error.strerror}): free it, or choose another data folder.",
        ) from error


def _check_unchanged(conversion: Conversion) -> None:
    folder = conversion.opened.directory
    if {**fingerprint(folder), CONVERTER: _CONVERTER} != conversion.contents.source:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The files in {folder} changed while they were being converted: try again once they are there.",
        )


def removed(nbytes: int) -> str:
    return f"Removed {about(nbytes)} of converted weights that no model here needs any more." if nbytes else ""


def made_again(reason: str) -> str:
    return f"The weights were converted again because {reason}."


def _usable(path: Path, contents: Contents) -> Container | UnusableContainerError | None:
    try:
        return open_container(path, contents)
    except FileNotFoundError:
        return None
    except UnusableContainerError as error:
        _log.warning("%s It is made again.", error.message)
        return error


def _take_over(path: Path, contents: Contents) -> None:
    """Renames a file of the very same model, where it was before, to `path` if there is none.

    A data folder that comes from another machine, or with a model that was moved by hand, would otherwise keep files
    that nobody finds.
    """
    own = _NAMED.fullmatch(path.name)
    if own is None or path.exists():
        return
    for other in sorted(path.parent.glob(f"*{path.suffix}")):
        named = _NAMED.fullmatch(other.name)
        if named is None or named["place"] == own["place"]:
            continue
        with contextlib.suppress(OSError, UnusableContainerError):  # in use, or something else
            open_container(other, contents)
            other.rename(path)
            return


def _write(
    conversion: Conversion, writer: ContainerWriter, done: int, on_progress: OnProgress, check: Callable[[], None]
) -> None:
    contents, opened = writer.contents, conversion.opened
    todo = [index for index in range(len(contents.tensors)) if index not in writer.finished]
    if not todo:
        return
    most, working = max(contents.tensors[index].nbytes for index in todo), working_bytes(opened.plan, conversion.sites)
    require_ram(opened.name, most + working, Budgets(available_ram()))
    memory = allocate_records(1, RecordLayout((), most), _CPU)[0]

    def report(written: int = 0) -> None:
        nonlocal done
        done += written
        on_progress(done, contents.nbytes)
        check()

    with TensorReader(
        lambda _done, _total: report(), never_cancelled, opened.plan.nbytes, direct=True, dtype=opened.plan.dtype,
        kernels=conversion.kernels,
    ) as reader:  # fmt: skip
        for index in todo:
            spec = contents.tensors[index]
            records = memory[: spec.nbytes].view(spec.num_experts, spec.layout.nbytes)
            conversion.make(index, records, reader)
            report()
            writer.write(index, records, report)
    on_progress(done, contents.nbytes)


def keeps_nothing() -> bool:
    return os.environ.get(KEEP_VARIABLE) == "0"
