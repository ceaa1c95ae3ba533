"""`switchyard models families`: which architectures run, and what is done for each of them."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from engine.families.known import Known, known_families
from engine.verbs.options import AddAction
from engine.verbs.output import emit

_COLUMNS = ("architecture", "GGUF files", "native steps", "rows together", "draft head")


def add_actions(action: AddAction) -> None:
    listing = action("families", "the architectures that run, and what is done for each", _families)
    listing.add_argument("--dense", action="store_true", help="also those without experts")


def _families(args: argparse.Namespace) -> int:
    found = [one for one in known_families() if one.has_experts or args.dense]
    emit({"families": [asdict(one) for one in found]}, as_json=args.json, human=lambda: _text(found))
    return 0


def _text(found: list[Known]) -> str:
    rows = [_COLUMNS, *(row_of(one) for one in found if not one.refused)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *(f"{one.model_type} {one.refused}." for one in found if one.refused)]).rstrip()


def row_of(one: Known) -> tuple[str, ...]:
    """Its cells."""
    marks = ("yes" if one.is_native else "", one.shares, "yes" if one.has_draft_head else "")
    return (one.model_type, ", ".join(one.architectures) or "-", *(mark or "-" for mark in marks))
