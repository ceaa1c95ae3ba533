"""The experts of a model: their layers, how often each was used, where each is, how other cache sizes would do, and a
recording of what the routers chose."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.common.errors import EngineError, ErrorCode
from engine.experts.cache.policies import Key
from engine.experts.dispatch import BANK_LAYER
from engine.experts.executor import LAYER_NUMBER, ExpertExecutor
from engine.experts.replay import RoutingTrace, hit_ratio_curve, stack_distances, write_trace
from engine.kernels.interface import ExpertKernel
from engine.protocol import ARRIVING, IN_RAM, IN_VRAM, ON_DISK, ExpertMap
from engine.runtime.fast_path.decoder_layer import route_in_library
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry.lanes import layer_number
from engine.telemetry.records import pack

HALF_LIFE_STEPS = 128.0
"""Of the heat of an expert."""
SAMPLED_LAYERS = 4
"""Layers that the curve is made from: a sample of the keys, in a cache of that fraction (SHARDS, Waldspurger 2015)."""
CURVE_STEPS = 512
CURVE_POINTS = 48
_FEWEST_STEPS = 32
_BULK = 5
"""Length of an entry of many layers."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NumberedLayer:
    """A layer of experts.

    Attributes:
        number: of its decoder layer.
        name: of its module.
        experts: how many.
        kernel: what computes them.
    """

    number: int
    name: str
    experts: int
    kernel: Any


def number_layers(model: Any) -> list[NumberedLayer]:
    """The expert layers of a model in its order; from now on what they record carries their numbers."""
    layers: list[NumberedLayer] = []
    taken: set[int] = set()
    for name, module in model.named_modules():
        bound = module.__dict__.get(BANK_LAYER)
        if bound is None:
            continue
        number = layer_number(name)
        if number < 0 or number in taken:  # an encoder's and a decoder's layers, say: they need different numbers
            number = max(taken, default=-1) + 1
        taken.add(number)
        setattr(module, LAYER_NUMBER, number)
        place, kernel = bound
        if isinstance(kernel, ExpertExecutor):
            kernel.number_in_model(number)
        layers.append(NumberedLayer(number, name, _experts_of(module, place, kernel), kernel))
    return layers


def _experts_of(module: Any, place: Any, kernel: Any) -> int:
    for owner in (module, kernel, place):
        count = getattr(owner, "num_experts", None)
        if isinstance(count, int):
            return count
    return 0


