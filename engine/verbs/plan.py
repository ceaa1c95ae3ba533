"""`switchyard plan`: how a model would run on a machine: memory, placement, speed."""

from __future__ import annotations

import argparse
from typing import Any

from engine.verbs.output import emit
from engine.verbs.planning import add_plan_options, plan_document, plan_of, plan_text, workload_of


def add_parser(subparsers: Any) -> None:
    """Mount the verb."""
    parser = subparsers.add_parser("plan", help="how a model would run, and how fast")
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="starter, a library name, a folder, a profile in resources/models, or a hub id such as Qwen/Qwen3-30B-A3B",
    )
    add_plan_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plans and prints; see `add_parser`."""
    from engine.checkpoint.find_shape import find_shape

    workload = workload_of(args)
    plan = plan_of(args, find_shape(args.model), workload)
    emit(plan_document(plan), as_json=args.json, human=lambda: plan_text(plan))
    return 0
