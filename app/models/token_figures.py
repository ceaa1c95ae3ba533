"""What a decoded token used, on average of the last ones."""

from __future__ import annotations

from dataclasses import dataclass

from app.services.history.history import EXPERT_KINDS, History, experts_met, of_last_kind
from engine.telemetry.analysis import joules_per_token
from engine.telemetry.lanes import BATCH_STEP, DECODE

LAST_STEPS = 200


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Of each token.

    Attributes:
        tokens: that these are means of; steps: that they came in.
        is_batch: whether these were steps of a batch, whose tokens are also those of prompts that were read.
        experts: how they were met -> experts, see `EXPERT_KINDS`.
        took_s: seconds.
        h2d_bytes, disk_bytes: payload brought to devices, read from disk.
        joules: None where neither cards nor processors tell their power.
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
        """Experts, however they were met."""
        return sum(self.experts.values())


def token_figures(history: History, until_ns: int | None = None, last: int = LAST_STEPS) -> TokenFigures | None:
    """Means over the last steps, of those that began before a moment; None if nothing has been decoded.

    Either a chat's or a batch's, whichever ran last: a mean of both would be neither.
    """
    steps = history.last_steps(last) if until_ns is None else history.steps_between(0, until_ns)[-last:]
    steps = of_last_kind(steps)
    tokens = int(steps["tokens"].sum())
    if not tokens:
        return None
    as_decoded = steps.copy()
    as_decoded["name"] = DECODE  # steps of a batch use energy for their tokens as well
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
