"""`switchyard batch`: rows in, rows out, the input's columns kept."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.prepared_job import PreparedJob, begun, prepare
from engine.common.config import HERE, BatchJob, BatchStart, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.falls import FALLS
from engine.common.sizes import rounded_up
from engine.common.untrusted import DEEPEST, parse_json, read_untrusted, reason
from engine.formats import AUTO
from engine.remote.job import endpoints_of, run_remote_job, run_remote_sample
from engine.verbs.chat import load_engine
from engine.verbs.options import (
    add_engine_options,
    add_sampling_options,
    engine_config,
    given_sampling,
    positive_int,
)
from engine.verbs.output import clear_progress, emit, note, show_progress, stopped_by_ctrl_c

if TYPE_CHECKING:
    from engine.batch_files.job_watcher import Pace, PlacePace
    from engine.batch_files.rows import Answer
    from engine.planner.batch_prediction import JobPrediction
    from engine.protocol import BatchSampled

_LIMITS = {
    "arithmetic": "CPU compute",
    "weights": "reading weights from RAM",
    "attention": "attention",
    "disk": "reading experts from disk",
    "link": "the link to the card",
    "card": "the card",
}
_REDO: dict[str | None, BatchStart] = {"failed": "retry_failed", "cut-off": "redo_cut_off"}
_INTERRUPTED = 130
_MOST_SCHEMA_BYTES = 4 * 2**20
_PLAIN_TELL_S = 30.0
"""Interval of progress lines if stderr is not a terminal."""
PATIENCE_S = 120.0
"""How long to wait for space on a full disk if stderr is not a terminal."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "batch",
        help="rows in, rows out: answers a file of prompts",
        description="Answers every row of a txt, csv, tsv, jsonl, parquet, xlsx, md, pdf, docx or html file, of a "
        "folder of such files, or of an OpenAI batch file, many at once.  Answers are greedy without --temperature.  A "
        "run that was stopped or killed continues with --resume; `switchyard jobs` lists and stops jobs.  On a full "
        f"disk it waits (without a terminal or with --json for {PATIENCE_S:.0f} s).  Exit codes: 0 "
        "every row has an answer or an error, 2 a user error, 1 an internal error, 130 stopped.",
    )
    parser.add_argument("input", metavar="INPUT", help="a file, or a folder of files")
    parser.add_argument(
        "-o", "--output", metavar="OUTPUT", help="csv, tsv, jsonl, parquet or xlsx (default: INPUT.answers.jsonl)"
    )
    parser.add_argument("--model", default="starter", metavar="M", help="starter, a library name or a folder")
    parser.add_argument("--template", default="", metavar="T", help="the prompt, such as 'Summarise: {{text}}'")
    parser.add_argument(
        "--image-column",
        default="",
        metavar="NAME",
        help="the column of pictures for a model that sees: paths (relative to INPUT's folder), or file: or data: "
        "addresses; they stand where the template has {{NAME}}, or before its text",
    )
    parser.add_argument("--system", default="", metavar="S", help="system prompt of every row")
    add_sampling_options(parser, beams=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--schema", metavar="FILE", help="a JSON schema that every answer satisfies")
    what.add_argument("--choice", action="append", metavar="C", help="an answer is one of these; repeat for each")
    parser.add_argument("--tries", type=positive_int, default=3, metavar="N", help="attempts if an answer is cut off")
    start = parser.add_mutually_exclusive_group()
    for option, text in (
        ("--resume", "continue an earlier run"),
        ("--restart", "discard earlier answers and replace OUTPUT"),
        ("--retry-failed", "the same as --redo failed"),
    ):
        name = option.removeprefix("--").replace("-", "_")
        start.add_argument(option, dest="start", action="store_const", const=name, default="new", help=text)
    start.add_argument(
        "--redo",
        choices=_REDO,
        help="continue, and answer failed rows again, or those cut off at the limit, with --max-tokens, or else with "
        "twice the tokens that each had",
    )
    parser.add_argument("--sample", type=positive_int, metavar="N", help="only answer and show the first N rows")
    elsewhere = parser.add_argument_group("where rows are answered")
    who = elsewhere.add_mutually_exclusive_group()
    who.add_argument(
        "--endpoint",
        action="append",
        metavar="E",
        help="a server that answers rows: the name of an endpoint of Settings, or an address such as "
        f"http://10.0.0.5:8000/v1#model-id; repeat for several, {HERE} for this one's --model among them",
    )
    who.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="answer the rows on the nodes of a Ray cluster (auto: the one that this computer belongs to); --device, "
        "--ram, --vram and --threads then hold for each node",
    )
    elsewhere.add_argument(
        "--ask-twice",
        action="store_true",
        help="near the end, ask a second endpoint for rows that the first one is slow with (costs tokens)",
    )
    elsewhere.add_argument(
        "--mix-models", action="store_true", help="go on although the answers so far are of another model"
    )
    elsewhere.add_argument(
        "--name-endpoints", action="store_true", help="add a column that says which endpoint answered"
    )
    parser.add_argument(
        "--policy",
        metavar="FILE",
        help="how a graphics card runs the rows: what `switchyard plan --workload batch --json` prints, edited",
    )
    long = parser.add_argument_group("long rows")
    long.add_argument(
        "--attention-window",
        type=positive_int,
        default=0,
        metavar="N",
        help="attend to the last N and the first four tokens (StreamingLLM): faster, slightly different answers",
    )
    form = parser.add_argument_group("how text is read and written")
    form.add_argument("--encoding", metavar="E", help="such as cp1252, if not UTF-8")
    form.add_argument("--separator", metavar="C", help="of a csv (default: detected)")
    form.add_argument("--sheet", metavar="NAME", help="of an xlsx (default: the first one with rows)")
    form.add_argument(
        "--whole-files",
        action=argparse.BooleanOptionalAction,
        help="a txt file is a single row, not one row per line (default: in a folder)",
    )
    form.add_argument(
        "--raw-text",
        action="store_true",
        help="write answers into csv and tsv as they are; otherwise one that a spreadsheet would compute (=, +, -, @) "
        "has ' in front, and control characters are replaced",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answers the rows; returns the exit code."""
    job = _job(args)
    if args.sample:  # nothing is written, so existing files do not matter
        job = replace(job, start="resume")
    prepared = prepare(job)
    if not args.sample:
        prepared.require_own_files()  # report obstacles before loading a model
        if args.precision == AUTO:
            args.precision = prepared.begun_precision
    if job.ray:
        return _on_a_cluster(args, prepared)
    if job.endpoints:
        return _at_endpoints(args, prepared)
    if args.sharing == "auto":
        from engine.tuning.batch_forecast import sharing_for

        args.sharing = sharing_for(prepared, engine_config(args, args.model))
    engine, _info = load_engine(args)
    try:
        if args.sample:
            return _sample(args, prepared, lambda watcher: engine.sample_batch(prepared, args.sample, watcher))
        return _whole(args, prepared, lambda watcher: engine.run_batch(prepared, watcher))
    finally:
        engine.unload()


def _at_endpoints(args: argparse.Namespace, prepared: PreparedJob) -> int:
    """A model is loaded only if this machine is one of those that answer."""
    names = prepared.job.endpoints
    hosts = [f"{endpoint.name} ({endpoint.host})" for endpoint in endpoints_of(names) if not endpoint.is_here]
    if hosts:
        note(f"switchyard: the text of the rows is sent to {' and '.join(hosts)}")
    engine = load_engine(args)[0] if HERE in names else None
    own = engine.hosted_model(beside_others=False) if engine is not None else None

    def sample(watcher: JobWatcher) -> None:
        found = run_remote_sample(prepared, args.sample, watcher, own)
        if found is not None:
            note(f"switchyard: {sample_words(found)}")

    try:
        if args.sample:
            return _sample(args, prepared, sample)
        return _whole(args, prepared, lambda watcher: run_remote_job(prepared, watcher, own))
    finally:
        if engine is not None:
            engine.unload()


def _on_a_cluster(args: argparse.Namespace, prepared: PreparedJob) -> int:
    from engine.remote.ray_rows import run_cluster_job

    if args.sample:
        raise EngineError(ErrorCode.INVALID_REQUEST, "A sample is answered on this computer: leave out --ray.")
    config = engine_config(args, args.model)
    return _whole(args, prepared, lambda watcher: run_cluster_job(prepared, config, watcher))


def _job(args: argparse.Namespace) -> BatchJob:
    source = Path(args.input)
    output = args.output or str(source.with_name(f"{source.name}.answers.jsonl"))
    start: BatchStart = _REDO.get(args.redo, args.start)
    sampling, more_tokens = replace(SamplingParams(), **given_sampling(args)), 0
    if start == "redo_cut_off" and (found := begun(Path(output))) is not None:
        # The limit is that of the rows that were cut off: the others keep theirs.
        limit = found.settings.get("job", {}).get("sampling", {}).get("max_tokens", sampling.max_tokens)
        sampling, more_tokens = replace(sampling, max_tokens=limit), args.max_tokens or 0
    return BatchJob(
        input=str(source),
        output=output,
        template=args.template,
        system=args.system,
        sampling=sampling,
        schema=_schema(args.schema),
        choices=tuple(args.choice or ()),
        tries=args.tries,
        kv_precision=args.kv_precision,
        attention_window=args.attention_window,
        encoding=args.encoding,
        separator=args.separator,
        whole_files=args.whole_files,
        sheet=args.sheet,
        start=start,
        endpoints=tuple(args.endpoint or ()),
        ray=args.ray or "",
        ask_twice=args.ask_twice,
        mix_models=args.mix_models,
        name_endpoints=args.name_endpoints,
        more_tokens=more_tokens,
        raw_text=args.raw_text,
        policy=_policy(args.policy),
        image_column=args.image_column,
    )


def _policy(file: str | None) -> str:
    if file is None:
        return ""
    from engine.planner.batch_plan import read_policy

    return json.dumps(asdict(read_policy(file)))


def _schema(file: str | None) -> str:
    if file is None:
        return ""
    try:
        return json.dumps(parse_json(read_untrusted(Path(file), _MOST_SCHEMA_BYTES), deepest=DEEPEST))
    except OSError as error:
        why = reason(error)
    except ValueError as error:
        why = f"it is not JSON: {error}"
    raise EngineError(ErrorCode.INVALID_REQUEST, f"Cannot read the schema {file} ({why}): check the file.")


def _sample(args: argparse.Namespace, prepared: PreparedJob, answer: Callable[[JobWatcher], None]) -> int:
    answers: list[tuple[Answer, str]] = []
    watcher = JobWatcher(
        on_pace=lambda _pace, _blocked: None,
        on_answer=lambda answer, question: answers.append((answer, question)),
        should_yield=lambda: False,
        give_way=lambda: None,
        cancelled=lambda: False,
    )
    answer(watcher)
    answers.sort(key=lambda pair: pair[0].row)
    rows = [{**asdict(answer), "prompt": question} for answer, question in answers]
    emit(
        {"columns": prepared.source.columns, "rows": rows},
        as_json=args.json,
        human=lambda: "\n\n".join(_sampled(row) for row in rows),
    )
    return 0


def _sampled(row: dict[str, Any]) -> str:
    answer = f"The row {row['problem']}." if row["problem"] else row["text"]
    return f"Row {row['row']}: {row['prompt']}\n{answer}"


def _whole(args: argparse.Namespace, prepared: PreparedJob, answer_all: Callable[[JobWatcher], JobEnding]) -> int:
    begun_s = time.monotonic()
    # `--redo cut-off` would give more tokens once more to rows that have had them, and takes its own --max-tokens.
    how = f"the {'first' if prepared.job.start == 'redo_cut_off' else 'same'} command with --resume"
    with stopped_by_ctrl_c() as stopped:
        shown = _Shown()
        patience_s = PATIENCE_S if args.json or not shown.is_terminal else None
        watcher = JobWatcher(
            on_pace=shown.pace,
            on_answer=lambda _answer, _question: None,
            should_yield=lambda: False,
            give_way=lambda: None,
            cancelled=stopped,
            on_plan=lambda prediction: note(f"switchyard: {prediction_text(prediction)}"),
            patience_s=patience_s,
        )
        try:
            ending = answer_all(watcher)
        except EngineError as error:
            if error.code not in (ErrorCode.DISK_FULL, ErrorCode.ENDPOINT_FAILED):
                raise
            raise EngineError(error.code, f"{error.message.removesuffix('.')} ({how} continues).") from None
        finally:
            shown.clear()
    document = _document(prepared, ending, time.monotonic() - begun_s)
    emit(document, as_json=args.json, human=lambda: _summary(document))
    if not ending.finished:
        kept = "all but the last answers kept" if ending.unkept else "all answers kept"
        note(f"switchyard: stopped, {kept}; {how} continues.")
        return _INTERRUPTED
    return 0


def _document(prepared: PreparedJob, ending: JobEnding, seconds: float) -> dict[str, Any]:
    pace = ending.pace
    return {
        "input": str(prepared.source.path),
        "output": str(ending.output or prepared.output),
        "finished": ending.finished,
        "rows": pace.total,
        "done": pace.done,
        "failed": pace.failed,
        "cut_off": pace.cut_off,
        "written": ending.written,
        "seconds": round(seconds, 3),
        "computing_seconds": round(ending.computing_s, 3),
        "tokens_per_s": round(ending.tokens / ending.computing_s, 2) if ending.computing_s > 0 else 0.0,
        "unkept": ending.unkept,
        "endpoints": [_place_document(place) for place in pace.places],
        "note": ending.note,
        "gave_way": FALLS.note,
        "errors": str(ending.errors) if ending.errors is not None else None,
    }


def _place_document(place: PlacePace) -> dict[str, Any]:
    cost = None if place.cost is None else round(place.cost, 6)
    return {
        "name": place.name or HERE,
        "host": place.host or None,
        "state": place.state,
        "why": place.why,
        "rows": place.rows,
        "failed": place.failed,
        "prompt_tokens": place.prompt_tokens,
        "generated_tokens": place.generated_tokens,
        "tokens_per_s": round(place.tokens_per_s, 2),
        "cost": cost,
        "currency": place.currency,
    }


def _summary(document: dict[str, Any]) -> str:
    why = f"{document['errors']} says why" if document["errors"] else "column `problem` says why"
    failed = f", {document['failed']:,} of them failed ({why})" if document["failed"] else ""
    cut = f", {document['cut_off']:,} cut off at the limit (--redo cut-off gives them more tokens)"
    failed += cut if document["cut_off"] else ""
    rows = "1 row is" if document["written"] == 1 else f"{document['written']:,} rows are"
    return (
        f"{rows} in {document['output']}{failed}; "
        f"{document['tokens_per_s']:,} tokens/s, in {_span(document['seconds'])}."
        f"{'  ' + document['note'] if document['note'] else ''}"
        f"{''.join(map(_place_line, document['endpoints']))}"
    )


def _place_line(place: dict[str, Any]) -> str:
    cost = f", {place['cost']:,.4g} {place['currency']}".rstrip() if place["cost"] is not None else ""
    tokens = place["prompt_tokens"] + place["generated_tokens"]
    why = f"; {place['why']}" if place["why"] else ""
    return f"\n  {place['name']}: {place['rows']:,} rows, {tokens:,} tokens{cost}{why}"


class _Shown:
    """Progress on stderr: one updated line on a terminal, otherwise occasional lines."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self._told_s = time.monotonic()
        self._waits = ""
        self._waits_since_s = 0.0

    def pace(self, pace: Pace, blocked: str) -> None:
        """Shows the progress, or why the job is blocked."""
        now = time.monotonic()
        # Progress changes constantly; the start and end of a block are reported at once.
        waits = blocked if not blocked.endswith("%") else ""
        is_news = waits != self._waits
        if is_news:
            self._waits, self._waits_since_s = waits, now
        if self.is_terminal:
            line = blocked or pace_text(pace)
            if waits and now - self._waits_since_s >= 1:
                line = f"{_span(now - self._waits_since_s)}: {line}"
            show_progress(line)
        elif is_news or (not waits and now - self._told_s >= _PLAIN_TELL_S):
            self._told_s = now
            note(f"switchyard: {blocked or pace_text(pace)}")

    def clear(self) -> None:
        if self.is_terminal:
            clear_progress()


def pace_text(pace: Pace) -> str:
    """A job's progress on one line."""
    total = f" of {pace.total:,}" if pace.total is not None else ""
    failed = f", {pace.failed:,} failed" if pace.failed else ""
    failed += f", {pace.cut_off:,} cut off" if pace.cut_off else ""
    rate = f", {pace.tokens_per_s:,.0f} tokens/s" if pace.tokens_per_s else ""
    left = ""
    if pace.remaining_low_s is not None and pace.remaining_high_s is not None:
        left = f", done in {_between(pace.remaining_low_s, pace.remaining_high_s)}"
    elif pace.remaining_high_s is not None:
        left = f", done in {_span(pace.remaining_high_s)} at most"
    places = "; ".join(map(_place_text, pace.places))
    return f"{pace.done:,}{total} rows{failed}{rate}{left}{f' ({places})' if places else ''}"


def _place_text(place: PlacePace) -> str:
    name = place.name or "this PC"
    if place.state == "starting":
        return place.why.removesuffix(".")
    if place.state != "working":
        return f"{name} rests"
    return f"{name} {place.tokens_per_s:,.0f} tokens/s"


def prediction_text(prediction: JobPrediction) -> str:
    rows = prediction.batch_rows
    share = f"{rows:,} rows share each weight load" if rows > 1 else "one row at a time"
    chunks = f" in {prediction.micro_batches} chunks" if prediction.micro_batches > 1 else ""
    held = f", context takes up to {rounded_up(prediction.kv_bytes)}" if prediction.kv_bytes else ""
    ends = _between(prediction.seconds_low, prediction.seconds_high)
    return (
        f"{share}{chunks}{held}; about {_rate(prediction.low)} to {_rate(prediction.high)} tokens/s, "
        f"{_LIMITS[prediction.bottleneck.value]} limits it; done in {ends} "
        f"if answers are about {prediction.job.generated_tokens:,.0f} tokens long."
    )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


def _between(low_s: float, high_s: float) -> str:
    low, high = _span(low_s), _span(high_s)
    return high if low == high else f"{low} to {high}"


def _span(seconds: float) -> str:
    if seconds < 1:
        return "under a second"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def sample_words(sample: BatchSampled) -> str:
    each = f"{sample.prompt_tokens:,.0f} tokens read and {sample.generated_tokens:,.0f} written"
    cost = "" if sample.cost is None else f", at {sample.cost:,.2g} {sample.currency}".rstrip()
    return f"a row took {sample.row_s:.1f} s with few asked at once, {each}{cost}; many at once are faster"
