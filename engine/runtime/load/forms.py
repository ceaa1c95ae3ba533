"""How a model's weights are held in one precision (`Forms`): in tiles, in numbers, or in files used as they lie.

There experts, linear layers and embeddings are rows of ggml's types, blocks or plain numbers: nothing is made of them
and nothing is written.  On the CPU alone each file is in memory as a whole (`Files`): GGUF in any type, safetensors in
bf16 and fp16.  With a card, experts in blocks are read into RAM that it can copy from, and the rest into its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.stored import (
    beside,
    common_format,
    heads_in_rows,
    in_columns,
    in_rows,
    is_in_gguf,
    linear_format,
    mixed_rows,
    pieces_of,
    target_of,
    type_of,
)
from engine.common.footprint import PASSING_MATRICES
from engine.experts.direct_file import Part, Place, bytes_of
from engine.experts.dispatch import ExpertsSite
from engine.experts.record import HugePages
from engine.families.library import own_forward, take_over
from engine.formats import BF16, STORED, TiledFormat, WeightFormat, as_stored, careful, format_of, is_router
from engine.formats.ggml import GGML, BlockType
from engine.formats.tiles import Pairing, PartSpec, RecordLayout, TiledMatrix
from engine.kernels.gpu.linear import CardEmbedding, CardLinear, is_held_quantised, quantised_sizes
from engine.kernels.gpu.proof import kernels_of
from engine.kernels.interface import LayerRecords, activation_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import (
    BlockEmbedding,
    GroupedLinear,
    LatentHeads,
    MixedRows,
    QuantisedLinear,
    TurnedLinear,
    formats_of_linears,
    large_linears,
    looks_rows_up,
    multiplies_groups,
    scale_of_rows,
)
from engine.kernels.repack import Blocks, quantise_into
from engine.planner.placement import Made
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.library_conversion import LoadingPlan, PartConverter, Stack, parameter_dtypes
from engine.runtime.load.library_models import tied_to
from engine.runtime.load.records import ranges_of, repack_all
from engine.runtime.load.tables import StoredTable, tables_in
from engine.runtime.load.tensor_reader import Stored, TensorReader, blocks_of, stored_of, torch_dtype

SIXTEEN_BITS = frozenset(("F16", "BF16"))
"""Types that a model in bf16 is used in as its files have them."""
BLOCKS = frozenset(name for name, kind in GGML.items() if kind.is_blocks)
"""Types that cards read in place: plain numbers come to them as their own."""
ALL_TYPES = frozenset(GGML)


def types_in_place(opened: OpenedCheckpoint, precision: str, types: frozenset[str]) -> frozenset[str]:
    """Those of `types` whose matrices a model in this precision uses as they lie in its files; none if its experts, or
    all its matrices, are of others."""
    used = types if precision == STORED else types & SIXTEEN_BITS if precision == BF16.name else frozenset[str]()
    return used if used and lies_in_place(opened, used) else frozenset()


def lies_in_place(opened: OpenedCheckpoint, types: frozenset[str]) -> bool:
    """Whether all experts of a checkpoint, and some of its matrices, can be used as they lie in its files."""
    plan = opened.plan
    if plan.quantizer is not None or not any(_is_matrix(entry, types) for entry in plan.entries):
        return False
    if not opened.sites and not matrices_in_place(opened, types):
        return False  # a dense model in the library's own numbers
    return all(_stacks_of(site, plan, types) is not None for site in opened.sites)


def _is_matrix(entry: TensorEntry, types: frozenset[str]) -> bool:
    stored = in_rows(entry)
    return stored is not None and stored.dtype in types and len(stored.shape) > 1


def site_in_place(site: ExpertsSite, plan: LoadingPlan, types: frozenset[str]) -> ExpertsSite:
    stacks = _stacks_of(site, plan, types)
    assert stacks is not None
    kinds = {name: [GGML[stack.dtype] for stack in each] for name, each in stacks.items()}
    return replace(site, layout=RecordLayout.in_blocks(site.layout.unquantised, kinds, alternates=_alternates(site)))


def _alternates(site: ExpertsSite) -> bool:
    activation = activation_of(site.module)
    return activation is not None and activation.pairing is Pairing.ALTERNATING


def _stacks_of(site: ExpertsSite, plan: LoadingPlan, types: frozenset[str]) -> dict[str, list[Stack]] | None:
    """For each matrix of an experts module what it is made of: all its rows, or gate and then up rows; `None` if one is
    made of anything but rows of these types."""
    sources = plan.experts.get(site.name)
    if sources is None or not hasattr(site.module, "has_gate") or activation_of(site.module) is None:
        return None
    if site.module.has_post_expert_norm:  # no native kernel has one, and the library's operators want plain weights
        types &= BLOCKS
    found: dict[str, list[Stack]] = {}
    for part in site.layout.unquantised.parts:
        if len(part.shape) == 1:
            continue
        source = sources.get(part.name)
        rows = source.rows if source is not None else None
        stacks = rows.stacks if rows is not None and rows.transposed == part.transposed else None
        if stacks is None or not all(_is_in_place(stack, site, part, types) for stack in stacks):
            return None
        if sum(stack.shape[0] for stack in stacks) != part.shape[0] or len(stacks) > 2:
            return None
        if len(stacks) == 1 and part.name.startswith("gate_up") and _alternates(site):
            return None
        found[part.name] = stacks
    return found


def _is_in_place(stack: Stack, site: ExpertsSite, part: PartSpec, types: frozenset[str]) -> bool:
    """Whether all experts have a matrix of rows of these types, that begins where a file allows to use it in place."""
    if stack.dtype not in types or len(stack.shape) != 2 or stack.shape[1] != part.shape[1]:
        return False
    aligned = stack.dtype in BLOCKS or not any(offset % GGML[stack.dtype].nbytes for _, offset in stack.places)
    return aligned and len(stack.places) == site.num_experts


def parts_in_place(opened: OpenedCheckpoint, site: ExpertsSite, reader: TensorReader) -> list[Part]:
    """Where the records of an experts module lie that are read from a model's own files as they are needed.  Biases,
    which are small, are in RAM."""
    stacks, biases = _stacks_by_part(site, opened.plan), _biases(opened, site, reader)
    return [
        Part(
            part.offset,
            part.nbytes,
            stacks[part.name].places if part.name in stacks else bytes_of(biases[part.name].view(-1).view(torch.uint8)),
        )
        for part in site.layout.parts
    ]


def files_in_place(opened: OpenedCheckpoint, types: frozenset[str]) -> list[Path]:
    used = [
        entry
        for entry in opened.plan.entries
        if _is_matrix(entry, types) or heads_in_rows(entry) is not None or mixed_rows(entry) is not None
    ]
    of_sites = [_stacks_of(site, opened.plan, types) or {} for site in opened.sites]
    experts = (file for each in of_sites for stacks in each.values() for stack in stacks for file, _ in stack.places)
    return list(dict.fromkeys((*(file for entry in used for file in entry.files), *experts)))


def layer_in_place(site: ExpertsSite, parts: Sequence[Part], reader: TensorReader) -> LayerRecords:
    views: dict[str, list[torch.Tensor]] = {}
    for spec, part in zip(site.layout.parts, parts, strict=True):
        raw = _in_memory(part.places, site.num_experts, part.nbytes, reader)
        views[spec.name] = [each.view(spec.dtype).view(spec.shape) for each in raw]
    return LayerRecords(site.name, site.layout, parts=views)


def _in_memory(
    places: Sequence[Place] | memoryview, experts: int, nbytes: int, reader: TensorReader
) -> Iterable[torch.Tensor]:
    if isinstance(places, memoryview):
        return torch.frombuffer(places, dtype=torch.uint8).view(experts, nbytes)
    each = [TensorEntry(file, "experts", "U8", (nbytes,), offset, nbytes) for file, offset in places]
    file, begin = places[0]
    if all(place == (file, begin + at * nbytes) for at, place in enumerate(places)):
        whole = experts * nbytes
        return reader.bytes_of(replace(each[0], shape=(whole,), nbytes=whole)).view(experts, -1)
    whole_files = reader.whole_files
    if all(entry.file in whole_files for entry in each):
        return [reader.bytes_of(entry) for entry in each]
    rows = HugePages().empty((experts, nbytes), dtype=torch.uint8)
    reader.read_into(zip(each, rows, strict=True))
    return rows


def bind_matrices_in_place(
    opened: OpenedCheckpoint,
    matrices: Mapping[str, TensorEntry],
    kernels: NativeKernels,
    reader: TensorReader,
    *,
    besides: Collection[str] = (),
) -> None:
    take_over(_forwards_in_place(opened.model, matrices, kernels, reader, besides))


def _forwards_in_place(
    model: Any,
    matrices: Mapping[str, TensorEntry],
    kernels: NativeKernels,
    reader: TensorReader,
    besides: Collection[str],
) -> Iterator[tuple[Any, Callable[..., Any]]]:
    made = dict[int, Blocks]()  # one for all who share it, which then count it once
    for name, entry in matrices.items():
        if name in besides:
            continue
        own, raw_of = model.get_submodule(name.removesuffix(".weight")), reader.bytes_of
        stacks, turned, mixed = heads_in_rows(entry), in_columns(entry), mixed_rows(entry)
        if stacks is not None:
            keys, values = (
                Blocks(GGML[stack.dtype], raw_of(stack).view(stack.shape[0] * stack.shape[1], -1)) for stack in stacks
            )
            yield own, LatentHeads(own, keys, values, kernels)
        elif turned is not None:
            source, order = turned
            matrix = Blocks(GGML[source.dtype], raw_of(source).view(source.shape[0], -1))
            yield own, TurnedLinear(QuantisedLinear(own, matrix, kernels), torch.from_numpy(order))
        elif mixed is not None:
            sources, rows = mixed
            each = [Blocks(GGML[source.dtype], raw_of(source).view(source.shape[0], -1)) for source in sources]
            yield own, MixedRows(own, each, torch.from_numpy(rows), kernels)
        else:
            if id(entry) not in made:
                stored = blocks_of(entry)
                assert stored is not None
                made[id(entry)] = reader.blocks_of(stored)
            table = made[id(entry)]
            if isinstance(own, torch.nn.Embedding):
                yield own, BlockEmbedding(own, table, kernels)
            elif multiplies_groups(own):
                yield own, GroupedLinear(own, table, kernels)
            else:
                yield own, QuantisedLinear(own, table, kernels, is_head=own is model.get_output_embeddings())


def matrices_in_place(opened: OpenedCheckpoint, types: frozenset[str]) -> dict[str, TensorEntry]:
    """The weights of linear layers and embeddings that can be used as they lie in the files, by name: an output layer
    that shares the embedding's has a name of its own."""
    tied, found = tied_to(opened.model), dict[str, TensorEntry]()
    for name, module in opened.model.named_modules():
        entry = opened.weight_of(name)
        if entry is None or not _is_used(entry, types):
            continue
        is_linear = type(module) is torch.nn.Linear or multiplies_groups(module)
        is_linear = is_linear and not is_router(name) and name.rpartition(".")[2] not in _USED_OTHERWISE
        is_plain = is_linear and {each.dtype for each in module.parameters(recurse=False)} == {torch.bfloat16}
        if is_plain or looks_rows_up(module):
            found[f"{name}.weight"] = entry
    # A weight that several modules share is in place for all of them or for none.
    alone = {tied.get(name, name) for name in (*tied, *tied.values()) if name not in found}
    return {name: entry for name, entry in found.items() if tied.get(name, name) not in alone}


