"""The outcome of resizing the cache: requested size, actual size, and the gain."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QCoreApplication

from app.widgets.quantities import number
from engine.telemetry.messages import CacheReport, CacheTier, TierReport

translate = QCoreApplication.translate

_SETTLED_REPORTS = 5
"""Seconds of decoding before the new size is judged: until then the cache fills."""


@dataclass
class Resizing:
    """One change of size, from its request on.

    Attributes:
        before: the tier as it was.
        asked: experts requested.
        speed_before: tokens per second before; 0 if nothing was decoded.
        predicted: tokens per second with the requested size; None if unknown.
    """

    before: TierReport
    asked: int
    speed_before: float
    predicted: float | None
    now: TierReport | None = None
    reports: int = 0
    decoded: int = 0
    speed: float = 0.0

    @property
    def tier(self) -> CacheTier:
        return self.before.tier

    @property
    def is_answered(self) -> bool:
        """Whether the engine has reported the new size."""
        # The first report may predate the command.
        return self.now is not None and (self.now.slots != self.before.slots or self.reports > 1)

    def on_report(self, report: CacheReport) -> None:
        """Handles the next report."""
        now = next((tier for tier in report.tiers if tier.tier == self.tier), None)
        if now is None:
            return
        self.now = now
        self.reports += 1
        if report.steps_per_s > 0 and now.slots != self.before.slots:
            self.decoded += 1
            self.speed = report.steps_per_s

    def sentence(self) -> str:
        """The outcome, for the user."""
        if self.now is None or not self.is_answered:
            return translate("Resizing", "Requested {0} experts…").format(number(self.asked, 0))
        has, had = number(self.now.slots, 0), number(self.before.slots, 0)
        if self.now.slots == self.before.slots:
            no_room = translate("Resizing", "Stays at {0} experts: no room for {1}.")
            no_size = translate("Resizing", "Stays at {0} experts: {1} is not a valid size, or too few for a step.")
            text = no_room if self.asked > self.now.slots else no_size
            return text.format(has, number(self.asked, 0))
        # Sizes are whole sets: a few less than requested still meets the request.
        if self.now.slots < 0.9 * self.asked:
            text = translate("Resizing", "Now {0} experts, was {1}; no room for {2}.")
            return self._with_gain(text.format(has, had, number(self.asked, 0)))
        return self._with_gain(translate("Resizing", "Now {0} experts, was {1}.").format(has, had))

    def _with_gain(self, text: str) -> str:
        if self.now is None or self.decoded < _SETTLED_REPORTS:
            return text
        gains = []
        if self.now.recent_hit_rate >= 0 and self.before.recent_hit_rate >= 0:
            gains.append(
                translate("Resizing", "hits {0}%, was {1}%").format(
                    number(100 * self.now.recent_hit_rate, 0), number(100 * self.before.recent_hit_rate, 0)
                )
            )
        if self.speed_before > 0:
            gain = translate("Resizing", "{0} tokens/s, was {1}").format(
                number(self.speed, 1), number(self.speed_before, 1)
            )
            if self.predicted is not None:
                gain += " " + translate("Resizing", "(predicted: {0})").format(number(self.predicted, 1))
            gains.append(gain)
        return " ".join((text, translate("Resizing", "Measured: {0}.").format("; ".join(gains)))) if gains else text
