"""The entry point for all expert computation: registered with transformers' experts interface, backed by the bank.

`StandardExperts` is a module in the standard layout, with which adapters replace modules that lack the interface.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.integrations.moe import _default_apply_gate

from engine.common.errors import EngineError, ErrorCode
from engine.experts.executor import recorded_experts
from engine.experts.record import ExpertBank, LayerSpec
from engine.families.library import CHOSEN_EXPERTS, EXPERTS_INTERFACE
from engine.formats.tiles import RecordLayout
from engine.kernels import choose_kernel
from engine.kernels.native.library import NativeKernels
from engine.telemetry.recorder import RECORDER

if TYPE_CHECKING:
    from engine.kernels.interface import ExpertKernel, LayerRecords

IMPLEMENTATION = "switchyard"
"""Our name in the library's registry of experts implementations."""

ExpertsForward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Same signature as `experts_forward`."""


class _Interruption(threading.local):
    handler: ExpertsForward | None = None


_interruption = _Interruption()

BANK_LAYER = "_switchyard_bank_layer"
"""Attribute of an experts module that holds its (LayerRecords, kernel)."""


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Args:
        module: the experts module, bound to the bank.
        hidden_states: [T, H].
        top_k_index: [T, k]; ids at or above the number of experts contribute nothing.
        top_k_weights: [T, k].

    Returns:
        [T, H], with the dtype and device of `hidden_states`.

    Raises:
        EngineError: `INTERNAL`, the module is not bound.
    """
    if _interruption.handler is not None:
        return _interruption.handler(module, hidden_states, top_k_index, top_k_weights)
    return compute_experts(module, hidden_states, top_k_index, top_k_weights)


def compute_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`experts_forward`, ignoring `interrupted_by_experts`."""
    layer, kernel = bound_kernel(module)
    device, place = layer.device, hidden_states.device
    if place != device:
        # The experts are in RAM, the rest of the model on the GPU: only activations are copied.
        hidden_states, top_k_index, top_k_weights = (
            tensor.to(device) for tensor in (hidden_states, top_k_index, top_k_weights)
        )
    if RECORDER.on:
        result = recorded_experts(module, kernel, hidden_states, top_k_index, top_k_weights, place)
    else:
        result = kernel(hidden_states, top_k_index, top_k_weights)
    return result if place == device else result.to(place)


@contextmanager
def interrupted_by_experts(handler: ExpertsForward) -> Iterator[None]:
    """Calls `handler` instead of `experts_forward` on this thread.

    Graph capture has to break at the experts, because the work to do depends on the routing.
    """
    before, _interruption.handler = _interruption.handler, handler
    try:
        yield
    finally:
        _interruption.handler = before


def bound_kernel(module: Any) -> tuple[LayerRecords, ExpertKernel]:
    """The records and the kernel that an experts module is currently bound to.

    Raises:
        EngineError: `INTERNAL`, the module is not bound.
    """
    try:
        return cast("tuple[LayerRecords, ExpertKernel]", module._switchyard_bank_layer)
    except AttributeError:
        raise EngineError(
            ErrorCode.INTERNAL, f"An experts module ({type(module).__name__}) is not bound to the expert bank."
        ) from None


def bank_layer(module: Any) -> LayerRecords:
    """The records of an experts module with its own forward (see `engine.runtime.adapters`)."""
    return bound_kernel(module)[0]


class StandardExperts(torch.nn.Module):
    """Gated or plain MLP experts in the library's standard layout, computed by `experts_forward`.

    Args:
        num_experts: E.
        hidden: H, width of input and output.
        intermediate: I.
        act_fn: the activation, elementwise.
        has_gate: whether an expert is `down(act(gate(x)) * up(x))` rather than `down(act(up(x)))`.
        has_bias: whether its matrices have biases.
        is_transposed: whether the checkpoint has the matrices as [in, out] rather than [out, in].
    """

    _apply_gate = _default_apply_gate  # the library's default, by which kernels recognise that they can fuse it

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        *,
        has_gate: bool = True,
        has_bias: bool = False,
        is_transposed: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.has_gate, self.has_bias = has_gate, has_bias
        self.is_transposed = is_transposed
        self.has_post_expert_norm = False
        self.act_fn = act_fn
        first, width = ("gate_up_proj", 2 * intermediate) if has_gate else ("up_proj", intermediate)
        matrices = {first: (width, hidden), "down_proj": (hidden, intermediate)}
        shapes: dict[str, tuple[int, ...]] = {
            name: (inputs, outputs) if is_transposed else (outputs, inputs)
            for name, (outputs, inputs) in matrices.items()
        }
        if has_bias:
            shapes |= {f"{first}_bias": (width,), "down_proj_bias": (hidden,)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(num_experts, *shape), requires_grad=False))
        self.expert_parts = tuple(shapes)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, k], [T, k] -> [T, H]."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


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
