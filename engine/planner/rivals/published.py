"""Published decode speeds: what was run on which machine, how fast it was, and who says so.

They are data: `resources/rivals.json`, read and checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.checkpoint.model_shape import ModelShape, read_model, shape_in
from engine.common.paths import resources_dir
from engine.common.profile_file import ProfileFile, refused
from engine.hardware.machine import HardwareProfile, machine_in

WAYS = ("cpu", "fetch", "mixed", "processor")
POLICIES = ("lru", "static")
_SHARES, _NUMBERS = ("hits", "disk_share", "accepted"), ("tokens_per_step", "reserved_gb")


@dataclass(frozen=True, slots=True)
class SizedModel(ModelShape):
    """A model in a file whose sizes are known, whatever its formats are called.

    Attributes:
        expert_bits: per weight of a routed expert; other_bits: of all other weights.
    """

    expert_bits: float = 16.0
    other_bits: float = 16.0

    def expert_bytes(self, precision: str) -> float:  # noqa: ARG002
        """See `ModelShape.expert_bytes`."""
        return self.expert_weights * self.expert_bits / 8

    def layer_bytes_per_weight(self, precision: str) -> float:  # noqa: ARG002
        """See `ModelShape.layer_bytes_per_weight`."""
        return self.other_bits / 8

    def head_bytes_per_weight(self, precision: str) -> float:  # noqa: ARG002
        """See `ModelShape.head_bytes_per_weight`."""
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


def rivals_file() -> Path:
    return resources_dir() / "rivals.json"


def read_rivals(path: Path | None = None) -> list[PublishedSpeed]:
    """All published speeds, in the order of the file.

    Raises:
        EngineError: `INVALID_REQUEST` if the file has invalid values.
    """
    file = ProfileFile(path or rivals_file())
    machines, models = file.part("machines"), file.part("models")
    known = {name: machine_in(machines.part(name), name) for name in machines.content}
    shapes = {name: shape_in(models.part(name), name) for name in models.content}
    results = file.content.get("results")
    if not isinstance(results, list):
        raise refused(file.path, "has no list 'results'")
    return [
        _speed(ProfileFile(file.path, _object(file.path, entry), f"results.{index}."), known, shapes)
        for index, entry in enumerate(results)
    ]


def _object(path: Path, entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise refused(path, "has a result that is not an object")
    return entry


def _speed(
    file: ProfileFile, machines: Mapping[str, HardwareProfile], shapes: Mapping[str, ModelShape]
) -> PublishedSpeed:
    machine = machines.get(file.text("machine"))
    if machine is None:
        raise refused(file.path, f"has no machine {file.text('machine')!r}, which {file.prefix}machine names")
    method = _method(file.part("method"))
    shape = shapes.get(file.text("model")) or read_model(file.text("model"))
    values: dict[str, Any] = {field.name: getattr(shape, field.name) for field in fields(shape)}
    values["experts_per_token"] = method.experts_per_token or shape.experts_per_token
    values |= {name: file.number(name, 0.5, 32) for name in ("expert_bits", "other_bits")}
    return PublishedSpeed(
        program=file.text("program"),
        group=file.text("group"),
        result=file.text("result"),
        model=SizedModel(**values),
        machine=machine,
        method=method,
        tokens_per_s=file.number("published", 1e-3, 1e5),
        source=file.text("source"),
        by=file.text("by"),
        note=file.text("note") if "note" in file.content else "",
    )


def _method(file: ProfileFile) -> Method:
    content = dict(file.content)
    unknown = sorted(set(content) - {field.name for field in fields(Method)})
    if unknown:
        raise refused(file.path, f"has {file.prefix}{unknown[0]}, which means nothing")
    way, policy = file.text("way"), content.get("policy", "lru")
    if way not in WAYS or policy not in POLICIES:
        raise refused(file.path, f"has a {file.prefix}way or policy that does not exist")
    values: dict[str, Any] = {"way": way, "policy": policy, "reads_ahead": content.get("reads_ahead", False) is True}
    for name in sorted(set(content) - set(values)):
        if name in _SHARES:
            values[name] = file.number(name, 0.01 if name == "accepted" else 0, 1)
        elif name in _NUMBERS:
            values[name] = file.number(name, 0, 1000)
        else:
            values[name] = file.whole(name, 0, 10**7)
    return Method(**values)
