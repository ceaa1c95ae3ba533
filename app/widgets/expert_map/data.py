"""An `ExpertMap` event as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PySide6.QtCore import QCoreApplication
from PySide6.QtGui import QColor, QImage

from engine.common.errors import EngineError, ErrorCode
from engine.protocol import ARRIVING, IN_RAM, IN_VRAM, ON_DISK, ExpertMap
from engine.telemetry.records import unpack

translate = QCoreApplication.translate


_CIVIDIS = (
    "#00224E", "#05306B", "#213D6B", "#3C4C6D", "#545B70", "#6A6A75", "#7F7A78",
    "#958B78", "#AD9C72", "#C5AE69", "#DEC15A", "#F5D63F", "#FEE838",
)  # fmt: skip
"""Stops of cividis (Nuñez, Anderton, Renslow 2018): uniform in lightness, and safe for colour-blind readers."""
OUTLINE_FROM_PX, MARK_FROM_PX = 8, 3
"""Smaller cells have a mark at their left instead of an outline; the smallest have none."""

Pixels = NDArray[np.uint32]


def cividis() -> Pixels:
    """256 colours as 0xFFRRGGBB, from least to most used."""
    stops = np.array([[QColor(name).red(), QColor(name).green(), QColor(name).blue()] for name in _CIVIDIS], np.float64)
    at = np.linspace(0, len(stops) - 1, 256)
    parts = [np.interp(at, np.arange(len(stops)), stops[:, part]).round().astype(np.uint32) for part in range(3)]
    return np.asarray(0xFF000000 | parts[0] << 16 | parts[1] << 8 | parts[2], np.uint32)


_COLOURS = cividis()


def draw_map(
    data: MapData, order: NDArray[np.intp], width: int, height: int, outline: QColor, background: QColor
) -> QImage:
    """The map as `width` x `height` pixels: coloured by use, outlined if in VRAM, striped if not in RAM."""
    rows, columns = data.shape
    heat = np.take_along_axis(data.heat, order, axis=1)
    places = np.take_along_axis(data.places, order, axis=1)
    heat, places = _narrowed(heat, width), _narrowed(places, width)
    shown = heat.shape[1]
    ys = np.arange(height) * rows // height
    xs = np.arange(width) * shown // width
    colours = np.where(places != 0, _COLOURS[heat], np.uint32(background.rgb()))
    pixels = np.ascontiguousarray(colours[ys][:, xs])
    where = places[ys][:, xs]
    cell_width, cell_height = width / columns, height / rows
    if min(cell_width, cell_height) >= MARK_FROM_PX:
        left = np.concatenate(([True], np.diff(xs) != 0))
        top = np.concatenate(([True], np.diff(ys) != 0))
        gaps = left[None, :] | top[:, None]
        wide = cell_width >= OUTLINE_FROM_PX
        if min(cell_width, cell_height) >= OUTLINE_FROM_PX:
            inner = (np.roll(left, 1) | np.roll(left, -1))[None, :] | (np.roll(top, 1) | np.roll(top, -1))[:, None]
        else:
            mark = np.roll(left, 1) | ((np.roll(left, 2) | np.roll(left, 3)) & wide)
            inner = np.broadcast_to(mark[None, :], gaps.shape)
        if wide:  # a dark edge: white alone would not show on yellow
            edge = np.roll(left, 4 if cell_height < OUTLINE_FROM_PX else 2)
            pixels[edge[None, :] & ~gaps & ((where & IN_VRAM) != 0)] = QColor("#14161A").rgb()
        pixels[inner & ~gaps & ((where & IN_VRAM) != 0)] = outline.rgb()
        dotted = (np.arange(width)[None, :] + np.arange(height)[:, None]) % 4 < 2
        pixels[inner & ~gaps & dotted & ((where & ARRIVING) != 0) & ((where & IN_VRAM) == 0)] = outline.rgb()
        pixels[gaps] = background.rgb()
    stripes = (np.arange(width)[None, :] + np.arange(height)[:, None]) % 4 == 0
    pixels[stripes & (where != 0) & ((where & (IN_RAM | IN_VRAM)) == 0)] = background.rgb()
    image = QImage(pixels.tobytes(), width, height, 4 * width, QImage.Format.Format_RGB32)
    return image.copy()  # QImage does not own the array's memory


def _narrowed(values: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """Reduces to at most one column per pixel, keeping the maximum."""
    columns = values.shape[1]
    if columns <= most:
        return values
    firsts = np.arange(most) * columns // most
    return np.asarray(np.maximum.reduceat(values, firsts, axis=1))


MOST_CELLS = 2**20


@dataclass(frozen=True, eq=False)
class MapData:
    """The map as arrays, [layers, experts].

    Attributes:
        layers: each row's layer number.
        heat: 0 to 255, decayed use; places: bits, see `engine.protocol`.
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
