"""`switchyard bench`: benchmarks on this machine.  A checkout adds what maintainers measure with, and peers."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.bench.opened import from_checkout
from engine.verbs.options import add_engine_options, engine_config, positive_int
from engine.verbs.output import emit, note

if TYPE_CHECKING:
    from engine.bench.report import Report
    from engine.common.config import EngineConfig


def add_parser(subparsers: Any) -> None:
    """Mount the verb and its kinds."""
    parser = subparsers.add_parser("bench", help="measure this machine, with peers in the same run")
    kinds = parser.add_subparsers(dest="kind", required=True)

    startup = kinds.add_parser(
        "startup",
        help="seconds to a usable window and to the first token, and where they go; longest wait of the GUI; with "
        "--model, seconds of its second start against reading its prepared files",
    )
    add_model(startup)
    startup.set_defaults(model=None)
    add_common(startup, repeats=5)
    add_engine_options(startup)
    startup.set_defaults(run=_run_startup)

    decode = kinds.add_parser("decode", help="tokens per second at batch 1")
    add_model(decode)
    decode.add_argument("--tokens", type=positive_int, default=48, metavar="N", help="tokens decoded per repeat")
    decode.add_argument(
        "--contexts",
        "--prompt-tokens",
        type=lengths,
        metavar="N,N",
        default=(None,),
        help="lengths of the prompt before them, a row for each (default: a sentence)",
    )
    add_common(decode, repeats=5)
    add_engine_options(decode)
    decode.set_defaults(run=runs("engine.bench.decode:bench_decode", "DecodePlan", "tokens", "repeats", "contexts"))

    prefill = kinds.add_parser("prefill", help="tokens per second of a long prompt, and the decode cache after it")
    add_model(prefill)
    prefill.add_argument("--prompt-tokens", type=positive_int, default=2000, metavar="N", help="length of the prompt")
    prefill.add_argument("--tokens", type=positive_int, default=96, metavar="N", help="decoded before and after it")
    add_common(prefill, repeats=3)
    add_engine_options(prefill)
    prefill.set_defaults(
        run=runs("engine.bench.decode:bench_prefill", "PrefillPlan", "prompt_tokens", "tokens", "repeats")
    )

    batch = kinds.add_parser("batch", help="tokens per second of many rows together")
    add_model(batch)
    batch.add_argument("--rows", type=positive_int, default=64, metavar="N", help="prompts")
    batch.add_argument("--tokens", type=positive_int, default=32, metavar="N", help="generated for each")
    add_common(batch, repeats=3)
    add_engine_options(batch)
    batch.set_defaults(run=runs("engine.bench.decode:bench_batch", "BatchBenchPlan", "rows", "tokens", "repeats"))

    kernels = kinds.add_parser("kernels", help="CPU expert kernels on cold weights, against the read bandwidth")
    kernels.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads that compute")
    kernels.add_argument("--tokens", type=positive_int, default=1, metavar="N", help="tokens per call")
    add_common(kernels, repeats=5)
    kernels.set_defaults(run=_run_kernels)

    telemetry = kinds.add_parser("telemetry", help="decode with all telemetry on against off")
    add_model(telemetry)
    telemetry.add_argument("--tokens", type=positive_int, default=16, metavar="N", help="tokens decoded per stretch")
    add_common(telemetry, repeats=250)
    add_engine_options(telemetry)
    telemetry.set_defaults(run=runs("engine.bench.telemetry:bench_telemetry", "TelemetryPlan", "tokens", "repeats"))

    card = kinds.add_parser("card", help="ten minutes on a graphics card: tests, link, kernels, decoding, in a file")
    card.add_argument("--device", default="cuda:0", metavar="D", help="cuda:0, or emulated:NAME to see what it does")
    card.add_argument("--model", metavar="M", help="as for decode (default: eight layers of Qwen3-30B-A3B's shape)")
    card.add_argument("--folder", type=Path, default=Path("docs/cards"), metavar="DIR", help="(default: docs/cards)")
    card.add_argument("--json", action="store_true", help="print one JSON document")
    card.set_defaults(run=_run_card)

    more = from_checkout("kinds")
    if more is not None:
        more.add_kinds(kinds)
    kinds.metavar = f"{{{','.join(kinds.choices)}}}"
    for kind in kinds.choices.values():
        kind.set_defaults(run=_leaving_nothing(kind.get_default("run")))


def _leaving_nothing(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The same, without a trace of what it prepares of models, or in precisions, that are there to be measured."""

    def leaving_nothing(args: argparse.Namespace) -> int:
        from engine.checkpoint.synthetic import is_synthetic

        many = args.kind == "card" or getattr(args, "predict", False) or getattr(args, "brute_force", False)
        if not many and not is_synthetic(getattr(args, "model", None) or ""):
            return run(args)
        from engine.bench.opened import prepared_apart

        with prepared_apart():
            return run(args)

    return leaving_nothing


