"""What is no expert of a quantised model is kept too: a bank file with a record for each linear layer and embedding.

Of a file that is quantised already, its linear layers are kept in the form that the kernels read.

Embeddings are kept as they are: reading them with the rest, early and past the page cache, takes half as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from engine.checkpoint.library import bank_path
from engine.experts.bank import BankLayer, ExpertBank
from engine.experts.bank_header import BankHeader, BankLayerSpec
from engine.experts.checksums import BEST_CHECKSUM
from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.record import RecordLayout
from engine.experts.record_memory import HugePages
from engine.formats import GROUP, STORED, TiledFormat, careful, format_of
from engine.formats.tiles import Pairing, TiledMatrix
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import StoredMatrices, formats_of_linears, keepable
from engine.kernels.quantise import quantise_into
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.decision import Decision
from engine.runtime.load.kept_records import KEEP_VARIABLE, WORTH_KEEPING, KeptRecords
from engine.runtime.load.library_conversion import parameter_dtypes
from engine.runtime.load.prepare_bank import kept_as, require_unchanged, source_of
from engine.runtime.load.stored import StoredLinears
from engine.runtime.load.tensor_reader import torch_dtype

_WEIGHT = "weight"


class KeptDense:
    """The linear layers of a model on the CPU in a tiled format, and its embeddings: read, or made and kept.

    Args:
        linears: layouts of the linear layers, by their modules' names.
        plain: layouts of parameters that stay as they are, by their names.
        apart: parameters that nothing but these linear layers is made of.

    Attributes:
        records: reads or writes them while the rest of the model is loaded.
    """

    def __init__(
        self,
        records: KeptRecords,
        linears: Mapping[str, QuantisedLayout],
        plain: Mapping[str, RecordLayout],
        apart: set[str],
    ) -> None:
        self.records, self._layouts, self._plain = records, linears, plain
        self._apart = apart | plain.keys()
        self._bank, self._pages = ExpertBank(torch.device("cpu")), HugePages()
        records.read_into(self._bank)

    @property
    def apart(self) -> set[str]:
        """Names of parameters of the checkpoint that need not be read."""
        return self._apart if self.records.is_there else set()

    @property
    def formats(self) -> Mapping[str, TiledFormat]:
        """The formats of the layers that are read, by name."""
        return {
            name: self._layouts[name].tiled_shape(_WEIGHT).format for name in self._bank.layers if name in self._layouts
        }

    def matrix(self, name: str, kernels: NativeKernels | None = None) -> TiledMatrix:  # noqa: ARG002
        """One of `formats`; its bytes are there after `records.wait`."""
        return self._layouts[name].matrix(self._bank.layers[name].rows, _WEIGHT, 0)

    def take_place(self, model: torch.nn.Module) -> None:
        """Gives parameters that stay as they are their memory, where they are read; else keeps them."""
        for name, layout in self._plain.items():
            parameter, shape = model.get_parameter(name), layout.parts[0].shape
            layer = self._bank.layers.get(name)
            if layer is not None:
                parameter.data = layer.part(_WEIGHT, 0)
            elif parameter.shape == shape and parameter.dtype == torch.bfloat16 and parameter.is_contiguous():
                records = parameter.data.view(-1).view(torch.uint8).view(1, layout.nbytes)
                self.records.write(BankLayer(name, layout, records))

    def quantised(
        self, name: str, weight: torch.Tensor, target_format: TiledFormat, kernels: NativeKernels
    ) -> TiledMatrix | None:
        """The weight of a layer that was not there, kept from now on; None if it is not one of those that are."""
        layout = self._layouts.get(name)
        if layout is None or layout.tiled_shape(_WEIGHT).format is not target_format:
            return None
        return self._made(name, layout, lambda matrix: quantise_into(weight, matrix, kernels))

    def keeping(self, stored: StoredLinears) -> StoredMatrices:
        """The same layers, each kept from now on once it has been read."""
        return _Keeping(self, stored)

    def _made(self, name: str, layout: QuantisedLayout, fill: Callable[[TiledMatrix], None]) -> TiledMatrix:
        record = self._pages.empty((1, layout.nbytes), dtype=torch.uint8)
        for begin, end in layout.padding:
            record[:, begin:end].zero_()
        layer = self._bank.adopt(name, layout, record)
        matrix = self.matrix(name)
        fill(matrix)
        self.records.write(layer)
        return matrix


class _Keeping:
    """See `KeptDense.keeping`."""

    def __init__(self, dense: KeptDense, stored: StoredLinears) -> None:
        self._dense, self._stored = dense, stored

    @property
    def formats(self) -> Mapping[str, TiledFormat]:
        return self._stored.formats

    def matrix(self, name: str, kernels: NativeKernels | None) -> TiledMatrix:
        layout = self._dense._layouts.get(name)
        if layout is None:
            return self._stored.matrix(name, kernels)
        return self._dense._made(name, layout, lambda matrix: self._stored.read_into(name, matrix, kernels))


def kept_dense(opened: OpenedCheckpoint, decision: Decision, kernels: NativeKernels | None) -> KeptDense | None:
    """The linear layers of a model that runs on the CPU alone; None if they need not be converted.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if a file of the model is gone.
    """
    precision = decision.precision
    if decision.in_place or decision.devices or kernels is None or os.environ.get(KEEP_VARIABLE) == "0":
        return None
    if precision == STORED:
        linears, apart, plain = _of_stored(opened)
    elif format_of(precision).is_tiled:
        linears, apart, plain = _of_quantised(opened, precision)
    else:
        return None
    if sum(layout.unquantised.nbytes for layout in linears.values()) < WORTH_KEEPING:
        return None
    layers = tuple(BankLayerSpec(name, 1, layout) for name, layout in {**linears, **plain}.items())
    dense = STORED if precision == STORED else careful(precision, opened.weights)
    group = None if precision == STORED else GROUP
    header = BankHeader(dense, group, BEST_CHECKSUM, source_of(opened.directory), layers)
    records = KeptRecords(
        header,
        bank_path(opened.directory, f"{kept_as(precision, guesses=opened.guesses)}-dense"),
        "other weights",
        lambda made: require_unchanged(opened.directory, made),
        keeps=True,
    )
    return KeptDense(records, linears, plain, apart)


_Linears = tuple[dict[str, QuantisedLayout], set[str], dict[str, RecordLayout]]
"""Layouts of linear layers, parameters that nothing but these is made of, and layouts of parameters that stay."""


def _of_quantised(opened: OpenedCheckpoint, precision: str) -> _Linears:
    model, dense = opened.model, careful(precision, opened.weights)
    formats = formats_of_linears(model, dense, parameter_dtypes(model, opened.dtype))
    weights = {name: model.get_submodule(name).weight for name in formats}
    linears = {name: _layout(weight, formats[name]) for name, weight in weights.items()}
    shared = {name for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items() for name in pair}
    named = opened.plan.renamed if opened.plan.quantizer is None else {}  # else the library has a use for them
    apart = {f"{name}.{_WEIGHT}" for name in linears} & set(named) - shared
    return linears, apart, _embeddings(opened, set(weights))


def _of_stored(opened: OpenedCheckpoint) -> _Linears:
    stored = StoredLinears(opened)
    layers = keepable(opened.model, stored.formats)
    linears = {name: _layout(module.weight, stored.shape(name).format) for name, module in layers.items()}
    return linears, stored.read_apart(linears), {}


def _embeddings(opened: OpenedCheckpoint, linears: set[str]) -> dict[str, RecordLayout]:
    """Large parameters that are the checkpoint's own tensors, in whole pages, by name."""
    dtype_of = parameter_dtypes(opened.model, opened.dtype)
    found: dict[str, RecordLayout] = {}
    if opened.plan.quantizer is not None:
        return found
    for name, parameter in opened.model.named_parameters():
        entry = opened.plan.renamed.get(name)
        own = entry is not None and torch_dtype(entry) == dtype_of(name, parameter) == torch.bfloat16
        layout = RecordLayout.of({_WEIGHT: (tuple(parameter.shape), torch.bfloat16)}, transposed=False)
        large = parameter.nbytes >= WORTH_KEEPING and parameter.nbytes == layout.nbytes
        if own and large and name.removesuffix(f".{_WEIGHT}") not in linears:
            found[name] = layout
    return found


def _layout(weight: torch.Tensor, target: TiledFormat) -> QuantisedLayout:
    plain = RecordLayout.of({_WEIGHT: (tuple(weight.shape), weight.dtype)}, transposed=False)
    return QuantisedLayout.quantising(plain, lambda _name: target, Pairing.PLAIN)
