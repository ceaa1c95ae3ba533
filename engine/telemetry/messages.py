"""What worker and window say to each other about telemetry; part of `engine.protocol`.

`Telemetry`, `ExpertMap` and `CacheReport` are samples: a newer one replaces an unsent one. Spans and counters arrive in
order; those that do not fit into a slow pipe are dropped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheTier = Literal["vram", "ram"]


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchTelemetry:
    """Selects what is recorded and sent; initially nothing.

    Attributes:
        on: spans, counters and cache reports.
        expert_map: `ExpertMap`, twice a second; only while `on`.
    """

    on: bool
    expert_map: bool = False


@dataclass(frozen=True, slots=True)
class ResizeCache:
    """Resizes a tier to so many experts, if there is room; the next `CacheReport` has the actual number."""

    tier: CacheTier
    slots: int


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The engine's memory use and speed; a newer sample replaces an unsent one.

    Attributes:
        rss_bytes: resident memory of the worker; the next three are parts of it.
        kv_tokens, kv_bytes: current context.
        tokens_per_s: over the last second of decoding; 0 when idle.
        device_total_bytes, device_used_bytes: budget and use of device memory by the model;
            device_experts_bytes is the experts' part.  All 0 on the CPU.
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
    """Spans that ended since the previous message.

    Attributes:
        clock_ns, wall_s: the same moment on the spans' clock and in seconds since 1970.
        packed: `SPAN` records, not sorted (see `engine.telemetry.records.unpack`); `count` of them.
        dropped: spans dropped since recording started.
    """

    clock_ns: int
    wall_s: float
    count: int
    packed: str
    dropped: int


@dataclass(frozen=True, slots=True)
class TelemetryCounters:
    """Steps ended since the previous message: packed `STEP` records, in order; `dropped` as in `TelemetrySpans`."""

    count: int
    packed: str
    dropped: int


@dataclass(frozen=True, slots=True)
class TelemetryRequest:
    """Maps the `number` in spans to a `request_id`."""

    number: int
    request_id: str
    clock_ns: int


@dataclass(frozen=True, slots=True)
class RequestPlace:
    """Which endpoint answers the request of this number in the requests' lane."""

    number: int
    place: str


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Use and location of all experts, [layers, experts] in row-major order.

    Attributes:
        layers: layer number of each row.
        experts: per row; rows with fewer are padded with experts in no place.
        step: the last step counted.
        heat: packed uint8: decayed use counts, scaled so that 255 is `hottest`.
        places: packed uint8: bits of `IN_VRAM`, `IN_RAM`, `ON_DISK`, `ARRIVING`.
        uses, hits, last_step: packed uint32: since the model was loaded; steps count from 1, 0 is never.
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
    """The recent hit rate of a policy had it been used alone."""

    name: str
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of the expert cache.

    Attributes:
        slots, most_slots: capacity in experts, and the most that are useful.
        record_bytes: of one expert, on average.
        hits, lookups: since the model was loaded, decode steps only.
        recent_hit_rate: over the last seconds; -1 without lookups.
        policy: the current policy; is_adaptive: chosen among `shadows`.
        arriving: copies or reads in flight.
        evictions, prefetched, prefetches_used, prefetches_wasted: since the model was loaded.
        note: note for the user; may be empty.
        miss_s: extra seconds of an expert in the tier below; 0 if unknown.
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
    """One predictor, measured on recent routing whether it was in use or not.

    Attributes:
        name: as in the engine's configuration.
        layers: how many layers it was compared on.
        hit_rate: share predicted, of the experts that were needed and absent.
        precision: share needed, of the experts that were predicted and absent.
        cost_s: seconds per step that the step waits for the predictor.
        gain_s: seconds per step that using it saves, net of its cost, wasted prefetches and their evictions.
    """

    name: str
    layers: int
    hit_rate: float
    precision: float
    cost_s: float
    gain_s: float


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Bytes of one purpose in one place (`ram`, or the name of a device); `total` and `free` are parts too.

    The other parts of a place sum to its `total`.
    """

    place: str
    purpose: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """State of the expert cache, once a second while computing.

    Attributes:
        tiers: fastest first; empty if all experts are in RAM without a cache.
        curve_slots, curve_hit_rates: hit rate of an LRU cache of that size on the recent routing (Mattson et al.
            1970), for the top tier; empty until there is enough data.
        steps_per_s: over the last seconds of decoding; 0 without decoding.
        lookups_per_step: experts per step.
        hit_s, miss_s: seconds of a hit and of a miss; 0 if unknown.
        adopted: the predictor in use, empty if none; ahead: its lookahead in layers.
        predictors: all available ones.
        memory: see `MemoryPart`.
        note: note for the user; may be empty.
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
