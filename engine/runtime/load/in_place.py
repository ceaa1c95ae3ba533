"""Files used as they lie: experts, linear layers and embeddings are rows of ggml's types, blocks or plain numbers.

Nothing is made of them and nothing is written.  On the CPU alone each file is in memory as a whole (`Files`): GGUF in
any type, safetensors in bf16 and fp16.  With a card, experts in blocks are read into RAM that it can copy from, and the
rest into its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.expert_index import ExpertSource, PartSources
from engine.checkpoint.gguf.types import BY_NAME, BlockType
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.stored import heads_in_rows, in_columns, in_rows, is_in_gguf, pieces_of
from engine.experts.bank import ExpertBank, LayerInPlace
from engine.experts.direct_file import bytes_of
from engine.experts.quantised_layout import BlockLayout
from engine.experts.ranges import Part, Place
from engine.experts.record import HugePages, PartSpec, RecordLayout
from engine.experts.sites import ExpertsSite
from engine.formats import BF16, ROUTERS, STORED
from engine.formats.ggml import GGML, BlockFormat
from engine.formats.tiles import Pairing
from engine.kernels.activation import activation_of
from engine.kernels.dense import card_layers, quantised_sizes
from engine.kernels.gpu.linear import CardEmbedding, CardLinear
from engine.kernels.gpu.proof import kernels_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import (
    BlockEmbedding,
    LatentHeads,
    QuantisedLinear,
    TurnedLinear,
    looks_rows_up,
    scale_of_rows,
)
from engine.kernels.repack import Blocks
from engine.runtime.load.blocks import blocks_of
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.files import Files
from engine.runtime.load.library_conversion import LoadingPlan, PartConverter
from engine.runtime.load.library_models import tied_to
from engine.runtime.load.records import PartRows
from engine.runtime.load.tensor_reader import TensorReader

SIXTEEN_BITS = frozenset(("F16", "BF16"))
"""Types that a model in bf16 is used in as its files have them."""
BLOCKS = frozenset(name for name, kind in BY_NAME.items() if kind.split is not None)
"""Types that cards read in place: plain numbers come to them as their own."""
ALL_TYPES = frozenset(BY_NAME)


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix of every expert of a module, as files have it: rows of one of ggml's types.

    Attributes:
        places: where that of each expert begins.
    """

    kind: BlockType
    rows: int
    columns: int
    places: Sequence[Place]

    @property
    def nbytes(self) -> int:
        """Of one expert's."""
        return self.rows * self.columns // self.kind.elements * self.kind.nbytes

    @property
    def is_gapless(self) -> bool:
        """Whether each expert's begins where that before ends."""
        file, begin = self.places[0]
        return all(place == (file, begin + at * self.nbytes) for at, place in enumerate(self.places))

    def entry(self, expert: int, count: int = 1) -> TensorEntry:
        """The bytes of an expert's, or of several that lie behind one another."""
        (file, offset), nbytes = self.places[expert], count * self.nbytes
        return TensorEntry(file, "experts", "U8", (nbytes,), offset, nbytes)


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
    """The experts module with records as its files have them; see `lies_in_place`."""
    stacks = _stacks_of(site, plan, types)
    assert stacks is not None
    kinds = {name: [stack.kind for stack in each] for name, each in stacks.items()}
    return replace(site, layout=BlockLayout.storing(site.layout.unquantised, kinds, alternates=_alternates(site)))


def _alternates(site: ExpertsSite) -> bool:
    activation = activation_of(site.module)
    return activation is not None and activation.pairing is Pairing.ALTERNATING


def _stacks_of(site: ExpertsSite, plan: LoadingPlan, types: frozenset[str]) -> dict[str, list[Stack]] | None:
    """For each matrix of an experts module what it is made of: all its rows, or gate and then up rows; `None` if one is
    made of anything but rows of these types."""
    sources = plan.index.modules.get(site.name)
    if sources is None or not hasattr(site.module, "has_gate") or activation_of(site.module) is None:
        return None
    if site.module.has_post_expert_norm:  # no native kernel has one, and the library's operators want plain weights
        types &= BLOCKS
    if site.name not in plan.stacks:
        plan.stacks[site.name] = _any_stacks_of(site, sources, plan)
    found = plan.stacks[site.name]
    is_of_types = found is not None and all(each.kind.name in types for stacks in found.values() for each in stacks)
    return found if is_of_types else None


