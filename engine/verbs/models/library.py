"""`switchyard models list|show|import|verify|move|export|remove|folders`: the models on this machine."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from engine.checkpoint.importing import import_model
from engine.checkpoint.library import LibraryEntry, Verification, look_around, resolve, show, starter_is_built, verify
from engine.checkpoint.model_directories import FOLDER, OWN, add_model_folder, drop_model_folder, model_folders
from engine.checkpoint.moving import export, move
from engine.checkpoint.names import STARTER_NAME
from engine.checkpoint.ownership import named, remove
from engine.checkpoint.pictures import picture_tokens
from engine.common.errors import EngineError
from engine.common.paths import models_dir
from engine.common.sizes import about
from engine.verbs.options import MODEL, AddAction
from engine.verbs.output import clear_progress, emit, note, show_progress

_REDRAW_S = 0.1
_LINE_S = 5.0
_RATE_S = 5.0
"""Rates are of so many last seconds."""
_LEAST_BAR, _WIDEST_BAR = 8, 24


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt, so that staging folders and pip are cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ProgressLine:
    """Progress on stderr: a bar on a terminal, in one line that is updated, otherwise occasional lines.

    Args:
        label: what is being done.
        in_bytes: whether what is counted are bytes, which are then told with their rate and the time left.
    """

    def __init__(self, label: str, *, in_bytes: bool = False) -> None:
        self._label, self._in_bytes = label, in_bytes
        self._is_terminal = sys.stderr.isatty()
        self._shown = (-1, "")
        self._drawn_at = 0.0
        self._seen: deque[tuple[float, int]] = deque()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown[0] >= 0:
            clear_progress()

    def update(self, done: int, total: int, words: str = "", label: str = "") -> None:
        """Shows how far it is; `words` follow the percentage and may change without it.

        Args:
            label: instead of the line's own.
        """
        percent = 100 * done // max(total, 1)
        now = time.monotonic()
        if self._in_bytes:
            self._seen.append((now, done))
            while now - self._seen[0][0] > _RATE_S:
                self._seen.popleft()
        interval = _REDRAW_S if self._is_terminal else _LINE_S
        if (percent, words) == self._shown and not self._in_bytes:
            return
        if now - self._drawn_at < interval and (percent < 100 or self._shown[0] == percent):
            return
        words = words or (self._amount(done, total) if self._in_bytes else "")
        label = label or self._label
        if self._is_terminal:
            show_progress(drawn(label, done / max(total, 1), words, shutil.get_terminal_size().columns - 1))
        else:
            note(f"{label}: {percent} %" + (f", {words}" if words else ""))
        self._shown, self._drawn_at = (percent, words), now

    def _amount(self, done: int, total: int) -> str:
        (since, before), (until, _) = self._seen[0], self._seen[-1]
        rate = max(0, done - before) / (until - since) if until > since else 0.0  # it may begin again
        return amount_words(done, total, rate, (total - done) / rate if rate > 0 else None)


def amount_words(done: int, total: int, rate: float, eta_s: float | None) -> str:
    """`7.1 GB of 17.3 GB, 46 MB/s, 3 min left`, with as much of it as is known."""
    words = [f"{about(done)} of {about(total)}"]
    if rate:
        words.append(f"{about(round(rate))}/s")
        words += [f"{duration(eta_s)} left"] if eta_s is not None and done < total else []
    return ", ".join(words)


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `2 h 05 min`."""
    minutes = round(seconds) // 60
    if not minutes:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def drawn(label: str, share: float, words: str, width: int) -> str:
    """A line with a bar in what room is left; the label is cut before the figures are."""
    share = min(max(share, 0.0), 1.0)
    figures = f" {int(100 * share):>3} %" + (f" {words}" if words else "")
    room = width - len(figures) - 1
    name = label if len(label) + _LEAST_BAR <= room else f"{label[: max(0, room - _LEAST_BAR - 1)]}…"
    cells = min(_WIDEST_BAR, room - len(name))
    if cells < _LEAST_BAR or len(name) < 2:
        return f"{label}{figures}"[:width]
    full, empty = ("█", "░") if _can_draw() else ("#", "-")
    filled = round(share * cells)
    return f"{name} {full * filled}{empty * (cells - filled)}{figures}"


