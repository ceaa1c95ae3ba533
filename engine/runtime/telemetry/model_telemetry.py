"""Everything that telemetry reads of one loaded model.

Made when a model is loaded; costs nothing until `start`.  `snapshot`s may be taken on any thread while the model runs.

When a device did what its callers only queue: attention, norms, routers, heads and captured graphs.

Where torch's operators return before they are done, as on a card, the host's clock knows nothing of them.  But all that
stands between two marks in the device's queue is known by its own clock, and most of the marks are there anyway: the
end of what a layer's experts submitted, and the moment at which the router's choice may be read.  Time in which the
queue is empty between the two, because the host is slower than the device, belongs to the span.  Of what is inside
nothing is known, least of all of a graph's inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from engine.common.errors import EngineError
from engine.common.falls import FALLS
from engine.common.kept_context import kept_context_settings
from engine.devices.device import CopyRecord, Device, Event
from engine.devices.memory_budget import MemoryCategory
from engine.experts.cache.tier import CacheSnapshot, TierCounters
from engine.experts.file_image import dropped_note
from engine.experts.latency import LatencyModel
from engine.experts.ram_tier import RamTier
from engine.experts.shared import parts_of
from engine.experts.vram_cache import VramCache
from engine.protocol import (
    CacheReport,
    CacheTier,
    ExpertMap,
    MemoryPart,
    PolicyRate,
    TierReport,
)
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.telemetry.experts import ExpertUses, NumberedLayer, expert_map, number_layers
from engine.telemetry.lanes import CPU_ATTENTION, CPU_EXPERTS, DECODE, DENSE, DISK, EXPERTS, GPU, READ
from engine.telemetry.recorder import RECORDER, DeviceWork, Recorder
from engine.telemetry.records import Records

_KEPT = 0.7
"""Of a figure of the seconds before, when there is a new one."""
RAM = "ram"
DISK_KEPT = "disk"
_PROCESS = psutil.Process()


class CacheReporter:
    """Of one loaded model; remembers what was slowly measured between two reports."""

    def __init__(
        self, loaded: LoadedModel, layers: list[NumberedLayer], uses: ExpertUses, kv_bytes: Callable[[], int]
    ) -> None:
        self._loaded, self._layers, self._uses, self._kv_bytes = loaded, layers, uses, kv_bytes
        self._curve: tuple[tuple[int, ...], tuple[float, ...]] = (), ()
        self._curve_step = -1
        self._read_s = self._expert_s = 0.0
        self._lookups_per_step = 0.0

    @property
    def ram_record_bytes(self) -> int:
        """Of an expert on disk, on average."""
        disk_backed = self._loaded.disk_backed
        if disk_backed is None:
            return 0
        table = disk_backed.disk.table
        return table.nbytes // max(1, sum(layer.num_experts for layer in table.layers))

    def report(self, spans: Records, steps: Records) -> CacheReport:
        if self._loaded.disk_backed is not None:
            self._learn(spans)
        self._renew_curve()
        tokens = steps[steps["name"] == DECODE]
        took_s = float((tokens["end_ns"] - tokens["start_ns"]).sum()) / 1e9
        tiers = tuple(tier for tier in (self._vram(tokens), self._ram(tokens)) if tier is not None)
        hit_s, miss_s = self._costs()
        wanted = tokens["hits"] + tokens["fetched"] + tokens["on_cpu"]
        if len(tokens):
            self._lookups_per_step = float(wanted.mean())
        foresight = self._loaded.foresight
        prefetcher = foresight.prefetcher if foresight is not None else None
        prediction = prefetcher.report() if prefetcher is not None else None
        notes = [each.note for each in (prediction, self._loaded.kept) if each is not None]
        return CacheReport(
            tiers=tiers,
            curve_slots=self._curve[0],
            curve_hit_rates=self._curve[1],
            steps_per_s=len(tokens) / took_s if took_s > 0 else 0.0,
            lookups_per_step=self._lookups_per_step,
            hit_s=hit_s,
            miss_s=miss_s,
            adopted=(prediction.adopted or "") if prediction is not None else "",
            ahead=prediction.ahead if prediction is not None else 0,
            predictors=prediction.predictors if prediction is not None else (),
            memory=memory_parts(self._loaded, self._kv_bytes()),
            note=" ".join(filter(None, (*notes, dropped_note(), FALLS.note))),
        )

    def _vram(self, tokens: Records) -> TierReport | None:
        caches = self._loaded.caches
        if not caches:
            return None
        snapshots = [cache.snapshot() for cache in caches]
        counters = [cache.counters for cache in caches]
        slots = sum(cache.slots for cache in caches)
        every = sum(layer.experts for layer in self._layers if parts_of(layer.kernel))
        hits, misses = int(tokens["hits"].sum()), int((tokens["fetched"] + tokens["on_cpu"]).sum())
        notes = [cache.note for cache in caches if cache.note is not None]
        record = sum(cache.layout.nbytes * max(cache.slots, 1) for cache in caches) // max(slots, len(caches))
        return TierReport(
            tier="vram",
            slots=slots,
            most_slots=every,
            record_bytes=record,
            hits=sum(each.hits for each in counters),
            lookups=sum(each.lookups for each in counters),
            recent_hit_rate=_rate(hits, misses),
            **_policy(snapshots, counters),
            note=" ".join(notes),
        )

    def _ram(self, tokens: Records) -> TierReport | None:
        ram = self._loaded.disk_backed
        if ram is None:
            return None
        counters = ram.counters
        snapshots = ram.snapshots()
        hits, others = int(tokens["ram_hits"].sum()), int((tokens["ram_late"] + tokens["ram_misses"]).sum())
        return TierReport(
            tier="ram",
            slots=sum(snapshot.slots for snapshot in snapshots),
            most_slots=sum(layer.num_experts for layer in ram.disk.table.layers),
            record_bytes=self.ram_record_bytes,
            hits=counters.hits,
            lookups=counters.hits + counters.late + counters.misses,
            recent_hit_rate=_rate(hits, others),
            **_policy(snapshots, [counters]),
            note=ram.note,
            miss_s=self._read_s,
        )

    def _learn(self, spans: Records) -> None:
        reads = spans[(spans["lane"] == DISK) & (spans["name"] == READ)]
        self._read_s = _followed(self._read_s, reads)
        experts = spans[(spans["lane"] == CPU_EXPERTS) & (spans["count"] > 0)]
        self._expert_s = _followed(self._expert_s, experts)

    def _costs(self) -> tuple[float, float]:
        """Seconds of an expert that is there, and of one that is not, in the topmost tier."""
        latency = self._latency()
        if latency is not None:
            there = latency.gpu_s(1)
            return there, min(latency.cpu_s(1), latency.transfer_s + there)
        if self._loaded.disk_backed is not None and self._read_s and self._expert_s:
            return self._expert_s, self._expert_s + self._read_s
        return 0.0, 0.0

    def _latency(self) -> LatencyModel | None:
        return next((experts.latency for layer in self._layers for experts in parts_of(layer.kernel)), None)

    def _renew_curve(self) -> None:
        """Costs tens of milliseconds, so only where there is a cache and enough that is new."""
        cached = self._loaded.disk_backed is not None or self._loaded.devices is not None
        if cached and self._uses.step - self._curve_step >= 64:
            self._curve_step = self._uses.step
            slots, rates = self._uses.curve()
            self._curve = tuple(slots.tolist()), tuple(rates.tolist())


def _policy(snapshots: Sequence[CacheSnapshot], counters: Sequence[TierCounters]) -> dict[str, Any]:
    names = ("evictions", "prefetched", "prefetches_used", "prefetches_wasted")
    biggest = max(snapshots, key=lambda snapshot: snapshot.slots)
    return {
        "policy": biggest.policy,
        "is_adaptive": biggest.is_adaptive,
        "shadows": tuple(PolicyRate(name, rate) for name, rate in biggest.shadows.items()),
        "arriving": sum(len(snapshot.arriving) for snapshot in snapshots),
        **{name: sum(getattr(each, name) for each in counters) for name in names},
    }


def _rate(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits + misses else -1.0


def _followed(before_s: float, spans: Records) -> float:
    """Seconds of one expert, as these spans say and as it was thought before."""
    if not len(spans):
        return before_s
    now_s = float(np.median((spans["end_ns"] - spans["start_ns"]) / np.maximum(spans["count"], 1))) / 1e9
    return now_s if before_s == 0 else _KEPT * before_s + (1 - _KEPT) * now_s


def memory_parts(loaded: LoadedModel, kv_bytes: int) -> tuple[MemoryPart, ...]:
    """Of this process's RAM, and of the budget of each device that the model runs on.

    Args:
        kv_bytes: that the held context takes.
    """
    parts: list[MemoryPart] = []
    devices = loaded.devices.devices if loaded.devices is not None else ()
    kept = loaded.kept
    held = {"experts": 0, "weights": 0, "kv": 0, "kept": kept.ram_bytes if kept is not None else 0}
    if loaded.bank is not None:
        held["experts"] += sum(layer.nbytes for layer in loaded.bank.layers.values() if _in_ram(layer.device))
    if loaded.disk_backed is not None:
        held["experts"] += loaded.disk_backed.filled_nbytes
    if not devices and loaded.device.type == "cpu":
        held["weights"], held["kv"] = loaded.info.weights_bytes, kv_bytes
    elif devices:  # rows of jobs may have theirs in RAM
        on_cards = (device.memory.use().by_category.get(MemoryCategory.KV, 0) for device in devices)
        held["kv"] = max(0, kv_bytes - sum(on_cards))
    if loaded.sight is not None:
        held["pictures"] = loaded.sight.nbytes
    resident = _PROCESS.memory_info().rss
    parts += [MemoryPart(RAM, purpose, nbytes) for purpose, nbytes in held.items()]
    # Weights may be mapped from a file and not all in RAM yet: what is left over is then nothing, and not less.
    other = max(0, resident - sum(held.values()))
    parts += [MemoryPart(RAM, "other", other), MemoryPart(RAM, "total", other + sum(held.values()))]
    if kept is not None and (on_disk := kept.disk_bytes):
        room = max(on_disk, kept_context_settings().disk_bytes)
        parts += [MemoryPart(DISK_KEPT, purpose, nbytes) for purpose, nbytes in (("kept", on_disk), ("total", room))]
    for device in devices:
        use = device.memory.use()
        parts += [MemoryPart(device.name, str(kind), nbytes) for kind, nbytes in use.by_category.items()]
        # After others have taken memory more may be used than the budget still allows.
        free = max(0, use.total - use.used)
        parts += [MemoryPart(device.name, "free", free), MemoryPart(device.name, "total", use.used + free)]
    return tuple(parts)


def _in_ram(device: object) -> bool:
    return str(device) == "cpu"


class Between:
    """What a queue did between the end of one of its works and the beginning of another, as `DeviceWork`."""

    __slots__ = ("_after", "_until")

    def __init__(self, after: DeviceWork, until: DeviceWork) -> None:
        self._after, self._until = after, until

    def done(self) -> bool:
        """Whether both are known; never blocks."""
        return self._until.done() and self._after.done()

    @property
    def failure(self) -> Exception | None:
        """Of either."""
        return self._after.failure or self._until.failure

    @property
    def started_s(self) -> float:
        """When the first ended, in seconds of `time.perf_counter`."""
        return self._after.ended_s

    @property
    def ended_s(self) -> float:
        """When the second began."""
        return max(self._after.ended_s, self._until.started_s)


class QueuedDense:
    """Marks in the queues of devices, where the caller's thread only queues dense work.

    For the thread of the engine; never waits for a device.

    Args:
        devices: whose compute streams the caller's operators are queued on, in the order of the model's layers.
    """

    def __init__(self, devices: Sequence[Device], recorder: Recorder) -> None:
        self._recorder = recorder
        self._devices = {device.torch_device: device for device in reversed(devices)}
        self._first = devices[0]
        self._in_forward = False
        self._since: DeviceWork | None = None
        self._ended: DeviceWork | None = None

    def begin(self) -> None:
        self._in_forward, self._ended = True, None
        self._since = self._mark(self._first)

    def head(self, name: int, layer: int, count: int) -> None:
        if self._since is not None:
            self._add(self._mark(self._first), name, layer, count, self._first.index)
        self.forget()

    def forget(self) -> None:
        self._in_forward, self._since, self._ended = False, None, None

    def experts_begin(self, place: torch.device) -> DeviceWork | None:
        device = self._devices.get(place, self._first)
        mark = self._mark(device)
        self.routed(mark, device.index)
        return mark

    def routed(self, mark: DeviceWork | None, device: int) -> None:
        if self._since is not None:
            self._add(mark, *self._recorder.named(DENSE, self._recorder.layer), device)

    def experts_done(self, begun: DeviceWork, place: torch.device, experts: int) -> None:
        device = self._devices.get(place, self._first)
        end = self._ended = self._mark(device)
        if end is not None:
            self._recorder.event(Between(begun, end), GPU, EXPERTS, count=experts, device=device.index)

    def submitted(self, work: DeviceWork) -> None:
        self._ended = work

    def experts_end(self, place: torch.device) -> None:
        ended, self._ended = self._ended, None
        if self._in_forward:
            self._since = ended or self._mark(self._devices.get(place, self._first))

    def _add(self, until: DeviceWork | None, name: int, layer: int, count: int, device: int) -> None:
        since, self._since = self._since, None
        if since is not None and until is not None:
            self._recorder.event(Between(since, until), GPU, name, layer, count=count, device=device)

    def _mark(self, device: Device) -> Event | None:
        try:
            return device.compute_stream.record()
        except EngineError:  # it has been closed: the computation raises its own error
            return None


@dataclass
class LinkBytes:
    """Payload that has crossed the links of some devices since `listen`; every copy tells, so nothing is left out.
    What comes from another card counts as to the device."""

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
        # Each stream's copies end one after the other, so there is no second writer to this entry.
        counts = self._streams.get(copy.stream)
        if counts is None:
            return
        if copy.direction in ("h2d", "p2p"):
            counts[0] += copy.nbytes
        elif copy.direction == "d2h":
            counts[1] += copy.nbytes


def counted(caches: list[VramCache], disk_backed: RamTier | None, link: LinkBytes, streamed: int) -> tuple[int, ...]:
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
        return (*vram, 0, 0, 0, 0, 0, 0, 0, *link.total(), streamed)
    r = disk_backed.counters
    ram = (r.hits, r.late, r.misses, r.evictions, r.prefetched, r.prefetches_used, r.prefetches_wasted)
    return (*vram, *ram, *link.total(), disk_backed.disk.bytes_read + streamed)


class ModelTelemetry:
    """Of one loaded model.

    Args:
        kv_bytes: bytes that the held context takes.
    """

    def __init__(
        self, loaded: LoadedModel, kv_bytes: Callable[[], int] = lambda: 0, recorder: Recorder = RECORDER
    ) -> None:
        self._loaded, self._recorder = loaded, recorder
        self._layers = number_layers(loaded.model)
        self._devices = loaded.devices.devices if loaded.devices is not None else ()
        self._link = LinkBytes()
        self.uses = ExpertUses([layer.number for layer in self._layers], [layer.experts for layer in self._layers])
        self._reporter = CacheReporter(loaded, self._layers, self.uses, kv_bytes)

    def start(self) -> None:
        """Counts for the recorder from now on."""
        self._link.listen(self._devices)
        self._recorder.uses = self.uses.entries
        self._recorder.queued = self._queued()
        self._recorder.dense_lane = self._dense_lane() if self._recorder.queued is None else None
        self._recorder.count_with(self._counted)

    def stop(self) -> None:
        """Counts nothing more.  Harmless if repeated."""
        self._recorder.count_with(None)
        self._recorder.uses = None
        self._recorder.queued = None
        self._link.stop()

    def expert_map(self) -> ExpertMap | None:
        """Uses and places of all experts; None if there are none."""
        self.uses.settle()
        return expert_map(self._loaded, self._layers, self.uses) if self._layers else None

    def cache_report(self, spans: Records, steps: Records) -> CacheReport:
        """What the caches do.

        Args:
            spans, steps: since the last report.
        """
        self.uses.settle()
        return self._reporter.report(spans, steps)

    def resize(self, tier: CacheTier, slots: int) -> None:
        """So many experts in a tier from now on, as far as there is room.

        Raises:
            EngineError: a device has failed.
        """
        slots = max(0, slots)
        if tier == "vram" and self._loaded.devices is not None:
            self._loaded.devices.experts.resize(slots)
        elif tier == "ram" and self._loaded.disk_backed is not None:
            self._loaded.disk_backed.resize(slots * self._reporter.ram_record_bytes)

    def _queued(self) -> QueuedDense | None:
        """Where the caller's thread only queues; None if it computes itself, or there is no device clock."""
        followed = [device for device in self._devices if device.compute_follows_caller]
        return QueuedDense(followed, self._recorder) if followed else None

    def _dense_lane(self) -> int | None:
        if self._loaded.device.type != "cpu":
            return None
        return GPU if self._devices else CPU_ATTENTION

    def _counted(self) -> tuple[int, ...]:
        stream = self._loaded.stream
        read = stream.bytes_read if stream is not None else 0
        return counted(self._loaded.caches, self._loaded.disk_backed, self._link, read)