def _is_used(entry: TensorEntry, types: frozenset[str]) -> bool:
    """Whether the kernels are to read a matrix in place.  Not one row of numbers, as gates have; and bf16 of
    safetensors, which lies in place as well, is the library's own."""
    heads = heads_in_rows(entry)
    if heads is not None:
        return {stack.dtype for stack in heads} <= types
    turned, mixed = in_columns(entry), mixed_rows(entry)
    if turned is not None:
        return turned[0].dtype in types
    if mixed is not None:
        return {source.dtype for source in mixed[0]} <= types
    stored = in_rows(entry)
    if stored is None or stored.dtype not in types or len(stored.shape) != 2:
        return False
    if stored.dtype in BLOCKS:
        return True
    is_ours = stored.dtype != BF16.name.upper() or is_in_gguf(entry)
    return is_ours and stored.shape[0] > 1 and stored.offset % GGML[stored.dtype].nbytes == 0


def _stacks_by_part(site: ExpertsSite, plan: LoadingPlan) -> dict[str, Stack]:
    stacks, layout = _stacks_of(site, plan, ALL_TYPES), site.layout
    assert stacks is not None
    parts = (zip(layout.blocks_of(name), each, strict=True) for name, each in stacks.items())
    return {own: stack for each in parts for (own, _), stack in each}


