from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from engine.checkpoint.headers import read_header
from engine.checkpoint.safetensors_numpy import read_safetensors, write_safetensors


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {
        "half": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "full": np.linspace(0, 1, 5, dtype=np.float32),
        "slice": np.arange(20, dtype=np.float32).reshape(4, 5)[:, 1:3],
        "none": np.zeros((0, 3), np.float32),
    }
    written: list[int] = []
    write_safetensors(file, tensors, written.append)
    again = read_safetensors(file)
    assert {name: (again[name].shape, again[name].tolist()) for name in again} == {
        name: (tensor.shape, tensor.tolist()) for name, tensor in tensors.items()
    }
    assert sum(written) == sum(tensor.nbytes for tensor in tensors.values())
    header = read_header(file)
    assert header["half"].dtype == "BF16"
    assert header["half"].offset % 64 == 0


def test_damage_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"weight": np.zeros((4, 4), np.float32)})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SafetensorError):
        read_safetensors(file)
