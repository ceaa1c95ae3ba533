"""`switchyard engine`: gets the engine's part of an installed package, as the window's first page does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about
from engine.verbs.models.library import ProgressLine, stopped_by_sigterm
from engine.verbs.output import emit, note

if TYPE_CHECKING:
    from engine.parts.wheels import EngineChoice


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "engine",
        help="get what answers, for an installed package: once, without the window",
        description="Fetches the build of PyTorch that suits this computer's cards, with the libraries that it needs, "
        "tests it and puts it into use.  What was stopped goes on with the same command.",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="made for a computer without a connection")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from engine.parts.install import install
    from engine.parts.wheels import choose_engine

    choice = choose_engine()
    if choice.why:
        note(choice.why)
    with stopped_by_sigterm():
        if args.file is None:
            _fetch(choice)
        elif not args.file.exists():
            raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no file {args.file}.")
        name = install(choice, args.file, lambda step: note(f"{step}…"))
    document = {"engine": name, "build": choice.build}
    emit(document, as_json=args.json, human=f"The engine with PyTorch for {choice.build_name} is ready.")
    return 0


def _fetch(choice: EngineChoice) -> None:
    """Downloads the wheels, unless they are there, or nothing has to be fetched."""
    from engine.checkpoint.downloads import queue
    from engine.common.installed import part
    from engine.parts.install import proven_partial
    from engine.parts.wheels import begin_download, fetched_folder

    if part(choice.name) or choice.reused or proven_partial(choice.name) or fetched_folder(choice.name):
        return
    note(f"PyTorch for {choice.build_name}, {about(choice.download_bytes)}, is fetched.")
    download = begin_download(choice)
    queue.resume(download.key)
    with ProgressLine(download.title, in_bytes=True) as line:
        done = queue.run(download.key, on_progress=lambda now: line.update(now.done_bytes, now.total_bytes))
    if done.state is queue.DownloadState.FAILED:
        raise EngineError(ErrorCode(done.error_code), done.problem)
    if done.state is not queue.DownloadState.DONE:
        raise EngineError(ErrorCode.DOWNLOAD_FAILED, f"{done.title} is {done.state}; the same command goes on with it.")
