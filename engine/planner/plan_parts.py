"""A plan and its parts: plain frozen dataclasses that a window can draw and a file can store.

The rule of `auto` precision: the best quality that is not much slower than a lower one.

Callers that know speeds, predicted or measured, use `worthwhile`.  Before a model is loaded no speeds are known; then
the slowest memory that a token may wait for stands in for speed (`best_in_reach`), because it matters more than any
precision does.  Checkpoints are in bf16; int8 costs little of a model's quality (perplexity of the starter: no
measurable change on WikiText-2, 0.1% on chats, 0.8% on code) and int4 costs more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, cast

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import CachePolicy, EngineConfig, KvPrecision, Misses, Prefetch, Sharing
from engine.formats import FORMATS, LADDER, STORED
from engine.hardware.machine import HardwareProfile

USABLE_SHARE = 0.95
"""Share of a card's memory that allocations may take: the driver and fragmentation take the rest."""
RUNTIME_BYTES = 0.5e9
"""Runtime of a card: context, libraries and their workspaces."""
CHUNKS_TOGETHER = 8
"""Pieces of prompts that share each load of a layer: as many micro-batches, whose hidden states wait on the card."""
RAM_SHARE = 0.85
"""Share of the RAM that weights and caches may take."""


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """Usable memory of a machine, where it is known more exactly than by `USABLE_SHARE` and `RAM_SHARE`.

    Attributes:
        card: bytes of all cards together that allocations may take.
        runtime: bytes of these that are neither weights, nor keys and values, nor experts.
        ram: bytes of RAM for weights, keys and values.
        weights: bytes of the non-expert weights on the card; None for 16-bit weights.
        record: bytes of a slot for an expert where batches are this engine's own: all other weights stay on the card
            then, prompts are read in pieces, and a micro-batch takes room for its keys and values; None: as published.
        chunk: tokens of such a piece.
        staging: bytes of slots that single experts pass through in steps of few rows.
    """

    card: float
    runtime: float
    ram: float
    weights: float | None = None
    record: float | None = None
    chunk: int = 0
    staging: float = 0.0


def with_all_visits(rule: MemoryRule, model: ModelShape) -> MemoryRule:
    """The same for schedules that compute each expert for all micro-batches at once: a row for each choice of an expert
    waits to be added up."""
    visits = 2.0 * CHUNKS_TOGETHER * rule.chunk * model.experts_per_token * model.hidden
    return replace(rule, runtime=rule.runtime + visits) if rule.record is not None else rule


def usual_rule(machine: HardwareProfile) -> MemoryRule:
    """Shares of the data sheet's sizes."""
    return MemoryRule(machine.vram_bytes * USABLE_SHARE, RUNTIME_BYTES, machine.cpu.ram_bytes * RAM_SHARE)


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes on the card, by purpose.

    Attributes:
        usable: usable bytes of the card.
        weights: non-expert weights.
        kv: keys and values of the planned context.
        staging: buffers for experts in transfer.
        runtime: `RUNTIME_BYTES`.
    """

    usable: float
    weights: float
    kv: float
    staging: float
    runtime: float = RUNTIME_BYTES

    @property
    def held(self) -> float:
        """Everything on the card except resident experts."""
        return self.weights + self.kv + self.staging + self.runtime

    @property
    def for_experts(self) -> float:
        """Bytes left for resident experts; negative if even the rest does not fit."""
        return self.usable - self.held


def card_memory(
    machine: HardwareProfile,
    model: ModelShape,
    precision: str,
    *,
    cached_tokens: float,
    staging_experts: float = 1.0,
    rule: MemoryRule | None = None,
) -> CardMemory:
    """How a card's memory is divided before resident experts.

    Args:
        cached_tokens: context tokens of all sequences whose keys and values are on the card.
        staging_experts: expert records in addition to resident ones.
        rule: None for the usual one.
    """
    rule = rule or usual_rule(machine)
    return CardMemory(
        usable=rule.card,
        weights=model.non_expert_bytes() if rule.weights is None else rule.weights,
        kv=model.kv_bytes_per_token() * cached_tokens,
        staging=staging_experts * model.expert_bytes(precision),
        runtime=rule.runtime,
    )


def expert_slots(memory: CardMemory, model: ModelShape, precision: str) -> int:
    """S = floor(free VRAM / expert bytes), at most all experts."""
    fitting = int(max(memory.for_experts, 0.0) // model.expert_bytes(precision))
    return min(fitting, model.moe_layers * model.experts)


def indexes(slots: int, ways: int, layers: int) -> int:
    """N = floor(S / M): layers that have a set of their own."""
    return min(slots // ways, layers) if ways > 0 else 0


def share_on_disk(
    machine: HardwareProfile,
    model: ModelShape,
    precision: str,
    *,
    kv_bytes: float = 0.0,
    rule: MemoryRule | None = None,
) -> float:
    """Share of the expert bytes that does not fit into RAM next to `kv_bytes`."""
    room = (rule or usual_rule(machine)).ram - kv_bytes
    return min(1.0, max(0.0, 1.0 - room / model.all_expert_bytes(precision)))


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences to be continued.

    Attributes:
        name: shown to users.
        prompt_tokens: of each sequence, including padding if the schedule pads.
        generated_tokens: of each sequence.
        sequences: independent prompts.
        beams: hypotheses per sequence; 1 is plain sampling.
    """

    name: str
    prompt_tokens: int
    generated_tokens: int
    sequences: int = 1
    beams: int = 1

    @property
    def tokens_out(self) -> int:
        """Tokens delivered: only those of the best hypothesis."""
        return self.sequences * self.generated_tokens

    @property
    def mean_context(self) -> float:
        """Mean number of context tokens of a decode step."""
        return self.prompt_tokens + (self.generated_tokens + 1) / 2


