"""A plan and what it is made of: plain frozen dataclasses, so that a window can draw it and a file can hold it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import cast

from engine.common.config import CachePolicy, EngineConfig, Misses, Prefetch
from engine.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user and other programs leave to the engine.

    Attributes:
        vram_bytes, ram_bytes: budgets, as `EngineConfig`'s.
        threads: CPU threads; None for one per core.
        context_tokens: longest context; None is the model's own.
        precision: of the experts; `auto` lets the plan choose.
        use_card: False keeps everything on the CPU.
        vram_of_others, ram_of_others: bytes that other programs hold now.
    """

    vram_bytes: int | None = None
    ram_bytes: int | None = None
    threads: int | None = None
    context_tokens: int | None = None
    precision: str = "auto"
    use_card: bool = True
    vram_of_others: int = 0
    ram_of_others: int = 0


@dataclass(frozen=True, slots=True)
class TierBytes:
    """A tier's memory by purpose; what is left of `total` is free.

    Attributes:
        total: of the card(s), or the RAM.
        weights: non-expert weights.
        experts: resident experts (slots, or all of them).
        staging: slots that experts pass through.
        kv: keys and values of the context that there is room for from the start.
        activations: of one chunk of a prompt.
        headroom: left to drivers, the desktop, the rest of the program.
        other_programs: held by others now.
    """

    total: int
    weights: int = 0
    experts: int = 0
    staging: int = 0
    kv: int = 0
    activations: int = 0
    headroom: int = 0
    other_programs: int = 0

    @property
    def held(self) -> int:
        """By the engine."""
        return self.weights + self.experts + self.staging + self.kv + self.activations

    @property
    def free(self) -> int:
        return max(0, self.total - self.held - self.headroom - self.other_programs)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The expert cache on the card.

    Attributes:
        slots: experts that it holds.
        ways, indexes: M and N of N indexes x M ways; ways is None where all layers share one pool.
        policy: who leaves; see `EngineConfig.cache_policy`.
        misses, prefetch: see there.
        hit_rate: expected; None if there is no cache.
        all_experts: nothing ever misses.
        prefill_threshold: rows of one expert from which on a miss is fetched and computed on the card rather than by
            the CPU (Fiddler's Algorithm 1); None if the CPU is always better, or there is no card.
    """

    slots: int = 0
    ways: int | None = None
    indexes: int = 0
    policy: str = "auto"
    misses: str = "mixed"
    prefetch: str = "auto"
    hit_rate: float | None = None
    all_experts: bool = False
    prefill_threshold: int | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How many sequences are run together: MoE-Lightning's table 1, and Klotski's n.

    Attributes:
        schedule: whose.
        prefill, decode: names of the schedules that read prompts and that generate: those that were simulated are those
            that the executor runs.
        sequences: N.
        micro_batch: mu.
        attention_on_card: A_g.
        experts_on_card: F_g.
        weights_on_card: r_w.
        cache_on_card: r_c.
        batches: n, micro-batches that share each layer's weights.
        fewest_batches: the smallest n of this size that satisfies Klotski's inequalities (4) to (7); None if none does.
        hides_transfers: whether n is enough for these: weights arrive before they are needed.
        tokens_per_s: predicted, prefill counted.
    """

    schedule: str
    prefill: str
    decode: str
    sequences: int
    micro_batch: int
    attention_on_card: bool
    experts_on_card: bool
    weights_on_card: float
    cache_on_card: float
    batches: int
    fewest_batches: int | None
    hides_transfers: bool
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted, or timed where the engine has run just so.

    Attributes:
        tokens_per_s: delivered tokens over all the time, prefill counted.
        decode_tokens_per_s: decode steps per second, what a person who reads along sees.
        low, high: range of `decode_tokens_per_s`; narrower the more of the machine was measured.
        ttft_s: until the first token.
        predicted: what `decode_tokens_per_s` had been predicted to be, if it was timed; else 0.
        timed_at: when it was timed, ISO 8601; empty if it is predicted.
    """

    tokens_per_s: float
    decode_tokens_per_s: float
    low: float
    high: float
    ttft_s: float
    predicted: float = 0.0
    timed_at: str = ""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run the same, and how fast it would be.

    Attributes:
        policy: its name.
        precision: of the experts.
        speed: predicted.
        runs_here: whether the engine has it; else it is there to compare with.
    """

    policy: str
    precision: str
    speed: Speed
    runs_here: bool


@dataclass(frozen=True, slots=True)
class Help:
    """A change and what it would bring.

    Attributes:
        change: in words: "8 GB more RAM".
        tokens_per_s: delivered with it; decode_tokens_per_s: likewise.
        gain: factor over the plan's `tokens_per_s`.
    """

    change: str
    tokens_per_s: float
    decode_tokens_per_s: float
    gain: float


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """A computation in the picture of the roofline.

    Attributes:
        name: what.
        intensity: flops per byte of expert weights that are read or fetched.
        flops: that are reached there, 1 / s.
        bound_by: "link", "GPU memory", "GPU arithmetic", "CPU memory" or "CPU arithmetic".
    """

    name: str
    intensity: float
    flops: float
    bound_by: str


@dataclass(frozen=True, slots=True)
class RooflinePicture:
    """MoE-Lightning's Hierarchical Roofline of this machine and model, ready to be drawn.

    Attributes:
        cpu_flops, cpu_bytes_per_s, gpu_flops, gpu_bytes_per_s, link_bytes_per_s: the roofs; 0 without a card.
        first_turning_point: P1 (eq. 9): at less flops per fetched byte it does not pay to fetch.
        second_turning_point: P2 (eq. 10): at less the link limits what is computed on the card.
        balance: eq. 11, of a decode step of one sequence.
        points: the experts' part of decode, prefill and batch.
    """

    cpu_flops: float
    cpu_bytes_per_s: float
    gpu_flops: float = 0.0
    gpu_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    first_turning_point: float = 0.0
    second_turning_point: float = 0.0
    balance: float = 0.0
    points: tuple[RooflinePoint, ...] = field(default=())


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


def total_held(tier: TierBytes) -> dict[str, int]:
    """Purpose -> bytes, for tables and bars; purposes without bytes are left out."""
    return {part.name: value for part in fields(tier) if part.name != "total" and (value := getattr(tier, part.name))}
