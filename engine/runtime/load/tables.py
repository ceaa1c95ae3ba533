"""Tables that stay on disk: embeddings of tokens, n-grams and layers whose rows are looked up in a model's files.

A step reads the rows that it needs and no others, each once, a few at a time in parallel; where the row numbers of all
layers follow from the tokens, all are asked for before the first layer.  Rows come through the page cache, which keeps
as many as the machine can spare; those used last are kept besides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, is_blocks
from engine.checkpoint.stored import rows_of
from engine.common.errors import RequestCancelled
from engine.common.footprint import KEPT_ROWS_BYTES, LARGE_TABLE_BYTES
from engine.experts.direct_file import OpenFiles, bytes_of
from engine.families.library import take_over
from engine.formats.ggml import GGML
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import BlockEmbedding
from engine.kernels.repack import Blocks, unpack_into
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.library_conversion import parameter_dtypes
from engine.runtime.load.library_models import tied_to
from engine.runtime.load.tensor_reader import torch_dtype

_THREADS = 16
"""Reads in flight: rows are small, so the disk's latency counts and not its rate."""
_HASHES = "ngram_heads"
"""Attribute of a module that makes row numbers of tokens: how many for each."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredTable:
    """Where the rows of an embedding lie: matrices of one type, one below the other."""

    parts: tuple[TensorEntry, ...]
    row_bytes: int
    columns: int
    per_token: int

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def kept(self) -> int:
        return min(self.nbytes, KEPT_ROWS_BYTES) // self.row_bytes * self.row_bytes

    def unpack(self, raw: torch.Tensor, dtype: torch.dtype, kernels: NativeKernels | None) -> torch.Tensor:
        entry = self.parts[0]
        plain = torch_dtype(entry)
        if plain is not None:
            return raw.view(plain).to(dtype)
        out = torch.empty(len(raw), self.columns, dtype=dtype)
        unpack_into(Blocks(GGML[entry.dtype], raw), out, kernels)
        return out


def tables_in(opened: OpenedCheckpoint) -> dict[str, StoredTable]:
    """The large embeddings of a model that can be looked up in its files, by the names of their weights: none that an
    output layer shares, which needs all of it."""
    model, plan = opened.model, opened.plan
    tied = tied_to(model)
    found: dict[str, StoredTable] = {}
    if plan.quantizer is not None:
        return found
    for name, module in model.named_modules():
        weight, entry = f"{name}.weight", plan.renamed.get(f"{name}.weight")
        if entry is None or not _is_looked_up(module) or weight in {*tied, *tied.values()}:
            continue
        parts = _parts_of(entry)
        rows = sum(part.shape[0] for part in parts)
        if (rows, module.embedding_dim) != tuple(module.weight.shape) or entry.nbytes < LARGE_TABLE_BYTES:
            continue
        per_token = getattr(model.get_submodule(name.rpartition(".")[0]), _HASHES, 1)
        found[weight] = StoredTable(parts, parts[0].nbytes // parts[0].shape[0], module.embedding_dim, per_token)
    return found


def _is_looked_up(module: Any) -> bool:
    if not isinstance(module, torch.nn.Embedding) or module.max_norm is not None:
        return False
    return type(module).forward is torch.nn.Embedding.forward or hasattr(module, "embed_scale")


def _parts_of(entry: TensorEntry) -> tuple[TensorEntry, ...]:
    """The matrices of one type that a tensor consists of, one below the other; none if it is stored otherwise."""
    packing = rows_of(entry)
    parts: tuple[TensorEntry, ...] = (entry,)
    if isinstance(entry, PackedEntry):
        if packing is None or not packing.are_below:
            return ()
        parts = entry.sources
    known = is_blocks(parts[0].dtype) or torch_dtype(parts[0]) is not None
    alike = {(part.dtype, part.shape[1:]) for part in parts}
    return parts if known and len(alike) == 1 and all(len(part.shape) == 2 and part.shape[0] for part in parts) else ()


class TableReads:
    """Reads rows of all tables of a model; closed with it."""

    def __init__(self) -> None:
        self.rows = self.nbytes = self.reads = 0
        self.tables: dict[str, RowTable] = {}
        self._files, self._closed = OpenFiles(direct=False), False
        self._pool = ThreadPoolExecutor(_THREADS, "table-rows")

    @property
    def per_token(self) -> tuple[int, int]:
        stored = [table.stored for table in self.tables.values()]
        return sum(each.per_token for each in stored), sum(each.per_token * each.row_bytes for each in stored)

    def open(self, table: StoredTable) -> None:
        for part in table.parts:
            self._files.open(part.file).read_at_random()

    def start(self, table: StoredTable, rows: Rows, places: Rows, target: torch.Tensor) -> list[Future[None]]:
        """Begins to fill rows of a matrix, uint8 [any, row_bytes]."""
        if not len(rows):
            return []
        begins = np.cumsum([0, *(part.shape[0] for part in table.parts)])
        part = np.searchsorted(begins, rows, "right") - 1
        apart = (np.diff(rows) != 1) | (np.diff(places) != 1) | (np.diff(part) != 0)
        first = np.concatenate(([0], np.flatnonzero(apart) + 1))
        count = np.diff(np.append(first, len(rows))) * table.row_bytes
        offset = np.array([each.offset for each in table.parts])[part[first]]
        offset += (rows[first] - begins[part[first]]) * table.row_bytes
        memory, width = bytes_of(target), table.row_bytes
        runs = np.stack((part[first], offset, places[first] * width, count), axis=1).tolist()
        self.rows += len(rows)
        self.nbytes += len(rows) * width
        self.reads += len(runs)
        shares = [runs[at::_THREADS] for at in range(min(_THREADS, len(runs)))]
        return [self._pool.submit(self._read, table, share, memory) for share in shares]

    def _read(self, table: StoredTable, runs: list[list[int]], memory: memoryview) -> None:
        for part, offset, at, nbytes in runs:
            if self._closed:
                raise RequestCancelled
            self._files.read(table.parts[part].file, offset, memory[at : at + nbytes])

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._files.close()


class _Reading:
    def __init__(self, rows: Rows, raw: torch.Tensor, missing: Rows, jobs: list[Future[None]]) -> None:
        self.rows, self.raw, self._missing, self._jobs = rows, raw, missing, jobs

    def wait(self) -> Rows:
        """Until all are there; places of those that were read."""
        wait(self._jobs)  # all: they write into this memory
        for job in self._jobs:
            job.result()
        return self._missing


class RowTable(BlockEmbedding):
    """The `forward` of an embedding that stays on disk; replaces its weight.

    Args:
        rounds: whether it gives what the module in its own type gives; else blocks are unpacked to `dtype` at once, as
            `BlockEmbedding` does.

    Attributes:
        stored: where its rows lie.
        dtype: of what it gives.
        numbers: while it is set, row numbers are expected, and nothing is given for them.
    """

    def __init__(
        self,
        module: torch.nn.Embedding,
        table: StoredTable,
        reads: TableReads,
        kernels: NativeKernels | None,
        dtype: torch.dtype,
        place: torch.device,
        *,
        rounds: bool,
    ) -> None:
        self._module, self.stored, self._reads, self._unpacking = module, table, reads, kernels
        self._type, self._rounds, self.dtype, self.numbers = dtype, rounds, dtype, False
        self._count = module.num_embeddings
        self._recent = torch.empty(table.kept // table.row_bytes, table.row_bytes, dtype=torch.uint8)
        self._order: OrderedDict[int, int] = OrderedDict()
        self._ahead: _Reading | None = None
        reads.open(table)
        module.padding_idx = None  # says nothing of what is looked up
        module.weight = torch.nn.Parameter(torch.empty(0, dtype=dtype, device=place), requires_grad=False)
        module.register_buffer("rows_used_last", self._recent, persistent=False)  # registered only to be counted

    def expect(self, ids: torch.Tensor) -> None:
        """Begins to read the rows of the next step; numbers that are none are left to whoever looks up in the end."""
        self._settle()
        rows = np.unique(ids.cpu().numpy().astype(np.int64))
        self._ahead = self._begin(rows[(rows >= 0) & (rows < self._count)])

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if self.numbers:
            self.expect(input)
            return torch.empty(*input.shape, 0, device=input.device)
        wanted, inverse = np.unique(input.cpu().numpy().astype(np.int64), return_inverse=True)
        reading = self._settle()
        if reading is None or not np.isin(wanted, reading.rows, assume_unique=True).all():
            reading = self._begin(wanted)
            self._keep(reading)
        at = np.searchsorted(reading.rows, wanted)
        raw = reading.raw if len(wanted) == len(reading.rows) else reading.raw[torch.from_numpy(at)]
        rows = self.stored.unpack(raw, self._type if self._rounds else self.dtype, self._unpacking)
        ids = torch.from_numpy(inverse.reshape(tuple(input.shape))).to(input.device)
        module, empty = self._module, self._module.weight
        module.weight = torch.nn.Parameter(rows.to(input.device), requires_grad=False)
        try:  # the module's own, with these rows for its weight: it may do more with them
            found: torch.Tensor = type(module).forward(module, ids)
        finally:
            module.weight = empty
        return found.to(self.dtype)

    def _begin(self, rows: Rows) -> _Reading:
        if len(rows) and not 0 <= rows[0] <= rows[-1] < self._count:
            raise IndexError("index out of range in self")
        raw = torch.empty(len(rows), self.stored.row_bytes, dtype=torch.uint8)
        known = [(at, self._order[row]) for at, row in enumerate(rows.tolist()) if row in self._order]
        if known:
            here, there = torch.tensor(known).T
            raw[here] = self._recent[there]
            for row in rows[here.numpy()].tolist():
                self._order.move_to_end(row)
        missing = np.setdiff1d(np.arange(len(rows)), [at for at, _ in known], assume_unique=True)
        return _Reading(rows, raw, missing, self._reads.start(self.stored, rows[missing], missing, raw))

    def _settle(self) -> _Reading | None:
        reading, self._ahead = self._ahead, None
        if reading is not None:
            self._keep(reading)
        return reading

    def _keep(self, reading: _Reading) -> None:
        missing = reading.wait()[-len(self._recent) or len(reading.rows) :]
        slots = []
        for row in reading.rows[missing].tolist() if len(self._recent) else []:
            slot = len(self._order) if len(self._order) < len(self._recent) else self._order.popitem(last=False)[1]
            self._order[row] = slot
            slots.append(slot)
        if slots:
            self._recent[torch.tensor(slots)] = reading.raw[torch.from_numpy(missing)]


def bind_tables(
    opened: OpenedCheckpoint,
    tables: Mapping[str, StoredTable],
    reads: TableReads,
    kernels: NativeKernels | None,
    place_of: Callable[[str], torch.device],
    *,
    in_place: Collection[str],
) -> None:
    model, dtype_of = opened.model, parameter_dtypes(opened.model, opened.plan.dtype)
    for weight, table in tables.items():
        name = weight.removesuffix(".weight")
        module = model.get_submodule(name)
        dtype, place = dtype_of(weight, module.weight), place_of(f"{name}.")
        own = reads.tables[name] = RowTable(module, table, reads, kernels, dtype, place, rounds=weight not in in_place)
        take_over([(module, own)])
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if len(tables) > 1 or any(table.per_token > 1 for table in tables.values()):
        decoder.register_forward_pre_hook(_Expecting(model, reads), with_kwargs=True)


class _Expecting:
    def __init__(self, model: Any, reads: TableReads) -> None:
        self._plain: list[RowTable] = []
        self._hashing: list[tuple[Any, RowTable]] = []
        for name, table in reads.tables.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            if hasattr(owner, _HASHES):
                self._hashing.append((owner, table))
            else:
                self._plain.append(table)

    def __call__(self, _decoder: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if isinstance(ids, torch.Tensor):
            for table in self._plain:
                table.expect(ids)
        given = named.get("ple_input_ids")
        ids = ids if given is None else given
        cache = named.get("cache", named.get("past_key_values"))
        for owner, table in self._hashing if isinstance(ids, torch.Tensor) else []:
            table.numbers = True
            try:
                owner.forward(ids, None if cache is None else _Unchanged(cache))
            finally:
                table.numbers = False


class _Unchanged:
    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def get_conv_state(self, *arguments: Any, **named: Any) -> Any:
        return self._cache.get_conv_state(*arguments, **named)

    def update_conv_state(self, states: Any, *_: Any, **_named: Any) -> Any:
        return states
