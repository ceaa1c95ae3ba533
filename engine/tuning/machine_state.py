"""This machine as the planner sees it: what is here, what was measured of it, what has changed since it was tuned."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from engine.checkpoint.library import read_usage
from engine.checkpoint.model_shape import ModelShape
from engine.checkpoint.names import resolve
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.formats import measured_as
from engine.hardware.gpu_info import CARD_NAMES
from engine.hardware.machine import HardwareProfile
from engine.hardware.measured import Measurements, changes, described, load_measurements, machine_profile
from engine.hardware.probe import Probe, busy_now
from engine.hardware.probe import probe as probe_machine
from engine.hardware.profiles import EMULATED, emulated_cards, with_emulated
from engine.planner.plan_parts import Limits, Plan
from engine.planner.plan_words import Change, what_if
from engine.tuning.known_speed import best_settled, results_here, with_decode
from engine.tuning.result import Correction
from engine.tuning.saved_results import all_results, kept_corrections, machine_changes, model_mark

_MUCH = 0.05
"""Share of a memory that other programs may take or give back before a plan is made again."""


@dataclass(frozen=True, slots=True)
class MachineLook:
    """A look at the machine.

    Attributes:
        probe: what operating system and drivers tell.
        device: beside the CPU, by the engine's name; empty without one.
        measurements: of that device; None if none were ever taken here.
        profile: the numbers that plans are made with.
        changed: what is another than when it was last measured or tuned, in sentences.
        others: share of the processor that other programs use now, in tenths.
        download_free: bytes free where downloads go, if that is another disk than the library's: 0 if unknown, None if
            it is the library's.
        cards: how many were asked for by their numbers; 0 for all that there are.
    """

    probe: Probe
    device: str
    measurements: Measurements | None
    profile: HardwareProfile
    changed: tuple[str, ...] = ()
    others: float = 0.0
    download_free: int | None = None
    cards: int = 0

    @property
    def free_for_files(self) -> int:
        """Bytes free on the disk that downloads go to; 0 if unknown."""
        return (self.probe.models_disk_free_bytes or 0) if self.download_free is None else self.download_free

    def is_another_situation(self, other: MachineLook) -> bool:
        """Whether a plan made with `other` may be wrong now: other hardware, numbers, or much other memory in use."""
        if (self.device, self.measurements, self.changed) != (other.device, other.measurements, other.changed):
            return True
        if described(self.probe) != described(other.probe):
            return True
        now, then, plain = self.probe.compute_gpu, other.probe.compute_gpu, EngineConfig("")
        of_card = (now.total_bytes or 0) if now is not None and then is not None else 0
        mine, theirs = self.limits(plain), other.limits(plain)
        return (
            abs(mine.ram_of_others - theirs.ram_of_others) > _MUCH * self.probe.ram_bytes
            or abs(mine.vram_of_others - theirs.vram_of_others) > _MUCH * of_card
        )

    def machine(self, precision: str, expert_bytes: float | None = None) -> HardwareProfile:
        """The profile with the reading rate of experts in this precision, of about this size if it is given."""
        machine = machine_profile(self.probe, self.measurements, precision=precision, expert_bytes=expert_bytes)
        return _with_cards(machine, self.device, self.measurements, self.cards)

    def limits(self, config: EngineConfig) -> Limits:
        """What the user's settings and other programs leave; an emulated device is nobody else's."""
        return Limits.of(
            config,
            use_card=bool(self.device),
            vram_of_others=0 if self.device.startswith(EMULATED) else self.probe.vram_in_use,
            ram_of_others=self.probe.ram_in_use,
            cpu_of_others=self.others,
        )


def look_at_machine(setting: str = "auto", device: str | None = None) -> MachineLook:
    """Asks the machine and reads what was measured.  Takes milliseconds, or seconds where a driver does not answer.

    Args:
        setting: `EngineConfig.device`.
        device: what the engine said that it measured; None to go by the setting and what is there.
    """
    probe = probe_machine()
    if device is None:
        device = _device(probe, setting)
    measured = load_measurements(probe, device)
    if measured is None and device.startswith(CARD_NAMES) and setting == "auto":
        # An engine that cannot use the card measures without it.
        without = load_measurements(probe, "")
        if without is not None:
            device, measured = "", without
    cards = 0 if setting in ("auto", "cpu", *CARD_NAMES) else sum(emulated_cards(one)[1] for one in setting.split(","))
    profile = _with_cards(machine_profile(probe, measured), device, measured, cards)
    return MachineLook(probe, device, measured, profile, changes_since(probe, device), busy_now(), cards=cards)


def _with_cards(machine: HardwareProfile, device: str, measured: Measurements | None, cards: int) -> HardwareProfile:
    """With so many of its cards, 0 for all; an emulated one that nobody measured is as it says."""
    if device.startswith(EMULATED) and (machine.gpu is None or measured is None):
        return with_emulated(machine, device)
    gpu = machine.gpu
    return machine if gpu is None or not cards else replace(machine, gpu=replace(gpu, count=cards))


def machine_for(config: EngineConfig) -> HardwareProfile:
    device = "" if config.device == "cpu" else config.device.partition("#")[0]
    return look_at_machine(config.device, device).machine(measured_as(config.precision))


def plan_here(
    look: MachineLook, model: ModelShape, asked: EngineConfig, limits: Limits, change: Change | None = None
) -> Plan:
    """The plan that the engine would choose: each precision with the rates that were measured for it.

    Where this model was timed on this machine, what came out is its figure, and other predictions are corrected by it.

    Args:
        asked: the model, and the settings that hold.
        change: other hardware, to see what it would do; of that nothing was timed.
    """
    mark = _mark(asked.model)
    if change is not None and change.gpu is not None:
        limits = replace(limits, use_card=True, vram_of_others=0)

    def machine_with(precision: str) -> HardwareProfile:
        machine = look.machine(model.measured_as(precision), model.expert_bytes(precision))
        return machine if change is None else what_if(machine, change)

    plan = best_settled(
        machine_with,
        model,
        limits,
        measured=look.measurements is not None and change is None,
        corrections=corrections_here(look, asked.model),
        results=results_here(mark, look.probe, asked) if mark is not None and change is None else (),
    )
    is_timed = bool(plan.speed.timed_at) or change is not None or mark is None
    return plan if is_timed else _as_answered(plan, look, asked)


def _as_answered(plan: Plan, look: MachineLook, asked: EngineConfig) -> Plan:
    """The plan with the speed of the model's last answers, if they came from this device, in this precision.

    How much memory they had is not known: with a budget of its own the plan stays a prediction.
    """
    usage = read_usage(resolve(asked.model))
    device, _, precision = usage.how.rpartition(", ")
    wanted = look.device if plan.card is not None else "cpu"
    rates = usage.tokens_per_s
    is_alike = (device.partition("#")[0], precision) == (wanted, plan.precision)
    if not rates or not is_alike or (asked.vram_bytes, asked.ram_bytes) != (None, None):
        return plan
    predicted, at = plan.speed.decode_tokens_per_s, datetime.fromtimestamp(usage.last_used or 0.0, UTC)
    plan = with_decode(plan, statistics.median(rates), min(rates), max(rates))
    return replace(plan, speed=replace(plan.speed, predicted=predicted, timed_at=at.isoformat(timespec="seconds")))


def corrections_here(look: MachineLook, model: str) -> tuple[Correction, ...]:
    """How far off predictions of this model were seen to be on this machine."""
    mark = _mark(model)
    return kept_corrections(mark, described(look.probe)) if mark is not None else ()


def _mark(model: str) -> str | None:
    """What results of a model are kept under; None if it is not here, so that nothing of it was ever timed."""
    try:
        return model_mark(resolve(model))
    except EngineError:
        return None


def changes_since(probe: Probe, device: str = "") -> tuple[str, ...]:
    """What is another than at the last tuning, else at the last measuring; empty if nothing is, or neither was done."""
    now = described(probe)
    results = all_results()
    if results:
        found = [machine_changes(result, now) for result in results]
        return () if any(not one for one in found) else found[0]
    return changes(probe, device)


def _device(probe: Probe, setting: str) -> str:
    if setting in CARD_NAMES:
        return f"{setting}:0"
    if setting == "auto":
        gpu = probe.compute_gpu
        return probe.card_device if gpu is not None and gpu.total_bytes else ""
    return "" if setting == "cpu" else setting
