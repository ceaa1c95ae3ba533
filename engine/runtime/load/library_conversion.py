"""transformers' side of a model, part two: how its checkpoint's tensors become the model's weights.

The library's own conversion is used for everything.  Non-expert tensors go through its normal loading.  Tensors of
experts are set apart before that by the same renaming, indexed, and later converted a few at a time by copies of the
library's own converters, so that a layer's stacked experts never exist.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, Rows
from engine.checkpoint.stored import pieces_of, rows_of
from engine.common.errors import EngineError, ErrorCode
from engine.experts.direct_file import Place
from engine.experts.dispatch import ExpertsSite
from engine.runtime.adapters import Adapter
from engine.runtime.load.tensor_reader import LazyTensor, TensorReader

# The library would read in threads of its own: progress and cancelling then come from anywhere, and a load that fails
# leaves threads running for a while.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

_log = logging.getLogger(__name__)
_HARMLESS = ("input_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "output_scale", "rotary_emb.inv_freq")
"""Endings of tensors that some checkpoints carry beside the weights and that plain computation does not need."""


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix or vector of every expert of a module, as files have it: what one is, and where each begins."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    places: Sequence[Place]

    @classmethod
    def of(cls, entries: Sequence[TensorEntry], experts: int, *, is_fused: bool) -> Stack | None:
        """That of a tensor [E, ...], or of one for each expert; `None` if they differ, or are made of others."""
        first, places = entries[0], list[Place]()
        for entry in entries:
            if type(entry) is not TensorEntry or (entry.dtype, entry.shape) != (first.dtype, first.shape):
                return None
            places.append((entry.file, entry.offset))
        if not is_fused:
            return cls(first.dtype, first.shape, first.nbytes, places)
        each = first.nbytes // experts
        places = [(first.file, first.offset + expert * each) for expert in range(experts)]
        return cls(first.dtype, first.shape[1:], each, places)


@dataclass
class PartSources:
    """Sources of one part (`gate_up_proj`, say) of all experts of one layer.

    Attributes:
        target: name of the parameter that the library would make of them.
        experts: how many there are.
        converter: the library's, which makes it; `None`: it is the tensor as it is.
        by_pattern: the source tensors, in the library's order, by the pattern that matched their names.
    """

    target: str
    experts: int
    converter: Any | None
    by_pattern: dict[str, list[TensorEntry]] = field(default_factory=dict)

    @property
    def is_fused(self) -> bool:
        """Whether every source tensor holds all experts, one per row of its first dimension."""
        return all(
            len(entries) == 1 and len(entries[0].shape) > 1 and entries[0].shape[0] == self.experts
            for entries in self.by_pattern.values()
        )

    @property
    def is_apart(self) -> bool:
        """Whether each expert has sources of its own: tensors in order, or a row of every stack."""
        return self.is_fused or all(len(entries) == self.experts for entries in self.by_pattern.values())

    def of_expert(self, expert: int) -> dict[str, TensorEntry]:
        if self.is_fused:
            return {pattern: entries[0].row(expert) for pattern, entries in self.by_pattern.items()}
        return {pattern: entries[expert] for pattern, entries in self.by_pattern.items()}

    @property
    def entries(self) -> Iterator[TensorEntry]:
        for entries in self.by_pattern.values():
            yield from entries

    @cached_property
    def rows(self) -> PartRows | None:
        """The same as rows of tensors, one below the other; `None` if it takes more."""
        order = list(self.by_pattern)
        if self.converter is not None:
            order = list(self.converter.source_patterns)
            kinds = [type(operation) for operation in self.converter.operations]
            dims = [getattr(operation, "dim", None) for operation in self.converter.operations]
            stacked = kinds == [MergeModulelist] and dims == [0] and len(order) == 1
            joined = kinds == [MergeModulelist, Concatenate] and dims == [0, 1]
            joined_fused = kinds == [Concatenate] and dims == [1] and self.is_fused
            if not (stacked or joined or joined_fused) or set(order) != self.by_pattern.keys():
                return None
        packings = [rows_of(self.by_pattern[pattern][0]) for pattern in order]
        turned = {packing is not None and packing.transposed for packing in packings}
        if len(turned) > 1 or not self.is_apart:
            return None
        alternating = any(packing is not None and packing.alternating for packing in packings)
        return PartRows(self, order, turned.pop(), alternating)


@dataclass
class PartRows:
    """A part that is the rows of stored tensors, one below the other.

    Attributes:
        order: the patterns of its sources.
        transposed: whether they are stored the other way round than the library has them.
        alternating: whether the library has a row of each in turn.
    """

    part: PartSources
    order: Sequence[str]
    transposed: bool
    alternating: bool

    def of_expert(self, expert: int) -> list[TensorEntry]:
        sources = self.part.of_expert(expert)
        return [piece for pattern in self.order for piece in pieces_of(sources[pattern])]

    @cached_property
    def stacks(self) -> list[Stack] | None:
        part = self.part
        pieces = [zip(*map(pieces_of, part.by_pattern[pattern]), strict=True) for pattern in self.order]
        found = [Stack.of(each, part.experts, is_fused=part.is_fused) for pattern in pieces for each in pattern]
        known = [stack for stack in found if stack is not None]
        return known if len(known) == len(found) else None


@dataclass
class LoadingPlan:
    """Which tensors make experts, and which the rest.

    Attributes:
        experts: module name (`model.layers.0.mlp.experts`) -> part name -> its sources.
        rest: tensors for the library's normal loading, by checkpoint name.
        renamed: those of `rest` that become parameters unchanged, by the parameters' names.
        surplus: biases of modules that have none: GPTQ's tools store them for every module, all of them zeros.
    """

    experts: dict[str, dict[str, PartSources]]
    rest: dict[str, TensorEntry]
    quantizer: Any | None
    adapter: Adapter | None
    dtype: torch.dtype
    renamed: dict[str, TensorEntry] = field(default_factory=dict)
    surplus: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def expert_bytes(self) -> int:
        return sum(entry.nbytes for parts in self.experts.values() for part in parts.values() for entry in part.entries)

    @property
    def nbytes(self) -> int:
        return self.expert_bytes + sum(entry.nbytes for entry in self.rest.values())

    @property
    def entries(self) -> list[TensorEntry]:
        parts = (part for module in self.experts.values() for part in module.values())
        return [*self.rest.values(), *(entry for part in parts for entry in part.entries)]


def parameter_dtypes(model: Any, dtype: torch.dtype) -> Any:
    """`f(name, parameter) -> torch.dtype`: the type a parameter is kept in (the library keeps some in fp32)."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return lambda _name, parameter: parameter.dtype
    pattern, by_group, _ = build_glob_alternation(list(plan))

    def of(name: str, parameter: torch.Tensor) -> torch.dtype:
        match = pattern.search(name)
        chosen = plan[by_group[match.lastgroup]] if match is not None else parameter.dtype
        return chosen if isinstance(chosen, torch.dtype) else parameter.dtype

    return of


