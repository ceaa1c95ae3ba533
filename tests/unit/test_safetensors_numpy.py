import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from engine.checkpoint.headers import read_header
from engine.checkpoint.packed import read_safetensors, write_safetensors
from engine.formats.coded import from_bfloat16, to_bfloat16

BELOW_OVERFLOW = 2.0**127


def _rounded(value: float) -> float:
    return float(from_bfloat16(to_bfloat16(np.array([value], np.float32)))[0])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),  # halfway: to the even neighbour, below
        (1 + 3 * 2**-8, 1 + 2**-6),  # halfway: to the even neighbour, above
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-1 - 3 * 2**-8, -1 - 2**-6),
        (2**-133, 2**-133),  # subnormal
        (1.9999999, 2.0),  # carries into the exponent
    ],
)
def test_rounds_to_nearest_even(value: float, expected: float) -> None:
    assert _rounded(value) == expected


@given(st.floats(-BELOW_OVERFLOW, BELOW_OVERFLOW, width=32))
def test_is_the_nearest_of_its_neighbours(value: float) -> None:
    bits = to_bfloat16(np.array([value], np.float32))
    rounded = float(from_bfloat16(bits)[0])
    for step in (-1, 1):
        neighbour = float(from_bfloat16((bits.astype(np.int64) + step).astype(np.uint16))[0])
        if math.isfinite(neighbour):
            assert abs(rounded - value) <= abs(neighbour - value)


@given(st.integers(0, 0x7F7F))
def test_what_is_bfloat16_stays_so(bits: int) -> None:
    exact = np.array([bits, bits | 0x8000], np.uint16)
    assert to_bfloat16(from_bfloat16(exact)).tolist() == exact.tolist()


def test_shape_and_strides_do_not_matter() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert from_bfloat16(to_bfloat16(matrix[:, ::2])).tolist() == matrix[:, ::2].tolist()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {
        "half": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "full": np.linspace(0, 1, 5, dtype=np.float32),
        "slice": np.arange(20, dtype=np.float32).reshape(4, 5)[:, 1:3],
        "none": np.zeros((0, 3), np.float32),
    }
    write_safetensors(file, tensors)
    again = read_safetensors(file)
    assert {name: (again[name].shape, again[name].tolist()) for name in again} == {
        name: (tensor.shape, tensor.tolist()) for name, tensor in tensors.items()
    }
    header = read_header(file)
    assert header["half"].dtype == "BF16"
    assert header["half"].offset % 64 == 0


def test_damage_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"weight": np.zeros((4, 4), np.float32)})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SafetensorError):
        read_safetensors(file)
