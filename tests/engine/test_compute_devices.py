"""What a model computes on: devices that there are, and no more threads than there are."""

from __future__ import annotations

import pytest
import torch

from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.runtime.load.model import open_compute_devices, set_threads


def test_without_a_card_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_compute_devices(EngineConfig("m"))[0] == open_compute_devices(EngineConfig("m", device="cpu"))[0] == []
    with pytest.raises(EngineError) as caught:
        open_compute_devices(EngineConfig("m", device="cuda"))
    assert caught.value.code is ErrorCode.DEVICE_UNAVAILABLE


def test_threads_are_never_more_than_there_are() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1 == torch.get_num_threads()
        assert 1 <= set_threads(None) <= set_threads(10_000)
    finally:
        torch.set_num_threads(before)