def _biases(opened: OpenedCheckpoint, site: ExpertsSite, reader: TensorReader) -> dict[str, torch.Tensor]:
    """The parts of an experts module that are not in blocks, [E, rows] each; those of the gate first."""
    plan, layout = opened.plan, site.layout
    found: dict[str, torch.Tensor] = {}
    for part in layout.unquantised.parts:
        if layout.blocks_of(part.name):
            continue
        sources = plan.experts[site.name][part.name]
        plain = replace(site, layout=RecordLayout.of({part.name: (part.shape, part.dtype)}, transposed=False))
        converter = PartConverter(opened.model, {site.name: plain}, sources.converter)
        tensors = {pattern: [reader.read(entry) for entry in each] for pattern, each in sources.by_pattern.items()}
        value = converter.convert(sources.target, sources.experts, tensors)[sources.target].to(part.dtype)
        if layout.alternates and not part.name.startswith("down_"):
            value = value.view(len(value), -1, 2).mT.flatten(-2)
        found[part.name] = value.contiguous()
    return found


def formats_on_cards(opened: OpenedCheckpoint) -> set[tuple[str, str]]:
    """The types that cards' kernels have to read together: of gate and up rows, or twice a matrix's own."""
    stacks = [each for site in opened.sites for each in (_stacks_of(site, opened.plan, BLOCKS) or {}).values()]
    matrices = matrices_in_place(opened, BLOCKS).values()
    alone = {each.kind.name for entry in matrices if (each := blocks_of(entry)) is not None and each.kind}
    alone |= {stack.dtype for entry in matrices for stack in heads_in_rows(entry) or ()}
    return {(each[0].dtype, each[-1].dtype) for each in stacks} | {(name, name) for name in alone}