def _any_stacks_of(
    site: ExpertsSite, sources: Mapping[str, PartSources], plan: LoadingPlan
) -> dict[str, list[Stack]] | None:
    found: dict[str, list[Stack]] = {}
    for part in site.layout.unquantised.parts:
        if len(part.shape) == 1:
            continue
        stacks = _stacks_of_part(part, sources[part.name], plan) if part.name in sources else None
        if stacks is None or sum(stack.rows for stack in stacks) != part.shape[0]:
            return None
        if any(len(stack.places) != site.num_experts or stack.columns != part.shape[1] for stack in stacks):
            return None
        if len(stacks) == 1 and part.name.startswith("gate_up") and _alternates(site):
            return None
        found[part.name] = stacks
    return found


def _stacks_of_part(spec: PartSpec, part: PartSources, plan: LoadingPlan) -> list[Stack] | None:
    rows = PartRows.of(part, plan)
    if rows is None or spec.transposed != rows.transposed:
        return None
    stacks: list[Stack | None] = []
    for pattern in rows.order:
        pieces = zip(*map(pieces_of, part.by_pattern[pattern]), strict=True)
        stacks += [_stack(piece, is_fused=part.is_fused) for piece in pieces]
    found = [stack for stack in stacks if stack is not None]
    return found if len(found) == len(stacks) and 1 <= len(found) <= 2 else None


def _stack(entries: Sequence[TensorEntry | ExpertSource], *, is_fused: bool) -> Stack | None:
    """That of a tensor [E, rows, columns], or of E matrices; `None` if they are anything else."""
    first = entries[0]
    if not isinstance(first, TensorEntry) or first.dtype not in BY_NAME or len(first.shape) != 2 + is_fused:
        return None
    if not _is_aligned(first):
        return None
    kind, (rows, columns) = BY_NAME[first.dtype], first.shape[-2:]
    if is_fused:
        each = first.nbytes // first.shape[0]
        return Stack(kind, rows, columns, [(first.file, first.offset + at * each) for at in range(first.shape[0])])
    places: list[Place] = []
    for entry in entries:
        if type(entry) is not TensorEntry or (entry.dtype, entry.shape) != (first.dtype, first.shape):
            return None
        if not _is_aligned(entry):
            return None
        places.append((entry.file, entry.offset))
    return Stack(kind, rows, columns, places)


def parts_in_place(opened: OpenedCheckpoint, site: ExpertsSite, reader: TensorReader) -> list[Part]:
    """Where the records of an experts module lie that are read from a model's own files as they are needed.  Biases,
    which are small, are in RAM.

    Raises:
        EngineError, RequestCancelled: as `TensorReader.read`.
    """
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
    """Those that experts, linear layers and embeddings are used in."""
    used = (entry for entry in opened.plan.entries if _is_matrix(entry, types) or heads_in_rows(entry) is not None)
    of_sites = [_stacks_of(site, opened.plan, types) or {} for site in opened.sites]
    experts = (file for each in of_sites for stacks in each.values() for stack in stacks for file, _ in stack.places)
    return list(dict.fromkeys((*(file for entry in used for file in entry.files), *experts)))


def bind_experts_in_place(
    opened: OpenedCheckpoint, sites: Iterable[ExpertsSite], files: Files, reader: TensorReader, bank: ExpertBank
) -> None:
    """Gives the bank the layers of these modules; biases, which are small, are read.

    Raises:
        EngineError, RequestCancelled: as `TensorReader.read`.
    """
    for site in sites:
        shapes = {part.name: part.shape for part in site.layout.parts}
        parts = {name: list(biases) for name, biases in _biases(opened, site, reader).items()}
        for name, stack in _stacks_by_part(site, opened.plan).items():
            parts[name] = [each.view(shapes[name]) for each in _in_memory(stack, files, reader)]
        records = torch.empty(site.num_experts, 0, dtype=torch.uint8)
        bank.layers[site.name] = LayerInPlace(site.name, site.layout, records, parts=parts)


def _in_memory(stack: Stack, files: Files, reader: TensorReader) -> list[torch.Tensor]:
    """The bytes of each expert's, where a file in memory has them."""
    experts = len(stack.places)
    if stack.is_gapless:
        return list(files.bytes_of(stack.entry(0, experts), reader).view(experts, -1))
    if all(files.is_whole(file) for file, _ in stack.places):
        return [files.bytes_of(stack.entry(expert), reader) for expert in range(experts)]
    rows = list(HugePages().empty((experts, stack.nbytes), dtype=torch.uint8))
    reader.read_into((stack.entry(expert), row) for expert, row in enumerate(rows))
    return rows


