"""transformers' side of a model, part two: how its checkpoint's tensors become the model's weights.

The library's own conversion is used for everything.  Non-expert tensors go through its normal loading.  Tensors of
experts are set apart before that by the same renaming, indexed, and later converted a few at a time by copies of the
library's own converters, so that a layer's stacked experts never exist.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
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
from engine.common.errors import EngineError, ErrorCode
from engine.experts.record import empty_in_huge_pages
from engine.experts.sites import ExpertsSite
from engine.runtime.adapters import FamilyAdapter
from engine.runtime.load.tensor_reader import LazyTensor, TensorReader

# The library would read in threads of its own: progress and cancelling then come from anywhere, and a load that fails
# leaves threads running for a while.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

_log = logging.getLogger(__name__)
_HARMLESS = ("input_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "output_scale", "rotary_emb.inv_freq")
"""Endings of tensors that some checkpoints carry beside the weights and that plain computation does not need."""


@dataclass(slots=True)
class PartSources:
    """Sources of one part (`gate_up_proj`, say) of all experts of one layer.

    Attributes:
        target: name of the parameter that the library would make of them.
        by_pattern: the source tensors, in the library's order, by the pattern that matched their names.
        experts: number of experts.
    """

    target: str
    experts: int
    by_pattern: dict[str, list[TensorEntry]] = field(default_factory=dict)

    @property
    def is_per_expert(self) -> bool:
        """Whether the checkpoint has one tensor per expert, in order."""
        return all(len(entries) == self.experts for entries in self.by_pattern.values()) and not self.is_fused

    @property
    def is_fused(self) -> bool:
        """Whether every source tensor holds all experts, one per row of its first dimension."""
        return all(
            len(entries) == 1 and len(entries[0].shape) > 1 and entries[0].shape[0] == self.experts
            for entries in self.by_pattern.values()
        )

    def of_expert(self, expert: int) -> dict[str, TensorEntry]:
        """The sources of one expert, by pattern, rows of stacks as such; only if `is_per_expert` or `is_fused`."""
        if self.is_fused:
            return {pattern: entries[0].row(expert) for pattern, entries in self.by_pattern.items()}
        return {pattern: entries[expert] for pattern, entries in self.by_pattern.items()}

    def entries(self) -> Iterator[TensorEntry]:
        """Every source tensor."""
        for entries in self.by_pattern.values():
            yield from entries

    @property
    def nbytes(self) -> int:
        """Bytes to read for all experts."""
        return sum(entry.nbytes for entry in self.entries())


@dataclass
class LoadingPlan:
    """Which tensors make experts, and which the rest.

    Attributes:
        experts: module name (`model.layers.0.mlp.experts`) -> part name -> its sources.
        converters: first target name -> the library's converter that makes it (`None`: the tensor as it is).
        rest: tensors for the library's normal loading, by checkpoint name.
        renamed: those of `rest` that become parameters unchanged, by the parameters' names.
        surplus: biases of modules that have none: GPTQ's tools store them for every module, all of them zeros.
        stacks: of experts' parts, by target, once `engine.runtime.load.records` has looked where they lie.
    """

    experts: dict[str, dict[str, PartSources]]
    converters: dict[str, Any | None]
    rest: dict[str, TensorEntry]
    quantizer: Any | None
    adapter: FamilyAdapter | None
    dtype: torch.dtype
    renamed: dict[str, TensorEntry] = field(default_factory=dict)
    surplus: dict[str, TensorEntry] = field(default_factory=dict)
    stacks: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def expert_bytes(self) -> int:
        """Bytes of experts in the checkpoint."""
        return sum(part.nbytes for parts in self.experts.values() for part in parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return self.expert_bytes + sum(entry.nbytes for entry in self.rest.values())

    @property
    def entries(self) -> list[TensorEntry]:
        """Every tensor that is read."""
        parts = (part for module in self.experts.values() for part in module.values())
        return [*self.rest.values(), *(entry for part in parts for entry in part.entries())]


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
    adapter: FamilyAdapter | None,
) -> LoadingPlan:
    """Sorts the checkpoint's tensors.  `model` must still have its expert parameters (on meta)."""
    mapping = _conversions(model, quantizer, adapter)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    owners = {target: site for site in sites for target in site.targets}
    plan = LoadingPlan({}, {}, {}, quantizer, adapter, dtype)
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
        part = parts.setdefault(site.targets[name], PartSources(name, site.num_experts))
        converter = plan.converters[name] = by_pattern[pattern] if pattern is not None else None
        entry = tensors[key]
        if getattr(converter, "experts_below_one_another", False):
            entry = _by_expert(entry, site.num_experts)
        part.by_pattern.setdefault(pattern or key, []).append(entry)
    for name, keys in shards.items():
        if len({tensors[key].shape[1:] for key in keys}) == 1 and len(tensors[keys[0]].shape) == 2:
            plan.rest[name] = plan.renamed[name] = _joined([plan.rest.pop(key) for key in keys], name)
    for target, converter in list(plan.converters.items()):
        if _divides_experts(converter):
            _divide(plan, target, converter, owners)
    return plan


