"""`switchyard simulate`: predicted timelines and speeds; figures of five papers and of other programs, predicted."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common.errors import EngineError, ErrorCode
from engine.formats import LADDER
from engine.verbs.options import positive_int
from engine.verbs.output import emit

if TYPE_CHECKING:
    from engine.planner.papers import PublishedCell
    from engine.planner.rivals import ComparedSpeed
    from engine.planner.simulator.request import Outcome
    from engine.planner.simulator.requests import Setting

_MOST_SPANS = 20_000


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("simulate", help="predicted timeline and speed; published figures, predicted")
    parser.add_argument(
        "what",
        nargs="?",
        choices=["papers", "rivals"],
        help="papers: figures of five papers, and predictions; rivals: speeds of other programs, and predictions",
    )
    parser.add_argument("--model", metavar="M", help="model profile: a name in resources/models, or a JSON file")
    parser.add_argument("--hardware", metavar="P", help="machine profile: a name in resources/machines, or a JSON file")
    parser.add_argument(
        "--workload",
        default="chat",
        metavar="W",
        help="chat, long-prefill, beam, batch, or PROMPTxGENERATED[xSEQUENCES[xBEAMS]] (default: chat)",
    )
    parser.add_argument("--policy", metavar="P", help="only this one (default: all, and Switchyard's choice)")
    parser.add_argument("--precision", choices=LADDER, default=LADDER[-1], help="of the experts")
    parser.add_argument("--threads", type=positive_int, default=0, metavar="N", help="of the CPU (default: all cores)")
    parser.add_argument(
        "--routing", type=Path, metavar="FILE", help="recorded routing to use instead of a synthetic one"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the timeline, for a trace viewer (.csv: a table)"
    )
    parser.add_argument(
        "--train", action="store_true", help="papers: train DuoServe-MoE's network on recorded routing, too (minutes)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, including the timeline")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulates and reports; see `add_parser`."""
    if args.what == "papers":
        return _papers(as_json=args.json, trains=args.train)
    return _rivals(as_json=args.json) if args.what == "rivals" else _workload(args)


def _papers(*, as_json: bool, trains: bool) -> int:
    from engine.bench.predictors import network_rows, recorded_trace, table_rows
    from engine.planner.papers.report import all_rows

    rows = [*all_rows(), *table_rows(recorded_trace())]
    if trains:
        rows += network_rows(recorded_trace())
    return emit_cells(rows, as_json=as_json)


def emit_cells(rows: list[PublishedCell], *, as_json: bool) -> int:
    """Published figures beside ours: `simulate papers` and, of the engine itself, `bench papers`."""
    from engine.planner.papers.report import document, in_order

    rows = in_order(rows)
    content = document(rows)
    emit(content, as_json=as_json, human=lambda: _table(rows, content))
    return 0


def _rivals(*, as_json: bool) -> int:
    from engine.planner.rivals import all_speeds, document

    speeds = all_speeds()
    content = document(speeds)
    emit(content, as_json=as_json, human=lambda: _speeds(speeds, content))
    return 0


def _speeds(speeds: list[ComparedSpeed], content: dict[str, Any]) -> str:
    lines = [f"{'':2}{'published':>11} {'predicted':>11} {'ratio':>6}  tokens/s; * the factors were chosen with it"]
    group = None
    for speed in speeds:
        published = speed.published
        if group != (group := (published.program, published.group, published.source)):
            lines.append(f"\n{published.program}: {published.group}\n{'':4}{published.source}, by {published.by}")
        mark = "*" if speed.fitted else " "
        numbers = f"{published.tokens_per_s:11.4g} {speed.tokens_per_s:11.4g} {speed.ratio:6.2f}"
        lines.append(f"{mark} {numbers}  {published.result}")
        lines += [f"{'':34}({published.note})"] if published.note else []
    error = content["median_error"]
    lines.append(
        f"\nMedian error: {error['all']:.1%} of {len(speeds)} results; {error['fitted']:.1%} of the half that the "
        f"factors were chosen with, {error['others']:.1%} of the other half."
    )
    lines.append(
        f"Order within what each source compares: {content['pairs_right']} of {content['pairs']} pairs right. Not in:"
    )
    lines += [
        f"  {each['right']} of {each['pairs']} right: {each['group']}"
        for each in content["orders"]
        if each["right"] < each["pairs"]
    ]
    lines.append("Factors, the same for all programs and machines:")
    lines += [f"  {each['name']} = {each['value']:g}: {each['meaning']}" for each in content["factors"]]
    lines.append("What sources leave open is assumed from data sheets (--json says what).")
    return "\n".join(lines)


