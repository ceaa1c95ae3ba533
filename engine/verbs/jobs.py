"""`switchyard jobs`: all batch jobs on this machine: list, show, stop, remove."""

from __future__ import annotations

import argparse
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common.config import HERE
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line
from engine.verbs.output import emit

if TYPE_CHECKING:
    from engine.batch_files.journal import KnownJob

_STOP_S = 60.0


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "jobs",
        help="batch jobs: list, show, stop, remove",
        description="Batch jobs of this machine, started on the command line or in the window.  A job is named by its "
        "output file.  `switchyard batch ... --resume` continues an unfinished one.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, text in (
        ("list", "all jobs, newest first (the default)"),
        ("show", "one job, with the reasons of failed rows and the numbers of those cut off"),
        ("stop", "stop a job wherever it runs; its answers are kept and written"),
        ("remove", "delete a job and its saved answers; its output file stays"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        if name != "list":
            action.add_argument("output", metavar="OUTPUT", type=Path, help="the output file of the job")
        action.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Performs the action; returns the exit code."""
    from engine.batch_files.journal import known_jobs

    if args.action in (None, "list"):
        jobs = [_document(job) for job in known_jobs()]
        emit(jobs, as_json=args.json, human=lambda: "\n".join(map(_line, jobs)) or "There are no batch jobs.")
    elif args.action == "show":
        _show(args.output, as_json=args.json)
    elif args.action == "stop":
        _stop(args.output, as_json=args.json)
    else:
        _remove(args.output, as_json=args.json)
    return 0


def _job(output: Path) -> KnownJob:
    from engine.batch_files.journal import journal_path, read_job

    job = read_job(journal_path(output))
    if job is None:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"There is no job with the output {output}: see `switchyard jobs`."
        )
    return job


def _show(output: Path, *, as_json: bool) -> None:
    from engine.batch_files.journal import read_answers

    job = _job(output)
    failures = [{"row": answer.row, "problem": answer.problem} for answer in read_answers(job.journal, ended="failed")]
    cut_off = [answer.row for answer in read_answers(job.journal, ended="cut_off") if not answer.failed]
    document = {**_document(job), "failures": failures, "cut_off_rows": cut_off}
    told = [f"Row {failure['row']} {failure['problem']}." for failure in failures]
    told += [f"Row {row} was cut off at its limit." for row in cut_off]
    emit(document, as_json=as_json, human=lambda: "\n".join([_line(document), *map(plain_line, told)]))


def _stop(output: Path, *, as_json: bool) -> None:
    from engine.batch_files.journal import ask_to_stop

    job = _job(output)
    if not job.running:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"The job of {output} is not running.")
    ask_to_stop(job.journal)
    until = time.monotonic() + _STOP_S
    while (job := _job(output)).running:
        if time.monotonic() > until:
            raise EngineError(ErrorCode.BUSY, f"The job of {output} has not stopped yet: check again with `jobs`.")
        time.sleep(0.2)
    document = _document(job)
    emit(document, as_json=as_json, human=lambda: _line(document))


def _remove(output: Path, *, as_json: bool) -> None:
    from engine.batch_files.journal import discard

    job = _job(output)
    discard(job.journal)
    document = {"removed": str(output), "answers": job.done}
    emit(document, as_json=as_json, human=f"Removed the job of {output} with {job.done:,} answers.")


def _document(job: KnownJob) -> dict[str, Any]:
    settings = job.settings.get("job", {})
    state = "running" if job.running else "finished" if job.finished_s is not None else "stopped"
    return {
        "output": settings.get("output", ""),
        "input": settings.get("input", ""),
        "model": job.settings.get("model", ""),
        "state": state,
        "done": job.done,
        "failed": job.failed,
        "cut_off": job.cut_off,
        "generated_tokens": job.generated_tokens,
        "endpoints": [
            {"name": name or HERE, "rows": rows, "generated_tokens": tokens} for name, rows, tokens in job.endpoints
        ],
        "begun_s": job.begun_s,
        "finished_s": job.finished_s,
    }


def _line(job: dict[str, Any]) -> str:
    begun = datetime.fromtimestamp(job["begun_s"]).strftime("%Y-%m-%d %H:%M")
    failed = f", {job['failed']:,} of them failed" if job["failed"] else ""
    failed += f", {job['cut_off']:,} cut off" if job["cut_off"] else ""
    by = ", ".join(f"{place['rows']:,} by {place['name']}" for place in job["endpoints"])
    by = f"  ({by})" if by else ""
    line = f"{begun}  {job['state']:<8}  {job['done']:,} rows answered{failed}"
    return f"{line}  {plain_line(job['output'])}{plain_line(by)}"