CHAT = Workload("chat", prompt_tokens=128, generated_tokens=128)
LONG_PREFILL = Workload("long prefill", prompt_tokens=4096, generated_tokens=16)
BEAM = Workload("beam", prompt_tokens=32, generated_tokens=64, beams=8)
BATCH = Workload("batch", prompt_tokens=256, generated_tokens=64, sequences=512)
_TEXT = re.compile(r"(\d{1,7})x(\d{1,7})(?:x(\d{1,6}))?(?:x(\d{1,3}))?")
WORKLOADS = {"chat": CHAT, "long-prefill": LONG_PREFILL, "beam": BEAM, "batch": BATCH}
"""The four workloads that plans are compared on."""


def parse_workload(text: str) -> Workload:
    """One of `WORKLOADS`, or `PROMPTxGENERATED[xSEQUENCES[xBEAMS]]` in tokens, such as `512x32x64`.

    Raises:
        ValueError: it is neither, or a number is 0.
    """
    if text in WORKLOADS:
        return WORKLOADS[text]
    match = _TEXT.fullmatch(text)
    numbers = [int(part) for part in match.groups() if part] if match else []
    if not numbers or not all(numbers):
        raise ValueError(f"{text!r} is not a workload: use {', '.join(WORKLOADS)}, or for example 512x32x64")
    return Workload(text, *numbers)


class Reach(IntEnum):
    """The slowest memory that a token may have to wait for, the fastest first."""

    DEVICE = 0
    """Dense weights are on a device, experts there or in RAM."""
    RAM = 1
    """The CPU computes everything, from RAM."""
    DISK = 2
    """Experts are read from disk when needed."""


def worthwhile(speeds: Mapping[str, float]) -> str | None:
    """The precision to run in, given the speed of each: the best quality that is not much slower than a lower one.

    Args:
        speeds: by precision, of those that fit.
    """
    taken: str | None = None
    for precision in (STORED, *LADDER):
        worth = FORMATS[precision].worth
        if precision in speeds and (taken is None or speeds[precision] > worth * speeds[taken]):
            taken = precision
    return taken


