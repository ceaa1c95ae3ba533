"""Finds a model's experts modules, removes their weights, and binds them to the bank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts.dispatch import BANK_LAYER, IMPLEMENTATION
from engine.experts.record import ExpertBank, LayerSpec
from engine.families.library import CHOSEN_EXPERTS, EXPERTS_INTERFACE
from engine.formats.tiles import RecordLayout
from engine.kernels import choose_kernel
from engine.kernels.native.library import NativeKernels

_STANDARD_PARTS = ("gate_up_proj", "up_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj", "down_proj_bias")


DRAFT_HEAD = "draft_head"
"""Name of the module beside a decoder's layers that guesses tokens, where there is one."""


@dataclass(frozen=True)
class ExpertsSite(LayerSpec):
    """An experts module, before its weights are loaded."""

    module: Any

    @property
    def is_on_demand(self) -> bool:
        """Whether its experts may come from disk: kernels compute them, where a module with its own forward needs all
        its records in RAM.

        So do those that guess tokens, which a bank of the same model has or has not, as it is asked to guess or not.
        """
        return hasattr(self.module, "has_gate") and DRAFT_HEAD not in self.name.split(".")

    @property
    def targets(self) -> dict[str, str]:
        return {f"{self.name}.{part.name}": part.name for part in self.layout.unquantised.parts}


def find_sites(model: Any, dtype_of: Any) -> list[ExpertsSite]:
    """The experts modules of a model on the meta device, in the order of its layers.

    `dtype_of(name, parameter) -> torch.dtype` gives the precision to store a parameter in.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`, an experts module does not have the layout that the interface requires.
    """
    sites = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        names = getattr(module, "expert_parts", None)
        if names is None:
            if not all(hasattr(module, attribute) for attribute in EXPERTS_INTERFACE):
                continue
            names = tuple(part for part in _STANDARD_PARTS if part in own)
        if not names or set(names) != own.keys() or len({own[part].shape[0] for part in names}) != 1:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"The experts of {name} are laid out in a way that Switchyard does not know.",
            )
        shapes = {part: (tuple(own[part].shape[1:]), dtype_of(f"{name}.{part}", own[part])) for part in names}
        layout = RecordLayout.of(shapes, transposed=bool(getattr(module, "is_transposed", False)))
        sites.append(ExpertsSite(name, own[names[0]].shape[0], layout, module))
    return sites


def empty_modules(model: Any, sites: list[ExpertsSite]) -> None:
    """Replaces the expert parameters with `None`, so that any code path but ours raises instead of computing garbage.

    The library must not try to initialise the removed parameters, neither in an experts module nor from its parent, as
    some families do (Qwen3-Omni).
    """
    for site in sites:
        for part in site.layout.unquantised.parts:
            setattr(site.module, part.name, None)
        site.module._is_hf_initialized = True
        parent = model.get_submodule(site.name.rpartition(".")[0])
        if not any(True for _ in (*parent.parameters(recurse=False), *parent.buffers(recurse=False))):
            parent._is_hf_initialized = True


def bind(sites: list[ExpertsSite], bank: ExpertBank, kernels: NativeKernels | None) -> None:
    for site in sites:
        layer = bank.layers[site.name]
        setattr(site.module, BANK_LAYER, (layer, choose_kernel(site.module, layer, kernels)))


def unbind(model: Any) -> None:
    """Unbinds all experts modules, so that further use of the model raises instead of reading freed memory."""
    for module in model.modules():
        module.__dict__.pop(BANK_LAYER, None)


def verify(model: Any, sites: list[ExpertsSite]) -> None:
    """Checks that every experts module is bound, empty and dispatched to us, and all other parameters loaded."""
    for site in sites:
        config = getattr(site.module, "config", None)
        if config is not None and getattr(config, CHOSEN_EXPERTS, IMPLEMENTATION) != IMPLEMENTATION:
            raise _fault(f"{site.name} would not be computed by Switchyard")
        if getattr(site.module, BANK_LAYER, None) is None:
            raise _fault(f"{site.name} has no experts")
        if any(True for _ in site.module.parameters(recurse=False)):
            raise _fault(f"{site.name} still holds weights")
    for kind in (model.named_parameters(), model.named_buffers()):
        for name, tensor in kind:
            if tensor.device == torch.device("meta"):
                raise _fault(f"{name} was not loaded")


def _fault(what: str) -> EngineError:
    return EngineError(ErrorCode.INTERNAL, f"The model was assembled incorrectly: {what}.")
