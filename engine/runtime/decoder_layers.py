"""The decoder layers of a model: in order, by name, and on which of several devices each of them is.

Layers are on devices in consecutive runs, all else is on the first device.  Steps over several devices become a graph
for each run: where hidden states, angles and masks travel to another device, the graph under way ends, they are copied
to tensors that stay there, and with these the next graph begins.  The copies are torch's own: they go from card to
card where the system lets them, else through the host, and the streams of both wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from engine.devices.device import Capture, Device, Graph
from engine.devices.memory_budget import MemoryCategory


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


Carry = Callable[[Sequence[torch.Tensor], int], Sequence[torch.Tensor]]
"""Brings tensors to the device of an index, and returns them there."""

_carriers: list[Carry] = []
"""Of the step that is being captured; one at most, because a single thread computes."""


def carry_by(carry: Carry | None) -> None:
    """Lets this bring all that travels between devices from now on; None: copies that the devices' streams order."""
    _carriers[:] = [] if carry is None else [carry]


def stays(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor that stands for something and is never read: it does not travel."""
    tensor.stays_where_it_is = True  # type: ignore[attr-defined]
    return tensor


def move_between(
    model: Any, layers: LayerDevices, places: Sequence[torch.device], *, is_captured: bool = False
) -> None:
    """Lets hidden states and whatever else a layer is given travel to the device that the layer is on, and back.

    Nothing is to be done where all devices share one memory, as emulated ones do, unless steps are captured: a graph is
    one device's.
    """
    is_shared = len({str(place) for place in places}) < 2
    if (is_shared and not is_captured) or not any(layers.of_layer):
        return
    modules = model.get_submodule(layers.prefix.removesuffix("."))
    there = {index: _Moved(places[index], index, is_shared=is_shared) for index in sorted({0, *layers.of_layer})}

    def forget(*_: Any) -> None:
        for moved in there.values():
            moved.forget()

    modules[0].register_forward_pre_hook(forget)
    before = 0
    for index, module in zip(layers.of_layer, modules, strict=True):
        if index or before:
            module.register_forward_pre_hook(partial(there[index].bring, index != before), with_kwargs=True)
        before = index
    if before:
        modules[-1].register_forward_hook(lambda _module, _args, output: there[0].back(output))
    modules[-1].register_forward_hook(forget)


class _Moved:
    """What the layers of one device were given in this pass, on that device.

    Angles and masks are the same tensors for every layer, so the first of its layers has them copied for the others.

    Args:
        is_shared: whether all devices have this place, so that a tensor does not say which of them it is on.
    """

    _MOST = 16
    """Layers called out of order, and not to the last one, hold on to no more than this."""

    def __init__(self, place: torch.device, index: int, *, is_shared: bool) -> None:
        self._place, self._index, self._is_shared = place, index, is_shared
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        """Before the next pass, whose tensors may be the same ones with other numbers."""
        self._of.clear()

    def bring(self, begins: bool, _module: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Moves the arguments of a module to the device; `begins` if the layer before it is on another one."""
        if self._is_shared and not _carriers:
            return None
        hidden = _tensors_in((args, kwargs.get("hidden_states")))
        others = _tensors_in({name: value for name, value in kwargs.items() if name != "hidden_states"})
        moving = {id(each): each for each in hidden if self._is_elsewhere(each, begins)}
        moving |= {id(each): each for each in others if id(each) not in self._of and self._is_elsewhere(each, True)}
        there = self._carried(moving)
        # These hold the tensors too, so that no other one gets their identity.
        self._of.update({id(each): (each, there[id(each)]) for each in others if id(each) in there})
        moved = {**{number: pair[1] for number, pair in self._of.items()}, **there}
        while len(self._of) > self._MOST:
            del self._of[next(iter(self._of))]
        return _replaced(args, moved), _replaced(kwargs, moved)

    def back(self, output: Any) -> Any:
        """Moves what the last layer returns to the device."""
        if self._is_shared and not _carriers:
            return output
        return _replaced(output, self._carried({id(t): t for t in _tensors_in(output) if self._is_elsewhere(t, True)}))

    def _is_elsewhere(self, tensor: torch.Tensor, crosses: bool) -> bool:
        if getattr(tensor, "stays_where_it_is", False):
            return False
        return crosses if self._is_shared else tensor.device != self._place

    def _carried(self, moving: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if not moving:
            return {}
        tensors = list(moving.values())
        if _carriers:
            return dict(zip(moving, _carriers[0](tensors, self._index), strict=True))
        return dict(zip(moving, (each.to(self._place, non_blocking=True) for each in tensors), strict=True))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in tuples, lists and dictionaries; other objects, such as caches, are not looked into."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is dict:
        value = tuple(value.values())
    return [each for item in value for each in _tensors_in(item)] if type(value) in (tuple, list) else []


def _replaced(value: Any, by: Mapping[int, torch.Tensor]) -> Any:
    """The same with other tensors in the place of those with these identities."""
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, by) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, by) for key, item in value.items()}
    return value


class _Crossing:
    """Copies from tensors of one device to those of another, all of which stay."""

    def __init__(self, sources: Sequence[torch.Tensor], place: torch.device) -> None:
        self._sources = sources
        self.targets = [torch.empty_like(source, device=place) for source in sources]

    def replay(self) -> None:
        for source, target in zip(self._sources, self.targets, strict=True):
            target.copy_(source, non_blocking=True)


class _Segments:
    """See `engine.devices.device.Graph`."""

    def __init__(self, parts: Sequence[Graph]) -> None:
        self.parts = parts

    def replay(self) -> None:
        for part in self.parts:
            part.replay()


class SegmentedCapture:
    """See `engine.devices.device.Capture`; of several devices, which have layers one after the other.

    Args:
        devices: all of which capture; a step begins and ends on the first.

    Attributes:
        crossings: copies between devices in what was captured so far.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._places = [device.torch_device for device in devices]
        self._captures: list[Capture] = []
        for device in devices:
            assert device.new_capture is not None
            self._captures.append(device.new_capture())
        self._others = [device.memory.reserve(0, MemoryCategory.ACTIVATIONS) for device in devices[1:]]
        self._at = self.crossings = 0
        self._parts: list[Graph] = []

    @property
    def nbytes(self) -> int:
        """Of the first device.  What the others hold is counted here."""
        return self._captures[0].nbytes

    def begin(self) -> None:
        self._parts = []
        carry_by(self._cross)
        self._captures[self._at].begin()

    def end(self) -> Graph:
        """See `Capture.end`.

        Raises:
            DeviceMemoryError: a device has no room for what was captured.
        """
        carry_by(None)
        self._parts.append(self._captures[self._at].end())
        for reservation, capture in zip(self._others, self._captures[1:], strict=True):
            reservation.resize(capture.nbytes)
        made, self._parts = _Segments(self._parts), []
        return made

    def abandon(self) -> None:
        carry_by(None)
        for capture in self._captures:
            capture.abandon()

    def close(self) -> None:
        carry_by(None)
        self._parts = []
        with ExitStack() as closing:
            for reservation in self._others:
                closing.callback(reservation.release)
            for capture in self._captures:
                closing.callback(capture.close)

    def _cross(self, tensors: Sequence[torch.Tensor], index: int) -> Sequence[torch.Tensor]:
        self._parts.append(self._captures[self._at].end())
        crossing = _Crossing(tensors, self._places[index])
        crossing.replay()
        self._parts.append(crossing)
        self.crossings += 1
        self._at = index
        self._captures[index].begin()
        return crossing.targets
