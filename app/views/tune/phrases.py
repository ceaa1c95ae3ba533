"""The Tune page's texts: stages of a run, uses of memory, a plan's speed."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.engine_words import said
from app.widgets.memory_bar import BarPart, TierBar, memory_parts
from app.widgets.quantities import arithmetic, figures, memory, number, rate, rough
from engine.planner.plan_parts import Plan, Speed
from engine.protocol import Measured, TuningNumber, TuningProgress
from engine.tuning.machine_state import MachineLook
from engine.tuning.result import day

translate = QCoreApplication.translate

_ALIKE = 0.1
"""A prediction that is off by less needs no explanation."""


def stage_sentence(progress: TuningProgress) -> str:
    texts = {
        "probing": translate("Tune", "Looking up the hardware"),
        "waiting": translate("Tune", "Waiting for other programs, which use {0} of the CPU").format(progress.name),
        "measuring": translate("Tune", "Measuring {0}").format(progress.name)
        if progress.name
        else translate("Tune", "Measuring"),
        "planning": translate("Tune", "Planning"),
        "loading": translate("Tune", "Loading: {0}").format(progress.name),
        "timing": translate("Tune", "Timing real tokens: {0}").format(progress.name),
        "restoring": translate("Tune", "Loading {0} again").format(progress.name),
    }
    return texts[progress.stage]


def measured_name(what: Measured) -> str:
    return {
        "ram": translate("Tune", "Reading RAM"),
        "cpu_flops": translate("Tune", "CPU arithmetic"),
        "cpu_experts": translate("Tune", "Experts on the CPU"),
        "gpu_flops": translate("Tune", "GPU arithmetic"),
        "gpu_memory": translate("Tune", "Reading VRAM"),
        "gpu_experts": translate("Tune", "Experts on the GPU"),
        "h2d": translate("Tune", "RAM to the card"),
        "d2h": translate("Tune", "Card to RAM"),
        "disk": translate("Tune", "Reading the disk"),
        "decode": translate("Tune", "Decoding"),
    }[what]


def number_words(number: TuningNumber) -> str:
    if number.unit == "bytes/s":
        return rate(number.value)
    if number.unit == "flop/s":
        return arithmetic(number.value)
    return translate("Tune", "{0} tokens/s").format(figures(number.value))


def speed_headline(plan: Plan) -> str:
    """`19.7 tokens/s` if that was measured, else `About 20 tokens/s`."""
    speed = plan.speed
    if speed.timed_at:
        return translate("Tune", "{0} tokens/s").format(figures(speed.decode_tokens_per_s))
    return translate("Tune", "About {0} tokens/s").format(rough(speed.decode_tokens_per_s))


def speed_range(plan: Plan) -> str:
    speed = plan.speed
    if speed.timed_at:
        return _timed_words(speed)
    return translate("Tune", "predicted, {0} to {1} on an idle machine; first token after about {2} s").format(
        rough(speed.low), rough(speed.high), rough(speed.ttft_s)
    )


def _timed_words(speed: Speed) -> str:
    timed = translate("Tune", "measured with real tokens on {0}").format(day(speed.timed_at))
    off = speed.predicted / speed.decode_tokens_per_s - 1 if speed.decode_tokens_per_s else 0.0
    if not speed.predicted or abs(off) < _ALIKE:
        return timed
    words = (
        translate(
            "Tune",
            "{0}: use this figure. The prediction was {1}, {2}% too high: it adds up what memory and "
            "processor can do, and leaves out the engine's overhead.",
        )
        if off > 0
        else translate(
            "Tune",
            "{0}: use this figure. The prediction was {1}, {2}% too low: it is based on memory and "
            "processor measured one at a time, and together they are faster.",
        )
    )
    return words.format(timed, figures(speed.predicted), number(100 * abs(off), 0))


def plan_summary(plan: Plan) -> str:
    parts = [said(plan.words(plan.precision)), said(plan.policy)]
    parts.append(
        translate("Tune", "1 thread")
        if plan.threads == 1
        else translate("Tune", "{0} threads", "", plan.threads).format(plan.threads)
    )
    if plan.card is not None and plan.cache.all_experts:
        parts.append(translate("Tune", "all experts on the card"))
    elif plan.cache.slots:
        parts.append(translate("Tune", "{0} expert slots").format(figures(plan.cache.slots)))
        if plan.cache.hit_rate is not None:
            parts.append(translate("Tune", "about {0}% hits").format(round(100 * plan.cache.hit_rate)))
    return " · ".join(parts)


def disk_warning(plan: Plan, look: MachineLook | None) -> str:
    disk = look.probe.models_disk if look is not None else None
    if disk is None or disk.free_bytes is None or plan.written_bytes <= disk.free_bytes:
        return ""
    return translate("Tune", "Not enough disk space: {0} of experts need it, and {1} are free.").format(
        memory(plan.written_bytes), memory(disk.free_bytes)
    )


def tier_bars(plan: Plan, look: MachineLook | None) -> tuple[TierBar, ...]:
    bars = []
    if plan.card is not None:
        bars.append(TierBar(translate("Tune", "VRAM"), memory_parts(plan.card, plan.cache.slots), plan.card.total))
    bars.append(TierBar(translate("Tune", "RAM"), memory_parts(plan.ram), plan.ram.total))
    stays = [
        BarPart(name, nbytes, "disk")
        for name, nbytes in (
            (translate("Tune", "experts read on demand"), plan.disk_bytes),
            (translate("Tune", "layers read for each token"), plan.streamed_bytes),
        )
        if nbytes
    ]
    if stays:
        disk = look.probe.models_disk if look is not None else None
        free = disk.free_bytes if disk is not None and disk.free_bytes else 0
        total = free if free > plan.disk_bytes + plan.streamed_bytes else 0
        bars.append(TierBar(translate("Tune", "Disk"), tuple(stays), total))
    return tuple(bars)
