"""GGUF files used as they lie: experts, linear layers and embeddings are rows of blocks.

Nothing is made of them and nothing is written.  On the CPU alone each file is in memory as a whole (`Files`).  With a
card, experts are read into RAM that it can copy from, and the rest into its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.expert_index import ExpertSource, PartSources
from engine.checkpoint.gguf.types import BY_NAME
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import is_blocks
from engine.checkpoint.stored import heads_in_blocks, in_blocks, pieces_of, rows_of
from engine.experts.bank import ExpertBank, LayerInPlace
from engine.experts.direct_file import bytes_of
from engine.experts.quantised_layout import BlockLayout
from engine.experts.ranges import Part, Place
from engine.experts.record import RecordLayout, allocate_records
from engine.experts.sites import ExpertsSite
from engine.formats import ROUTERS, STORED
from engine.formats.ggml import GGML, BlockFormat
from engine.formats.tiles import Pairing
from engine.kernels.activation import activation_of
from engine.kernels.dense import card_layers, quantised_sizes
from engine.kernels.gpu.linear import CardEmbedding, CardLinear
from engine.kernels.gpu.proof import kernels_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import BlockEmbedding, LatentHeads, QuantisedLinear
from engine.kernels.repack import Blocks
from engine.runtime.load.blocks import blocks_of
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.files import Files
from engine.runtime.load.library_conversion import LoadingPlan, PartConverter
from engine.runtime.load.tensor_reader import TensorReader


def lies_in_place(opened: OpenedCheckpoint) -> bool:
    """Whether all experts of a checkpoint, and some of its matrices, can be used as they lie in its files."""
    plan = opened.plan
    if not any(in_blocks(entry) is not None for entry in plan.entries):
        return False
    return all(_stacks_of(site, plan) is not None for site in opened.sites)


def site_in_place(site: ExpertsSite, plan: LoadingPlan) -> ExpertsSite:
    """The experts module with records as its files have them; see `lies_in_place`."""
    stacks = _stacks_of(site, plan)
    assert stacks is not None
    kinds = {name: [BY_NAME[entry.dtype] for entry in entries] for name, entries in stacks.items()}
    activation = activation_of(site.module)
    alternates = activation is not None and activation.pairing is Pairing.ALTERNATING
    return replace(site, layout=BlockLayout.storing(site.layout.unquantised, kinds, alternates=alternates))


def _stacks_of(site: ExpertsSite, plan: LoadingPlan) -> dict[str, list[TensorEntry]] | None:
    """For each matrix of an experts module the stacks [E, rows, columns] of blocks that it is made of: all its rows, or
    gate and then up rows; `None` if one is made of anything else."""
    sources = plan.index.modules.get(site.name)
    if sources is None or not hasattr(site.module, "has_gate") or activation_of(site.module) is None:
        return None
    found: dict[str, list[TensorEntry]] = {}
    for part in site.layout.unquantised.parts:
        if len(part.shape) == 1:
            continue
        stacks = _stacks_of_part(sources[part.name], plan) if part.name in sources else None
        if stacks is None or sum(stack.shape[1] for stack in stacks) != part.shape[0]:
            return None
        if any(stack.shape[0] != site.num_experts or stack.shape[2] != part.shape[1] for stack in stacks):
            return None
        found[part.name] = stacks
    return found


def _stacks_of_part(part: PartSources, plan: LoadingPlan) -> list[TensorEntry] | None:
    order = PartConverter(None, {}, plan.converters[part.target]).rows_in_order(part)
    if order is None or not (part.is_fused or part.is_per_expert):
        return None
    stacks: list[TensorEntry | None] = []
    for pattern in order:
        entries = part.by_pattern[pattern]
        if not part.is_fused:
            stacks.append(_behind_one_another(entries))
            continue
        packing = rows_of(entries[0])
        stacks += [
            piece if isinstance(piece, TensorEntry) and is_blocks(piece.dtype) and len(piece.shape) == 3 else None
            for piece in (pieces_of(entries[0]) if packing is None or packing.order is None else ())
        ]
    found = [stack for stack in stacks if stack is not None]
    return found if len(found) == len(stacks) and 1 <= len(found) <= 2 else None


def _behind_one_another(entries: list[TensorEntry]) -> TensorEntry | None:
    """Matrices of one type and shape that follow each other in a file as one stack; `None` if they are not such."""
    first, nbytes = entries[0], entries[0].nbytes
    if not is_blocks(first.dtype) or len(first.shape) != 2:
        return None
    for number, entry in enumerate(entries):
        if (
            type(entry) is not TensorEntry
            or replace(first, key=entry.key, offset=first.offset + number * nbytes) != entry
        ):
            return None
    return replace(first, shape=(len(entries), *first.shape), nbytes=len(entries) * nbytes)


def parts_in_place(opened: OpenedCheckpoint, site: ExpertsSite, reader: TensorReader) -> list[Part]:
    """Where the records of an experts module lie that are read from a model's own files as they are needed.  Biases,
    which are small, are in RAM.

    Raises:
        EngineError, RequestCancelled: as `TensorReader.read`.
    """
    blocks, biases, parts = _parts_in_blocks(site, opened.plan), _biases(opened, site, reader), list[Part]()
    for part in site.layout.parts:
        places: list[Place] | memoryview
        if part.name in blocks:
            entry = blocks[part.name]
            places = [(entry.file, entry.offset + expert * part.nbytes) for expert in range(site.num_experts)]
        else:
            places = bytes_of(biases[part.name].view(-1).view(torch.uint8))
        parts.append(Part(part.offset, part.nbytes, places))
    return parts


def files_in_place(opened: OpenedCheckpoint) -> list[Path]:
    """Those that experts, linear layers and embeddings are used in."""
    stored = (stored for entry in opened.plan.entries if (stored := in_blocks(entry)) is not None)
    heads = (stack for entry in opened.plan.entries for stack in heads_in_blocks(entry) or ())
    of_sites = [_stacks_of(site, opened.plan) or {} for site in opened.sites]
    experts = (stack for each in of_sites for stacks in each.values() for stack in stacks)
    return list(dict.fromkeys(entry.file for entry in (*stored, *heads, *experts)))


def bind_experts_in_place(
    opened: OpenedCheckpoint, sites: Iterable[ExpertsSite], files: Files, reader: TensorReader, bank: ExpertBank
) -> None:
    """Gives the bank the layers of these modules; biases, which are small, are read.

    Raises:
        EngineError, RequestCancelled: as `TensorReader.read`.
    """
    for site in sites:
        shapes = {part.name: part.shape for part in site.layout.parts}
        parts = {
            name: files.bytes_of(entry, reader).view(site.num_experts, *shapes[name])
            for name, entry in _parts_in_blocks(site, opened.plan).items()
        }
        parts |= _biases(opened, site, reader)
        records = torch.empty(site.num_experts, 0, dtype=torch.uint8)
        bank.layers[site.name] = LayerInPlace(site.name, site.layout, records, parts=parts)


def bind_matrices_in_place(
    opened: OpenedCheckpoint, files: Files, kernels: NativeKernels, reader: TensorReader
) -> None:
    """Lets linear layers and embeddings compute from the files."""
    model, made = opened.model, dict[int, Blocks]()  # one for all who share it, which then count it once
    for name, entry in matrices_in_place(opened).items():
        stacks = heads_in_blocks(entry)
        if stacks is not None:
            own = model.get_submodule(name.removesuffix(".weight"))
            keys, values = (_rows_of(stack, files.bytes_of(stack, reader)) for stack in stacks)
            own.forward = LatentHeads(own, keys, values, kernels)
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


def matrices_in_place(opened: OpenedCheckpoint) -> dict[str, TensorEntry]:
    """The weights of linear layers and embeddings that can be used as they lie in the files, by name: an output layer
    that shares the embedding's has a name of its own."""
    model, named = opened.model, opened.plan.renamed
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    found: dict[str, TensorEntry] = {}
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        entry = named.get(weight) or named.get(tied.get(weight, ""))
        if entry is None or (blocks_of(entry) is None and heads_in_blocks(entry) is None):
            continue
        is_linear = type(module) is torch.nn.Linear and name.rpartition(".")[2] not in ROUTERS
        is_plain = is_linear and {each.dtype for each in module.parameters(recurse=False)} == {torch.bfloat16}
        if is_plain or (type(module) is torch.nn.Embedding and module.max_norm is None):
            found[weight] = entry
    # A weight that several modules share is in place for all of them or for none.
    alone = {tied.get(name, name) for name in (*tied, *tied.values()) if name not in found}
    return {name: entry for name, entry in found.items() if tied.get(name, name) not in alone}


