"""What the planner takes a weight to weigh is what it weighs in memory."""

from __future__ import annotations

import pytest
import torch

from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.record import RecordLayout
from engine.kernels.quantised.tiles import Pairing, TiledShape
from engine.planner.precision import BITS_PER_WEIGHT, SMALL_MODEL, bytes_per_weight, careful_precision

HIDDEN, INNER = 2048, 768


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_matrix(precision: str) -> None:
    shape = TiledShape(HIDDEN, INNER, precision)
    parts = sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in shape.parts.values())
    assert 8 * parts == BITS_PER_WEIGHT[precision] * HIDDEN * INNER


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("weights", [SMALL_MODEL - 1, SMALL_MODEL])
def test_an_expert_of_a_small_and_of_a_big_model(precision: str, weights: int) -> None:
    plain = RecordLayout.of(
        {"gate_up_proj": ((2 * INNER, HIDDEN), torch.bfloat16), "down_proj": ((HIDDEN, INNER), torch.bfloat16)},
        transposed=False,
    )
    down = careful_precision(precision, weights)
    layout = QuantisedLayout.quantising(plain, precision, Pairing.HALVES, down)
    planned = HIDDEN * INNER * (2 * bytes_per_weight(precision) + bytes_per_weight(down))
    assert planned <= layout.nbytes < planned + 4096
    assert (down == precision) == (precision == "int8" or weights >= SMALL_MODEL)


def test_only_int4_has_exceptions() -> None:
    for precision in ("fp32", "bf16", "int8"):
        assert careful_precision(precision, 1) == precision
