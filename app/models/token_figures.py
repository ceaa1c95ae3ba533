"""What a decoded token costs, averaged over the last ones."""

from __future__ import annotations

from dataclasses import dataclass

from app.services.history.history import EXPERT_KINDS, History, experts_met, of_last_kind
from engine.telemetry.analysis import joules_per_token
from engine.telemetry.lanes import BATCH_STEP, DECODE

LAST_STEPS = 200


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Means per token.

    Attributes:
        tokens: how many were averaged; steps: how many steps decoded them.
        is_batch: whether these were batch steps, whose tokens include those of prompts.
        experts: how they were served -> experts, see `EXPERT_KINDS`.
        took_s: seconds.
        h2d_bytes, disk_bytes: bytes copied to devices, read from disk.
        joules: None where neither cards nor processors report their power.
    """

    tokens: int
    steps: int
    is_batch: bool
    experts: dict[str, float]
    took_s: float
    h2d_bytes: float
    disk_bytes: float
    joules: float | None

    @property
    def used(self) -> float:
        """Experts used, however they were served."""
        return sum(self.experts.values())


def token_figures(history: History, until_ns: int | None = None, last: int = LAST_STEPS) -> TokenFigures | None:
    """Means over the last steps that began before a moment; None if nothing has been decoded.

    A chat's steps or a batch's, whichever ran last: a mean of both would describe neither.
    """
    steps = history.last_steps(last) if until_ns is None else history.steps_between(0, until_ns)[-last:]
    steps = of_last_kind(steps)
    tokens = int(steps["tokens"].sum())
    if not tokens:
        return None
    as_decoded = steps.copy()
    as_decoded["name"] = DECODE  # batch steps use energy for their tokens too
    return TokenFigures(
        tokens,
        len(steps),
        bool((steps["name"] == BATCH_STEP).any()),
        {kind: max(0.0, float(experts_met(steps, kind).sum()) / tokens) for kind in EXPERT_KINDS},
        max(0.0, float((steps["end_ns"] - steps["start_ns"]).sum()) / 1e9 / tokens),
        max(0.0, float(steps["h2d_bytes"].sum()) / tokens),
        max(0.0, float(steps["disk_bytes"].sum()) / tokens),
        joules_per_token(*history.power(), as_decoded),
    )