def _parts_in_blocks(site: ExpertsSite, plan: LoadingPlan) -> dict[str, TensorEntry]:
    """Where the parts in blocks of a module from `site_in_place` lie."""
    stacks, layout = _stacks_of(site, plan), site.layout
    assert stacks is not None
    assert isinstance(layout, BlockLayout)
    parts = (zip(layout.blocks_of(name), entries, strict=True) for name, entries in stacks.items())
    return {own: entry for each in parts for (own, _), entry in each}


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


def formats_in_place(opened: OpenedCheckpoint) -> set[tuple[str, str]]:
    """The types that kernels have to read together: of gate and up rows, or twice a matrix's own."""
    stacks = [each for site in opened.sites for each in (_stacks_of(site, opened.plan) or {}).values()]
    matrices = matrices_in_place(opened).values()
    alone = {each.kind.name for entry in matrices if (each := blocks_of(entry)) is not None}
    alone |= {stack.dtype for entry in matrices for stack in heads_in_blocks(entry) or ()}
    return {(each[0].dtype, each[-1].dtype) for each in stacks} | {(name, name) for name in alone}


def fill_records(
    opened: OpenedCheckpoint, sites: Iterable[ExpertsSite], reader: TensorReader, bank: ExpertBank
) -> None:
    """Allocates the records of these modules and reads them from the files.

    Raises:
        EngineError, RequestCancelled: as `TensorReader.read`.
    """
    for site in sites:
        layer = bank.add_layer(site.name, site.num_experts, site.layout)
        here = layer.device.type == "cpu"
        records = layer.records if here else allocate_records(site.num_experts, site.layout, torch.device("cpu"))
        specs = {part.name: part for part in site.layout.parts}
        places: list[tuple[TensorEntry | ExpertSource, torch.Tensor]] = []
        for name, entry in _parts_in_blocks(site, opened.plan).items():
            part = specs[name]
            for expert in range(site.num_experts):
                begin = entry.offset + expert * part.nbytes
                one = replace(entry, dtype="U8", shape=(part.nbytes,), offset=begin, nbytes=part.nbytes)
                places.append((one, records[expert, part.offset : part.offset + part.nbytes]))
        reader.read_into(places)
        for name, value in _biases(opened, site, reader).items():
            site.layout.stacked_view(records, specs[name]).copy_(value)
        if not here:
            layer.records.copy_(records)


def bytes_in_place(opened: OpenedCheckpoint, sites: Iterable[ExpertsSite]) -> int:
    """What `fill_records` reads of blocks."""
    return sum(entry.nbytes for site in sites for entry in _parts_in_blocks(site, opened.plan).values())


class MatricesOnCards:
    """The linear layers and embeddings that cards hold in blocks; see `StoredMatrices`.

    Attributes:
        formats: of linear layers, by the modules' names.
        embeddings: stored weights, by the modules' names.
    """

    def __init__(self, opened: OpenedCheckpoint, reader: TensorReader | None = None) -> None:
        self._found, self._reader = matrices_in_place(opened), reader
        self._tied: Mapping[str, str] = getattr(opened.model, "all_tied_weights_keys", None) or {}
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

    def matrix(self, name: str, kernels: NativeKernels | None = None) -> Blocks:  # noqa: ARG002
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
            module.weight = torch.nn.Parameter(module.weight.new_empty(0, device=place), requires_grad=False)
            module.register_buffer("tiles", table.raw, persistent=False)  # registered only to be counted
            module.forward = CardEmbedding(table, kernels)


_READ_BY_ATTENTION = ("kv_b_proj",)
"""Modules whose weights the kernels for latent attention read as numbers."""