def add_common(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    parser.add_argument("--repeats", type=positive_int, default=repeats, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def lengths(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part) for part in text.split(","))


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="starter",
        metavar="M",
        help="starter, a library name, a checkpoint folder, a GGUF file, or synthetic:NAME?layers=4 for random weights "
        "(&gguf=Q4_K_M: in a GGUF file, with the types that llama.cpp chooses)",
    )


def reported(bench: Callable[[argparse.Namespace, Report], None]) -> Callable[[argparse.Namespace], int]:
    """A verb's run that prints what a benchmark has reported."""

    def run(args: argparse.Namespace) -> int:
        report = new_report()
        bench(args, report)
        return emit_report(report, args)

    return run


def runs(bench: str, plan: str | None, *options: str, opens: bool = True) -> Callable[[argparse.Namespace], int]:
    """The run of a benchmark, `module:function`.

    Args:
        plan: the class in its module that takes these options of the command line; None: they are arguments.
        opens: whether the first argument is the configuration of a model.
    """

    @reported
    def run(args: argparse.Namespace, report: Report) -> None:
        config = [config_of(args)] if opens else []  # before torch is imported
        name, _, function = bench.partition(":")
        module, given = importlib.import_module(name), [getattr(args, option) for option in options]
        getattr(module, function)(*config, *([getattr(module, plan)(*given)] if plan else given), report, note)

    return run


def _run_startup(args: argparse.Namespace) -> int:
    if args.model is not None:
        config, report = config_of(args), new_report()
        from engine.bench.startup import bench_second_start

        bench_second_start(config, args.repeats, report, note)
        return emit_report(report, args)
    from engine.bench.startup import bench_startup

    report = new_report()
    bench_startup(args.repeats, report, note)
    return emit_report(report, args)


def _run_kernels(args: argparse.Namespace) -> int:
    from engine.bench.kernels import bench_kernels
    from engine.common.errors import EngineError, ErrorCode
    from engine.kernels.native.build import BuildError, build

    try:
        build()
    except BuildError as failure:
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE, f"There are no native kernels to measure: {failure}."
        ) from failure
    return emit_report(bench_kernels(args.threads, args.repeats, tokens=args.tokens, on_progress=note), args)


def _run_card(args: argparse.Namespace) -> int:
    from engine.bench.card.run import MODEL, as_markdown, bench_card

    done = bench_card(args.device, args.model or MODEL, args.folder, note)
    emit(done, as_json=args.json, human=lambda: as_markdown(done))
    return 0 if all(part["outcome"] in ("done", "skipped") for part in done["parts"]) else 1


def config_of(args: argparse.Namespace) -> EngineConfig:
    """What to open; sets the environment of torch, so nothing that imports it comes before."""
    from engine.process.lifetime import quiet_libraries

    quiet_libraries()
    from engine.bench.opened import resolve_model

    checkpoint = resolve_model(args.model, note)
    # Random weights, and tokens past an end, repeat themselves: drafted, they would be timed as if all answers did.
    return dataclasses.replace(engine_config(args, str(checkpoint)), speculation="off")


def new_report() -> Report:
    from engine.bench.report import Report
    from engine.hardware.probe import probe

    return Report(dataclasses.asdict(probe()))


def emit_report(report: Report, args: argparse.Namespace) -> int:
    emit(report.document(), as_json=args.json, human=report.text)
    return 0