def plan_loading(
    model: Any,
    sites: list[ExpertsSite],
    tensors: dict[str, TensorEntry],
    dtype: torch.dtype,
    quantizer: Any | None,
    adapter: Adapter | None,
) -> LoadingPlan:
    """Sorts the checkpoint's tensors.  `model` must still have its expert parameters (on meta)."""
    renamings, converters = _sorted_conversions(model, quantizer, adapter)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    owners = {target: site for site in sites for target in site.targets}
    plan = LoadingPlan({}, {}, quantizer, adapter, dtype)
    shards: dict[str, list[str]] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        site = owners.get(name)
        if site is None:
            beside = tensors.get(f"{key.removesuffix('.bias')}.weight") if key.endswith(".bias") else None
            surplus = name not in state and isinstance(beside, PackedEntry)
            (plan.surplus if surplus else plan.rest)[key] = tensors[key]
            if pattern is None and name in state:
                plan.renamed[name] = tensors[key]
            elif pattern is not None and name in state and _joins_shards(by_pattern[pattern]):
                shards.setdefault(name, []).append(key)
            continue
        parts = plan.experts.setdefault(site.name, {})
        converter = by_pattern[pattern] if pattern is not None else None
        part = parts.setdefault(site.targets[name], PartSources(name, site.num_experts, converter))
        entry = tensors[key]
        if getattr(converter, "experts_below_one_another", False):
            each, uneven = divmod(entry.shape[0] if entry.shape else 0, site.num_experts)
            entry = entry if uneven or not each else replace(entry, shape=(site.num_experts, each, *entry.shape[1:]))
        part.by_pattern.setdefault(pattern or key, []).append(entry)
    for name, keys in shards.items():
        if len({tensors[key].shape[1:] for key in keys}) == 1 and len(tensors[keys[0]].shape) == 2:
            plan.rest[name] = plan.renamed[name] = PackedEntry.of(
                name,
                (sum(tensors[key].shape[0] for key in keys), *tensors[keys[0]].shape[1:]),
                [plan.rest.pop(key) for key in keys],
                Rows(),
            )
    for part in [part for parts in plan.experts.values() for part in parts.values()]:
        operations = getattr(part.converter, "operations", [])
        if operations and isinstance(operations[-1], ErnieFuseAndSplitTextVisionExperts):
            _divide(plan, part, owners)
    return plan


