"""The common contract, kept by the devices that every machine has."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.devices.card import CardKind, open_card
from engine.devices.cpu import open_cpu
from engine.devices.device import Device
from engine.devices.emulated import open_emulated
from engine.devices.host_memory import HostMemory
from engine.hardware.profiles import DeviceProfile
from tests.device_contract import DeviceContract
from tests.fake_cards import FakeCards


class TestCpu(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with open_cpu(total=2**26) as device:
            yield device


class TestEmulated(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with open_emulated(DeviceProfile("brisk", "for tests", 2**26, 3.0, 3.0, 5.0)) as device:
            yield device


class TestEmulatedSlowCompute(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with open_emulated(DeviceProfile("tired", "for tests", 2**26, 1.0, 0.5, 50.0, 2.0)) as device:
            yield device


class TestCardOfFakeTorch(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        kind = CardKind("cpu", FakeCards(), lambda _place: HostMemory(), lambda _index: "fake")
        with open_card(kind) as device:
            yield replace(device, torch_device=torch.device("cpu"))  # tensors do not say cpu:0
