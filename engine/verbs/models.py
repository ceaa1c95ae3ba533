"""`switchyard models`: the model library."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.checkpoint.importing import import_model
from engine.checkpoint.library import (
    LibraryEntry,
    Verification,
    list_models,
    remove,
    resolve,
    show,
    starter_is_built,
    verify,
)
from engine.checkpoint.names import STARTER_NAME
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import models_dir
from engine.common.sizes import about
from engine.verbs.output import clear_progress, emit, note, show_progress
from engine.verbs.plan import add_plan_options, plan_of, timing_text, workload_of

_REDRAW_S = 0.1
_LINE_S = 1.0


def add_parser(subparsers: Any) -> None:
    """Mount the verb."""
    parser = subparsers.add_parser("models", help="the model library")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run, action=_list)
    actions = parser.add_subparsers(metavar="{list,show,fit,import,verify,remove,pull}")

    def action(name: str, help_text: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = actions.add_parser(name, help=help_text)
        # No default here: it would override an option given before the action.
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")
        sub.set_defaults(run=run, action=function)
        return sub

    action("list", "all models in the library (the default)", _list)
    what = "`starter`, a library name, a checkpoint directory or a GGUF file"
    action("show", "one model, in full", _show).add_argument("model", metavar="M", help=what)
    fitting = action("fit", "whether a model can run on a machine, and how fast, without downloading it", _fit)
    fitting.add_argument("model", metavar="M", help=f"{what}, a profile in resources/models, or a hub id")
    add_plan_options(fitting)
    importing = action("import", "add a checkpoint directory or a GGUF file", _import)
    importing.add_argument("path", type=Path, metavar="PATH", help="folder with config.json and weights, or GGUF file")
    importing.add_argument("--name", metavar="NAME", help="its name (default: that of the folder or file)")
    action("verify", "check every file of a model", _verify).add_argument("model", metavar="M", help=what)
    action("remove", "delete a model from the library", _remove).add_argument("model", metavar="NAME")
    action("pull", "get a model (only `starter`)", _pull).add_argument("model", metavar="M")


def run(args: argparse.Namespace) -> int:
    """Performs the action; returns the exit code.  The caller reports EngineErrors."""
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)


def _list(args: argparse.Namespace) -> int:
    entries = list_models()

    def human() -> str:
        lines = [_row(entry) for entry in entries] or [f"The library ({models_dir()}) is empty."]
        if not starter_is_built():
            lines.append("The starter model is not here yet: `switchyard models pull starter` gets it.")
        return "\n".join(lines)

    document = {"library": models_dir(), "starter_is_built": starter_is_built(), "models": entries}
    emit(document, as_json=args.json, human=human)
    return 0


def _show(args: argparse.Namespace) -> int:
    entry = show(args.model)
    emit(entry, as_json=args.json, human=lambda: _details(entry))
    return 0


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


def _import(args: argparse.Namespace) -> int:
    with _stopped_by_sigterm(), _ProgressLine("importing") as progress:
        entry = import_model(args.path, args.name, on_progress=progress.update)
    emit(entry, as_json=args.json, human=lambda: f"Imported.\n{_details(entry)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    with _ProgressLine("verifying") as progress:
        found = verify(args.model, on_progress=progress.update)
    emit(
        {"name": found.name, "path": found.path, "ok": not found.damaged, "checked": found.checked,
         "files": found.files, "damaged": found.damaged},
        as_json=args.json,
        human=lambda: _verdict(found),
    )  # fmt: skip
    if not found.damaged:
        return 0
    if args.json:
        note(f"switchyard: {found.name} is damaged ({', '.join(found.damaged)}).")
    return 2


def _remove(args: argparse.Namespace) -> int:
    freed = remove(args.model)
    emit(
        {"removed": args.model, "freed_bytes": freed},
        as_json=args.json,
        human=f"Removed {args.model} ({about(freed)}).",
    )
    return 0


def _pull(args: argparse.Namespace) -> int:
    if args.model != STARTER_NAME:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"Switchyard can pull only `{STARTER_NAME}` so far: fetch {args.model!r} with "
            "`hf download ORG/NAME --local-dir FOLDER`, then run `switchyard models import FOLDER`.",
        )
    from engine.checkpoint.starter import build_starter  # imports numpy, which no other action needs

    with _stopped_by_sigterm(), _ProgressLine("getting the starter model") as progress:
        build_starter(on_progress=progress.update)
    entry = show(STARTER_NAME)
    emit(entry, as_json=args.json, human=lambda: f"The starter model is ready.\n{_details(entry)}")
    return 0


def _row(entry: LibraryEntry) -> str:
    if entry.problem:
        return f"{entry.name:<32} damaged: {entry.problem}"
    return f"{entry.name:<32} {entry.family:<16} {_count(entry.parameters):>8} {about(entry.bytes_on_disk):>9}"


def _details(entry: LibraryEntry) -> str:
    experts = f"{entry.experts} per layer, {entry.experts_per_token} per token" if entry.experts else "none (dense)"
    rows = [
        ("name", entry.name),
        ("family", entry.family or "unknown"),
        ("parameters", _count(entry.parameters)),
        ("experts", experts),
        ("stored as", entry.dtype or "unknown"),
        ("context", f"{entry.context_tokens} tokens" if entry.context_tokens else "unknown"),
        ("on disk", about(entry.bytes_on_disk)),
        ("folder", str(entry.path)),
        ("from", entry.source or "unknown"),
    ]
    if entry.problem:
        rows.append(("problem", entry.problem))
    card = entry.path / "CARD.md"
    if card.is_file():
        rows.append(("card", str(card)))
    return "\n".join(f"{label + ':':<12} {value}" for label, value in rows)


def _verdict(found: Verification) -> str:
    if found.damaged:
        repair = (
            "`switchyard models pull starter` builds it again."
            if found.name == STARTER_NAME and found.path == resolve(STARTER_NAME)
            else "Download or copy the model again."
        )
        lines = [f"{file}: {what}" for file, what in found.damaged.items()]
        return "\n".join([f"{found.name} is damaged:", *lines, repair])
    if found.checked == "sha256":
        return f"{found.name}: {_files(found.files)} unchanged (SHA-256)."
    return f"{found.name}: {_files(found.files)} complete and well-formed; there are no checksums."


def _files(count: int) -> str:
    return "its one file is" if count == 1 else f"all {count} files are"


def _count(parameters: int) -> str:
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= factor:
            return f"{parameters / factor:.1f} {unit}"
    return str(parameters)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt, so that staging folders and pip are cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _ProgressLine:
    """Progress on stderr: one updated line on a terminal, otherwise occasional lines."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_terminal = sys.stderr.isatty()
        self._shown = -1
        self._drawn_at = 0.0

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown >= 0:
            clear_progress()

    def update(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        now = time.monotonic()
        interval = _REDRAW_S if self._is_terminal else _LINE_S
        if percent == self._shown or (percent < 100 and now - self._drawn_at < interval):
            return
        if self._is_terminal:
            show_progress(f"{self._label}: {percent} %")
        else:
            note(f"{self._label}: {percent} %")
        self._shown, self._drawn_at = percent, now
