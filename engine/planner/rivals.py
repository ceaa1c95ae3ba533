"""All published speeds beside their predictions, and how far the two are apart.

Predicts published decode speeds of other programs with the engine's own model of a step's time.

No number is a result's, a program's or a machine's own: four hold for all of them (`FACTORS`).
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from engine.checkpoint.model_shape import ModelShape, read_model, shape_in
from engine.common.json_fields import ProfileFile
from engine.common.paths import resources_dir
from engine.hardware.machine import HardwareProfile, machine_in
from engine.planner.costs import Costs, Dispatch, Efficiency, Factor
from engine.planner.plan_parts import USABLE_SHARE
from engine.planner.simulator.strategy import (
    PUBLISHED_STATISTICS,
    STRONGEST_STATISTICS,
    Residency,
    RoutingSkew,
    SimulatedResidents,
    popularity,
    routing,
)
from engine.planner.step_time import StepTime


@dataclass(frozen=True, slots=True)
class SizedModel(ModelShape):
    """A model in a file whose sizes are known, whatever its formats are called.

    Attributes:
        expert_bits: per weight of a routed expert; other_bits: of all other weights.
    """

    expert_bits: float = 16.0
    other_bits: float = 16.0

    def expert_bytes(self, precision: str) -> float:  # noqa: ARG002
        return self.expert_weights * self.expert_bits / 8

    def layer_bytes_per_weight(self, precision: str) -> float:  # noqa: ARG002
        return self.other_bits / 8

    def head_bytes_per_weight(self, precision: str) -> float:  # noqa: ARG002
        return self.other_bits / 8


@dataclass(frozen=True, slots=True)
class Method:
    """The mechanism behind a published speed, with the numbers that its source gives.

    Attributes:
        way: where experts that miss are computed: `cpu`, `fetch` (on the card), `mixed` (both at once), or `processor`
            if no card takes part, in which case a miss is an expert that is read from disk.
        hits: share of expert uses that hit; None to derive it from `slots` and `policy`.
        slots: experts on the card; None for as many as fit.
        policy: of the cache: `lru`, or `static` for the most used ones.
        whole_layers: layers with all of their experts on the card.
        disk_share: share of the misses that is on disk.
        reads_ahead: the processor computes while the disk reads.
        experts_per_token: if not the model's own.
        tokens_per_step: tokens that a step yields; accepted: share of drafts that are accepted; 1 without drafts.
        context: tokens that each step attends to.
        threads: 0 for all cores.
        reserved_gb: of the card's memory, not for experts.
    """

    way: str
    hits: float | None = None
    slots: int | None = None
    policy: str = "lru"
    whole_layers: int = 0
    disk_share: float = 0.0
    reads_ahead: bool = False
    experts_per_token: int | None = None
    tokens_per_step: float = 1.0
    accepted: float = 1.0
    context: int = 256
    threads: int = 0
    reserved_gb: float = 1.0

    @property
    def rows(self) -> float:
        """Tokens that a step computes: the one it yields anyway, and all drafts, accepted or not."""
        return 1 + (self.tokens_per_step - 1) / self.accepted


@dataclass(frozen=True, slots=True)
class PublishedSpeed:
    """One published decode speed.

    Attributes:
        program: what was measured.
        group: what it is compared with in its source: results of one program and group.
        result: its name in the group.
        model, machine: as the source describes them.
        method: see `Method`.
        tokens_per_s: as published.
        source: an address; by: who measured it.
        note: what was assumed.
    """

    program: str
    group: str
    result: str
    model: SizedModel
    machine: HardwareProfile
    method: Method
    tokens_per_s: float
    source: str
    by: str
    note: str = ""


def read_rivals() -> list[PublishedSpeed]:
    """All published speeds, in the order of their file."""
    file = ProfileFile(resources_dir() / "rivals.json")
    machines, models = file.part("machines"), file.part("models")
    known = {name: machine_in(machines.part(name), name) for name in machines.content}
    shapes = {name: shape_in(models.part(name), name) for name in models.content}
    return [_speed(dict(result), known, shapes) for result in file.content["results"]]


def _speed(
    result: dict[str, Any], machines: Mapping[str, HardwareProfile], shapes: Mapping[str, ModelShape]
) -> PublishedSpeed:
    method, name = Method(**result.pop("method")), result.pop("model")
    shape = shapes.get(name) or read_model(name)
    values: dict[str, Any] = {field.name: getattr(shape, field.name) for field in fields(shape)}
    values["experts_per_token"] = method.experts_per_token or shape.experts_per_token
    values |= {bits: result.pop(bits) for bits in ("expert_bits", "other_bits")}
    return PublishedSpeed(
        model=SizedModel(**values),
        machine=machines[result.pop("machine")],
        method=method,
        tokens_per_s=result.pop("published"),
        **result,
    )


EFFICIENCY = Efficiency(arithmetic=0.35, card_memory=0.5, host_memory=0.35, operator_s=4e-6)
"""The least mean of |log(predicted / published)|, clipped at 0.5, over every other result, on a grid of four numbers;
arithmetic is the planner's own and decides nothing here.  The results in between did not decide about these numbers."""
HANDOVER = Dispatch(layer_s=50e-6)
"""Found together with them."""


