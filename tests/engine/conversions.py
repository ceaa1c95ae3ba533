"""Conversions of a checkpoint, and linear layers in tiles, without a load."""

import torch

from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import formats_of_linears, hold_linears
from engine.kernels.repack import quantise
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.conversion import Conversion
from engine.runtime.load.forms import Forms


def conversion_of(
    opened: OpenedCheckpoint, precision: str, *, linears: bool = False, kernels: NativeKernels | None = None
) -> Conversion:
    """All experts that may be read from disk, and the linear layers if these are wanted."""
    forms = Forms(opened, precision, has_kernels=linears)
    return Conversion(forms, [site for site in forms.sites if site.is_on_demand], kernels)


def quantise_linears(model: torch.nn.Module, precision: str, kernels: NativeKernels) -> int:
    """Lets large linear layers compute from tiles made of their numbers; how many there are."""
    formats = formats_of_linears(model, precision)

    def matrix(name: str) -> object:
        return quantise(model.get_submodule(name).weight, formats[name], kernels=kernels)

    hold_linears(model, formats, matrix, kernels)
    return len(formats)
