"""`switchyard models`: the models on this machine, those that can be had, and how they fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from engine.verbs.models import hub, library


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("models", help="the model library")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run, action=library.list_action)
    actions = parser.add_subparsers(metavar="ACTION")

    def action(name: str, help_text: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = actions.add_parser(name, help=help_text)
        # No default here: it would override an option given before the action.
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")
        sub.set_defaults(run=run, action=function)
        return sub

    library.add_actions(action)
    hub.add_actions(action)


def run(args: argparse.Namespace) -> int:
    """Performs the action; returns the exit code.  The caller reports EngineErrors."""
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)
