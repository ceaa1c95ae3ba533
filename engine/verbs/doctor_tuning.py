"""`doctor`'s check of tuning: done, never done, or outdated."""

from __future__ import annotations

from engine.hardware.measured import described
from engine.hardware.probe import Probe
from engine.tuning.keeping import all_results, day, machine_changes
from engine.verbs.doctor_checks import Finding, Status

_SHOWN = 3


def tuning_findings(hardware: Probe) -> list[Finding]:
    """The models tuned on this machine; advice if there are none, or the machine has changed."""
    results = [one for one in all_results() if one.won is not None]
    if not results:
        action = "Run `switchyard tune --model M` for the model you use."
        return [Finding("tuning", Status.ADVICE, "No model has been tuned on this machine yet.", action)]
    now = described(hardware)
    here = [one for one in results if not machine_changes(one, now)]
    if not here:
        changed = machine_changes(results[0], now)[0]
        return [Finding("tuning", Status.ADVICE, f"It is out of date: {changed}", "Run `switchyard tune` again.")]
    latest = {one.model: one for one in reversed(here)}
    doubtful = next((one for one in latest.values() if not one.is_trusted), None)
    if doubtful is not None:
        why = (
            f"has since run at {doubtful.outrun:.1f} tokens/s, much faster than what was timed"
            if doubtful.outrun
            else f"was tuned while other programs used {doubtful.others:.0%} of the CPU"
        )
        return [Finding("tuning", Status.ADVICE, f"{doubtful.model} {why}.", "Run `switchyard tune` again.")]
    said = [
        f"{name} at {one.won.tokens_per_s:.1f} tokens/s on {day(one.taken_at)}"
        for name, one in list(latest.items())[-_SHOWN:]
        if one.won is not None
    ]
    more = f" and {len(latest) - _SHOWN} more" if len(latest) > _SHOWN else ""
    return [Finding("tuning", Status.OK, "; ".join(said) + more)]
