"""Files used as they lie: experts, linear layers and embeddings are rows of ggml's types, blocks or plain numbers.

Nothing is made of them and nothing is written.  On the CPU alone each file is in memory as a whole (`Files`): GGUF in
any type, safetensors in bf16 and fp16.  With a card, experts in blocks are read into RAM that it can copy from, and the
rest into its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.stored import heads_in_rows, in_columns, in_rows, is_in_gguf
from engine.experts.direct_file import Part, Place, bytes_of
from engine.experts.dispatch import ExpertsSite
from engine.experts.record import HugePages
from engine.formats import BF16, STORED, is_router
from engine.formats.ggml import GGML, BlockType
from engine.formats.layouts import PartSpec, RecordLayout
from engine.formats.tiles import Pairing
from engine.kernels.gpu.linear import CardEmbedding, CardLinear, quantised_sizes
from engine.kernels.gpu.proof import kernels_of
from engine.kernels.interface import LayerRecords, activation_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import (
    BlockEmbedding,
    LatentHeads,
    QuantisedLinear,
    TurnedLinear,
    large_linears,
    looks_rows_up,
    scale_of_rows,
)
from engine.kernels.repack import Blocks
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.library_conversion import LoadingPlan, PartConverter, Stack
from engine.runtime.load.library_models import tied_to
from engine.runtime.load.tensor_reader import TensorReader, blocks_of

SIXTEEN_BITS = frozenset(("F16", "BF16"))
"""Types that a model in bf16 is used in as its files have them."""
BLOCKS = frozenset(name for name, kind in GGML.items() if kind.split is not None)
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
    used = (entry for entry in opened.plan.entries if _is_matrix(entry, types) or heads_in_rows(entry) is not None)
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
    model, made = opened.model, dict[int, Blocks]()  # one for all who share it, which then count it once
    for name, entry in matrices.items():
        if name in besides:
            continue
        stacks = heads_in_rows(entry)
        if stacks is not None:
            own = model.get_submodule(name.removesuffix(".weight"))
            keys, values = (_rows_of(stack, reader.bytes_of(stack)) for stack in stacks)
            own.forward = LatentHeads(own, keys, values, kernels)
            continue
        turned = in_columns(entry)
        if turned is not None:
            stored_matrix, order = turned
            own, kind = model.get_submodule(name.removesuffix(".weight")), GGML[stored_matrix.dtype]
            raw = reader.bytes_of(stored_matrix).view(stored_matrix.shape[0], -1)
            own.forward = TurnedLinear(QuantisedLinear(own, Blocks(kind, raw), kernels), torch.from_numpy(order))
            continue
        if id(entry) not in made:
            stored = blocks_of(entry)
            assert stored is not None
            made[id(entry)] = stored.blocks(reader.bytes_of(stored.sources[0]))
        table, module = made[id(entry)], model.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, torch.nn.Embedding):
            module.forward = BlockEmbedding(module, table, kernels)  # type: ignore[method-assign]
        else:
            is_head = module is model.get_output_embeddings()
            module.forward = QuantisedLinear(module, table, kernels, is_head=is_head)


def _rows_of(stack: TensorEntry, raw: torch.Tensor) -> Blocks:
    matrices, rows, _ = stack.shape
    return Blocks(GGML[stack.dtype], raw.view(matrices * rows, -1))


def matrices_in_place(opened: OpenedCheckpoint, types: frozenset[str]) -> dict[str, TensorEntry]:
    """The weights of linear layers and embeddings that can be used as they lie in the files, by name: an output layer
    that shares the embedding's has a name of its own."""
    tied, found = tied_to(opened.model), dict[str, TensorEntry]()
    for name, module in opened.model.named_modules():
        entry = opened.weight_of(name)
        if entry is None or not _is_used(entry, types):
            continue
        is_linear = (
            type(module) is torch.nn.Linear and not is_router(name) and name.rpartition(".")[2] not in _USED_OTHERWISE
        )
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
    return entry.dtype in BLOCKS or entry.offset % GGML[entry.dtype].nbytes == 0


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
        self._found = {name: entry for name, entry in found if in_columns(entry) is None}
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
        return stored.blocks(reader.bytes_of(stored.sources[0]))

    def bind_embeddings(
        self, model: Any, place_of: Callable[[str], torch.device], reader: TensorReader, besides: Collection[str]
    ) -> None:
        """Once the linear layers have theirs; all `besides` these weights."""
        heads = {table: model.get_submodule(head.removesuffix(".weight")) for head, table in self._tied.items()}
        for name in self.embeddings:
            if f"{name}.weight" in besides:
                continue
            module, place = model.get_submodule(name), place_of(name)
            forward = getattr(heads.get(f"{name}.weight"), "forward", None)
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
            module.forward = CardEmbedding(table, kernels, scale)


_USED_OTHERWISE = ("dt_proj",)
"""Linear layers whose weights the library's models use without their `forward`."""
_READ_BY_ATTENTION = ("kv_b_proj",)
"""Modules whose weights the kernels for latent attention read as numbers."""
