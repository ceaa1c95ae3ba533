"""`switchyard models fit`: whether a model can run on a machine, and how fast."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about, rounded_up
from engine.hardware.disk import free_disk_bytes
from engine.verbs.options import MODEL, AddAction
from engine.verbs.output import emit
from engine.verbs.plan import add_plan_options, asked_limits, plan_of, this_machine, timing_text, workload_of

if TYPE_CHECKING:
    from engine.checkpoint.hub import Candidate
    from engine.checkpoint.model_shape import ModelShape
    from engine.planner.plan_parts import Limits
    from engine.tuning.fit import FitCard, FitRow

_AT_ONCE = 4
"""Files of which the headers are read at the same time."""


def add_actions(action: AddAction) -> None:
    fitting = action("fit", "whether a model can run on a machine, and how fast, without downloading it", _fit)
    fitting.add_argument(
        "model",
        metavar="M",
        help=f"{MODEL}, a profile in resources/models, or a hub's ORG/NAME, of which every file is compared",
    )
    add_plan_options(fitting)


def _fit(args: argparse.Namespace) -> int:
    from engine.checkpoint.catalogue import find_shape, is_on_hub  # imports numpy, which no other action needs
    from engine.hardware.machine import read_machine
    from engine.planner.plan_words import picture_words
    from engine.tuning.fit import verdict_of

    if is_on_hub(args.model) and not args.hardware:
        return _fit_of_hub(args)
    workload, shape = workload_of(args), find_shape(args.model)
    machine = read_machine(args.hardware).name if args.hardware else "this machine"
    document: dict[str, Any] = {"model": shape.name, "machine": machine, "parameters": shape.total_weights}
    try:
        plan = plan_of(args, shape, workload)
    except EngineError as error:
        if error.code is not ErrorCode.NOT_ENOUGH_MEMORY:
            raise
        return _no(args, document, error.message)
    if not args.hardware and (why := _lacks_room(args.model, plan.written_bytes)):
        return _no(args, document, why)
    speed, answered = plan.speed, None if args.hardware else _last_answers(args.model)
    origin = "" if args.hardware else _estimate_text(answered)
    said = [timing_text(speed) or origin, plan.sharing_words, picture_words(plan.pictures)]
    document |= {
        "fits": True,
        "why": plan.bottleneck,
        "sharing": plan.sharing_words,
        "precision": plan.precision,
        "policy": plan.policy,
        "decode_tokens_per_s": speed.decode_tokens_per_s,
        "low": speed.low,
        "high": speed.high,
        "timing": timing_text(speed),
        "answered": answered,
        "ttft_s": speed.ttft_s,
        "card_bytes": plan.card.held if plan.card is not None else 0,
        "ram_bytes": plan.ram.held,
        "disk_bytes": plan.disk_bytes,
        "streamed_bytes": plan.streamed_bytes,
        "table_bytes": plan.table_bytes,
        "written_bytes": plan.written_bytes,
        "what_helps": plan.what_helps,
        "pictures": asdict(plan.pictures) if plan.pictures is not None else None,
    }
    emit(
        document,
        as_json=args.json,
        human=lambda: (
            f"{_YES[verdict_of(speed.decode_tokens_per_s)]}: about {speed.decode_tokens_per_s:.3g} tokens/s "
            f"({speed.low:.3g} to {speed.high:.3g}), "
            f"{plan.words(plan.precision)}, first token after {speed.ttft_s:.2g} s.\n"
            + "".join(f"{line}\n" for line in said if line)
            + f"{plan.bottleneck}\n{plan.what_helps}"
        ),
    )
    return 0


_YES = {"fast": "Yes", "works": "Yes", "batch-only": "Yes, slowly, for batches"}


def _no(args: argparse.Namespace, document: dict[str, Any], why: str) -> int:
    emit(document | {"fits": False, "why": why}, as_json=args.json, human=f"No. {why}")
    return 2


def _lacks_room(model: str, needed: int) -> str:
    """Says so if the disk has no room for what would have to be converted of a model that is here or not yet."""
    from engine.checkpoint.library import converted_dir, converted_of
    from engine.checkpoint.names import resolve

    with contextlib.suppress(EngineError):  # it is not here, only known
        needed -= sum(file.stat().st_size for file in converted_of(Path(resolve(model))))
    free = free_disk_bytes(converted_dir()) if needed > 0 else None
    if free is None or needed <= free:
        return ""
    return (
        f"Its experts are read from disk, and have to be converted for that: it lacks {rounded_up(needed - free)} in "
        f"{converted_dir()}, where {about(free)} are free."
    )


def _last_answers(model: str) -> dict[str, Any] | None:
    """How a model that is on this machine last answered; None if it did not."""
    from engine.checkpoint.library import read_usage
    from engine.checkpoint.names import resolve

    try:
        usage = read_usage(resolve(model))
    except EngineError:  # it is not here, only known
        return None
    device, _, precision = usage.how.rpartition(", ")
    rate = usage.measured_tokens_per_s
    return None if rate is None else {"device": device, "precision": precision, "tokens_per_s": rate}


def _estimate_text(answered: dict[str, Any] | None) -> str:
    """That a speed is a prediction, and what was measured in another way than the one that it is for."""
    if answered is None:
        return "Estimated: this model has not answered here yet."
    return (
        f"Estimated: this model has not answered here in this way. Its last answers came in {answered['precision']} on "
        f"{answered['device']}, at {answered['tokens_per_s']:.3g} tokens/s, measured here."
    )


def _fit_of_hub(args: argparse.Namespace) -> int:
    """Every candidate of a repository, or the one that is named, on this machine."""
    from engine.checkpoint.hub import parse_reference, read_repository
    from engine.checkpoint.hub.contents import candidates, find_candidate

    named = parse_reference(args.model).what
    found = (find_candidate(args.model),) if named else candidates(read_repository(args.model))
    card = _card_of(found, asked_limits(args), args.device)
    emit(_card_document(card), as_json=args.json, human=lambda: _card_text(card))
    return 0 if card.recommended is not None else 2


def candidate_for_here(reference: str) -> Candidate:
    """The candidate that a reference means: of several that can run, where none is named, the best one for this PC.

    Raises:
        EngineError: as `find_candidate`.
    """
    from engine.checkpoint.hub import parse_reference
    from engine.checkpoint.hub.contents import candidates, find_candidate
    from engine.checkpoint.hub.http import HubError
    from engine.planner.plan_parts import Limits

    usual = find_candidate(reference)
    if parse_reference(reference).what:
        return usual
    able = [one for one in candidates(usual.repository) if not one.problem]
    if len(able) < 2:
        return usual
    try:
        card = _card_of(able, Limits())
    except HubError:  # one file's header does not come: the usual one can still be had
        return usual
    return usual if card.recommended is None else card.rows[card.recommended].candidate


def _card_of(found: Sequence[Candidate], limits: Limits, device: str = "auto") -> FitCard:
    from engine.tuning.fit import fit_card

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        shaped = list(pool.map(_shaped, found))
    return fit_card(shaped, *this_machine(limits, device))


def _shaped(candidate: Candidate) -> tuple[Candidate, ModelShape | None]:
    """The candidate and what it is; with the reason instead, if its header says that it cannot run."""
    from engine.checkpoint.hub.contents import candidate_shape

    try:
        return candidate, None if candidate.problem else candidate_shape(candidate)
    except EngineError as error:
        if error.code is ErrorCode.DOWNLOAD_FAILED:
            raise
        return replace(candidate, problem=error.message), None


def _card_document(card: FitCard) -> dict[str, Any]:
    return {
        "endpoint": card.rows[0].candidate.repository.endpoint if card.rows else "",
        "rows": [_row_document(row) for row in card.rows],
        "recommended": None if card.recommended is None else card.rows[card.recommended].candidate.reference,
        "why": card.why,
    }


def _row_document(row: FitRow) -> dict[str, Any]:
    return {
        "reference": row.candidate.reference,
        "label": row.candidate.label,
        "bytes": row.bytes,
        "files": [file.path for file in row.candidate.files],
        "quality": row.quality,
        "precision": row.precision,
        "card": asdict(row.card) if row.card is not None else None,
        "ram": asdict(row.ram) if row.ram is not None else None,
        "disk": asdict(row.disk),
        "from_disk": row.from_disk,
        "kv_at_context": row.kv_at_context,
        "pictures": asdict(row.pictures) if row.pictures is not None else None,
        "speed": {**asdict(row.speed), "ttft_range": row.speed.ttft_range} if row.speed is not None else None,
        "verdict": row.verdict,
        "fits_alone": row.fits_alone,
        "why": row.why,
        "load_anyway": row.load_anyway,
    }


def _card_text(card: FitCard) -> str:
    lines = [f"  {'':<18} {'download':>9}  {'quality':<8} {'tokens/s':>17} {'first after':>11}  {'card':>9} {'RAM':>9}"]
    for at, row in enumerate(card.rows):
        speed = f"{row.speed.decode:.3g} ({row.speed.low:.3g}-{row.speed.high:.3g})" if row.speed is not None else ""
        first = f"{row.speed.ttft:.2g} s" if row.speed is not None else ""
        held = [about(tier.held) if tier is not None else "" for tier in (row.card, row.ram)]
        mark = "*" if at == card.recommended else " "
        verdict = "cannot run" if row.candidate.problem else row.verdict
        if row.speed is not None and row.speed.timing != "estimated":
            verdict += f", {row.speed.timing}"
        lines.append(
            f"{mark} {row.candidate.label:<18} {about(row.bytes):>9}  {row.quality:<8} {speed:>17} {first:>11}  "
            f"{held[0]:>9} {held[1]:>9}  {verdict}"
        )
    refused = [f"{row.candidate.label}: {row.why}" for row in card.rows if row.verdict == "too-large"]
    if len(card.rows) == 1 and card.rows[0].candidate.problem:
        return card.why
    return "\n".join([*lines, "", *refused, card.why])