def _can_draw() -> bool:
    try:
        "█░".encode(sys.stderr.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


_LIST_WITHIN_S = 20.0


def add_actions(action: AddAction) -> None:
    action("list", "all models on this machine (the default)", list_action)
    action("show", "one model, in full", _show).add_argument("model", metavar="M", help=MODEL)
    importing = action("import", "add a checkpoint directory or a GGUF file to the library", _import)
    importing.add_argument("path", type=Path, metavar="PATH", help="folder with config.json and weights, or GGUF file")
    importing.add_argument("--name", metavar="NAME", help="its name (default: that of the folder or file)")
    action("verify", "check every file of a model", _verify).add_argument("model", metavar="M", help=MODEL)
    moving = action("move", "move a model of the library to a folder on another disk", _move)
    moving.add_argument("model", metavar="NAME")
    moving.add_argument("folder", type=Path, metavar="FOLDER", help="becomes a model folder if it is none")
    exporting = action("export", "copy a model to a new folder of its name, or write it as a GGUF file", _export)
    exporting.add_argument("model", metavar="M", help=MODEL)
    exporting.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", default=Path(), help="where to put it")
    exporting.add_argument("--to", choices=("files", "gguf"), default="files", help="gguf: one file for llama.cpp")
    types = ("BF16", "Q8_0", "Q4_0", "Q4_1")
    exporting.add_argument("--type", choices=types, default="BF16", help="of the matrices of a GGUF file")
    removing = action("remove", "move a model to the trash", _remove)
    removing.add_argument("model", metavar="NAME")
    removing.add_argument("--permanently", action="store_true", help="delete it instead")
    folders = action("folders", "the folders with models", _folders)
    folders.add_argument("--add", type=Path, metavar="FOLDER", help="use the models in this folder too, where they lie")
    folders.add_argument("--drop", type=Path, metavar="FOLDER", help="no longer; nothing is deleted")


def list_action(args: argparse.Namespace) -> int:
    """`models list`, and `models` alone."""
    listing = look_around(within_s=_LIST_WITHIN_S)
    for problem in listing.problems:
        note(f"switchyard: {problem}")

    def human() -> str:
        lines = [_row(entry) for entry in listing.entries] or [f"The library ({models_dir()}) is empty."]
        if not starter_is_built():
            lines.append("The starter model is not here yet: `switchyard models pull starter` gets it.")
        return "\n".join(lines)

    document = {
        "library": models_dir(),
        "folders": model_folders(),
        "starter_is_built": starter_is_built(),
        "models": listing.entries,
        "problems": listing.problems,
    }
    emit(document, as_json=args.json, human=human)
    return 0


def _show(args: argparse.Namespace) -> int:
    entry = show(args.model)
    emit(entry, as_json=args.json, human=lambda: details(entry))
    if not entry.problem:
        return 0
    if args.json:
        note(f"switchyard: {entry.problem}")
    return 2


def _import(args: argparse.Namespace) -> int:
    with stopped_by_sigterm(), ProgressLine("importing", in_bytes=True) as progress:
        entry = import_model(args.path, args.name, on_progress=progress.update)
    emit(entry, as_json=args.json, human=lambda: f"Imported.\n{details(entry)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    with ProgressLine("verifying", in_bytes=True) as progress:
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


def _move(args: argparse.Namespace) -> int:
    with stopped_by_sigterm(), ProgressLine("moving", in_bytes=True) as progress:
        entry = move(args.model, args.folder, on_progress=progress.update)
    emit(entry, as_json=args.json, human=lambda: f"Moved.\n{details(entry)}")
    return 0


def _export(args: argparse.Namespace) -> int:
    if args.to == "gguf":
        return _export_gguf(args)
    with stopped_by_sigterm(), ProgressLine("copying", in_bytes=True) as progress:
        folder = export(args.model, args.folder, on_progress=progress.update)
    emit({"exported": args.model, "folder": folder}, as_json=args.json, human=f"Copied to {folder}.")
    return 0


def _export_gguf(args: argparse.Namespace) -> int:
    from engine.checkpoint.gguf.export import Quantisation
    from engine.runtime.load.gguf_export import export_gguf  # imports torch, which others do not need

    with stopped_by_sigterm(), ProgressLine("writing", in_bytes=True) as progress:
        file = export_gguf(Path(resolve(args.model)), args.folder, Quantisation[args.type], progress.update)
    emit({"exported": args.model, "file": file}, as_json=args.json, human=f"Written to {file}.")
    return 0


def _remove(args: argparse.Namespace) -> int:
    copies = _other_copies(args.model)
    removed = remove(args.model, permanently=args.permanently)
    human = f"{args.model} ({about(removed.bytes)}) is {'deleted' if args.permanently else 'in the trash'}."
    if removed.others:
        human += f" What else is in {removed.folder} stays there."
    if copies:
        human += f" That was the copy in {removed.folder}; the one in {' and '.join(map(str, copies))} stays."
    emit(
        {
            "removed": args.model,
            "freed_bytes": removed.bytes,
            "is_in_trash": not args.permanently,
            "others_left": removed.others,
            "copies_left": copies,
        },
        as_json=args.json,
        human=human,
    )
    return 0


def _other_copies(model: str) -> list[Path]:
    """Where else the model lies that is about to be removed."""
    path = named(model).path
    for entry in look_around(within_s=_LIST_WITHIN_S).entries:
        places = [entry.path, *(other for _, other in entry.also)]
        if path in places:
            return [other for other in places if other != path]
    return []


def _place(origin: str, path: Path) -> str:
    return str(path.parent) if origin in (OWN, FOLDER) else origin


def _folders(args: argparse.Namespace) -> int:
    if args.add is not None:
        add_model_folder(args.add)
    if args.drop is not None:
        drop_model_folder(args.drop)
    folders = model_folders()
    emit({"folders": folders}, as_json=args.json, human="\n".join(map(str, folders)))
    return 0


def _row(entry: LibraryEntry) -> str:
    if entry.problem:
        return f"{entry.name:<32} damaged: {entry.problem}"
    size = about(entry.bytes_on_disk)
    whose = "" if entry.origin == OWN else entry.origin
    whose += f" (also in {', '.join(_place(*one) for one in entry.also)})" if entry.also else ""
    columns = (f"{entry.family:<16} {_count(entry.parameters):>8}", f"{size:>9}", f"{entry.precision_words:<8}", whose)
    return f"{entry.name:<32} {' '.join(columns)}".rstrip()


def _able(entry: LibraryEntry) -> str:
    if entry.embeds:
        return "embed texts"
    return ", ".join(["chat", *["call tools"] * entry.calls_tools, *["think first"] * entry.thinks])


def details(entry: LibraryEntry) -> str:
    experts = f"{entry.experts} per layer, {entry.experts_per_token} per token" if entry.experts else "none (dense)"
    known = [
        ("family", entry.family or "unknown"),
        ("parameters", _count(entry.parameters)),
        ("experts", experts),
        ("stored as", entry.precision_words or "unknown"),
        ("context", f"{entry.context_tokens} tokens" if entry.context_tokens else "unknown"),
        ("reads", f"text and pictures ({_picture_cost(entry.path)})" if entry.sees else "text"),
        ("can", _able(entry)),
    ]
    rows = [
        ("name", entry.name),
        *(known if entry.parameters or not entry.problem else ()),
        ("on disk", about(entry.bytes_on_disk)),
        ("file" if entry.path.is_file() else "folder", str(entry.path)),
        ("from", entry.source or (entry.origin if entry.is_in_place else "unknown")),
        ("last used", f"{datetime.fromtimestamp(entry.last_used):%Y-%m-%d %H:%M}" if entry.last_used else "never"),
    ]
    if entry.is_in_place and entry.origin != FOLDER:
        rows.append(("belongs to", f"{entry.origin}; it is used where it lies"))
    rows += [("also in", f"{_place(origin, path)} ({path})") for origin, path in entry.also]
    if entry.measured_tokens_per_s:
        rows.append(("speed here", f"{entry.measured_tokens_per_s:.3g} tokens/s, measured"))
    if entry.converted_bytes:
        rows.append(("converted", about(entry.converted_bytes)))
    if entry.problem:
        rows.append(("problem", entry.problem))
    card = entry.path / "CARD.md"
    if card.is_file():
        rows.append(("card", str(card)))
    return "\n".join(f"{label + ':':<12} {value}" for label, value in rows)


def _picture_cost(path: Path) -> str:
    """What pictures of two sizes cost, and how long this machine takes for one."""
    from engine.checkpoint.catalogue import find_shape
    from engine.planner.plan import Limits, make_plan
    from engine.planner.plan_words import picture_words
    from engine.verbs.plan import this_machine

    small, large = (picture_tokens(path, *size) for size in ((512, 512), (1920, 1080)))
    said = f"512 x 512: {small:,} tokens; 1920 x 1080: {large:,}"
    with suppress(EngineError):  # it does not fit here
        look, limits = this_machine(Limits())
        plan = make_plan(look.profile, find_shape(str(path)), limits=limits)
        said += f"; {picture_words(plan.pictures).removeprefix('pictures: ')}"
    return said


def _verdict(found: Verification) -> str:
    if found.damaged and found.checked != "sha256":
        return f"{found.name} is damaged. {' '.join(found.damaged.values())}"
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
