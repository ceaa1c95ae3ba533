"""`switchyard tune`: measure this machine, plan for a model, time real tokens, save the winner.

Results taken while other programs were busy are saved only if the user confirms, or with `--even-if-busy`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine.common.errors import EngineError, ErrorCode
from engine.verbs.options import add_engine_options, engine_config
from engine.verbs.output import clear_progress, emit, note, show_progress

if TYPE_CHECKING:
    from engine.protocol import TuningFinished
    from engine.tuning.run import TuningEvent

_STAGES = {
    "probing": "detecting hardware",
    "waiting": "waiting for other programs, which use",
    "measuring": "measuring",
    "planning": "planning",
    "loading": "loading",
    "timing": "timing",
    "restoring": "reloading the earlier model",
}


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "tune", help="measure this machine, time real tokens of the best plans, and save the winner"
    )
    parser.add_argument("--model", default="starter", metavar="M", help="starter, a library name or a folder")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--quick", dest="kind", action="store_const", const="quick", help="measure for about ten seconds (the default)"
    )
    kind.add_argument(
        "--thorough", dest="kind", action="store_const", const="thorough", help="measure for about two minutes"
    )
    parser.add_argument("--measure-again", action="store_true", help="ignore earlier measurements of this machine")
    parser.add_argument(
        "--even-if-busy",
        action="store_true",
        help="save the result even if other programs were busy (otherwise you are asked; without "
        "a terminal it is not saved and the exit code is 2)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine_options(parser)
    parser.set_defaults(kind="quick")


def run(args: argparse.Namespace) -> int:
    """Tunes and reports; see `add_parser`."""
    from engine.bench.opened import prepared_apart
    from engine.checkpoint.synthetic import is_synthetic

    with prepared_apart() if is_synthetic(args.model) else contextlib.nullcontext():
        return _tune(args)


def _tune(args: argparse.Namespace) -> int:
    from engine.bench.opened import resolve_model
    from engine.hardware.probe import is_busy
    from engine.process.lifetime import quiet_libraries

    folder = resolve_model(args.model, note)  # before importing torch: report a mistyped name immediately
    quiet_libraries()
    from engine.protocol import StartTuning
    from engine.runtime.engine import Engine
    from engine.tuning.result import report_text
    from engine.tuning.run import tune

    engine = Engine()
    request = StartTuning(
        "tune",
        engine_config(args, str(folder)),
        args.kind,
        measure_again=args.measure_again,
        even_if_busy=args.even_if_busy,
    )
    try:
        ending = tune(engine, request, _show, lambda: False)
    finally:
        engine.unload()
        if sys.stderr.isatty():
            clear_progress()
    if ending.problem or ending.result is None:
        raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, ending.problem or "The run did not finish.")
    result = ending.result
    busy = is_busy(ending.others) and bool(result.winner) and not ending.saved
    saved = bool(result.winner) and (ending.saved or (busy and _confirmed(ending)))
    emit(_document(ending, saved=saved), as_json=args.json, human=lambda: report_text(result, saved=saved))
    if busy and not saved:
        note(
            "switchyard: nothing was saved, because other programs were busy: close them and run it again, or add "
            "--even-if-busy"
        )
    return 0 if saved else 2


def _confirmed(ending: TuningFinished) -> bool:
    """Asks at the terminal whether to save anyway, and does; returns whether it was saved."""
    from engine.tuning.saved_results import keep_anyway

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(
        f"Other programs used {ending.others:.0%} of the CPU during the timing, so these figures are too low.\n"
        "Save anyway? [y/N] "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return False
    try:
        keep_anyway(ending.result, ending.unsaved)
    except OSError as error:
        raise EngineError(ErrorCode.DISK_FULL, f"The result could not be saved: {error.strerror or error}.") from None
    return True


def _show(event: TuningEvent) -> None:
    """Progress on a terminal: one updated line, or nothing."""
    from engine.protocol import TuningProgress
    from engine.tuning.result import number_text

    if sys.stderr.isatty() and isinstance(event, TuningProgress):
        number = f": {number_text(event.number)}" if event.number is not None else ""
        show_progress(f"{_STAGES[event.stage]} {event.name}, {event.done:.0%}{number}")


def _document(ending: TuningFinished, *, saved: bool) -> dict[str, Any]:
    result = ending.result
    assert result is not None
    won, before = result.won, result.before
    return {
        **asdict(result),
        "tokens_per_s": won.tokens_per_s if won else 0.0,
        "before_tokens_per_s": before.tokens_per_s if before else 0.0,
        "gain": result.gain,
        "saved": saved,
    }