class MatricesOnCards:
    def __init__(self, opened: OpenedCheckpoint) -> None:
        found = matrices_in_place(opened, BLOCKS).items()
        self._found = {name: entry for name, entry in found if in_columns(entry) is None and mixed_rows(entry) is None}
        self._tied = tied_to(opened.model)
        linears: dict[str, BlockType] = {}
        self.embeddings: dict[str, TensorEntry] = {}
        for weight, entry in self._found.items():
            name = weight.removesuffix(".weight")
            if isinstance(opened.model.get_submodule(name), torch.nn.Embedding):
                self.embeddings[name] = entry
            elif name.rpartition(".")[2] not in _READ_BY_ATTENTION:
                stored = blocks_of(entry)
                assert stored is not None
                assert stored.kind is not None
                linears[name] = stored.kind
        self.formats = {name: linears[name] for name in large_linears(opened.model) if name in linears}
        for head, table in self._tied.items():  # a head that needs numbers needs those of the embedding
            if head.removesuffix(".weight") not in self.formats:
                self.embeddings.pop(table.removesuffix(".weight"), None)

    @property
    def names(self) -> set[str]:
        return {f"{name}.weight" for name in (*self.formats, *self.embeddings)}

    def sizes(self, model: Any, sizes: Mapping[str, int], *, together: bool) -> dict[str, int]:
        result = quantised_sizes(model, self.formats, sizes)
        shared = set(self._tied.values()) if together else set()
        for name, entry in self.embeddings.items():
            result[f"{name}.weight"] = 0 if f"{name}.weight" in shared else entry.nbytes
        return result

    def matrix(self, name: str, reader: TensorReader) -> Blocks:
        stored = blocks_of(self._found[f"{name}.weight"])
        assert stored is not None
        return reader.blocks_of(stored)

    def bind_embeddings(
        self, model: Any, place_of: Callable[[str], torch.device], reader: TensorReader, besides: Collection[str]
    ) -> None:
        """Once the linear layers have theirs; all `besides` these weights."""
        heads = {table: model.get_submodule(head.removesuffix(".weight")) for head, table in self._tied.items()}
        for name in self.embeddings:
            if f"{name}.weight" in besides:
                continue
            module, place = model.get_submodule(name), place_of(name)
            forward = own_forward(heads.get(f"{name}.weight"))
            if isinstance(forward, CardLinear) and isinstance(forward.matrix, Blocks):
                table = Blocks(forward.matrix.kind, forward.matrix.raw.to(place))
            else:
                read = self.matrix(name, reader)
                table = Blocks(read.kind, read.in_order.to(place))
            kernels = kernels_of(place)
            assert kernels is not None
            scale = scale_of_rows(module)
            module.weight = torch.nn.Parameter(module.weight.new_empty(0, device=place), requires_grad=False)
            module.register_buffer("tiles", table.raw, persistent=False)  # registered only to be counted
            take_over([(module, CardEmbedding(table, kernels, scale))])


