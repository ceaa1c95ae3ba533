"""Where all experts of a model are and how much they are used, as one message."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.experts.cache.policies import Key
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.telemetry.expert_uses import ExpertUses
from engine.runtime.telemetry.layers import ExpertLayer
from engine.telemetry.lanes import layer_number
from engine.telemetry.messages import ARRIVING, IN_RAM, IN_VRAM, ON_DISK, ExpertMap
from engine.telemetry.records import pack


def expert_map(loaded: LoadedModel, layers: list[ExpertLayer], uses: ExpertUses) -> ExpertMap:
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
    loaded: LoadedModel, layers: list[ExpertLayer], shape: tuple[int, ...]
) -> tuple[NDArray[np.uint8], list[int]]:
    """(bits of each expert, bytes of each layer's records)."""
    places = np.zeros(shape, np.uint8)
    nbytes = [0] * len(layers)
    row_of = {layer.number: row for row, layer in enumerate(layers)}
    row_of_name = {layer.name: row for row, layer in enumerate(layers)}
    bank, disk_backed, devices = loaded.bank, loaded.disk_backed, loaded.devices
    for name, held in bank.layers.items() if bank is not None else ():
        if (row := row_of_name.get(name)) is not None:
            places[row, : layers[row].experts] |= IN_RAM if held.device.type == "cpu" else IN_VRAM
            nbytes[row] = held.layout.nbytes
    if disk_backed is not None:
        header = disk_backed.disk.header
        rows = [row_of_name.get(spec.name, row_of.get(layer_number(spec.name), -1)) for spec in header.layers]
        for row, spec in zip(rows, header.layers, strict=True):
            if row >= 0:
                places[row, : spec.num_experts] |= ON_DISK
                nbytes[row] = spec.layout.nbytes
        stride = max((spec.num_experts for spec in header.layers), default=1)
        for snapshot in disk_backed.ram.snapshots():
            _mark(places, snapshot.residents, stride, rows, IN_RAM)
            _mark(places, snapshot.arriving, stride, rows, ARRIVING)
    for cache in [cache for caches in devices.experts.caches for cache in caches] if devices is not None else ():
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
