"""`switchyard kept`: what was computed of chats and is kept on disk: how much, remove it, turn it on or off."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained
from engine.common.kept_context import (
    LEAST_BYTES,
    MOST_BYTES,
    clear_kept_context,
    is_key_in_file,
    kept_context_bytes,
    kept_context_dir,
    kept_context_settings,
    save_kept_context_settings,
)
from engine.common.paths import config_dir
from engine.common.sizes import about
from engine.verbs.options import parse_size
from engine.verbs.output import emit


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "kept",
        help="computed context of chats that is kept on disk: show, clear, on, off",
        description="What the model has computed of the window's chats is kept on disk, so that a chat goes on at once "
        "after another one or a restart.  It is made of what was written in chats, encrypted, and removed with the "
        "chat that it is of; what was of no use for longest is removed first.  Chats themselves are not touched.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, text in (
        ("show", "where it is, and how much (the default)"),
        ("clear", "remove all of it"),
        ("on", "keep it from now on"),
        ("off", "remove all of it, and keep nothing on disk from now on"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        if name == "on":
            action.add_argument("--budget", type=parse_size, metavar="SIZE", help="the most that it takes (usual: 4GB)")
        action.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Performs the action; returns the exit code."""
    settings, removed = kept_context_settings(), 0
    with disk_errors_explained(kept_context_dir()):
        if args.action in ("on", "off"):
            budget = getattr(args, "budget", None) or settings.disk_bytes
            if not LEAST_BYTES <= budget <= MOST_BYTES:
                raise EngineError(
                    ErrorCode.INVALID_REQUEST,
                    f"The budget must be between {about(LEAST_BYTES)} and {about(MOST_BYTES)}.",
                )
            settings = replace(settings, on_disk=args.action == "on", disk_bytes=budget)
            save_kept_context_settings(settings)
        if args.action in ("clear", "off"):
            removed = clear_kept_context()
    document = {
        "folder": str(kept_context_dir()),
        "bytes": kept_context_bytes(),
        "removed_bytes": removed,
        "on_disk": settings.on_disk,
        "budget_bytes": settings.disk_bytes,
        "key_in_file": is_key_in_file(),
    }
    emit(document, as_json=args.json, human=lambda: _text(document, args.action))
    return 0


def _text(document: dict[str, Any], action: str | None) -> str:
    lines = [f"Removed {about(document['removed_bytes'])}."] if action in ("clear", "off") else []
    if document["on_disk"]:
        held, budget = about(document["bytes"]), about(document["budget_bytes"])
        lines.append(f"{held} of at most {budget} of computed context are kept in {document['folder']}, encrypted.")
        if document["key_in_file"]:
            lines.append(
                f"There is no keyring here, so the key is in {config_dir()}: whoever can read your files there can "
                "decrypt it."
            )
    else:
        lines.append("No computed context is kept on disk.")
    return "\n".join(lines)