def tensors_of(
    model: Any, tensors: Mapping[str, TensorEntry], quantizer: Any | None, adapter: FamilyAdapter | None
) -> dict[str, TensorEntry]:
    """Those of a checkpoint's tensors that a part of its model has a use for."""
    mapping = _conversions(model, quantizer, adapter)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
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


def _joined(shards: list[TensorEntry], name: str) -> TensorEntry:
    first, nbytes = shards[0], sum(shard.nbytes for shard in shards)
    shape = (sum(shard.shape[0] for shard in shards), *first.shape[1:])
    return PackedEntry(first.file, name, first.dtype, shape, first.offset, nbytes, tuple(shards), Rows())


def _divides_experts(converter: Any | None) -> bool:
    operations = getattr(converter, "operations", [])
    return bool(operations) and isinstance(operations[-1], ErnieFuseAndSplitTextVisionExperts)


def _divide(plan: LoadingPlan, target: str, converter: Any, owners: dict[str, ExpertsSite]) -> None:
    """Gives each module its own sources, where the library makes experts for text and for pictures of one list.

    So each can be made without the other: a bank is filled one module at a time.
    """
    *before, last = converter.operations
    joined = [MergeModulelist(dim=last.stack_dim)]
    if len(converter.source_patterns) > 1:
        joined.append(Concatenate(dim=last.concat_dim))
    site = owners[target]
    whole = plan.experts[site.name].pop(site.targets[target])
    prefix, _, suffix = target.partition(converter.target_patterns[0])
    shares = len(converter.target_patterns)
    for share, pattern in enumerate(converter.target_patterns):
        own = f"{prefix}{pattern}{suffix}"
        part = PartSources(own, owners[own].num_experts)
        for source, entries in whole.by_pattern.items():
            each = -(-len(entries) // shares)
            part.by_pattern[source] = entries[share * each : (share + 1) * each]
        plan.experts.setdefault(owners[own].name, {})[owners[own].targets[own]] = part
        plan.converters[own] = converter.copy(list(converter.source_patterns), [pattern], operations=[*before, *joined])


def _by_expert(entry: TensorEntry, experts: int) -> TensorEntry:
    """The same bytes, [E * rows, ...], seen as [E, rows, ...]; as they are if they cannot be."""
    if not entry.shape or entry.shape[0] % experts:
        return entry
    return replace(entry, shape=(experts, entry.shape[0] // experts, *entry.shape[1:]))


def rows_in_order(part: PartSources, converter: Any | None) -> list[str] | None:
    """The patterns whose tensors, one below the other, already are an expert's part; `None` if it takes more."""
    if converter is None:
        return list(part.by_pattern)
    kinds = [type(operation) for operation in converter.operations]
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    patterns = list(converter.source_patterns)
    stacked = kinds == [MergeModulelist] and dims == [0] and len(patterns) == 1
    joined = kinds == [MergeModulelist, Concatenate] and dims == [0, 1]
    joined_fused = kinds == [Concatenate] and dims == [1] and part.is_fused
    known = stacked or joined or joined_fused
    return patterns if known and set(patterns) == part.by_pattern.keys() else None


@dataclass
class PartConverter:
    """Makes one part of the experts of one module.

    Attributes:
        model: the skeleton, as the library's operations may look at it.
        sites: the experts modules by name.
    """

    model: Any
    sites: dict[str, ExpertsSite]
    converter: Any | None

    def __post_init__(self) -> None:
        self.converter = deepcopy(self.converter)

    def convert(self, target: str, experts: int, tensors: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Source tensors of `experts` experts, by pattern -> full target name -> [experts, *module shape].

        Raises:
            EngineError: `CHECKPOINT_DAMAGED` if they do not fit together.
        """
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
    in_place: Callable[[TensorEntry], torch.Tensor | None] = lambda _entry: None,
) -> None:
    """Loads everything but the experts through the library, ties, and computes the buffers that are not stored.

    Args:
        device_map: module name -> where it goes with all that is in it; the empty name is the whole model.
        apart: parameters that something else reads, by name: they only get their shape.
        in_place: gives a tensor that lies in a file in memory, and None for those that have to be read.

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

    def read(entry: TensorEntry) -> torch.Tensor:
        there = in_place(entry)
        return there if there is not None else reader.read(entry, empty_in_huge_pages)

    def lazy(entry: TensorEntry) -> LazyTensor:
        shell = shells.get(id(entry))
        return LazyTensor(entry, read) if shell is None else LazyTensor(entry, lambda e: shell.expand(e.shape), "BF16")

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


def _conversions(model: Any, quantizer: Any | None, adapter: FamilyAdapter | None) -> list[Any]:
    """Fresh ones: converters keep what they collect, and some renamings what they have seen."""
    if adapter is None:
        return list(get_model_conversion_mapping(model, None, quantizer))
    mapping = adapter.conversions(model, get_model_conversion_mapping(model, None, None))
    return list(quantizer.update_weight_conversions(mapping, model)) if quantizer is not None else mapping


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
