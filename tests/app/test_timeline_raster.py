"""Plots as pixels look as the painter's own polygons do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor, QImage, QPainter
from PySide6.QtWidgets import QApplication

from app.services.history.gauges import Floats
from app.widgets.timeline.lanes import Lane, LaneData
from app.widgets.timeline.plots import LaneRaster, _draw_outlines, draw_lane, over

WIDTH, HEIGHT = 300, 60
AREA = QRectF(10, 8, 280, 44)
COLUMNS = 282
XS = AREA.left() - 1 + np.arange(COLUMNS + 1, dtype=np.float64)
COLOUR = QColor("#0072B2")


def canvas(ratio: float = 1.0) -> QImage:
    image = QImage(round(WIDTH * ratio), round(HEIGHT * ratio), QImage.Format.Format_ARGB32_Premultiplied)
    image.setDevicePixelRatio(ratio)
    image.fill(QColor("white"))
    return image


def pixels(image: QImage) -> np.ndarray:
    raw = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.bytesPerLine() // 4, 4)
    return raw[:, : image.width(), :3].astype(np.int64)


def smooth(seed: int, layers: int) -> Floats:
    rng = np.random.default_rng(seed)
    waves = np.sin(np.arange(COLUMNS) / rng.uniform(5, 30, (layers, 1)) + rng.uniform(0, 6, (layers, 1)))
    return np.asarray((waves + 1) / 2 / layers)


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
@pytest.mark.parametrize(
    ("kind", "layers", "with_line"),
    [("share", 2, False), ("bytes", 1, False), ("rate", 0, True), ("experts", 3, False)],
)
def test_both_ways_look_alike(qapp: QApplication, kind: str, layers: int, with_line: bool, ratio: float) -> None:
    lane = Lane("lane", "Lane", kind, "gpu")  # type: ignore[arg-type]
    values = smooth(3, layers) if layers else np.zeros((0, COLUMNS))
    if kind == "experts":
        values = values / values.sum(axis=0)
    data = LaneData(values, line=smooth(4, 1)[0] if with_line else None)
    images = []
    for draw in (draw_lane, _draw_outlines):
        image = canvas(ratio)
        painter = QPainter(image)
        painter.setClipRect(AREA)
        draw(painter, AREA, XS, lane, data, COLOUR)
        painter.end()
        images.append(pixels(image))
    # Hatches and the smoothing of edges may differ; the colour that an eye sees of each spot does not.
    spots = [
        image[: image.shape[0] // 12 * 12, : image.shape[1] // 12 * 12]
        .reshape(image.shape[0] // 12, 12, image.shape[1] // 12, 12, 3)
        .mean(axis=(1, 3))
        for image in images
    ]
    assert np.abs(spots[0] - spots[1]).mean() < 4
    assert np.abs(spots[0] - spots[1]).max() < 45


@given(st.lists(st.floats(0, 1), min_size=COLUMNS, max_size=COLUMNS), st.sampled_from([1.0, 1.25, 2.0]))
def test_an_area_covers_what_it_stands_for(shares: list[float], ratio: float) -> None:
    raster = LaneRaster(AREA, XS, ratio)
    values = np.array(shares)
    covered = raster.columns(np.zeros(COLUMNS), values)
    middle = covered[:, 140 * round(ratio) : 140 * round(ratio) + 1].sum() / ratio / AREA.height()
    column = int((AREA.left() + (140 * round(ratio) + 0.5) / ratio - XS[0]) // 1)
    assert middle == pytest.approx(values[column], abs=0.03)
    assert covered.min() >= 0
    assert covered.max() <= 1


def test_a_line_has_gaps_where_nothing_is_known() -> None:
    raster = LaneRaster(AREA, XS, 1.0)
    shares = np.full(COLUMNS, 0.5)
    shares[100:200] = np.nan
    covered = raster.line(shares, 1.3)
    assert covered[:, 110:190].max() == 0
    assert covered[:, :90].sum(axis=0) == pytest.approx(1.3, abs=0.01)
    assert raster.line(np.full(COLUMNS, np.nan), 1.3).max() == 0
    assert over(covered, covered).max() <= 1
