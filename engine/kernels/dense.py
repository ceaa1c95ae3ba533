"""The dense part of a model on graphics cards: quantising and computing linear layers.

For the CPU see `engine.kernels.native.linear`; both select the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from engine.formats import ROUTERS, SMALLEST, TiledFormat, head_format, tiled_format
from engine.formats.ggml import BlockFormat
from engine.formats.tiles import TiledMatrix
from engine.kernels.gpu.joined import SIBLINGS, JoinedLinears, can_join
from engine.kernels.gpu.linear import CardLinear
from engine.kernels.gpu.proof import kernels_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import StoredFormats, StoredMatrices
from engine.kernels.quantise import quantise


def is_held_quantised(device: torch.device) -> bool:
    """Whether linear layers on a device have quantised weights, quantised while loading."""
    return device.type == "cuda"


def quantised_sizes(
    model: Any, precision: str, sizes: Mapping[str, int], stored: StoredFormats | None = None
) -> dict[str, int]:
    """Bytes of tensors by name once linear layers are in `precision`.

    Args:
        model: on any device, including the meta device.
        sizes: the sizes before; without tied weights, which are stored a second time.
        stored: formats of layers by name that keep what the checkpoint has; then all others stay as they are.
    """
    result = dict(sizes)
    if stored is None and tiled_format(precision) is None:
        return result
    for name, module, of_this in _layers(model, precision, stored):
        result.pop(f"{name}.weight", None)
        result[f"{name}.tiles"] = sum(of_this.part_bytes(module.out_features, module.in_features))
    tied = [name for name, module, _ in _layers(model, precision, stored) if _is_shared(model, module.weight)]
    return result | {f"{name}.weight": sizes[f"{name}.weight"] for name in tied if f"{name}.weight" in sizes}


def card_layers(model: Any, precision: str, stored: StoredFormats | None = None) -> list[str]:
    """Names of the layers that `quantise_on_cards` changes, whether the model has its weights yet or not."""
    return [name for name, _, _ in _layers(model, precision, stored)]


def quantise_on_cards(
    model: Any,
    precision: str,
    place_of: Callable[[str], torch.device],
    kernels: NativeKernels | None,
    stored: StoredMatrices | None = None,
) -> int:
    """Quantises the large linear layers of a model in RAM and moves them to cards, one by one.

    The parameter `weight` becomes empty; the tiles or blocks are a buffer of the module. A weight shared with an
    embedding stays. Everything else is unchanged.

    Args:
        place_of: module name -> its card.
        kernels: native ones of the CPU, which quantise faster than torch.
        stored: layers whose codes the checkpoint has; then all others stay as they are.

    Returns:
        Number of layers.
    """
    layers = list(_layers(model, precision, stored.formats if stored is not None else None))
    known = {name: (module, of_this) for name, module, of_this in layers}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for names in _together({name: of_this for name, (_, of_this) in known.items()}):
        matrices = []
        for name in names:
            module, of_this = known[name]
            made = stored.matrix(name) if stored is not None else _quantised(module.weight, of_this, kernels)
            matrices.append(made)
        biases = [m.bias.detach() if m.bias is not None else None for m, _ in (known[name] for name in names)]
        place = place_of(names[0])
        on_card = kernels_of(place) if all(_is_read(known[name][1]) for name in names) else None
        if on_card is not None and can_join(matrices):
            joined = JoinedLinears(matrices, biases, place, on_card)
            made_of = [(forward, joined.record) for forward in joined.forwards]
        else:
            alone = [
                CardLinear(
                    matrix,
                    bias,
                    place,
                    kernels_of(place) if _is_read(known[name][1]) else None,
                    is_head=known[name][0] is head,
                )
                for name, matrix, bias in zip(names, matrices, biases, strict=True)
            ]
            made_of = [(forward, forward.record) for forward in alone]
        for name, (forward, record) in zip(names, made_of, strict=True):
            module = known[name][0]
            module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)
            module.register_buffer("tiles", record, persistent=False)  # registered only to be counted
            module.forward = forward  # type: ignore[method-assign,assignment]
    return len(layers)


def _quantised(
    weight: torch.Tensor, of_weights: TiledFormat | BlockFormat, kernels: NativeKernels | None
) -> TiledMatrix:
    assert isinstance(of_weights, TiledFormat)
    return quantise(weight, of_weights, kernels=kernels)


def _is_read(of_weights: TiledFormat | BlockFormat) -> bool:
    """Whether the card's kernels read a format, where there are any; blocks would not be there otherwise."""
    return isinstance(of_weights, BlockFormat) or of_weights.on_card


def _together(formats: Mapping[str, TiledFormat | BlockFormat]) -> Iterator[list[str]]:
    """Names of layers in their order, those together that get the same input and are of one format."""
    left = dict.fromkeys(formats)
    for name in formats:
        if name not in left:
            continue
        parent, _, own = name.rpartition(".")
        family = next((each for each in SIBLINGS if own in each), (own,))
        all_of_them = (f"{parent}.{each}" if parent else each for each in family)
        mine = [full for full in all_of_them if full in left and formats[full] is formats[name]]
        for each in mine:
            del left[each]
        yield mine


def _layers(
    model: Any, precision: str, stored: StoredFormats | None = None
) -> Iterator[tuple[str, torch.nn.Linear, TiledFormat | BlockFormat]]:
    """(name, layer, its format): the head has its own format, and routers are skipped."""
    of_head, of_others = tiled_format(head_format(precision)), tiled_format(precision)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or name.rpartition(".")[2] in ROUTERS:
            continue
        weight, bias = module.weight, module.bias
        kinds = {weight.dtype, bias.dtype} if bias is not None else {weight.dtype}
        of_this = stored.get(name) if stored is not None else of_head if module is head else of_others
        if kinds == {torch.bfloat16} and weight.numel() >= SMALLEST and of_this is not None:
            yield name, module, of_this


def _is_shared(model: Any, weight: torch.Tensor) -> bool:
    embeddings = model.get_input_embeddings()
    return embeddings is not None and getattr(embeddings, "weight", None) is weight
