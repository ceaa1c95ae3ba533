"""`switchyard models fit`: whether a model can run on a machine, and how fast."""

from __future__ import annotations

import argparse
from typing import Any

from engine.common.errors import EngineError, ErrorCode
from engine.verbs.models.actions import MODEL, AddAction
from engine.verbs.output import emit
from engine.verbs.plan import add_plan_options, plan_of, timing_text, workload_of


def add_actions(action: AddAction) -> None:
    """Adds them to the verb."""
    fitting = action("fit", "whether a model can run on a machine, and how fast, without downloading it", _fit)
    fitting.add_argument("model", metavar="M", help=f"{MODEL}, a profile in resources/models, or a hub id")
    add_plan_options(fitting)


def _fit(args: argparse.Namespace) -> int:
    from engine.checkpoint.find_shape import find_shape  # imports numpy, which no other action needs
    from engine.hardware.machine import read_machine

    workload, shape = workload_of(args), find_shape(args.model)
    machine = read_machine(args.hardware).name if args.hardware else "this machine"
    document: dict[str, Any] = {"model": shape.name, "machine": machine, "parameters": shape.total_weights}
    try:
        plan = plan_of(args, shape, workload)
    except EngineError as error:
        if error.code is not ErrorCode.NOT_ENOUGH_MEMORY:
            raise
        document |= {"fits": False, "why": error.message}
        emit(document, as_json=args.json, human=f"No. {error.message}")
        return 2
    speed = plan.speed
    document |= {
        "fits": True,
        "why": plan.bottleneck,
        "precision": plan.precision,
        "policy": plan.policy,
        "decode_tokens_per_s": speed.decode_tokens_per_s,
        "low": speed.low,
        "high": speed.high,
        "timing": timing_text(speed),
        "ttft_s": speed.ttft_s,
        "card_bytes": plan.card.held if plan.card is not None else 0,
        "ram_bytes": plan.ram.held,
        "disk_bytes": plan.disk_bytes,
        "what_helps": plan.what_helps,
    }
    emit(
        document,
        as_json=args.json,
        human=lambda: (
            f"Yes: about {speed.decode_tokens_per_s:.3g} tokens/s ({speed.low:.3g} to {speed.high:.3g}), "
            f"{plan.words(plan.precision)}, first token after {speed.ttft_s:.2g} s.\n"
            + "".join(f"{line}\n" for line in [timing_text(speed)] if line)
            + f"{plan.bottleneck}\n{plan.what_helps}"
        ),
    )
    return 0