def bind_matrices_in_place(
    opened: OpenedCheckpoint,
    types: frozenset[str],
    files: Files,
    kernels: NativeKernels,
    reader: TensorReader,
    *,
    besides: Collection[str] = (),
) -> None:
    """Lets linear layers and embeddings compute from the files, all `besides` these weights."""
    model, made = opened.model, dict[int, Blocks]()  # one for all who share it, which then count it once
    for name, entry in matrices_in_place(opened, types).items():
        if name in besides:
            continue
        stacks = heads_in_rows(entry)
        if stacks is not None:
            own = model.get_submodule(name.removesuffix(".weight"))
            keys, values = (_rows_of(stack, files.bytes_of(stack, reader)) for stack in stacks)
            own.forward = LatentHeads(own, keys, values, kernels)
            continue
        turned = in_columns(entry)
        if turned is not None:
            stored_matrix, order = turned
            own, kind = model.get_submodule(name.removesuffix(".weight")), BY_NAME[stored_matrix.dtype]
            raw = files.bytes_of(stored_matrix, reader).view(stored_matrix.shape[0], -1)
            own.forward = TurnedLinear(QuantisedLinear(own, Blocks(kind, raw), kernels), torch.from_numpy(order))
            continue
        if id(entry) not in made:
            stored = blocks_of(entry)
            assert stored is not None
            assert isinstance(stored.source, TensorEntry)
            made[id(entry)] = stored.in_memory([files.bytes_of(stored.source, reader)])
        table, module = made[id(entry)], model.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, torch.nn.Embedding):
            module.forward = BlockEmbedding(module, table, kernels)  # type: ignore[method-assign]
        else:
            is_head = module is model.get_output_embeddings()
            module.forward = QuantisedLinear(module, table, kernels, is_head=is_head)


def _rows_of(stack: TensorEntry, raw: torch.Tensor) -> Blocks:
    """The matrices of a stack, one below the other."""
    matrices, rows, _ = stack.shape
    return Blocks(BY_NAME[stack.dtype], raw.view(matrices * rows, -1))


def matrices_in_place(opened: OpenedCheckpoint, types: frozenset[str]) -> dict[str, TensorEntry]:
    """The weights of linear layers and embeddings that can be used as they lie in the files, by name: an output layer
    that shares the embedding's has a name of its own."""
    tied, found = tied_to(opened.model), dict[str, TensorEntry]()
    for name, module in opened.model.named_modules():
        entry = opened.weight_of(name)
        if entry is None or not _is_used(entry, types):
            continue
        is_linear = type(module) is torch.nn.Linear and name.rpartition(".")[2] not in (*ROUTERS, *_USED_OTHERWISE)
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
    turned = in_columns(entry)
    if turned is not None:
        return turned[0].dtype in types
    stored = in_rows(entry)
    if stored is None or stored.dtype not in types or len(stored.shape) != 2:
        return False
    if stored.dtype in BLOCKS:
        return True
    is_ours = stored.dtype != BF16.name.upper() or is_in_gguf(entry)
    return is_ours and stored.shape[0] > 1 and _is_aligned(stored)


def _is_aligned(entry: TensorEntry) -> bool:
    """Whether numbers begin where a file allows to use them in place."""
    return entry.dtype in BLOCKS or entry.offset % BY_NAME[entry.dtype].nbytes == 0


def _stacks_by_part(site: ExpertsSite, plan: LoadingPlan) -> dict[str, Stack]:
    """Where the matrices of a module from `site_in_place` lie, by the parts of its layout."""
    stacks, layout = _stacks_of(site, plan, ALL_TYPES), site.layout
    assert stacks is not None
    assert isinstance(layout, BlockLayout)
    parts = (zip(layout.blocks_of(name), each, strict=True) for name, each in stacks.items())
    return {own: stack for each in parts for (own, _), stack in each}


