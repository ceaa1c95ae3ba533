"""`switchyard models pull`: gets a model."""

from __future__ import annotations

import argparse

from engine.checkpoint.library import show
from engine.checkpoint.names import STARTER_NAME
from engine.common.errors import EngineError, ErrorCode
from engine.verbs.models.actions import AddAction
from engine.verbs.models.library import details
from engine.verbs.models.progress import ProgressLine, stopped_by_sigterm
from engine.verbs.output import emit


def add_actions(action: AddAction) -> None:
    """Adds them to the verb."""
    action("pull", "get a model (only `starter`)", _pull).add_argument("model", metavar="M")


def _pull(args: argparse.Namespace) -> int:
    if args.model != STARTER_NAME:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"Switchyard can pull only `{STARTER_NAME}` so far: fetch {args.model!r} with "
            "`hf download ORG/NAME --local-dir FOLDER`, then run `switchyard models import FOLDER`.",
        )
    from engine.checkpoint.starter import build_starter  # imports numpy, which no other action needs

    with stopped_by_sigterm(), ProgressLine("getting the starter model") as progress:
        build_starter(on_progress=progress.update)
    entry = show(STARTER_NAME)
    emit(entry, as_json=args.json, human=lambda: f"The starter model is ready.\n{details(entry)}")
    return 0
