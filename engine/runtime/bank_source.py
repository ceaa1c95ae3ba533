"""What a bank file is made of: a checkpoint, read by the library's own conversion, one layer's experts at a time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.checkpoint.config_file import read_config
from engine.checkpoint.expert_index import ExpertIndex
from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.shards import read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.experts.bank import BankLayer, ExpertBank
from engine.experts.bank_header import BankHeader, BankLayerSpec
from engine.experts.checksums import BEST_CHECKSUM
from engine.experts.record import RecordLayout
from engine.experts.sites import ExpertsSite, find_sites, quantised
from engine.formats import GROUP, as_stored, format_of
from engine.kernels.native.library import NativeKernels
from engine.runtime.adapters import adapter_for
from engine.runtime.fill_bank import fill_bank
from engine.runtime.library_conversion import LoadingPlan, parameter_dtypes, plan_loading
from engine.runtime.library_models import (
    build_skeleton,
    count_weights,
    model_class_for,
    quantizer_for,
    quiet_library,
    read_library_config,
)
from engine.runtime.tensor_reader import TensorReader

_CONVERTER = "transformers " + ".".join(transformers.__version__.split(".")[:2])
"""Part of the fingerprint: another version may convert otherwise."""


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
    """

    directory: Path
    model: Any
    sites: list[ExpertsSite]
    plan: LoadingPlan
    precision: str
    kernels: NativeKernels | None = None

    @classmethod
    def open(cls, directory: Path, precision: str = "bf16", kernels: NativeKernels | None = None) -> BankSource:
        """Reads headers and builds the skeleton; seconds, and no weights.

        Raises:
            EngineError: as `load_model`; `INVALID_REQUEST` for a model without experts.
        """
        dtype = getattr(torch, as_stored(precision).dtype)
        raw = read_config(directory)
        tensors = read_tensors(directory)
        with torch.no_grad(), quiet_library():
            library_config = read_library_config(directory, raw["model_type"])
            adapter = adapter_for(raw["model_type"])
            model_class, part = model_class_for(library_config, adapter)
            quantizer = quantizer_for(part, directory.name)
            model = build_skeleton(model_class, part, dtype, adapter)
            sites = find_sites(model, parameter_dtypes(model, dtype))
            if not sites:
                raise EngineError(
                    ErrorCode.INVALID_REQUEST, f"{directory.name} has no experts, so there is nothing to prepare."
                )
            plan = plan_loading(model, sites, tensors, dtype, quantizer, adapter)
        if format_of(precision).is_tiled:
            sites = quantised(sites, precision, count_weights(model))
        return cls(directory, model, sites, plan, precision, kernels)

    def only(self, names: Collection[str]) -> BankSource:
        """The same, for a bank of these experts modules alone."""
        return replace(self, sites=[site for site in self.sites if site.name in names])

    def header(self) -> BankHeader:
        """What a bank made of the checkpoint as it is now would say.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED` if a file is gone.
        """
        tensors = chain(
            self.plan.rest.values(),
            (
                entry
                for parts in self.plan.index.modules.values()
                for sources in parts.values()
                for entry in sources.entries()
            ),
        )
        source = {**fingerprint(self.directory, tensors), "converter": _CONVERTER}
        layers = tuple(BankLayerSpec(site.name, site.num_experts, site.layout) for site in self.sites)
        group = GROUP if format_of(self.precision).is_tiled else None
        return BankHeader(self.precision, group, BEST_CHECKSUM, source, layers)

    def require_unchanged(self, header: BankHeader) -> None:
        """Raises `CHECKPOINT_DAMAGED` if the files are no longer those that `header` was made of."""
        if self.header().source != header.source:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"The files in {self.directory} changed while they were being prepared: try again once they are there.",
            )

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


class _GivenMemory(ExpertBank):
    """A bank of one layer in memory that somebody else owns."""

    def __init__(self, records: torch.Tensor) -> None:
        super().__init__(records.device)
        self._records = records

    def add_layer(self, name: str, num_experts: int, layout: RecordLayout) -> BankLayer:
        if self._records.shape != (num_experts, layout.nbytes):
            raise ValueError(f"{name} needs records of [{num_experts}, {layout.nbytes}], not {self._records.shape}")
        layer = BankLayer(name, layout, self._records)
        self.layers[name] = layer
        return layer