def _table(rows: list[PublishedCell], content: dict[str, Any]) -> str:
    lines, paper = [], None
    for index, row in enumerate(rows):
        if paper != (paper := row.paper):
            lines.append(f"\n{paper}\n{'':4}{'published':>11} {'here':>11} {'deviation':>10}")
        mark = "=" if row.given else " "
        name = f"{row.table}: {row.cell}, {row.unit}"
        lines.append(f"  {mark} {row.published:11.4g} {row.predicted:11.4g} {row.deviation:+10.1%}  {name}")
        following = rows[index + 1] if index + 1 < len(rows) else None
        lines += _wrapped(row.why)
        if row.note and (following is None or following.note != row.note):
            lines += _wrapped(f"({row.note})")
    lines.append("\n= : input, taken from the machine's profile; not counted below.")
    lines.append(f"{'median':>9} {'worst':>8} {'ranks':>6}  table, and its worst cell")
    for table in content["tables"]:
        ranks = f"{table['rank_correlation']:6.2f}" if table["rank_correlation"] is not None else f"{'':6}"
        name = f"  {table['table']}: {table['worst_cell']}" if table["table"] else f"{table['paper']}, all of it"
        lines.append(f"{table['median']:9.1%} {table['worst']:+8.0%} {ranks}  {name}")
    medians = content["median_absolute_deviation"]
    lines.append("Median absolute deviation: " + ", ".join(f"{kind} {value:.1%}" for kind, value in medians.items()))
    lines.append("Efficiency factors, the same everywhere:")
    lines += [
        f"  {factor['name']} = {factor['value']:g}: {factor['meaning']}" for factor in content["efficiency_factors"]
    ]
    return "\n".join(lines).lstrip("\n")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, initial_indent=" " * 40, subsequent_indent=" " * 40)


def _workload(args: argparse.Namespace) -> int:
    from engine.planner.simulator.plans import bounds, run_all, run_policy, switchyard

    setting = _setting(args)
    if args.policy:
        outcomes: list[Outcome] = []
        chosen = run_policy(_policy_name(args.policy), setting, record=True)
    else:
        outcomes = run_all(setting)
        chosen = switchyard(outcomes, setting, record=True)
    if chosen is None:
        who = f"the policy {args.policy}" if args.policy else "any policy"
        raise EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"{setting.costs.model.name} at {args.precision} does not fit on {setting.costs.machine.name} with {who}: "
            f"use a machine with more memory, a smaller model or a lower precision.",
        )
    document = {
        "model": setting.costs.model.name,
        "hardware": setting.costs.machine.name,
        "workload": asdict(setting.workload),
        "precision": args.precision,
        **_summary(chosen),
        "bottleneck": chosen.busiest,
        "policies": [_summary(outcome) for outcome in outcomes],
        "bounds": [] if args.policy else [_summary(outcome) for outcome in bounds(setting)],
        "spans": [asdict(span) for span in chosen.spans[:_MOST_SPANS]],
        "spans_left_out": max(0, len(chosen.spans) - _MOST_SPANS),
    }
    if args.trace:
        _write_timeline(chosen, setting, args.trace)
    emit(document, as_json=args.json, human=lambda: _text(document))
    return 0


