"""The plan itself, apart from how it is found: what a window is sent and a file can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from engine.common.config import CachePolicy, EngineConfig, Misses, Prefetch
from engine.planner.plan_parts import Alternative, BatchPlan, CachePlan, Help, Limits, RooflinePicture, Speed, TierBytes
from engine.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a model.

    Attributes:
        machine, model, workload: names of what was planned for.
        policy: name of the mechanism; see `engine.planner.simulator.plans`.
        precision: of the experts.
        threads: of the CPU.
        context_tokens: longest context.
        card: bytes on the card(s); None if all is computed on the CPU.
        ram: bytes in RAM.
        disk_bytes: of experts that are read from disk as they are needed; 0 if all fit into RAM or on the card.
        cache: the experts on the card.
        batch: how many sequences are run together; None for a single one.
        speed: predicted.
        bottleneck: what limits it, in one sentence.
        helps: changes of the machine, the biggest gain first; what_helps: the first, in one sentence.
        alternatives: other policies and precisions, the fastest first.
        roofline: the picture.
    """

    machine: str
    model: str
    workload: Workload
    policy: str
    precision: str
    threads: int
    context_tokens: int
    card: TierBytes | None
    ram: TierBytes
    disk_bytes: int
    cache: CachePlan
    batch: BatchPlan | None
    speed: Speed
    bottleneck: str
    helps: tuple[Help, ...]
    what_helps: str
    alternatives: tuple[Alternative, ...]
    roofline: RooflinePicture
    limits: Limits

    def engine_config(self, model: str, device: str = "auto") -> EngineConfig:
        """What the engine runs the plan with.

        Args:
            model: `starter`, a library name or a checkpoint directory.
            device: that the card is; of no account where the plan leaves it alone.
        """
        cache, limits = self.cache, self.limits
        return EngineConfig(
            model=model,
            device=device if self.card is not None else "cpu",
            precision=self.precision,
            vram_bytes=limits.vram_bytes,
            ram_bytes=limits.ram_bytes,
            threads=self.threads,
            context_tokens=limits.context_tokens,
            # As many as fit is what the engine finds out by itself, and better: what is free changes.  A batch's
            # schedule has the cache's memory for as long as it runs.
            cache_slots=0 if self._without_cache else None,
            cache_ways=cache.ways,
            cache_policy=cast("CachePolicy", cache.policy),
            misses=cast("Misses", cache.misses),
            prefetch=cast("Prefetch", cache.prefetch),
        )

    @property
    def _without_cache(self) -> bool:
        runs_batches = self.batch is not None and self.batch.schedule == self.policy
        return self.card is not None and self.cache.slots == 0 and self.cache.misses != "layer" and not runs_batches
