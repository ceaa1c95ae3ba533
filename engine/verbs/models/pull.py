"""`switchyard models pull`: downloads, shared with the window: what one has begun the other goes on with."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.library import show
from engine.checkpoint.names import STARTER_NAME
from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about
from engine.verbs.models.fit import candidate_for_here
from engine.verbs.models.library import ProgressLine, amount_words, details, stopped_by_sigterm
from engine.verbs.options import AddAction, parse_size
from engine.verbs.output import emit, note

if TYPE_CHECKING:
    from engine.checkpoint.downloads.queue import Download

_FOLLOW_S = 0.3


def add_actions(action: AddAction) -> None:
    parser = action("pull", "download a model, or go on with a download", _pull)
    parser.add_argument(
        "model",
        metavar="M",
        nargs="?",
        help="`starter`, or a model on a hub: ORG/NAME, ORG/NAME:Q4_K_M, modelscope:ORG/NAME; "
        "without a label, what `models fit` recommends for this machine",
    )
    parser.add_argument("--name", default="", metavar="NAME", help="what to call it (default: the hub's name)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="the folder of models that it goes into")
    parser.add_argument("--limit", type=_limit, metavar="SIZE", help="per second, such as 5MB; 0 for no limit")
    parser.add_argument("--queue", action="store_true", help="instead of a model: all downloads that wait, one by one")


def _pull(args: argparse.Namespace) -> int:
    if args.queue:
        return _queue(args)
    if args.model is None:
        raise EngineError(ErrorCode.INVALID_REQUEST, "No model was named: give ORG/NAME, `starter`, or --queue.")
    if args.model == STARTER_NAME:
        return _pull_starter(args)
    from engine.checkpoint.downloads import queue

    download = _begun(args.model)
    if download is None:
        download = queue.add(candidate_for_here(args.model), name=args.name, folder=args.folder)
    queue.resume(download.key)
    if args.limit is not None:
        queue.set_limit(download.key, args.limit)
    with stopped_by_sigterm(), ProgressLine(download.title) as line:
        try:
            download = queue.run(download.key, on_progress=lambda now: _show(line, now))
        except EngineError as error:
            if error.code is not ErrorCode.BUSY:
                raise
            download = _follow(download, line)
    return _end(download, as_json=args.json)


def _begun(model: str) -> Download | None:
    """The download of that reference or key which is not done yet: it goes on without asking the hub what that is."""
    from engine.checkpoint.downloads import queue

    same = (each for each in queue.downloads() if model in (each.key, each.reference) and each.state != "done")
    return next(same, None)


def _limit(text: str) -> int:
    return 0 if text == "0" else parse_size(text)


def _queue(args: argparse.Namespace) -> int:
    from engine.checkpoint.downloads import queue

    with stopped_by_sigterm(), ProgressLine("downloading") as line:
        ran = queue.run_queue(on_progress=lambda now: _show(line, now, now.title))
    emit(
        {"downloads": ran},
        as_json=args.json,
        human=lambda: "\n".join(f"{each.title}: {each.problem or each.state}" for each in ran) or "Nothing waits.",
    )
    # An end that a full disk could not take leaves it waiting: whoever started this must not do so again at once.
    over = {each.key for each in ran if each.state in ("failed", "done")}
    return 2 if any(each.key in over and each.state == "waiting" for each in queue.downloads()) else 0


def _follow(download: Download, line: ProgressLine) -> Download:
    """Shows the progress of a download that another process runs, until that ends."""
    from engine.checkpoint.downloads import queue

    while True:
        found = next((each for each in queue.downloads() if each.key == download.key), None)
        if found is None and download.folder.exists():  # complete, and taken off the list by the window since
            return replace(download, state=queue.DownloadState.DONE)
        if found is None or not found.is_live:
            return found or download
        _show(line, found)
        download = found
        time.sleep(_FOLLOW_S)


def _show(line: ProgressLine, now: Download, title: str = "") -> None:
    words = amount_words(now.done_bytes, now.total_bytes, 0.0 if now.problem else now.bytes_per_s, now.eta_s)
    line.update(now.done_bytes, now.total_bytes, f"{words}, {now.problem}" if now.problem else words, title)


def _end(download: Download, *, as_json: bool) -> int:
    if download.state == "failed":
        raise EngineError(ErrorCode(download.error_code), download.problem)
    if download.state != "done":
        emit(
            download, as_json=as_json, human=f"{download.title} is {download.state}; the same command goes on with it."
        )
        if as_json:
            note(f"switchyard: {download.title} is {download.state}.")
        return 2
    entry = show(str(download.folder))
    emit(
        {"download": download, "model": entry},
        as_json=as_json,
        human=f"{download.title} is ready as {download.folder.name} ({about(download.total_bytes)}, all verified).",
    )
    return 0


def _pull_starter(args: argparse.Namespace) -> int:
    from engine.checkpoint.starter import build_starter  # imports numpy, which no other action needs

    with stopped_by_sigterm(), ProgressLine("getting the starter model") as progress:
        build_starter(on_progress=progress.update)
    entry = show(STARTER_NAME)
    emit(entry, as_json=args.json, human=lambda: f"The starter model is ready.\n{details(entry)}")
    return 0
