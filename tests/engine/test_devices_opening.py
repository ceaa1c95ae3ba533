"""From what a user writes to devices."""

from __future__ import annotations

import contextlib

import pytest
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.opening import open_devices
from engine.hardware.profiles import profile_names, read_profile

no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("cpu", ["cpu"]),
        ("emulated:slow-link", ["emulated:slow-link#0"]),
        ("emulated:slow-linkx1", ["emulated:slow-link#0"]),
        ("emulated:slow-linkx2", ["emulated:slow-link#0", "emulated:slow-link#1"]),
        ("emulated:pcie3-x8-8gbx2", ["emulated:pcie3-x8-8gb#0", "emulated:pcie3-x8-8gb#1"]),
        ("emulated:slow-link,emulated:pcie3-x8-8gb", ["emulated:slow-link#0", "emulated:pcie3-x8-8gb#0"]),
    ],
)
def test_devices_by_name(spec: str, names: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(device) for device in open_devices(spec)]
        assert [device.name for device in devices] == names
        assert len({id(device.memory) for device in devices}) == len(devices)
        assert all(device.torch_device.type == "cpu" for device in devices)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_opens_with_its_memory_or_less(name: str) -> None:
    for vram, expected in ((None, read_profile(name).vram_bytes), (1000, 1000)):
        (device,) = open_devices(f"emulated:{name}", vram)
        with device:
            assert device.memory.total == expected


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "emulated:NAME"),
        ("CPU", "'CPU'"),
        ("cpu:0", "'cpu:0'"),
        ("cuda:", "'cuda:'"),
        ("cuda:x", "'cuda:x'"),
        ("cuda:²", "cuda:²"),
        ("emulated", "slow-link"),
        ("emulated:", "slow-link"),
        ("emulated:nothing", "'nothing'.*slow-link"),
        ("emulated:nothingx2", "'nothingx2'"),
        ("emulated:../slow-link", "'../slow-link'"),
        ("emulated:slow-linkx0", "0 devices: use 1 to 8"),
        ("emulated:slow-linkx9", "9 devices"),
        ("emulated:slow-linkx99999", "99999 devices"),
        ("emulated:slow-link,emulated:slow-link", "a card twice: several alike are NAMEx2"),
        ("emulated:slow-link,emulated:link8-4gb", "cards with a data sheet stand beside no others"),
    ],
)
def test_names_that_nothing_has(spec: str, says: str) -> None:
    with pytest.raises(EngineError, match=says) as caught:
        open_devices(spec)
    assert caught.value.code == ErrorCode.INVALID_REQUEST


@no_card
@pytest.mark.parametrize("spec", ["cuda", "cuda:0", "cuda:7"])
def test_a_card_that_is_not_there(spec: str) -> None:
    with pytest.raises(EngineError, match="cpu") as caught:
        open_devices(spec)
    assert caught.value.code == ErrorCode.DEVICE_UNAVAILABLE
