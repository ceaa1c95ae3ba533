"""`switchyard bench`: measure on this machine, with peers in the same run where they can be had."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from engine.verbs.options import add_engine_options, engine_config, positive_int
from engine.verbs.output import emit, note


def add_parser(subparsers: Any) -> None:
    """Mount the verb and its kinds."""
    parser = subparsers.add_parser("bench", help="measure this machine, with peers in the same run")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{startup,decode}")

    startup = kinds.add_parser(
        "startup", help="seconds to a usable window and to the first token; longest wait of the GUI"
    )
    startup.add_argument("--repeats", type=positive_int, default=5, metavar="N")
    startup.add_argument("--json", action="store_true", help="print one JSON document")
    startup.set_defaults(run=_run_startup)

    decode = kinds.add_parser("decode", help="tokens per second at batch 1")
    decode.add_argument(
        "--model", default="starter", metavar="M", help="starter, a library name or a checkpoint folder"
    )
    decode.add_argument("--tokens", type=positive_int, default=48, metavar="N", help="tokens decoded per repeat")
    decode.add_argument("--repeats", type=positive_int, default=5, metavar="N")
    decode.add_argument("--peers", action="store_true", help="run transformers beside us, in turn")
    decode.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine_options(decode)
    decode.set_defaults(run=_run_decode)


def _run_startup(args: argparse.Namespace) -> int:
    from engine.bench.report import Report
    from engine.bench.startup import bench_startup

    report = Report(_machine())
    bench_startup(args.repeats, report, note)
    emit(report.document(), as_json=args.json, human=report.text)
    return 0


def _run_decode(args: argparse.Namespace) -> int:
    from engine.bench.decode import DecodePlan, bench_decode
    from engine.bench.report import Report
    from engine.checkpoint.library import resolve

    checkpoint = resolve(args.model)
    report = Report(_machine())
    plan = DecodePlan(args.tokens, args.repeats, args.peers)
    bench_decode(engine_config(args, str(checkpoint)), checkpoint, plan, report, note)
    emit(report.document(), as_json=args.json, human=report.text)
    return 0


def _machine() -> dict[str, Any]:
    from engine.hardware.probe import probe

    return dataclasses.asdict(probe())
