"""`switchyard models search`, `recommend` and `families`: models on a hub, those that suit this PC, and what runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.common.sizes import about
from engine.families.known import Known, known_families
from engine.verbs.options import AddAction, positive_int
from engine.verbs.output import emit
from engine.verbs.plan import add_limit_options, asked_limits, this_machine

if TYPE_CHECKING:
    from engine.checkpoint.hub import Found
    from engine.tuning.fit import Recommendation

HUBS = ("huggingface", "modelscope")
_MOST = 100
_COLUMNS = ("architecture", "GGUF files", "native steps", "rows together", "draft head")


def add_actions(action: AddAction) -> None:
    searching = action("search", "models on a hub whose names match", _search)
    searching.add_argument("words", nargs="+", metavar="WORD", help="words of the name; modelscope: asks that hub")
    searching.add_argument("--limit", type=positive_int, default=20, metavar="N", help="at most so many (default: 20)")
    listing = action("families", "the architectures that run, and what is done for each", _families)
    listing.add_argument("--dense", action="store_true", help="also those without experts")
    recommending = action("recommend", "models of the catalogue that suit this machine; asks no network", _recommend)
    recommending.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="a newer catalogue, which is kept and used from now on"
    )
    add_limit_options(recommending)
    mirroring = action("mirror", "the mirror that is asked instead of Hugging Face, here and in the window", _mirror)
    mirroring.add_argument("address", nargs="?", metavar="ADDRESS", help="from now on; `none` for the hub itself")
    forgetting = action("forget-token", "remove the access token that was entered for a hub", _forget_token)
    forgetting.add_argument("hub", nargs="?", choices=HUBS, default=HUBS[0], help=f"default: {HUBS[0]}")


def _search(args: argparse.Namespace) -> int:
    from engine.checkpoint.hub import (
        HUGGINGFACE,
        MODELSCOPE,
        endpoint_of,
        search,  # imports numpy, which no other action needs
    )

    found = search(" ".join(args.words), limit=min(args.limit, _MOST))
    endpoint = endpoint_of(MODELSCOPE if args.words[0].startswith(f"{MODELSCOPE}:") else HUGGINGFACE)
    document = {"endpoint": endpoint, "found": [asdict(one) for one in found]}
    emit(document, as_json=args.json, human=lambda: _found_text(found))
    return 0


def _found_text(found: tuple[Found, ...]) -> str:
    if not found:
        return "Nothing found: try fewer words, or the maker's name."
    able, others = [one for one in found if not one.problem], [one for one in found if one.problem]
    lines = [
        f"{one.id:<56} {_size(one.parameters):>7} {one.downloads:>11,} {one.licence:<14}{' gated' if one.gated else ''}"
        for one in able
    ]
    lines = [f"{'':<56} {'weights':>7} {'downloads':>11} licence", *lines] if able else []
    lines += [f"{one.id}: {one.problem}" for one in others]
    if able:
        lines.append(f"\n`switchyard models fit {able[0].id}` says which file of it suits this machine.")
    return "\n".join(lines)


def _size(parameters: float | None) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters else ""


def _mirror(args: argparse.Namespace) -> int:
    from engine.checkpoint.hub import HUGGINGFACE, endpoint_of
    from engine.checkpoint.mirror import chosen_mirror, mirror_of_environment, use_mirror

    if args.address is not None:
        use_mirror("" if args.address.lower() == "none" else args.address)
    endpoint = endpoint_of(HUGGINGFACE)
    human = f"{endpoint} is asked for models."
    if mirror_of_environment():
        human += " HF_ENDPOINT in the environment says so, and wins."
    emit({"endpoint": endpoint, "mirror": chosen_mirror()}, as_json=args.json, human=human)
    return 0


def _forget_token(args: argparse.Namespace) -> int:
    from engine.checkpoint.hub import NAMES, endpoint_of
    from engine.checkpoint.hub.http import forget_token, read_token

    host = urlsplit(endpoint_of(args.hub)).hostname or ""
    forget_token(host)
    is_left = bool(read_token(host))
    human = f"Switchyard keeps no access token for {NAMES[args.hub]}."
    if is_left:
        human += " Another program's is still used: see `hf auth logout` and the environment (HF_TOKEN)."
    emit({"host": host, "is_another_left": is_left}, as_json=args.json, human=human)
    return 0


def _recommend(args: argparse.Namespace) -> int:
    from engine.checkpoint.catalogue import read_catalogue, use_catalogue
    from engine.checkpoint.downloads.queue import line_speed
    from engine.tuning.fit import ASSUMED_LINE_BYTES_PER_S, recommend

    catalogue = use_catalogue(args.catalogue) if args.catalogue else read_catalogue()
    look, limits = this_machine(asked_limits(args), args.device)
    measured = line_speed()
    line = measured or ASSUMED_LINE_BYTES_PER_S
    found = recommend(catalogue, look, limits)
    document = {
        "catalogue": catalogue.date,
        "line_bytes_per_s": line,
        "line_is_measured": measured is not None,
        "recommendations": [_document(one, line) for one in found],
    }
    emit(document, as_json=args.json, human=lambda: _recommended_text(found, line))
    return 0


def _document(one: Recommendation, line: float) -> dict[str, Any]:
    entry = one.entry
    return {
        "role": one.role,
        "name": entry.name,
        "reference": one.reference,
        "bytes": one.bytes,
        "licence": entry.licence,
        "licence_link": entry.licence_link,
        "verdict": one.verdict,
        "speed": asdict(one.speed) if one.speed is not None else None,
        "seconds_to_first_answer": one.seconds_to_first_answer(line),
        "sentence": one.sentence,
        "unchecked": entry.unchecked,
    }


def _recommended_text(found: tuple[Recommendation, ...], line: float) -> str:
    if not found:
        return "None of the catalogue would answer fast enough here: `switchyard models pull starter` gets the starter."
    lines = []
    for one in found:
        minutes = one.seconds_to_first_answer(line) / 60
        lines += [
            f"{one.role}: {one.entry.name} ({one.reference})",
            f"  {about(one.bytes)} to download, {minutes:.0f} minutes to the first answer at {about(round(line))}/s; "
            f"{one.entry.licence}",
            f"  {one.sentence}",
        ]
    return "\n".join([*lines, f"\n`switchyard models pull {found[-1].reference}` fetches one."])


def _families(args: argparse.Namespace) -> int:
    found = [one for one in known_families() if one.has_experts or args.dense]
    emit({"families": [asdict(one) for one in found]}, as_json=args.json, human=lambda: _table(found))
    return 0


def _table(found: list[Known]) -> str:
    rows = [_COLUMNS, *(row_of(one) for one in found if not one.refused)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *(f"{one.model_type} {one.refused}." for one in found if one.refused)]).rstrip()


def row_of(one: Known) -> tuple[str, ...]:
    """Its cells."""
    marks = ("yes" if one.is_native else "", one.shares, "yes" if one.has_draft_head else "")
    return (one.model_type, ", ".join(one.architectures) or "-", *(mark or "-" for mark in marks))
