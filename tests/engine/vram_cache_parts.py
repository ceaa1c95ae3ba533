"""A tiny emulated device, and an expert cache on it filled at will."""

from collections.abc import Iterable

from engine.devices.device import Device, Event
from engine.devices.emulated import EmulatedStream, open_emulated
from engine.experts.cache.policies import POLICY_NAMES
from engine.experts.record_source import Held, RecordSource
from engine.experts.vram_cache import VramCache
from engine.hardware.profiles import DeviceProfile
from engine.kernels.interface import LayerRecords
from tests.engine.made_up_records import SMALL

LAYERS, EXPERTS = 3, 4
RECORD = SMALL.nbytes
EVERY_POLICY = ["auto", *POLICY_NAMES]
POPULARITY = {key: float(20 - key) for key in range(LAYERS * EXPERTS)}


def tiny_device(slots: int = 32) -> Device:
    return open_emulated(DeviceProfile("tiny", "for tests", max(2**20, slots * RECORD), 50.0, 50.0, 0.0))


def kept(bank: LayerRecords, experts: Iterable[int]) -> Held:
    """They are in RAM, and stay there."""
    return RecordSource(bank, lambda hidden, *_: hidden).acquire(list(experts))


def fill(cache: VramCache, bank: list[LayerRecords], layer: int, experts: list[int]) -> None:
    cache.release(cache.acquire(layer, experts))
    cache.post_fetch(layer, experts, kept(bank[layer], experts))
    cache.wait()


def holding(device: Device, stream: int = 1) -> Event:
    """Keeps a stream, the copy engine's if none is named, busy for an hour by the card's clock, or until waited for."""
    held = device.streams[stream]
    assert isinstance(held, EmulatedStream)
    return held.charge(3600)
