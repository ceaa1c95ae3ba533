"""What a prefetch takes and saves, over a link and from a disk, from what is measured there."""

from __future__ import annotations

from collections.abc import Sequence

from engine.experts.disk_tier import DiskTier
from engine.experts.latency import LatencyModel
from engine.experts.prediction.target import PrefetchTimes
from engine.experts.vram_cache import VramCounters

_MEASURED_RECORDS = 64
"""Records that must have been read before what a disk has done says what it can do."""
_ASSUMED_BYTES_PER_S = 1e9


def over_link(latency: LatencyModel, counters: Sequence[VramCounters]) -> PrefetchTimes:
    """For slots on a device over records in RAM.

    An expert that is not there is computed on the CPU or fetched, and both are done at once: with a share f of them
    fetched, one more of them takes max((1 - f) cpu_lat, f (trans_lat + gpu_lat)).

    Args:
        counters: of the devices' caches, which say how misses have been met so far.
    """
    hit_s = latency.gpu_s(1)
    fetched_s = latency.transfer_s + hit_s
    fetched_so_far = sum(each.fetched for each in counters)
    met = fetched_so_far + sum(each.on_cpu for each in counters)
    fetched = fetched_so_far / met if met else float(not latency.prefers_cpu(1))
    return PrefetchTimes(
        record_nbytes=latency.record_nbytes,
        arrival_s=latency.transfer_s,
        miss_s=max((1 - fetched) * latency.cpu_s(1), fetched * fetched_s),
        hit_s=hit_s,
        late_saves=False,
        urgent_share=fetched,
    )


def over_disk(disk: DiskTier, record_nbytes: int) -> PrefetchTimes:
    """For slots in RAM over a bank on disk, of which a step waits for every expert that is not there."""
    read_bytes, busy_s = disk.bytes_read, disk.busy_s
    is_measured = busy_s > 0 and read_bytes >= _MEASURED_RECORDS * record_nbytes
    rate = read_bytes / busy_s if is_measured else _ASSUMED_BYTES_PER_S
    arrival_s = record_nbytes / rate
    return PrefetchTimes(
        record_nbytes=record_nbytes,
        arrival_s=arrival_s,
        miss_s=arrival_s,
        hit_s=0.0,
        late_saves=True,
        urgent_share=1.0,
    )
