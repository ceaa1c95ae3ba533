"""The counters of a model's caches, disk and links, in one order, as they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.devices.copy_log import CopyRecord
from engine.devices.device import Device
from engine.experts.disk_backed import DiskBackedBank
from engine.experts.vram_cache import VramCache
from engine.telemetry.recorder import RECORDER


@dataclass
class LinkBytes:
    """Payload that has crossed the links of some devices since `listen`; every copy tells, so nothing is left out."""

    h2d: int = 0
    d2h: int = 0
    small: int = 0
    _streams: dict[str, list[int]] = field(default_factory=dict)
    _stops: list[Callable[[], None]] = field(default_factory=list)

    def listen(self, devices: tuple[Device, ...]) -> None:
        """Counts from now on."""
        for device in devices:
            self._stops.append(device.copy_log.listen(self._on_copy))
            for stream in device.streams:
                self._streams.setdefault(stream.name, [0, 0, int(stream is device.small_copy_stream)])

    def stop(self) -> None:
        """Counts nothing more."""
        for stop in self._stops:
            stop()
        self._stops = []

    def total(self) -> tuple[int, int, int]:
        """(to the devices, back, and the part of both that went beside the weights)."""
        streams = list(self._streams.values())
        return (
            sum(h2d for h2d, _, _ in streams),
            sum(d2h for _, d2h, _ in streams),
            sum(h2d + d2h for h2d, d2h, is_small in streams if is_small),
        )

    def _on_copy(self, copy: CopyRecord) -> None:
        # Each stream's copies end one after the other, so nobody else writes to this entry.
        counts = self._streams.get(copy.stream)
        if counts is None:
            return
        if copy.direction == "h2d":
            counts[0] += copy.nbytes
        elif copy.direction == "d2h":
            counts[1] += copy.nbytes


def counted(caches: list[VramCache], disk_backed: DiskBackedBank | None, link: LinkBytes) -> tuple[int, ...]:
    """In the order of `engine.telemetry.records.COUNTERS`."""
    vram = [0] * 14
    vram[3], vram[13] = RECORDER.on_cpu, RECORDER.many_on_cpu
    for cache in caches:
        c = cache.counters
        # Written out: this is read after every token.
        vram[0] += c.hits
        vram[1] += c.late
        vram[2] += c.fetched
        vram[3] += c.on_cpu
        vram[4] += c.hits_on_cpu
        vram[5] += c.recomputed
        vram[6] += c.evictions
        vram[7] += c.post_fetches
        vram[8] += c.prefetched
        vram[9] += c.prefetches_used
        vram[10] += c.prefetches_wasted
        vram[11] += c.prefill_hits
        vram[12] += c.prefill_fetched
        vram[13] += c.prefill_on_cpu
    if disk_backed is None:
        return (*vram, 0, 0, 0, 0, 0, 0, 0, *link.total(), 0)
    r = disk_backed.ram.counters
    ram = (r.hits, r.late, r.misses, r.evictions, r.prefetched, r.prefetches_used, r.prefetches_wasted)
    return (*vram, *ram, *link.total(), disk_backed.disk.bytes_read)
