"""The table of predicted decode speeds in `docs/step-time.md`: `python -m engine.planner.step_table` prints it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from engine.checkpoint.model_shape import read_model
from engine.hardware.machine import read_machine
from engine.planner.engine_costs import engine_costs
from engine.planner.memory import share_on_disk
from engine.planner.step_time import StepTime

MACHINES = (
    "desktop-rtx-3060-12gb",
    "desktop-rtx-4060-ti-16gb",
    "desktop-rtx-4090-24gb",
    "desktop-rtx-5090-32gb",
)
MODELS = ("qwen3-30b-a3b", "gpt-oss-120b", "qwen3-235b-a22b")
_PRECISION, _CONTEXT = "int4", 4096
_MISS_RATIOS = (1.0, 0.5, 0.1)


def lines() -> Iterator[str]:
    """Of a Markdown table: each card in its shipped machine, each model in int4 after 4,096 tokens."""
    yield "| machine | model | from disk | predicted, no hits | predicted, half hits | predicted, 90% hits |"
    yield "|---|---|---|---|---|---|"
    for name in MACHINES:
        machine = read_machine(name)
        for model_name in MODELS:
            model = read_model(model_name)
            disk_share = share_on_disk(machine, model, _PRECISION)
            step = StepTime(engine_costs(machine, model, _PRECISION), context=_CONTEXT, disk_share=disk_share)
            rates = [1 / step.seconds(miss_ratio) for miss_ratio in _MISS_RATIOS]
            cells = [machine.description, model_name, f"{disk_share:.0%}", *(f"{rate:.3g}" for rate in rates)]
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines())