def _write_timeline(outcome: Outcome, setting: Setting, path: Path) -> None:
    from engine.telemetry.predicted import predicted_records
    from engine.verbs.chat import write_timeline

    model = setting.costs.model
    about = {
        "predicted": outcome.policy,
        "model": model.name,
        "machine": setting.costs.machine.name,
        "precision": setting.costs.precision,
    }
    # Schedules of many sequences number all layers, those of single requests only layers with experts.
    first_layer = model.dense_layers if outcome.batch is None else 0
    write_timeline(*predicted_records(outcome.spans, first_layer=first_layer), path, about)


def _setting(args: argparse.Namespace) -> Setting:
    from engine.checkpoint.model_shape import read_model
    from engine.hardware.machine import read_machine
    from engine.planner.costs import Costs
    from engine.planner.plan_parts import parse_workload
    from engine.planner.simulator.requests import DECODE_STEPS, Setting

    for option in ("model", "hardware"):
        if getattr(args, option) is None:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"Give --{option}, or run `switchyard simulate papers`.",
            )
    try:
        workload = parse_workload(args.workload)
    except ValueError as error:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{error}.") from None
    model = read_model(args.model)
    costs = Costs(read_machine(args.hardware), model, args.precision, threads=args.threads)
    recorded = None
    if args.routing:
        from engine.experts.replay import read_trace

        trace = read_trace(args.routing)
        if (
            trace.layers != model.moe_layers
            or trace.num_experts != model.experts
            or (trace.experts[trace.prefill_tokens :] < 0).any()
        ):
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{args.routing} has {trace.layers} layers of {trace.num_experts} experts, perhaps with gaps, but "
                f"{model.name} has {model.moe_layers} of {model.experts}: use a trace of this model.",
            )
        recorded = trace.experts[trace.prefill_tokens :]
        if len(recorded) < DECODE_STEPS:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{args.routing} has {len(recorded)} decoded tokens, fewer than {DECODE_STEPS}: record more.",
            )
    return Setting(costs, workload, recorded=recorded)


def _policy_name(wanted: str) -> str:
    from engine.planner.simulator.plans import POLICY_NAMES

    for name in POLICY_NAMES:
        if name.lower() == wanted.lower():
            return name
    raise EngineError(
        ErrorCode.INVALID_REQUEST, f"There is no policy {wanted!r}: use one of {'; '.join(POLICY_NAMES)}."
    )


def _summary(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "tokens_per_s": outcome.tokens_per_s,
        "decode_tokens_per_s": outcome.decode_tokens_per_s,
        "ttft_s": outcome.ttft_s,
        "tpot_s": outcome.tpot_s,
        "seconds": outcome.seconds,
        "vram_bytes": round(outcome.vram_bytes),
        "ram_bytes": round(outcome.ram_bytes),
        "hit_rate": outcome.hit_rate,
        "utilisation": {lane: round(share, 4) for lane, share in outcome.utilisation.items()},
    }


def _text(document: dict[str, Any]) -> str:
    work = document["workload"]
    lines = [
        f"{document['model']} at {document['precision']} on {document['hardware']}, {work['name']}: "
        f"{work['sequences']} x {work['prompt_tokens']} tokens read, {work['generated_tokens']} written"
        + (f", {work['beams']} beams" if work["beams"] > 1 else ""),
        f"{document['policy']}: {document['tokens_per_s']:.3g} tokens/s in all, "
        f"{document['decode_tokens_per_s']:.3g} steps/s, first token after {document['ttft_s']:.3g} s; "
        f"busiest: {document['bottleneck']}",
        f"on the card {document['vram_bytes'] / 1e9:.1f} GB, in RAM {document['ram_bytes'] / 1e9:.1f} GB",
    ]
    if document["policies"]:
        lines.append(f"{'tokens/s':>10} {'steps/s':>9} {'TTFT, s':>9}  policy")
        lines += [_line(entry) for entry in document["policies"]]
        lines += [_line(entry) + " (a bound)" for entry in document["bounds"]]
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> str:
    speeds = f"{entry['tokens_per_s']:>10.3g} {entry['decode_tokens_per_s']:>9.3g} {entry['ttft_s']:>9.3g}"
    return f"{speeds}  {entry['policy']}"
