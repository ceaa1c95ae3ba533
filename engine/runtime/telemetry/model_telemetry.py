"""Everything that telemetry reads of one loaded model.

Made when a model is loaded; costs nothing until `start`.  `snapshot`s may be taken on any thread while the model runs.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.experts.vram_cache import VramCache
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.telemetry.cache_report import CacheReporter
from engine.runtime.telemetry.counters import LinkBytes, counted
from engine.runtime.telemetry.expert_map import expert_map
from engine.runtime.telemetry.expert_uses import ExpertUses
from engine.runtime.telemetry.layers import number_layers
from engine.runtime.telemetry.queued_dense import QueuedDense
from engine.telemetry.lanes import CPU_ATTENTION, GPU
from engine.telemetry.messages import CacheReport, CacheTier, ExpertMap
from engine.telemetry.recorder import RECORDER, Recorder
from engine.telemetry.records import Records


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
        """Use and whereabouts of all experts; None if there are none."""
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
            ram = self._loaded.disk_backed.ram
            ram.resize(slots * self._reporter.ram_record_bytes)

    def _queued(self) -> QueuedDense | None:
        """Where the caller's thread only queues; None if it computes, or nobody has the device's clock."""
        followed = [device for device in self._devices if device.compute_follows_caller]
        return QueuedDense(followed, self._recorder) if followed else None

    def _dense_lane(self) -> int | None:
        if self._loaded.device.type != "cpu":
            return None
        return GPU if self._devices else CPU_ATTENTION

    def _caches(self) -> list[VramCache]:
        devices = self._loaded.devices
        return [cache for caches in devices.experts.caches for cache in caches] if devices is not None else []

    def _counted(self) -> tuple[int, ...]:
        return counted(self._caches(), self._loaded.disk_backed, self._link)
