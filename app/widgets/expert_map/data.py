"""An `ExpertMap` event as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PySide6.QtCore import QCoreApplication

from engine.common.errors import EngineError, ErrorCode
from engine.telemetry.messages import ARRIVING, IN_RAM, IN_VRAM, ON_DISK, ExpertMap
from engine.telemetry.records import unpack

translate = QCoreApplication.translate

MOST_CELLS = 2**20


@dataclass(frozen=True, eq=False)
class MapData:
    """The map as arrays, [layers, experts].

    Attributes:
        layers: each row's layer number.
        heat: 0 to 255, decayed use; places: bits, see `engine.telemetry.messages`.
        hottest: uses that a heat of 255 stands for.
        exists: False where a layer has fewer experts than the widest one.
    """

    layers: tuple[int, ...]
    step: int
    heat: NDArray[np.uint8]
    places: NDArray[np.uint8]
    uses: NDArray[np.uint32]
    hits: NDArray[np.uint32]
    last_step: NDArray[np.uint32]
    record_bytes: tuple[int, ...]
    hottest: float = 0.0

    @property
    def exists(self) -> NDArray[np.bool_]:
        return np.asarray(self.places != 0)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.heat.shape
        return int(rows), int(columns)

    def order(self, *, by_use: bool) -> NDArray[np.intp]:
        """The expert in each column, [layers, experts]: by number, or most used first."""
        rows, columns = self.shape
        if not by_use:
            return np.broadcast_to(np.arange(columns), (rows, columns))
        key = self.heat.astype(np.int64) * 2**33 + self.uses
        return np.argsort(-np.where(self.exists, key, -1), axis=1, kind="stable")


def map_data(event: ExpertMap) -> MapData:
    """The event's arrays.

    Raises:
        EngineError: `PROTOCOL`, if their sizes do not match.
    """
    rows, columns = len(event.layers), event.experts
    if not (0 < rows * columns <= MOST_CELLS and len(event.record_bytes) == rows):
        raise EngineError(ErrorCode.PROTOCOL, "An expert map has an invalid shape.")

    def grid(text: str, dtype: type[np.generic]) -> NDArray[np.generic]:
        values = unpack(text, np.dtype(dtype), MOST_CELLS)
        if len(values) != rows * columns:
            raise EngineError(ErrorCode.PROTOCOL, "Part of an expert map has the wrong size.")
        return values.reshape(rows, columns)

    return MapData(
        event.layers,
        event.step,
        grid(event.heat, np.uint8).astype(np.uint8),
        grid(event.places, np.uint8).astype(np.uint8),
        grid(event.uses, np.uint32).astype(np.uint32),
        grid(event.hits, np.uint32).astype(np.uint32),
        grid(event.last_step, np.uint32).astype(np.uint32),
        event.record_bytes,
        event.hottest if math.isfinite(event.hottest) and event.hottest > 0 else 0.0,
    )


def place_bits(data: MapData) -> tuple[bool, bool, bool, bool]:
    """Whether any expert is in VRAM, in RAM, on disk, being fetched."""
    seen = int(np.bitwise_or.reduce(data.places, axis=None)) if data.places.size else 0
    return bool(seen & IN_VRAM), bool(seen & IN_RAM), bool(seen & ON_DISK), bool(seen & ARRIVING)


def place_text(place: int) -> str:
    """Where an expert is, by its bits: `in VRAM, in RAM`."""
    names = (
        (IN_VRAM, translate("ExpertMap", "in VRAM")),
        (ARRIVING, translate("ExpertMap", "fetching")),
        (IN_RAM, translate("ExpertMap", "in RAM")),
        (ON_DISK, translate("ExpertMap", "on disk")),
    )
    return ", ".join(name for bit, name in names if place & bit)
