"""`switchyard models search`, `recommend`, `families`, `fit`, `pull`: what there is, what suits this PC, getting it.

Downloads are shared with the window: what one has begun the other goes on with.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.checkpoint.library import show
from engine.checkpoint.names import STARTER_NAME
from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about, rounded_up
from engine.families.known import Known, known_families
from engine.hardware.disk import free_disk_bytes
from engine.verbs.models.library import ProgressLine, amount_words, details, stopped_by_sigterm
from engine.verbs.options import MODEL, AddAction, parse_size, positive_int
from engine.verbs.output import emit, note
from engine.verbs.plan import (
    add_limit_options,
    add_plan_options,
    asked_limits,
    plan_of,
    this_machine,
    timing_text,
    workload_of,
)

if TYPE_CHECKING:
    from engine.checkpoint.downloads.queue import Download
    from engine.checkpoint.hub import Candidate, Found
    from engine.checkpoint.model_shape import ModelShape
    from engine.planner.plan_parts import Limits
    from engine.tuning.fit import FitCard, FitRow, Recommendation


_AT_ONCE = 4
"""Files of which the headers are read at the same time."""


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
    fitting = action("fit", "whether a model can run on a machine, and how fast, without downloading it", _fit)
    fitting.add_argument(
        "model",
        metavar="M",
        help=f"{MODEL}, a profile in resources/models, or a hub's ORG/NAME, of which every file is compared",
    )
    add_plan_options(fitting)
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
    """The candidate that a reference means: of several that can run, where none is named, the best one for this PC."""
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


_FOLLOW_S = 0.3


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


HUBS = ("huggingface", "modelscope")
_MOST = 100
_COLUMNS = ("architecture", "GGUF files", "native steps", "rows together", "draft head")


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
    from engine.checkpoint.mirror import chosen, mirror_of_environment, use

    if args.address is not None:
        use("mirror", "" if args.address.lower() == "none" else args.address)
    endpoint = endpoint_of(HUGGINGFACE)
    human = f"{endpoint} is asked for models."
    if mirror_of_environment():
        human += " HF_ENDPOINT in the environment says so, and wins."
    emit({"endpoint": endpoint, "mirror": chosen("mirror")}, as_json=args.json, human=human)
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
    marks = ("yes" if one.is_native else "", one.shares, "yes" if one.has_draft_head else "")
    return (one.model_type, ", ".join(one.architectures) or "-", *(mark or "-" for mark in marks))
