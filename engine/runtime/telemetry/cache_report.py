"""What the tiers of the expert cache do, to be shown, and for what-ifs about their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import psutil

from engine.common.falls import FALLS
from engine.common.kept_context import kept_context_settings
from engine.experts.cache.tier import CacheSnapshot
from engine.experts.file_image import dropped_note
from engine.experts.latency import LatencyModel
from engine.experts.shared import parts_of
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.telemetry.experts import ExpertUses, NumberedLayer
from engine.telemetry.lanes import CPU_EXPERTS, DECODE, DISK, READ
from engine.telemetry.messages import CacheReport, MemoryPart, PolicyRate, PredictorRate, TierReport
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
            predictors=tuple(
                PredictorRate(each.name, each.layers, each.hit_rate, each.precision, each.cost_s, each.gain_s)
                for each in (prediction.predictors if prediction is not None else ())
            ),
            memory=memory_parts(self._loaded, self._kv_bytes()),
            note=" ".join(
                filter(
                    None,
                    (prediction.note if prediction is not None else "", self._kept_note(), dropped_note(), FALLS.note),
                )
            ),
        )

    def _kept_note(self) -> str:
        kept = self._loaded.kept
        return kept.note if kept is not None else ""

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
            **_policy(snapshots),
            evictions=sum(each.evictions for each in counters),
            prefetched=sum(each.prefetched for each in counters),
            prefetches_used=sum(each.prefetches_used for each in counters),
            prefetches_wasted=sum(each.prefetches_wasted for each in counters),
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
            **_policy(snapshots),
            evictions=counters.evictions,
            prefetched=counters.prefetched,
            prefetches_used=counters.prefetches_used,
            prefetches_wasted=counters.prefetches_wasted,
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


def _policy(snapshots: Iterable[CacheSnapshot]) -> dict[str, Any]:
    snapshots = list(snapshots)
    biggest = max(snapshots, key=lambda snapshot: snapshot.slots)
    return {
        "policy": biggest.policy,
        "is_adaptive": biggest.is_adaptive,
        "shadows": tuple(PolicyRate(name, rate) for name, rate in biggest.shadows.items()),
        "arriving": sum(len(snapshot.arriving) for snapshot in snapshots),
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
