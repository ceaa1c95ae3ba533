"""The result of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.planner.costs import Cards
from engine.planner.simulator.batch_costs import OffloadPolicy
from engine.planner.simulator.timeline import LANES, Span, Timeline


@dataclass(frozen=True, slots=True)
class Outcome:
    """A workload under one policy.

    Attributes:
        policy: its name.
        seconds: from reading the first prompt token to delivering the last token.
        ttft_s: time to first token.
        tpot_s: seconds per decode step.
        tokens_out: tokens delivered.
        vram_bytes, ram_bytes: peak memory.
        hit_rate: share of expert uses that hit the card's cache; None where not applicable.
        utilisation: share of the simulated time that each lane was busy.
        slots, ways: of the expert cache.
        batch: the policy if sequences run together.
        cards: how several cards share the model.
        spans: of the part that was simulated span by span; repeated layers and steps appear once.
    """

    policy: str
    seconds: float
    ttft_s: float
    tpot_s: float
    tokens_out: int
    vram_bytes: float
    ram_bytes: float
    hit_rate: float | None = None
    utilisation: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    slots: int = 0
    ways: int = 0
    batch: OffloadPolicy | None = None
    cards: Cards = Cards.LAYERS

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens over the whole time, prefill included."""
        return self.tokens_out / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode steps per second: the speed at which text appears."""
        return 1 / self.tpot_s if self.tpot_s > 0 else 0.0


def utilisation(timeline: Timeline) -> dict[str, float]:
    """Share of the simulated time that each lane was busy."""
    return {lane: timeline.busy_s(lane) / timeline.end for lane in LANES if lane != "phase" and timeline.end > 0}
