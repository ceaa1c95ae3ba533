"""What worker and window say to each other about telemetry; part of `engine.protocol`.

`Telemetry`, `ExpertMap` and `CacheReport` are samples: a newer one replaces one not yet sent.  Spans and counters
arrive in order; what a slow pipe has no room for is dropped, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheTier = Literal["vram", "ram"]


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchTelemetry:
    """From now on send this and nothing else; at the start nothing is sent, and nothing recorded.

    Attributes:
        on: spans, counters and cache reports.
        expert_map: `ExpertMap`, twice a second; only while `on`.
    """

    on: bool
    expert_map: bool = False


@dataclass(frozen=True, slots=True)
class ResizeCache:
    """Keep so many experts in a tier from now on, as far as there is room; the next `CacheReport` says how many."""

    tier: CacheTier
    slots: int


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Latest sample of what the engine holds and does; a newer one replaces it unsent.

    Attributes:
        rss_bytes: resident memory of the worker; the next three are parts of it.
        kv_tokens, kv_bytes: context now held.
        tokens_per_s: over the last second of decoding; 0 when idle.
        device_total_bytes, device_used_bytes: what the model may use of its devices' memory, and what it does;
            device_experts_bytes is the part of that which experts have.  All 0 on the CPU.
    """

    rss_bytes: int
    weights_bytes: int
    experts_bytes: int
    kv_bytes: int
    kv_tokens: int
    tokens_per_s: float
    device_total_bytes: int = 0
    device_used_bytes: int = 0
    device_experts_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TelemetrySpans:
    """What has been done since the last one.

    Attributes:
        clock_ns, wall_s: one moment on the clock of all spans and as seconds since 1970.
        packed: `SPAN` records, not sorted (see `engine.telemetry.records.unpack`); `count` of them.
        dropped: spans lost since recording began, because nobody took them fast enough.
    """

    clock_ns: int
    wall_s: float
    count: int
    packed: str
    dropped: int


@dataclass(frozen=True, slots=True)
class TelemetryCounters:
    """The steps that ended since the last one: packed `STEP` records, in order; `dropped` as in `TelemetrySpans`."""

    count: int
    packed: str
    dropped: int


@dataclass(frozen=True, slots=True)
class TelemetryRequest:
    """Spans of this `number` belong to the request `request_id`."""

    number: int
    request_id: str
    clock_ns: int


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Use and whereabouts of all experts, [layers, experts] row by row.

    Attributes:
        layers: number of each row's layer in the model.
        experts: of a row; rows of layers with fewer are filled up, and nowhere.
        step: the last one that is counted.
        heat: packed uint8: decayed uses, 255 is `hottest` uses.
        places: packed uint8: bits of `IN_VRAM`, `IN_RAM`, `ON_DISK`, `ARRIVING`.
        uses, hits, last_step: packed uint32: since the model was loaded; steps are counted from 1, 0 is never.
        record_bytes: of each row's experts.
    """

    layers: tuple[int, ...]
    experts: int
    step: int
    hottest: float
    heat: str
    places: str
    uses: str
    hits: str
    last_step: str
    record_bytes: tuple[int, ...]


IN_VRAM, IN_RAM, ON_DISK, ARRIVING = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class PolicyRate:
    """What a policy would have hit recently, had it decided alone."""

    name: str
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of the expert cache.

    Attributes:
        slots, most_slots: experts that it has room for, and that are of use.
        record_bytes: of one expert, on average.
        hits, lookups: since the model was loaded, decode steps only.
        recent_hit_rate: of the last seconds; -1 if nothing was looked up.
        policy: that decides now; is_adaptive: chosen among `shadows`.
        arriving: copies or reads under way.
        evictions, prefetched, prefetches_used, prefetches_wasted: since the model was loaded.
        note: what the user should know; empty if nothing.
        miss_s: seconds that an expert takes longer that is not there but in the tier below; 0 if not known.
    """

    tier: CacheTier
    slots: int
    most_slots: int
    record_bytes: int
    hits: int
    lookups: int
    recent_hit_rate: float
    policy: str
    is_adaptive: bool
    shadows: tuple[PolicyRate, ...]
    arriving: int
    evictions: int
    prefetched: int
    prefetches_used: int
    prefetches_wasted: int
    note: str = ""
    miss_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PredictorRate:
    """As `engine.experts.prediction.score.PredictorReport`."""

    name: str
    layers: int
    hit_rate: float
    precision: float
    cost_s: float
    gain_s: float


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Bytes of one purpose in one place (`ram`, or the name of a device); `total` and `free` are parts as well.

    The parts of a place but `total` add up to its `total`.
    """

    place: str
    purpose: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the expert cache does, once a second while something is computed.

    Attributes:
        tiers: from the fastest down; empty if all experts are in RAM and nothing caches them.
        curve_slots, curve_hit_rates: hit rate of an LRU cache of that size on the recent routing (Mattson et al.
            1970), for the topmost tier; empty until enough has been seen.
        steps_per_s: of the last seconds of decoding; 0 if nothing was decoded.
        lookups_per_step: experts that a step wants.
        hit_s, miss_s: seconds that one expert takes that is there, and one that is not; 0 if not known.
        adopted: the predictor in use, empty if none; ahead: layers that it looks ahead.
        predictors: all that could be used.
        memory: see `MemoryPart`.
        note: what the user should know; empty if nothing.
    """

    tiers: tuple[TierReport, ...]
    curve_slots: tuple[int, ...]
    curve_hit_rates: tuple[float, ...]
    steps_per_s: float
    lookups_per_step: float
    hit_s: float
    miss_s: float
    adopted: str
    ahead: int
    predictors: tuple[PredictorRate, ...]
    memory: tuple[MemoryPart, ...]
    note: str = ""