def best_in_reach(reach: Mapping[str, Reach]) -> str | None:
    """The same without known speeds: the best quality among those that wait for the fastest memory.

    If all of them wait for the disk, the one with the fewest bytes.

    Args:
        reach: by precision, of those that fit.
    """
    nearest = min(reach.values(), default=Reach.DISK)
    if nearest is Reach.DISK:
        return next((precision for precision in reversed((STORED, *LADDER)) if precision in reach), None)
    return worthwhile({precision: 1.0 for precision, found in reach.items() if found is nearest})


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources that the user and other programs leave to the engine.

    Attributes:
        vram_bytes, ram_bytes: budgets, as in `EngineConfig`.
        threads: CPU threads; None for one per core.
        context_tokens: longest context; None for the model's own.
        precision: of the experts; `auto` lets the plan choose.
        kv_precision: of keys and values, as in `EngineConfig`; cards keep them in 16 bits.
        sharing: how several cards share the model; `auto` lets the plan choose.
        use_card: False keeps everything on the CPU.
        vram_of_others, ram_of_others: bytes that other programs hold now.
        cpu_of_others: share of the processor that they use now, 0 to 1.
    """

    vram_bytes: int | None = None
    ram_bytes: int | None = None
    threads: int | None = None
    context_tokens: int | None = None
    precision: str = "auto"
    kv_precision: KvPrecision = "auto"
    sharing: Sharing = "auto"
    use_card: bool = True
    vram_of_others: int = 0
    ram_of_others: int = 0
    cpu_of_others: float = 0.0

    @classmethod
    def of(cls, config: EngineConfig, **more: Any) -> Limits:
        """The limits that a configuration implies, and `more` of these fields."""
        return cls(
            **{
                "vram_bytes": config.vram_bytes,
                "ram_bytes": config.ram_bytes,
                "threads": config.threads,
                "context_tokens": config.context_tokens,
                "precision": config.precision,
                "kv_precision": config.kv_precision,
                "sharing": config.sharing,
                "use_card": config.device != "cpu",
                **more,
            }
        )

    def held(self, model: ModelShape, machine: HardwareProfile) -> ModelShape:
        """The model with its keys and values, and what is stored of its weights, as this machine holds them."""
        return (model if self.use_card and machine.gpu is not None else model.holding(self.kv_precision)).in_place()


@dataclass(frozen=True, slots=True)
class TierBytes:
    """A tier's memory by purpose; the rest of `total` is free.

    Attributes:
        total: bytes of the card(s), or of the RAM.
        weights: non-expert weights.
        experts: resident experts (slots, or all of them).
        staging: slots that experts pass through.
        kv: keys and values of the context that has room from the start.
        activations: activations of one chunk of a prompt.
        headroom: reserved for drivers, the desktop and the rest of the program.
        other_programs: held by other programs now.
        pictures: the tower that reads pictures, from the first one on.
    """

    total: int
    weights: int = 0
    experts: int = 0
    staging: int = 0
    kv: int = 0
    activations: int = 0
    headroom: int = 0
    other_programs: int = 0
    pictures: int = 0

    @property
    def held(self) -> int:
        return self.weights + self.experts + self.staging + self.kv + self.activations + self.pictures

    @property
    def free(self) -> int:
        return max(0, self.total - self.held - self.headroom - self.other_programs)


@dataclass(frozen=True, slots=True)
class PicturePlan:
    """Reading pictures.

    Attributes:
        seconds: for one of 1024 x 1024 pixels, beside reading its tokens.
        nbytes: of the tower, which is loaded with the first one.
        on_card: whether the card computes it, for which experts there make room meanwhile.
    """

    seconds: float
    nbytes: int
    on_card: bool = False


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The expert cache on the card.

    Attributes:
        slots: experts that fit into it.
        ways, indexes: M and N of N indexes x M ways; ways is None if all layers share one pool.
        policy: eviction policy; see `EngineConfig.cache_policy`.
        misses, prefetch: see `EngineConfig`.
        hit_rate: expected; None without a cache.
        all_experts: all experts are on the card, so nothing ever misses.
        prefill_threshold: rows of one expert from which a miss is fetched and computed on the card instead of on the
            CPU (Fiddler's Algorithm 1); None if the CPU is always faster, or there is no card.
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
    """How many sequences run together: MoE-Lightning's table 1, and Klotski's n.

    Attributes:
        schedule: name of the published schedule.
        prefill, decode: names of the schedules of prompts and of generation; the executor runs the same ones that were
            simulated.
        sequences: N.
        micro_batch: mu.
        weights_on_card: r_w.
        cache_on_card: r_c.
        row_tokens: of each sequence at its end.
        batches: n, micro-batches that share each load of a layer's weights.
        fewest_batches: the smallest n of this size that satisfies Klotski's inequalities (4) to (7); None if none does.
        hides_transfers: whether n satisfies them: weights arrive before they are needed.
        tokens_per_s: predicted, prefill included.
        sharing: how several cards share the model.
        by_hand: it was given: no other schedule is tried.
    """

    schedule: str
    prefill: str
    decode: str
    sequences: int
    micro_batch: int
    weights_on_card: float
    cache_on_card: float
    row_tokens: int
    batches: int
    fewest_batches: int | None
    hides_transfers: bool
    tokens_per_s: float
    sharing: Sharing = "auto"
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a plan: predicted, or measured if the engine has run this configuration.

    Attributes:
        tokens_per_s: delivered tokens over the whole time, prefill included.
        decode_tokens_per_s: decode steps per second, the speed at which text appears.
        low, high: range of `decode_tokens_per_s`; narrower on a measured machine.
        ttft_s: time to first token.
        predicted: the prediction of `decode_tokens_per_s` if that was measured; else 0.
        timed_at: when it was measured, ISO 8601; empty for predictions.
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
    """Another way to run the same workload, and its speed.

    Attributes:
        policy: name of the policy.
        precision: of the experts.
        speed: predicted.
        runs_here: whether the engine implements it; else it is listed for comparison only.
    """

    policy: str
    precision: str
    speed: Speed
    runs_here: bool


@dataclass(frozen=True, slots=True)
class Help:
    """A change of the machine and its effect.

    Attributes:
        change: in words: "8 GB more RAM".
        tokens_per_s, decode_tokens_per_s: as in `Speed`, with the change.
        gain: factor over the plan's `tokens_per_s`.
    """

    change: str
    tokens_per_s: float
    decode_tokens_per_s: float
    gain: float


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """A computation in the roofline diagram.

    Attributes:
        name: name of the computation.
        intensity: flops per byte of expert weights read or fetched.
        flops: attained, 1 / s.
        bound_by: "link", "GPU memory", "GPU arithmetic", "CPU memory" or "CPU arithmetic".
    """

    name: str
    intensity: float
    flops: float
    bound_by: str


@dataclass(frozen=True, slots=True)
class RooflinePicture:
    """MoE-Lightning's Hierarchical Roofline of this machine and model, ready to draw.

    Attributes:
        cpu_flops, cpu_bytes_per_s, gpu_flops, gpu_bytes_per_s, link_bytes_per_s: the roofs; 0 without a card.
        first_turning_point: P1 (eq. 9): with fewer flops per fetched byte, fetching does not pay.
        second_turning_point: P2 (eq. 10): with fewer flops per fetched byte, the link limits the card.
        balance: eq. 11, for a decode step of one sequence.
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
    """How to run a model on a machine.

    Attributes:
        machine, model, workload: names of what was planned for.
        policy: name of the mechanism; see `engine.planner.simulator.plans`.
        precision: of the experts.
        stored: what people call the precision `stored` of this model.
        threads: CPU threads.
        context_tokens: longest context.
        card: bytes on the card(s); None if the CPU computes everything.
        ram: bytes in RAM.
        disk_bytes: experts that are read from disk when needed; 0 if all fit into RAM or on the card.
        streamed_bytes: whole layers' weights that are read from disk for each token, or for all rows of a step.
        cache: the experts on the card.
        batch: how many sequences run together; None for a single one.
        speed: predicted or measured.
        bottleneck: what limits the speed, in one sentence.
        helps: changes of the machine, the biggest gain first; what_helps: the first of them, in one sentence.
        alternatives: other policies and precisions, the fastest first.
        roofline: the diagram.
        written_bytes: room on disk without which it cannot be loaded: for converted experts that are read from there.
        table_bytes: embeddings that stay on disk; table_rows, table_row_bytes: rows that a token reads there, and their
            bytes.
        sharing: how several cards share the model; sharing_words: a sentence on that, empty for one card.
        pictures: what reading them takes; None for a model that reads text only.
        gave_way: a sentence on why this is not the policy that was asked for.
    """

    machine: str
    model: str
    workload: Workload
    policy: str
    precision: str
    stored: str
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
    streamed_bytes: int = 0
    written_bytes: int = 0
    table_bytes: int = 0
    table_rows: int = 0
    table_row_bytes: int = 0
    sharing: Sharing = "auto"
    sharing_words: str = ""
    gave_way: str = ""
    pictures: PicturePlan | None = None

    def engine_config(self, model: str, device: str = "auto") -> EngineConfig:
        """The engine configuration that runs this plan.

        Args:
            model: `starter`, a library name or a checkpoint directory.
            device: name of the card; ignored if the plan does not use it.
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
            # The engine finds the number of slots that fit by itself, and better, because free memory changes.  Batch
            # schedules take over the cache's memory while they run.
            cache_slots=0 if self._without_cache else None,
            cache_ways=cache.ways,
            cache_policy=cast("CachePolicy", cache.policy),
            misses=cast("Misses", cache.misses),
            prefetch=cast("Prefetch", cache.prefetch),
            kv_precision=limits.kv_precision,
            sharing=self.sharing,
        )

    def words(self, precision: str) -> str:
        """A precision of this model, or of an alternative, for people."""
        return self.stored if precision == STORED else precision

    @property
    def _without_cache(self) -> bool:
        runs_batches = self.batch is not None and self.batch.schedule == self.policy
        return self.card is not None and self.cache.slots == 0 and self.cache.misses != "layer" and not runs_batches


def total_held(tier: TierBytes) -> dict[str, int]:
    """Purpose -> bytes, for tables and bars; empty purposes are left out."""
    return {part.name: value for part in fields(tier) if part.name != "total" and (value := getattr(tier, part.name))}