def _biases(opened: OpenedCheckpoint, site: ExpertsSite, reader: TensorReader) -> dict[str, torch.Tensor]:
    """The parts of an experts module that are not in blocks, [E, rows] each; those of the gate first."""
    plan, layout = opened.plan, site.layout
    assert isinstance(layout, BlockLayout)
    found: dict[str, torch.Tensor] = {}
    for part in layout.plain.parts:
        if layout.blocks_of(part.name):
            continue
        sources = plan.index.modules[site.name][part.name]
        plain = replace(site, layout=RecordLayout.of({part.name: (part.shape, part.dtype)}, transposed=False))
        converter = PartConverter(opened.model, {site.name: plain}, plan.converters[sources.target])
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
    alone = {each.kind.name for entry in matrices if (each := blocks_of(entry)) is not None}
    alone |= {stack.dtype for entry in matrices for stack in heads_in_rows(entry) or ()}
    return {(each[0].kind.name, each[-1].kind.name) for each in stacks} | {(name, name) for name in alone}


class MatricesOnCards:
    """The linear layers and embeddings that cards hold in blocks; see `StoredMatrices`.

    Args:
        besides: weights that they do not.

    Attributes:
        formats: of linear layers, by the modules' names.
        embeddings: stored weights, by the modules' names.
    """

    def __init__(
        self, opened: OpenedCheckpoint, reader: TensorReader | None = None, besides: Collection[str] = ()
    ) -> None:
        found = matrices_in_place(opened, BLOCKS).items()
        mine = {name: entry for name, entry in found if name not in besides and in_columns(entry) is None}
        self._found, self._reader = mine, reader
        self._tied = tied_to(opened.model)
        linears: dict[str, BlockFormat] = {}
        self.embeddings: dict[str, TensorEntry] = {}
        for weight, entry in self._found.items():
            name = weight.removesuffix(".weight")
            if isinstance(opened.model.get_submodule(name), torch.nn.Embedding):
                self.embeddings[name] = entry
            elif name.rpartition(".")[2] not in _READ_BY_ATTENTION:
                stored = blocks_of(entry)
                assert stored is not None
                linears[name] = GGML[stored.kind.name]
        used = set(card_layers(opened.model, STORED, linears))
        self.formats = {name: of_weights for name, of_weights in linears.items() if name in used}
        for head, table in self._tied.items():  # a head that needs numbers needs those of the embedding
            if head.removesuffix(".weight") not in self.formats:
                self.embeddings.pop(table.removesuffix(".weight"), None)

    @property
    def names(self) -> set[str]:
        """Of the weights that need not be read otherwise."""
        return {f"{name}.weight" for name in (*self.formats, *self.embeddings)}

    def sizes(self, model: Any, sizes: Mapping[str, int], *, together: bool) -> dict[str, int]:
        """Bytes of tensors by name, of which `sizes` are those before.

        Args:
            together: whether an embedding is on the card of a head that shares it.
        """
        result = quantised_sizes(model, STORED, sizes, self.formats)
        shared = set(self._tied.values()) if together else set()
        for name, entry in self.embeddings.items():
            result[f"{name}.weight"] = 0 if f"{name}.weight" in shared else entry.nbytes
        return result

    def matrix(self, name: str) -> Blocks:
        """Reads the weight of one of them.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
        """
        stored = blocks_of(self._found[f"{name}.weight"])
        assert stored is not None
        assert self._reader is not None
        assert isinstance(stored.source, TensorEntry)
        return stored.in_memory([Files(()).bytes_of(stored.source, self._reader)])

    def bind_embeddings(self, model: Any, place_of: Callable[[str], torch.device]) -> None:
        """Lets embeddings look rows up in blocks, once the linear layers have theirs."""
        heads = {table: model.get_submodule(head.removesuffix(".weight")) for head, table in self._tied.items()}
        for name in self.embeddings:
            module, place = model.get_submodule(name), place_of(name)
            head = heads.get(f"{name}.weight")
            forward = getattr(head, "forward", None)
            if isinstance(forward, CardLinear) and isinstance(forward.matrix, Blocks):
                table = Blocks(forward.matrix.kind, forward.matrix.raw.to(place))
            else:
                read = self.matrix(name)
                table = Blocks(read.kind, read.in_order.to(place))
            kernels = kernels_of(place)
            assert kernels is not None
            scale = scale_of_rows(module)
            module.weight = torch.nn.Parameter(module.weight.new_empty(0, device=place), requires_grad=False)
            module.register_buffer("tiles", table.raw, persistent=False)  # registered only to be counted
            module.forward = CardEmbedding(table, kernels, scale)


_USED_OTHERWISE = ("dt_proj",)
"""Linear layers whose weights the library's models use without their `forward`."""
_READ_BY_ATTENTION = ("kv_b_proj",)
"""Modules whose weights the kernels for latent attention read as numbers."""