_USED_OTHERWISE = ("dt_proj",)
"""Linear layers whose weights the library's models use without their `forward`."""
_READ_BY_ATTENTION = ("kv_b_proj",)
"""Modules whose weights the kernels for latent attention read as numbers."""


class Forms:
    """How each weight is held.

    Args:
        precision: a name of `engine.formats`.
        types: of matrices, that may be used as they lie in the files.
        places: that hold everything but experts, if it is not RAM.
        has_kernels: whether native kernels compute what is on the CPU.

    Attributes:
        in_place: types of the experts, linear layers and embeddings that are used as they lie in the model's files, on
            an emulated device experts alone; none if that is not done.
        on_cards: whether linear layers are quantised on cards.
    """

    def __init__(
        self,
        file: OpenedCheckpoint,
        precision: str,
        types: frozenset[str] = frozenset(),
        places: Sequence[torch.device] = (),
        *,
        has_kernels: bool,
    ) -> None:
        self.file, self.precision, self.places, self._has_kernels = file, precision, tuple(places), has_kernels
        self.in_place = types_in_place(file, precision, types)
        self.on_cards = (
            format_of(precision).is_tiled
            and bool(places)
            and all(map(is_held_quantised, places))
            and (precision != STORED or bool(self.stored))  # else it is a file of plain numbers
        )

    @cached_property
    def sites(self) -> list[ExpertsSite]:
        if self.in_place:
            return [site_in_place(site, self.file.plan, self.in_place) for site in self.file.sites]
        return list(map(self._in_tiles, self.file.sites)) if format_of(self.precision).is_tiled else self.file.sites

    def _in_tiles(self, site: ExpertsSite) -> ExpertsSite:
        """A module with its own forward stays as it is."""
        if not hasattr(site.module, "has_gate") or {part.dtype for part in site.layout.parts} != {torch.bfloat16}:
            return site
        names = [part.name for part in site.layout.parts if len(part.shape) == 2]
        formats: dict[str, WeightFormat | None]
        if self.precision == STORED:
            sources = self.file.plan.experts[site.name]
            found = beside(common_format(sources[name].entries) for name in names)
            formats = dict(zip(names, found, strict=True))
        else:
            most, down = format_of(self.precision), format_of(careful(self.precision, self.file.weights))
            formats = {name: down if name == "down_proj" else most for name in names}
        if not any(formats.values()):
            return site
        pairing = Pairing.PLAIN
        if site.module.has_gate:  # its own gate function needs the rows in original order
            activation = activation_of(site.module)
            pairing = Pairing.HALVES if activation is None else activation.pairing
        return replace(site, layout=RecordLayout.in_tiles(site.layout, lambda name: formats[name] or BF16, pairing))

    def made(self, site: ExpertsSite) -> Made:
        if self.in_place:
            return Made.NEVER
        if site.layout.tiled:
            return Made.ONCE
        return Made.FOR_DISK if ranges_of(site, self.file.plan) is None else Made.NEVER

    @cached_property
    def stored(self) -> dict[str, tuple[Stored, TiledFormat]]:
        """What a checkpoint has of linear layers in codes, and the formats that keep these, by the modules' names."""
        found: dict[str, tuple[Stored, TiledFormat]] = {}
        for name, module in self.file.model.named_modules():
            entry = self.file.weight_of(name) if isinstance(module, torch.nn.Linear) else None
            target, stored = (linear_format(entry), stored_of(entry)) if entry is not None else (None, None)
            if target is not None and stored is not None:
                found[name] = stored, target
        return found

    @cached_property
    def tiled(self) -> dict[str, TiledFormat]:
        if self.in_place or not (self._has_kernels or self.on_cards) or not format_of(self.precision).is_tiled:
            return {}
        model, dtype_of = self.file.model, parameter_dtypes(self.file.model, self.file.dtype)
        if self.precision == STORED:
            return {name: self.stored[name][1] for name in large_linears(model, dtype_of) if name in self.stored}
        return formats_of_linears(model, careful(self.precision, self.file.weights), dtype_of)

    @property
    def linears(self) -> dict[str, TiledFormat]:
        on_cpu = self._has_kernels and all(place.type == "cpu" for place in self.places)
        return self.tiled if on_cpu or self.on_cards else {}

    def fill(
        self,
        name: str,
        target: TiledMatrix,
        weight: Callable[[], torch.Tensor],
        reader: TensorReader,
        kernels: NativeKernels | None,
    ) -> None:
        if self.precision == STORED:
            repack_all([([self.stored[name][0]], target)], reader, kernels)
        else:
            quantise_into(weight(), target, kernels)

    @cached_property
    def matrices(self) -> dict[str, TensorEntry]:
        return matrices_in_place(self.file, self.in_place) if self.in_place and not self.places else {}

    @cached_property
    def blocks(self) -> MatricesOnCards | None:
        return MatricesOnCards(self.file) if self.in_place and self.on_cards else None

    @cached_property
    def tables(self) -> dict[str, StoredTable]:
        return tables_in(self.file)

    def apart(self, *, converted: bool) -> set[str]:
        """Parameters of the checkpoint that the library does not load, tables aside: they are read as they lie there,
        or nothing is made of them but linear layers in tiles, of codes or `converted`."""
        renamed, tied = self.file.plan.renamed.keys(), tied_to(self.file.model)
        if self.blocks is not None:
            return self.blocks.names & renamed
        weights = {f"{name}.weight" for name in self.linears} if converted or self.precision == STORED else set()
        if self.file.plan.quantizer is not None:
            weights = set()
        return (self.matrices.keys() & renamed) | ((weights & renamed) - {*tied, *tied.values()})

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor but experts as they are held, in RAM while the model is loaded."""
        experts = {target for site in self.file.sites for target in site.targets}
        sizes = {name: nbytes for name, nbytes in tensor_sizes(self.file.model).items() if name not in experts}
        # A tied one counts once.
        sizes |= {name: entry.nbytes for name, entry in self.matrices.items() if name in sizes}
        if self.blocks is not None:
            return self.blocks.sizes(self.file.model, sizes, together=len(self.places) == 1)
        return quantised_sizes(self.file.model, self.linears, sizes) if self.on_cards else sizes

    def in_files(self) -> dict[str, tuple[TensorEntry, ...]]:
        """Where weights lie that the CPU uses as files have them, by name, tables that may stay on disk apart."""
        own, found = self.file.plan, dict[str, tuple[TensorEntry, ...]]()
        if own.quantizer is not None or not (self.in_place or as_stored(self.precision).name == self.precision):
            return found
        dtype_of = parameter_dtypes(self.file.model, own.dtype)
        dtypes = {name: dtype_of(name, parameter) for name, parameter in self.file.model.named_parameters()}
        for name, entry in own.renamed.items():
            if dtypes.get(name) == torch_dtype(entry) and entry.offset % dtypes[name].itemsize == 0 and entry.nbytes:
                found[name] = (entry,)
        for name, entry in self.matrices.items():
            joined = blocks_of(entry)  # in memory of its own, if of several tensors
            if joined is None or len(joined.sources) == 1:
                found[name] = entry.stored
        return {name: entries for name, entries in found.items() if name not in self.tables}

    def passing_bytes(self, in_ram: dict[str, int], besides: Collection[str] = ()) -> int:
        """RAM for dense weights that are quantised on cards, on their way there, `besides` these; blocks pass through
        it a few at a time."""
        if not self.on_cards:
            return 0
        passing = self.blocks.names.difference(besides) if self.blocks is not None else set()
        largest = max((in_ram[name] for name in passing if name in in_ram), default=0)
        rest = sum(nbytes for name, nbytes in in_ram.items() if name not in passing and name not in besides)
        return rest + PASSING_MATRICES * largest


def tensor_sizes(model: Any) -> dict[str, int]:
    """Bytes of every tensor by name; tied weights are counted once, as they will be held."""
    tied = tied_to(model)
    sizes = {name: p.nbytes for name, p in model.named_parameters() if name not in tied}
    return {**sizes, **{name: buffer.nbytes for name, buffer in model.named_buffers()}}


def stored_note(plan: LoadingPlan) -> str:
    types = {type_of(piece) for entry in plan.entries for piece in pieces_of(entry)}
    phrases = []
    for name in sorted(name for name in types if name is not None):
        target = target_of(name)
        assert target is not None
        phrases.append(f"{name} {'is kept as' if name not in GGML or GGML[name].kept_in else 'became'} {target.words}")
    return f"The file's {', '.join(phrases)}." if phrases else ""
