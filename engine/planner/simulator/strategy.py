"""How one request's experts are stored and how misses are served: one description per published schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Residency(StrEnum):
    """Which experts are on the card initially."""

    NONE = "none"
    STATIC = "static"  # the most popular ones, permanently (Fiddler)
    LAYERS = "layers"  # all of the first layers with their attention; the other layers on the CPU (llama.cpp)
    CACHE = "cache"  # N indexes x M ways, LRU, post-fetched (CPU-GPU Collaborative)


class Miss(StrEnum):
    """Where an expert that is not on the card is computed."""

    CPU = "cpu"
    FETCH = "fetch"  # on the card, once it has arrived
    CHEAPER = "cheaper"  # wherever this expert alone finishes first (Fiddler's Algorithm 1)
    MIXED = "mixed"  # CPU and link at once, split so that both finish together


class Prefetch(StrEnum):
    """What is fetched before its router has run."""

    NONE = "none"
    PREDICTED = "predicted"  # the next layer's experts as predicted (DuoServe)
    IDEAL = "ideal"  # exactly the next layer's experts
    LAYER = "layer"  # all of the next layer's experts


@dataclass(frozen=True, slots=True)
class Strategy:
    """A schedule of single requests.

    Attributes:
        name: of the policy.
        residency, miss, prefetch: see these enumerations.
        pinned: whether weights are in pinned memory.
        overlapped: whether copying one expert may overlap computing another one within a layer.
        prefetch_accuracy: share of the predicted experts that are right.
        prefill_fetches: prefill fetches every miss to the card, whatever `miss` says.
        grouped: one kernel call per layer computes the experts on the card.
        host_only: the CPU computes everything; the card is unused.
        waits_for_arrival: an expert in transfer counts as cached and is waited for; else it is a miss.
    """

    name: str
    residency: Residency = Residency.NONE
    miss: Miss = Miss.FETCH
    prefetch: Prefetch = Prefetch.NONE
    pinned: bool = True
    overlapped: bool = True
    prefetch_accuracy: float = 1.0
    prefill_fetches: bool = False
    grouped: bool = False
    host_only: bool = False
    waits_for_arrival: bool = False


ON_DEMAND = Strategy("on-demand", overlapped=False, pinned=False)
WHOLE_LAYER = Strategy("whole-layer prefetch", prefetch=Prefetch.LAYER)
IDEAL_PREFETCH = Strategy("ideal prefetch", prefetch=Prefetch.IDEAL)
"""An upper bound rather than a schedule: a layer's experts are unknown until its router has run."""
CPU_ONLY = Strategy("CPU experts", miss=Miss.CPU)
HOST_ONLY = Strategy("CPU only", Residency.LAYERS, Miss.CPU, host_only=True)
STATIC_SPLIT = Strategy("static layer split", Residency.LAYERS, Miss.CPU)
FIDDLER = Strategy("Fiddler", Residency.STATIC, Miss.CHEAPER)
COLLABORATIVE = Strategy("CPU-GPU collaborative", Residency.CACHE, Miss.CPU, waits_for_arrival=True)
DUOSERVE = Strategy("DuoServe-MoE", prefetch=Prefetch.PREDICTED, prefetch_accuracy=0.78, prefill_fetches=True)
SWITCHYARD = Strategy("Switchyard mixed", Residency.CACHE, Miss.MIXED, grouped=True)
SWITCHYARD_CPU = Strategy("Switchyard, misses on the CPU", Residency.CACHE, Miss.CPU, grouped=True)
SWITCHYARD_STATIC = Strategy("Switchyard mixed, static", Residency.STATIC, Miss.MIXED, grouped=True)
SWITCHYARD_PREFETCH = Strategy(
    "Switchyard mixed, predicted",
    Residency.STATIC,
    Miss.MIXED,
    Prefetch.PREDICTED,
    prefetch_accuracy=0.85,
    prefill_fetches=True,
    grouped=True,
)

PUBLISHED = (
    ON_DEMAND,
    WHOLE_LAYER,
    HOST_ONLY,
    CPU_ONLY,
    STATIC_SPLIT,
    FIDDLER,
    COLLABORATIVE,
    DUOSERVE,
)
"""Published strategies."""
OWN = (SWITCHYARD, SWITCHYARD_CPU, SWITCHYARD_STATIC, SWITCHYARD_PREFETCH)
"""Switchyard's own strategies."""