class ExpertUses:
    """Counts of all experts of a model.

    Args:
        layers: number in the model of each layer with experts.
        experts: of each of them.

    Attributes:
        entries: what recording points append to: (step, layer, experts used, those of them that were hits).
        uses, hits, last_step: uint32 [layers, experts]; a step counts from 1, 0 is never.
        heat: float32 [layers, experts], decayed uses.
        step: the last one seen, from 1.
    """

    def __init__(self, layers: Sequence[int], experts: Sequence[int]) -> None:
        self.entries: deque[tuple[Any, ...]] = deque(maxlen=2**16)
        self.layers, self.widths = tuple(layers), tuple(experts)
        shape = len(layers), max(experts, default=0)
        self.uses, self.hits, self.last_step = (np.zeros(shape, np.uint32) for _ in range(3))
        self.heat = np.zeros(shape, np.float32)
        self.step = 0
        self._row_of = np.full(max(layers, default=0) + 2, -1)  # the last place is that of -1, which is no layer
        self._row_of[list(layers)] = np.arange(len(layers))
        parts = min(SAMPLED_LAYERS, len(layers))
        # Spread from the middle of each part: first and last layers route unlike the others.
        self._sampled = {layers[(2 * part + 1) * len(layers) // (2 * parts)]: part for part in range(parts)}
        self._recent: deque[dict[int, Sequence[int]]] = deque(maxlen=CURVE_STEPS)
        self._recent_step = -1

    def settle(self) -> None:
        """Counts what has been appended since the last call."""
        entries = self.entries
        taken = [entries.popleft() for _ in range(len(entries))]
        if not taken:
            return
        # Experts that are all in RAM have no cache whose size could be asked for: they leave no trace for the curve.
        for steps, layers, experts, counts, _ in (entry for entry in taken if len(entry) == _BULK):
            self._count(steps, layers, experts, counts)
        taken = [entry for entry in taken if len(entry) != _BULK]
        if not taken:
            return
        for step, layer, experts, _ in taken:
            if layer in self._sampled:
                self._remember(step, layer, experts)
        steps, layers = (np.fromiter((entry[place] for entry in taken), np.int64, len(taken)) for place in (0, 1))
        self._count(steps, layers, *_joined([entry[2] for entry in taken]))
        hits, _ = self._cells(layers, *_joined([entry[3] for entry in taken]))
        self.hits += self._tally(hits).astype(np.uint32)

    def curve(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(slots for the whole model, LRU hit rate), both [n]; empty until enough steps have been seen."""
        if len(self._recent) < _FEWEST_STEPS or not self._sampled:
            return np.empty(0, np.int64), np.empty(0)
        width = max((len(experts) for step in self._recent for experts in step.values()), default=0)
        routing = np.full((len(self._recent), len(self._sampled), max(width, 1)), -1, np.int16)
        for number, step in enumerate(self._recent):
            for part, experts in step.items():
                routing[number, part, : len(experts)] = experts
        universe = self.heat.shape[1]
        starts = np.array([0, len(routing)])
        trace = RoutingTrace(routing, np.zeros(routing.shape, np.float16), starts, universe)
        rates = hit_ratio_curve(stack_distances(trace, per_layer=False))
        chosen = np.unique(np.linspace(0, len(rates) - 1, CURVE_POINTS).round().astype(np.int64))
        return np.round(chosen * len(self.layers) / len(self._sampled)).astype(np.int64), rates[chosen]

    def _remember(self, step: int, layer: int, experts: Sequence[int]) -> None:
        if step != self._recent_step or not self._recent:
            self._recent.append({})
            self._recent_step = step
        self._recent[-1][self._sampled[layer]] = [expert for expert in experts if 0 <= expert < self.heat.shape[1]]

    def _count(self, steps: Ids, layers: Ids, experts: Ids, counts: Ids) -> None:
        newest = int(steps.max()) + 1
        self.heat *= 0.5 ** (max(0, newest - self.step) / HALF_LIFE_STEPS)
        self.step = max(self.step, newest)
        cells, of_entry = self._cells(layers, experts, counts)
        tally = self._tally(cells)
        self.uses += tally.astype(np.uint32)
        self.heat += tally.astype(np.float32)
        np.maximum.at(self.last_step.reshape(-1), cells, (steps + 1).clip(0).astype(np.uint32)[of_entry])

    def _cells(self, layers: Ids, experts: Ids, counts: Ids) -> tuple[Ids, Ids]:
        """(place of each use among all experts, the entry that it is of); ids that are no expert are left out."""
        of_entry = np.repeat(np.arange(len(counts)), counts)
        rows = self._row_of[np.clip(layers, -1, len(self._row_of) - 1)][of_entry]
        width = self.heat.shape[1]
        valid = (rows >= 0) & (experts >= 0) & (experts < width)
        cells = rows * width + experts
        return (cells, of_entry) if valid.all() else (cells[valid], of_entry[valid])

    def _tally(self, cells: Ids) -> Ids:
        """How often each expert is among them, [layers, experts]."""
        return np.bincount(cells, minlength=self.heat.size).reshape(self.heat.shape)


def _joined(experts: list[Sequence[int]]) -> tuple[Ids, Ids]:
    """All one after the other, and how many of each."""
    counts = np.fromiter(map(len, experts), np.int64, len(experts))
    return np.fromiter(chain.from_iterable(experts), np.int64, int(counts.sum())), counts


def expert_map(loaded: LoadedModel, layers: list[NumberedLayer], uses: ExpertUses) -> ExpertMap:
    """One moment of `loaded`, whose layers with experts are `layers`; `uses` has been settled."""
    hottest = float(uses.heat.max(initial=0.0))
    heat = np.rint(uses.heat * (255 / hottest if hottest else 0)).astype(np.uint8)
    places, record_bytes = _places(loaded, layers, uses.heat.shape)
    return ExpertMap(
        layers=tuple(layer.number for layer in layers),
        experts=int(uses.heat.shape[1]),
        step=uses.step,
        hottest=hottest,
        heat=pack(heat),
        places=pack(places),
        uses=pack(uses.uses),
        hits=pack(uses.hits),
        last_step=pack(uses.last_step),
        record_bytes=tuple(record_bytes),
    )


def _places(
    loaded: LoadedModel, layers: list[NumberedLayer], shape: tuple[int, ...]
) -> tuple[NDArray[np.uint8], list[int]]:
    """(bits of each expert, bytes of each layer's records)."""
    places = np.zeros(shape, np.uint8)
    nbytes = [0] * len(layers)
    row_of = {layer.number: row for row, layer in enumerate(layers)}
    row_of_name = {layer.name: row for row, layer in enumerate(layers)}
    bank, disk_backed = loaded.bank, loaded.disk_backed
    for name, held in bank.layers.items() if bank is not None else ():
        if (row := row_of_name.get(name)) is not None:
            places[row, : layers[row].experts] |= IN_RAM if held.device.type == "cpu" else IN_VRAM
            nbytes[row] = held.layout.nbytes
    if disk_backed is not None:
        table = disk_backed.disk.table
        rows = [row_of_name.get(spec.name, row_of.get(layer_number(spec.name), -1)) for spec in table.layers]
        for row, spec in zip(rows, table.layers, strict=True):
            if row >= 0:
                places[row, : spec.num_experts] |= ON_DISK
                nbytes[row] = spec.layout.nbytes
        stride = max((spec.num_experts for spec in table.layers), default=1)
        for snapshot in disk_backed.snapshots():
            _mark(places, snapshot.residents, stride, rows, IN_RAM)
            _mark(places, snapshot.arriving, stride, rows, ARRIVING)
    for cache in loaded.caches:
        rows = [row_of.get(number, -1) for number in cache.layer_numbers]
        snapshot = cache.snapshot()
        _mark(places, snapshot.residents, cache.key_of(1, 0), rows, IN_VRAM)
        _mark(places, snapshot.arriving, cache.key_of(1, 0), rows, ARRIVING)
    return places, nbytes


def _mark(places: NDArray[np.uint8], keys: list[Key], stride: int, rows: list[int], bit: int) -> None:
    if keys and rows:
        layer, expert = np.divmod(np.array(keys), stride)
        row = np.array(rows)[layer]
        known = row >= 0
        places[row[known], expert[known]] |= np.uint8(bit)


class RoutingRecorder:
    """Records every routed layer of a loaded model from its creation on; `save` writes the trace.

    The native step, which does its own routing, is bypassed meanwhile: recording costs some
    speed, answers stay the same.

    Raises:
        EngineError: `INVALID_REQUEST`, if the model routes nothing.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._choices: list[list[torch.Tensor]] = []
        self._shares: list[list[torch.Tensor]] = []
        self._starts: list[int] = []
        self._experts = 0
        route_in_library(loaded.model)
        for module in loaded.model.modules():
            bound = module.__dict__.get(BANK_LAYER)
            if bound is None or bound[1] is None:  # a module with its own computation reports no routing
                continue
            layer, kernel = bound
            # Of a model that mixes kinds of layers, those with the most experts are the ones that matter.
            count = getattr(module, "num_experts", None)
            self._experts = max(self._experts, layer.num_experts if count is None else count)
            setattr(module, BANK_LAYER, (layer, _RecordingKernel(kernel, self._new_layer())))
        if not self._choices:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{loaded.info.name} has no experts whose routing could be recorded."
            )

    def begin_sequence(self) -> None:
        """What follows belongs to another conversation."""
        tokens = self._tokens()
        if not self._starts or self._starts[-1] != tokens:
            self._starts.append(tokens)

    def save(self, path: Path) -> int:
        """Writes the trace; returns how many tokens it holds.

        Raises:
            EngineError: `INVALID_REQUEST`, if nothing was recorded or the file cannot be written.
        """
        tokens = self._tokens()
        if not tokens:
            raise EngineError(ErrorCode.INVALID_REQUEST, "No token was generated, so there is no routing to record.")
        width = max(rows[0].shape[1] for rows in self._choices)
        experts = np.full((tokens, len(self._choices), width), -1, np.int16)
        weights = np.zeros(experts.shape, np.float16)
        for layer, (choices, shares) in enumerate(zip(self._choices, self._shares, strict=True)):
            chosen = torch.cat(choices)[:tokens].numpy()
            experts[:, layer, : chosen.shape[1]] = np.where(chosen < self._experts, chosen, -1)
            weights[:, layer, : chosen.shape[1]] = torch.cat(shares)[:tokens].numpy()
        starts = np.array([*(self._starts or [0]), tokens], np.int64)
        try:
            write_trace(RoutingTrace(experts, weights, starts, self._experts), path)
        except OSError as error:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"The routing cannot be written to {path}: {error.strerror or error}."
            ) from error
        return tokens

    def _new_layer(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self._choices.append([])
        self._shares.append([])
        return self._choices[-1], self._shares[-1]

    def _tokens(self) -> int:
        """Tokens that every layer has seen: a cancelled pass may have reached only the first ones."""
        return min(sum(rows.shape[0] for rows in choices) for choices in self._choices)


class _RecordingKernel:
    """A layer's kernel that records the experts it is called with."""

    def __init__(self, kernel: ExpertKernel, notes: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        self._kernel = kernel
        self._choices, self._shares = notes

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        # Copies: the library may reuse both.
        self._choices.append(top_k_index.to("cpu", torch.int64, copy=True))
        self._shares.append(top_k_weights.to("cpu", torch.float32, copy=True))
        return self._kernel(hidden_states, top_k_index, top_k_weights)