FACTORS = (
    Factor("host_memory", EFFICIENCY.host_memory, "share of the RAM's theoretical bandwidth at which processors read"),
    Factor("card_memory", EFFICIENCY.card_memory, "share of a card's memory bandwidth at which weights are read"),
    Factor("operator_s", EFFICIENCY.operator_s, "seconds to launch one operator on a card"),
    Factor("handover_s", HANDOVER.layer_s, "seconds a layer between card and processor: the routing's way and back"),
)
"""The only fitted numbers."""
_LAYERS, _TOKENS, _WARM_UP = 4, 96, 32
_FEW = 16
"""Experts of a layer up to which favourites are as weak as published for Mixtral; above, as in recorded answers."""


def predicted_tokens_per_s(speed: PublishedSpeed) -> float:
    """Predicted decode speed of what a source describes."""
    method = speed.method
    costs = Costs(
        speed.machine, speed.model, threads=method.threads, efficiency=EFFICIENCY, dispatch=HANDOVER, score_bytes=0.0
    )
    on_card = method.way != "processor"
    step = StepTime(
        costs,
        on_card=on_card,
        way=method.way,
        context=method.context,
        disk_share=method.disk_share if on_card else 1.0,
        rows=method.rows,
        new_experts=new_experts(speed.model.experts, speed.model.experts_per_token) if method.rows > 1 else 1.0,
        reads_ahead=method.reads_ahead,
    )
    seconds = step.seconds(1 - hit_rate(speed), whole_layers=method.whole_layers)
    return method.tokens_per_step / seconds


def hit_rate(speed: PublishedSpeed) -> float:
    """Share of expert uses that hit: as published, else of synthetic routing with the cache that is described."""
    if speed.method.hits is not None:
        return speed.method.hits
    model = speed.model
    every = model.moe_layers * model.experts
    slots = speed.method.slots if speed.method.slots is not None else _fitting(speed)
    return expected_hits(model.experts, model.experts_per_token, min(slots / every, 1.0), speed.method.policy)


def _fitting(speed: PublishedSpeed) -> int:
    """Experts that fit on the card next to all other weights and the context's keys and values."""
    model, method = speed.model, speed.method
    others = model.non_expert_weights * model.other_bits / 8
    kv = model.kv_bytes_per_token() * method.context
    free = USABLE_SHARE * speed.machine.vram_bytes - others - kv - method.reserved_gb * 1e9
    return max(0, int(free / model.expert_bytes("")))


@functools.cache
def expected_hits(experts: int, per_token: int, share: float, policy: str) -> float:
    """Hits of a cache for this share of a layer's experts, from the planner's synthetic routing.

    Args:
        experts, per_token: of a layer.
        policy: `lru`, or `static` for the most popular ones.
    """
    statistics = _statistics(experts)
    shares = popularity(_LAYERS, experts, statistics)
    ways = round(share * experts)
    if not ways:
        return 0.0
    residency = Residency.STATIC if policy == "static" else Residency.CACHE
    residents = SimulatedResidents(residency, shares, ways * _LAYERS, ways)
    hits = uses = 0
    for number, token in enumerate(routing(_LAYERS, experts, per_token, _TOKENS, statistics)):
        for layer, chosen in enumerate(token[:, 0]):
            ids = [int(expert) for expert in chosen]
            found = [expert for expert in ids if residents.arrival(layer, expert) is not None]
            if number >= _WARM_UP:
                hits, uses = hits + len(found), uses + len(ids)
            residents.touch(layer, ids)
            for expert in ids:
                if expert not in found and residents.can_admit(layer, ids, 0.0):
                    residents.admit(layer, expert, 0.0, ids, 0.0)
    return hits / uses