def tensors_of(
    model: Any, tensors: Mapping[str, TensorEntry], quantizer: Any | None, adapter: Adapter | None
) -> dict[str, TensorEntry]:
    renamings, converters = _sorted_conversions(model, quantizer, adapter)
    state, prefix = model.state_dict(), model.base_model_prefix
    return {
        key: entry
        for key, entry in tensors.items()
        if rename_source_key(key, renamings, converters, prefix, state)[0] in state or key in state
    }


def _joins_shards(converter: Any) -> bool:
    """Whether it puts the rows of one list of tensors below one another: those of a table too large for one tensor."""
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    return kinds == [(Concatenate, 0)] and len(converter.source_patterns) == 1


def _divide(plan: LoadingPlan, whole: PartSources, owners: dict[str, ExpertsSite]) -> None:
    """Gives each module its own sources, where the library makes experts for text and for pictures of one list.

    So each can be made without the other: a bank is filled one module at a time.
    """
    target, converter = whole.target, whole.converter
    assert converter is not None
    *before, last = converter.operations
    joined = [MergeModulelist(dim=last.stack_dim)]
    if len(converter.source_patterns) > 1:
        joined.append(Concatenate(dim=last.concat_dim))
    site = owners[target]
    del plan.experts[site.name][site.targets[target]]
    prefix, _, suffix = target.partition(converter.target_patterns[0])
    shares = len(converter.target_patterns)
    for share, pattern in enumerate(converter.target_patterns):
        own = f"{prefix}{pattern}{suffix}"
        made_by = converter.copy(list(converter.source_patterns), [pattern], operations=[*before, *joined])
        part = PartSources(own, owners[own].num_experts, made_by)
        for source, entries in whole.by_pattern.items():
            each = -(-len(entries) // shares)
            part.by_pattern[source] = entries[share * each : (share + 1) * each]
        plan.experts.setdefault(owners[own].name, {})[owners[own].targets[own]] = part


@dataclass
class PartConverter:
    """Makes one part of the experts of one module; the library's operations may look at the skeleton."""

    model: Any
    sites: dict[str, ExpertsSite]
    converter: Any | None

    def __post_init__(self) -> None:
        self.converter = deepcopy(self.converter)

    def convert(self, target: str, experts: int, tensors: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Source tensors of `experts` experts, by pattern -> full target name -> [experts, *module shape]."""
        if self.converter is None:
            ((tensor,),) = tensors.values()
            return {target: tensor}
        for pattern, values in tensors.items():
            self.converter.collected_tensors[pattern] = values
        try:
            made = self.converter.convert(target, model=_OneExpertView(self, experts), config=self.model.config)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"The checkpoint's tensors do not add up to {target}: get another version of the model.",
            ) from error
        finally:
            self.converter.collected_tensors.clear()
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class _OneExpertView:
    """The skeleton as a conversion of a few experts must see it: expert parameters have only those rows."""

    def __init__(self, owner: PartConverter, experts: int) -> None:
        self._model, self._sites, self._experts = owner.model, owner.sites, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_submodule(self, name: str) -> Any:
        site = self._sites.get(name)
        if site is None:
            return self._model.get_submodule(name)
        shapes = {
            part.name: (part.shape[1], part.shape[0]) if part.transposed else part.shape for part in site.layout.parts
        }
        return SimpleNamespace(
            **{
                part.name: torch.empty(self._experts, *shapes[part.name], dtype=part.dtype, device="meta")
                for part in site.layout.parts
            }
        )

    def get_parameter(self, name: str) -> Any:
        module, _, parameter = name.rpartition(".")
        return getattr(self.get_submodule(module), parameter)


def load_rest(
    model: Any,
    plan: LoadingPlan,
    reader: TensorReader,
    device_map: Mapping[str, torch.device],
    apart: Collection[str] = (),
) -> None:
    """Loads everything but the experts through the library, ties, and computes the buffers that are not stored.

    Args:
        device_map: module name -> where it goes with all that is in it; the empty name is the whole model.
        apart: parameters that something else reads, by name: they only get their shape.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if a tensor is missing or of another shape, `MODEL_UNSUPPORTED` if the
            checkpoint holds weights for modules that would be ignored.
    """
    for key, entry in plan.surplus.items():
        if reader.read(entry).any():
            raise _unknown_use(key)
    config = LoadStateDictConfig(
        device_map=dict(device_map),
        dtype=plan.dtype,
        dtype_plan=model._get_dtype_plan(plan.dtype),
        hf_quantizer=plan.quantizer,
        weight_mapping=_conversions(model, plan.quantizer, plan.adapter),
    )
    dtype_of = parameter_dtypes(model, plan.dtype)
    dtypes = {name: dtype_of(name, parameter) for name, parameter in model.named_parameters()}
    shells = {id(plan.renamed[name]): torch.zeros(1, dtype=dtypes[name]) for name in apart}  # all one number: no memory

    def lazy(entry: TensorEntry) -> LazyTensor:
        shell = shells.get(id(entry))
        if shell is None:
            return LazyTensor(entry, reader.in_memory)
        return LazyTensor(entry, lambda e: shell.expand(e.shape), "BF16")

    state = {key: lazy(entry) for key, entry in plan.rest.items()}
    info, _ = convert_and_load_state_dict_in_model(model, state, config, None)
    if info.conversion_errors or info.mismatched_keys:
        names = sorted([*info.conversion_errors, *(key[0] for key in info.mismatched_keys)])
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The checkpoint does not fit its configuration (at {names[0]}): get another version of the model.",
        )
    _give_memory_to_buffers(model)
    info = model._finalize_model_loading(model, config, info)
    if info.missing_keys:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The checkpoint lacks {len(info.missing_keys)} of the model's tensors ({min(info.missing_keys)}): "
            "download or copy the model again.",
        )
    _check_unexpected(model, info.unexpected_keys)
    if plan.quantizer is not None:  # it leaves weights that were not quantised in the type that they are stored in
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])


def _give_memory_to_buffers(model: Any) -> None:
    """To those that are not stored, as the library does it in a moment: from the meta device torch would import its
    symbolic shapes, and sympy with them, to do so."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_strided(
                    buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu"
                )


def _conversions(model: Any, quantizer: Any | None, adapter: Adapter | None) -> list[Any]:
    """Fresh ones: converters keep what they collect, and some renamings what they have seen."""
    if adapter is None:
        return list(get_model_conversion_mapping(model, None, quantizer))
    mapping = adapter.conversions(model, get_model_conversion_mapping(model, None, None))
    return list(quantizer.update_weight_conversions(mapping, model)) if quantizer is not None else mapping


def _sorted_conversions(model: Any, quantizer: Any | None, adapter: Adapter | None) -> tuple[list[Any], list[Any]]:
    mapping = _conversions(model, quantizer, adapter)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    return renamings, [each for each in mapping if isinstance(each, WeightConverter)]


def _check_unexpected(model: Any, keys: set[str]) -> None:
    """A tensor for a module that exists here would change the answer; other parts (vision, MTP) are left out."""
    modules = {name for name, _ in model.named_modules()}
    ignored = []
    for key in sorted(keys):
        if key.endswith(_HARMLESS):
            continue
        if key.rpartition(".")[0] in modules:
            raise _unknown_use(key)
        ignored.append(key)
    if ignored:
        _log.info("%d tensors belong to parts of the model that are not used (%s, ...)", len(ignored), ignored[0])


def _unknown_use(key: str) -> EngineError:
    return EngineError(
        ErrorCode.MODEL_UNSUPPORTED,
        f"The checkpoint holds {key}, which Switchyard does not know how to use: its answers would be wrong.",
    )
