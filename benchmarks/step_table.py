"""The tables of predicted decode speeds in `docs/step-time.md`: `python -m benchmarks.step_table` prints them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from engine.checkpoint.model_shape import read_model
from engine.hardware.machine import read_machine
from engine.planner.costs import engine_costs
from engine.planner.plan_parts import share_on_disk
from engine.planner.step_time import StepTime, ways_of_step

MACHINES = {
    "RTX 3060": "desktop-rtx-3060-12gb",
    "RTX 4060 Ti": "desktop-rtx-4060-ti-16gb",
    "RTX 4090": "desktop-rtx-4090-24gb",
    "RTX 5090": "desktop-rtx-5090-32gb",
}
MODELS = ("qwen3-30b-a3b", "gpt-oss-120b", "qwen3-235b-a22b")
_PRECISION, _CONTEXT = "int4", 4096
_NEW_EXPERTS = 0.7
"""Share of a token's experts that the tokens before it, checked in the same step, did not use: assumed."""


def lines() -> Iterator[str]:
    """Of a Markdown table: each card in its shipped machine, each model in int4 after 4,096 tokens."""
    ways = ("no hits", "half hits", "90% hits", "half hits, by the dispatcher")
    yield f"| card | RAM, GB | model | on disk | {' | '.join(f'predicted, {way}' for way in ways)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for card, name in MACHINES.items():
        machine = read_machine(name)
        for model_name in MODELS:
            model = read_model(model_name)
            disk_share = share_on_disk(machine, model, _PRECISION)
            costs = engine_costs(machine, model, _PRECISION)
            now = StepTime(costs, context=_CONTEXT, disk_share=disk_share)
            without = engine_costs(machine, model, _PRECISION, captures=False)
            dispatched = StepTime(without, context=_CONTEXT, disk_share=disk_share)
            seconds = [*(now.seconds(miss_ratio) for miss_ratio in (1.0, 0.5, 0.1)), dispatched.seconds(0.5)]
            cells = [card, f"{machine.cpu.ram_bytes / 2**30:.0f}", model_name, f"{disk_share:.0%}"]
            yield f"| {' | '.join([*cells, *(f'{1 / each:.3g}' for each in seconds)])} |"


def drafts_lines() -> Iterator[str]:
    """Of a Markdown table: what each further token takes that is checked in the same graph, in steps of one token."""
    shares = (0.5, 0.1, 0.0)
    yield f"| card | model | rows | {' | '.join(f'{1 - share:.0%} hits' for share in shares)} |"
    yield "|---|---|---|---|---|---|"
    for card, name in MACHINES.items():
        machine = read_machine(name)
        for model_name in MODELS:
            model = read_model(model_name)
            asking = ways_of_step(engine_costs(machine, model, _PRECISION), "mixed")[-1]
            if share_on_disk(machine, model, _PRECISION) or not asking.dispatch.by_flags:
                continue
            one = StepTime(asking, way="cpu", context=_CONTEXT)
            for rows in (2, 4, 8):
                many = replace(one, rows=rows, new_experts=_NEW_EXPERTS)
                further = [
                    ((many.seconds(share) - many.drafts_s) / one.seconds(share) - 1) / (rows - 1) for share in shares
                ]
                yield f"| {' | '.join([card, model_name, str(rows), *(f'{each:.2f}' for each in further)])} |"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in (*lines(), "", *drafts_lines()))
