"""The dense part of a model on graphics cards: quantising and computing linear layers.

For the CPU see `engine.kernels.native.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from engine.formats import TiledFormat
from engine.formats.ggml import BlockType
from engine.kernels.gpu.linear import SIBLINGS, CardLinear, JoinedLinears, can_join
from engine.kernels.gpu.proof import kernels_of
from engine.kernels.native.linear import Formats, MatrixOf


def is_held_quantised(device: torch.device) -> bool:
    """Whether linear layers on a device have quantised weights, quantised while loading."""
    return device.type == "cuda"


def quantised_sizes(model: Any, formats: Formats, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of tensors by name once linear layers are in these formats.

    Args:
        model: on any device, including the meta device.
        sizes: the sizes before; without tied weights, which are stored a second time.
    """
    result = dict(sizes)
    for name, of_this in formats.items():
        module = model.get_submodule(name)
        if not _is_shared(model, module.weight):
            result.pop(f"{name}.weight", None)
        result[f"{name}.tiles"] = sum(of_this.part_bytes(module.out_features, module.in_features))
    return result


def quantise_on_cards(model: Any, formats: Formats, matrix: MatrixOf, place_of: Callable[[str], torch.device]) -> None:
    """Moves linear layers of a model in RAM to cards, in tiles or blocks, one by one.

    The parameter `weight` becomes empty; the tiles or blocks are a buffer of the module. A weight shared with an
    embedding stays. Everything else is unchanged.

    Args:
        place_of: module name -> its card.
    """
    modules = {name: model.get_submodule(name) for name in formats}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for names in _together(formats):
        matrices = [matrix(name) for name in names]
        biases = [each.bias.detach() if each.bias is not None else None for each in (modules[name] for name in names)]
        place = place_of(names[0])
        on_card = kernels_of(place) if all(_is_read(formats[name]) for name in names) else None
        if on_card is not None and can_join(matrices):
            joined = JoinedLinears(matrices, biases, place, on_card)
            made_of = [(forward, joined.record) for forward in joined.forwards]
        else:
            alone = [
                CardLinear(
                    made,
                    bias,
                    place,
                    kernels_of(place) if _is_read(formats[name]) else None,
                    is_head=modules[name] is head,
                )
                for name, made, bias in zip(names, matrices, biases, strict=True)
            ]
            made_of = [(forward, forward.record) for forward in alone]
        for name, (forward, record) in zip(names, made_of, strict=True):
            module = modules[name]
            module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)
            module.register_buffer("tiles", record, persistent=False)  # registered only to be counted
            module.forward = forward


def _is_read(of_weights: TiledFormat | BlockType) -> bool:
    """Whether the card's kernels read a format, where there are any; blocks would not be there otherwise."""
    return isinstance(of_weights, BlockType) or of_weights.on_card


def _together(formats: Formats) -> Iterator[list[str]]:
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


def _is_shared(model: Any, weight: torch.Tensor) -> bool:
    embeddings = model.get_input_embeddings()
    return embeddings is not None and getattr(embeddings, "weight", None) is weight