@functools.cache
def new_experts(experts: int, per_token: int) -> float:
    """Share of a token's experts that the token before it did not use, from the same routing."""
    drawn = routing(_LAYERS, experts, per_token, _TOKENS, _statistics(experts))[:, :, 0]
    pairs = zip(drawn[:-1].reshape(-1, per_token), drawn[1:].reshape(-1, per_token), strict=True)
    again = sum(len(set(before.tolist()) & set(after.tolist())) for before, after in pairs)
    return 1 - again / ((_TOKENS - 1) * _LAYERS * per_token)


def _statistics(experts: int) -> RoutingSkew:
    return PUBLISHED_STATISTICS if experts <= _FEW else STRONGEST_STATISTICS


@dataclass(frozen=True, slots=True)
class ComparedSpeed:
    """A published speed and its prediction.

    Attributes:
        published: what its source says.
        tokens_per_s: predicted.
        hit_rate: that the prediction rests on.
        fitted: whether the factors were chosen with it.
    """

    published: PublishedSpeed
    tokens_per_s: float
    hit_rate: float
    fitted: bool

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.tokens_per_s / self.published.tokens_per_s


@dataclass(frozen=True, slots=True)
class Order:
    """How well predictions rank what a source compares.

    Attributes:
        group: the comparison.
        pairs: of its results; right: those that the prediction ranks as published.
    """

    group: str
    pairs: int
    right: int

    @property
    def correlation(self) -> float:
        """Kendall's tau: 1 if all pairs are right, -1 if none is."""
        return 2 * self.right / self.pairs - 1


def all_speeds() -> list[ComparedSpeed]:
    """All published speeds, predicted, in the order of their file."""
    return [
        ComparedSpeed(speed, predicted_tokens_per_s(speed), hit_rate(speed), fitted=number % 2 == 0)
        for number, speed in enumerate(read_rivals())
    ]


def median_error(speeds: Sequence[ComparedSpeed]) -> float:
    """Median of |predicted / published - 1|."""
    return statistics.median(abs(speed.ratio - 1) for speed in speeds)


def orders(speeds: Sequence[ComparedSpeed]) -> list[Order]:
    """The order within each comparison of at least two results; no source compares with another."""
    groups: dict[str, list[ComparedSpeed]] = {}
    for speed in speeds:
        groups.setdefault(group_of(speed.published), []).append(speed)
    found = []
    for group, members in groups.items():
        pairs = list(itertools.combinations(members, 2))
        right = sum(
            (one.tokens_per_s - other.tokens_per_s) * (one.published.tokens_per_s - other.published.tokens_per_s) > 0
            for one, other in pairs
        )
        if pairs:
            found.append(Order(group, len(pairs), right))
    return found


def group_of(speed: PublishedSpeed) -> str:
    """The comparison that a result is part of: what one source measured of one model."""
    return f"{speed.group} ({speed.source})"


def document(speeds: Sequence[ComparedSpeed]) -> dict[str, object]:
    ranked = orders(speeds)
    return {
        "results": [_entry(speed) for speed in speeds],
        "factors": [asdict(each) for each in FACTORS],
        "median_error": {
            "all": median_error(speeds),
            "fitted": median_error([speed for speed in speeds if speed.fitted]),
            "others": median_error([speed for speed in speeds if not speed.fitted]),
        },
        "orders": [
            {"group": each.group, "pairs": each.pairs, "right": each.right, "correlation": each.correlation}
            for each in ranked
        ],
        "pairs": sum(each.pairs for each in ranked),
        "pairs_right": sum(each.right for each in ranked),
    }


def _entry(speed: ComparedSpeed) -> dict[str, object]:
    published = speed.published
    return {
        "program": published.program,
        "group": published.group,
        "result": published.result,
        "model": published.model.name,
        "machine": published.machine.description,
        "assumed": published.machine.source,
        "published": published.tokens_per_s,
        "predicted": round(speed.tokens_per_s, 4),
        "ratio": round(speed.ratio, 4),
        "hit_rate": round(speed.hit_rate, 4),
        "fitted": speed.fitted,
        "by": published.by,
        "source": published.source,
        "note": published.note,
    }
