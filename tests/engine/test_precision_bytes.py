"""What the planner takes a weight to weigh is what it weighs in memory."""

import pytest
import torch

from engine.formats import FORMATS, SMALL_MODEL, TiledFormat, careful
from engine.formats.tiles import Pairing, RecordLayout, TiledShape

HIDDEN, INNER = 2048, 768


TILED = [each for each in FORMATS.values() if isinstance(each, TiledFormat)]


@pytest.mark.parametrize("tiled", TILED, ids=lambda each: each.name)
def test_a_matrix(tiled: TiledFormat) -> None:
    shape = TiledShape(HIDDEN, INNER, tiled)
    parts = [torch.Size(size).numel() * dtype.itemsize for size, dtype in shape.parts.values()]
    assert tuple(parts) == tiled.part_bytes(HIDDEN, INNER)
    tables = 0 if tiled.table is None else len(tiled.table)
    assert 8 * (sum(parts) - tables) == tiled.bits * HIDDEN * INNER


@pytest.mark.parametrize("precision", [each.name for each in TILED])
@pytest.mark.parametrize("weights", [SMALL_MODEL - 1, SMALL_MODEL])
def test_an_expert_of_a_small_and_of_a_big_model(precision: str, weights: int) -> None:
    plain = RecordLayout.of(
        {"gate_up_proj": ((2 * INNER, HIDDEN), torch.bfloat16), "down_proj": ((HIDDEN, INNER), torch.bfloat16)},
        transposed=False,
    )
    most, down = FORMATS[precision], FORMATS[careful(precision, weights)]
    layout = RecordLayout.in_tiles(plain, lambda name: down if name == "down_proj" else most, Pairing.HALVES)
    planned = HIDDEN * INNER * (2 * most.bytes_per_weight + down.bytes_per_weight)
    tables = sum(64 for name, tiled in layout.tiled if tiled.table is not None)
    assert planned <= layout.nbytes < planned + tables + 4096
    assert (down is most) == (precision == "int8" or weights >= SMALL_MODEL)


def test_only_coarse_formats_have_exceptions() -> None:
    for precision in ("fp32", "bf16", "int8"):
        assert careful(precision, 1) == precision
