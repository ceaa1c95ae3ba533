"""The planner's predicted speedup of a running model for one change."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.hardware.machine import HardwareProfile
from engine.planner.cache_speed import tokens_per_s_by_slots

SlotsAndMisses = tuple[int, float]
"""(capacity of the top tier in experts, miss rate)."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSpeed:
    """Predicts speedups of one loaded model on one machine.

    Attributes:
        config: its settings, with the actual precision, device and threads.
    """

    machine: HardwareProfile
    model: ModelShape
    config: EngineConfig

    def gain(
        self,
        now: SlotsAndMisses,
        then: SlotsAndMisses,
        *,
        precision: str | None = None,
        threads: int | None = None,
    ) -> float | None:
        """Predicted decode speed after the change over that before it; None if unknown.

        Other thread counts are predicted only if several were measured.

        Errors of the machine model that affect both speeds cancel out in the ratio.
        """
        if threads is not None and len(self.machine.cpu.weights_bytes_per_s) < 2:
            return None
        changed = replace(
            self.config, precision=precision or self.config.precision, threads=threads or self.config.threads
        )
        try:
            ((_, before),) = tokens_per_s_by_slots(self.machine, self.model, self.config, [now])
            ((_, after),) = tokens_per_s_by_slots(self.machine, self.model, changed, [then])
        except EngineError:  # it fits in no available precision
            return None
        return after / before
