"""The page's contents as plain text, for the clipboard."""

from __future__ import annotations

from app.views.tune.machine_boxes import machine_boxes
from app.views.tune.phrases import plan_summary, speed_headline, speed_range
from app.widgets.quantities import memory
from engine.planner.plan_parts import Plan, TierBytes, total_held
from engine.tuning.machine_look import MachineLook
from engine.tuning.report import report_text
from engine.tuning.result import TuningResult


def page_report(look: MachineLook | None, plan: Plan | None, result: TuningResult | None) -> str:
    """The machine with each number's source, the plan with its memory, and the timings."""
    parts = []
    if look is not None:
        boxes, links = machine_boxes(look, {})
        lines = ["Machine", *(f"  {box.spoken}" for box in boxes), *(f"  {link.spoken}" for link in links)]
        if look.measurements is not None:
            lines.append(f"  Measurements: {look.measurements.kind}, {look.measurements.taken_at}")
            lines += [f"  {note}" for note in look.measurements.notes]
        parts.append("\n".join(lines))
    if plan is not None:
        lines = [f"Plan for {plan.model}", f"  {plan_summary(plan)}", f"  {speed_headline(plan)}, {speed_range(plan)}"]
        if plan.card is not None:
            lines.append(_tier("VRAM", plan.card))
        lines.append(_tier("RAM", plan.ram))
        if plan.disk_bytes:
            lines.append(f"  Disk: {memory(plan.disk_bytes)} of experts, read on demand")
        parts.append("\n".join([*lines, f"  {plan.bottleneck}", f"  {plan.what_helps}"]))
    if result is not None:
        parts.append(report_text(result))
    return "\n\n".join(parts) + "\n" if parts else ""


def _tier(name: str, tier: TierBytes) -> str:
    held = ", ".join(f"{purpose.replace('_', ' ')} {memory(nbytes)}" for purpose, nbytes in total_held(tier).items())
    return f"  {name} {memory(tier.total)}: {held}, free {memory(tier.free)}"
