"""How much faster the planner thinks that a running model would be, were one thing about it changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.hardware.machine import HardwareProfile
from engine.planner.cache_speed import tokens_per_s_by_slots

SlotsAndMisses = tuple[int, float]
"""(experts that the topmost tier has room for, share of uses that miss it)."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSpeed:
    """Of one loaded model on one machine.

    Attributes:
        config: as it runs: precision, device and threads are those it was loaded with.
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
        """Decode speed after the change over that before it, both predicted; None if it cannot be told.

        Other threads can be told of only where several numbers of them were measured.

        What the model of the machine gets wrong on both sides alike is not in a ratio.
        """
        if threads is not None and len(self.machine.cpu.weights_bytes_per_s) < 2:
            return None
        changed = replace(
            self.config, precision=precision or self.config.precision, threads=threads or self.config.threads
        )
        try:
            ((_, before),) = tokens_per_s_by_slots(self.machine, self.model, self.config, [now])
            ((_, after),) = tokens_per_s_by_slots(self.machine, self.model, changed, [then])
        except EngineError:  # it fits in no precision that could be chosen
            return None
        return after / before
