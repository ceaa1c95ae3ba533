"""The decoder layers of a model: in order, by name, and on which of several devices each of them is.

Layers are on devices in consecutive runs, all else is on the first device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch


@dataclass(frozen=True)
class LayerDevices:
    """Where the parts of a model are, by index of the device.

    Attributes:
        prefix: name of the list of decoder layers with a dot behind it; empty if nothing is split.
        of_layer: device of each decoder layer.
    """

    prefix: str = ""
    of_layer: tuple[int, ...] = ()

    def of(self, name: str) -> int:
        """The device of the module or tensor of this name."""
        if not self.prefix or not name.startswith(self.prefix):
            return 0
        number = name[len(self.prefix) :].partition(".")[0]
        return self.of_layer[int(number)] if number.isdecimal() else 0

    def of_cache_layer(self, index: int) -> int:
        """The device of the KV of a decoder layer."""
        return self.of_layer[index] if index < len(self.of_layer) else 0

    def device_map(self, places: Sequence[torch.device]) -> dict[str, torch.device]:
        """Module name -> torch device, as transformers' loading takes it."""
        split = {f"{self.prefix}{layer}": places[index] for layer, index in enumerate(self.of_layer) if index}
        return {"": places[0], **split}


@dataclass(frozen=True)
class LayerNames:
    """The list of decoder layers that a model has.

    Attributes:
        prefix: its name with a dot behind it; empty if there is none to be split.
        count: of layers.
    """

    prefix: str = ""
    count: int = 0

    def index_of(self, name: str) -> int | None:
        """The layer that the module or tensor of this name belongs to, if it does to one."""
        number = name[len(self.prefix) :].partition(".")[0] if self.prefix and name.startswith(self.prefix) else ""
        return int(number) if number.isdecimal() else None

    def on(self, of_layer: tuple[int, ...]) -> LayerDevices:
        """Each of them on the device of this index; nothing is split if there are none."""
        return LayerDevices(self.prefix, of_layer) if of_layer else LayerDevices()

    def sums(self, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], int]:
        """(bytes of each layer, bytes of all else) from those of each tensor by name."""
        layers, elsewhere = [0] * self.count, 0
        for name, nbytes in sizes.items():
            index = self.index_of(name)
            if index is None:
                elsewhere += nbytes
            else:
                layers[index] += nbytes
        return tuple(layers), elsewhere


def decoder_layers(model: Any) -> list[Any]:
    """The layers that tokens go through, in order; none if the library does not say which they are."""
    return list(_module_list(model) or ())


def layer_names(model: Any) -> LayerNames:
    """Those of a decoder-only model; none of any other."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        return LayerNames()
    layers = _module_list(model)
    if layers is None or len(layers) < 2:
        return LayerNames()
    name = next(name for name, module in model.named_modules() if module is layers)
    return LayerNames(f"{name}.", len(layers))


def _module_list(model: Any) -> torch.nn.ModuleList | None:
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for module in chain(decoder.modules(), model.modules()):  # the decoder first: a tower may have as many
        if isinstance(module, torch.nn.ModuleList) and len(module) == count > 0:
            return module
    return None


def move_between(model: Any, layers: LayerDevices, places: Sequence[torch.device]) -> None:
    """Lets hidden states and whatever else a layer is given travel to the device that the layer is on, and back.

    Nothing is to be done where all devices share one memory, as emulated ones do.
    """
    if len({str(place) for place in places}) < 2 or not any(layers.of_layer):
        return
    modules = model.get_submodule(layers.prefix.removesuffix("."))
    there = {index: _Moved(places[index]) for index in set(layers.of_layer) if index}

    def forget(*_: Any) -> None:
        for moved in there.values():
            moved.forget()

    modules[0].register_forward_pre_hook(forget)
    for index, module in zip(layers.of_layer, modules, strict=True):
        if index:
            module.register_forward_pre_hook(there[index].bring, with_kwargs=True)
    modules[-1].register_forward_hook(lambda _module, _args, output: _moved(output, places[0]))
    modules[-1].register_forward_hook(forget)


class _Moved:
    """What the layers of one device were given in this pass, on that device.

    Angles and masks are the same tensors for every layer, so the first of its layers has them copied for the others.
    """

    _MOST = 16
    """Layers called out of order, and not to the last one, hold on to no more than this."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        """Before the next pass, whose tensors may be the same ones with other numbers."""
        self._of.clear()

    def bring(self, _module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Moves the arguments of a module to the device."""
        named = {
            name: _moved(value, self._place, None if name == "hidden_states" else self._of)
            for name, value in kwargs.items()
        }
        while len(self._of) > self._MOST:
            del self._of[next(iter(self._of))]
        return _moved(args, self._place), named


def _moved(value: Any, place: torch.device, before: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None) -> Any:
    """Tensors in tuples, lists and dictionaries; other objects, such as caches, are left alone.

    Args:
        before: by identity, tensors that were moved and what they became; it gets those that are moved now.
    """
    if isinstance(value, torch.Tensor):
        if value.device == place:
            return value
        if before is None:
            return value.to(place, non_blocking=True)
        if id(value) not in before:  # it holds the tensor too, so that no other one gets its identity
            before[id(value)] = value, value.to(place, non_blocking=True)
        return before[id(value)][1]
    if type(value) in (tuple, list):
        return type(value)(_moved(item, place, before) for item in value)
    if type(value) is dict:
        return {key: _moved(item, place, before) for key, item in value.items()}
    return value
