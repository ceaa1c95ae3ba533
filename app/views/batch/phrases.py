"""Jobs, rows and times in words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QDate, QLocale, QTime

from app.engine_words import said
from app.services.batch_job import JobEntry, JobState
from app.services.batch_sample import SampleRate
from app.widgets.quantities import SEPARATOR, count, memory, number, percent
from engine.batch_files.job_watcher import PlacePace
from engine.common.config import HERE
from engine.planner.batch_prediction import Bottleneck, JobPrediction
from engine.protocol import BatchRow, BatchSampled
from engine.remote.endpoint import Endpoint, called, is_host_here, named_at

translate = QCoreApplication.translate


def rate_figure(tokens_per_s: float) -> str:
    return number(tokens_per_s, 1) if tokens_per_s < 10 else count(round(tokens_per_s))


def clock_text(moment_s: float, now: datetime | None = None) -> str:
    """A time of day; with the date if it is not today.

    Args:
        moment_s: seconds since 1970.
    """
    now = now or datetime.now()
    moment = datetime.fromtimestamp(moment_s)
    locale = QLocale()
    time = locale.toString(QTime(moment.hour, moment.minute), QLocale.FormatType.ShortFormat)
    days = (moment.date() - now.date()).days
    if days <= 0:
        return time
    if days == 1:
        return translate("Batch", "tomorrow {0}").format(time)
    if days < 7:
        return f"{locale.dayName(moment.isoweekday())} {time}"
    wanted = translate("Batch", "d MMM") if moment.year == now.year else translate("Batch", "d MMM yyyy")
    return locale.toString(QDate(moment.year, moment.month, moment.day), wanted)


def plan_text(plan: JobPrediction, now_s: float, alone_tokens_per_s: float = 0.0) -> str:
    """A job before its start: rows that share weights, rate, end, bottleneck, and the uncertainty.

    Args:
        alone_tokens_per_s: one row at a time; 0 if unknown.
    """
    shared = shared_text(plan.batch_rows) if plan.job.rows > 1 else translate("Batch", "One row")
    rate = translate("Batch", "{0} to {1} tokens/s").format(*_rates(plan))
    if plan.is_measured:
        first, last = clock_text(now_s + plan.seconds_low), clock_text(now_s + plan.seconds_high)
        end = translate("Batch", "done between {0} and {1}").format(first, last)
        if first == last:
            end = translate("Batch", "done at about {0}").format(first)
        sure = translate("Batch", "Measured on the trial rows, ±{0}.").format(percent(_off(plan)))
    else:
        end = translate("Batch", "done by {0} even if every answer takes all {1} tokens").format(
            clock_text(now_s + plan.seconds_high), count(round(plan.job.generated_tokens))
        )
        sure = translate("Batch", "Predicted, ±{0}; a trial of the first rows is more exact.").format(
            percent(_off(plan))
        )
    parts = [f"{shared}; {rate}; {end}.", limit_text(plan.bottleneck), sure]
    if alone_tokens_per_s > 0 and plan.batch_rows > 1:
        one_by_one = translate("Batch", "One row at a time: {0} tokens/s.")
        parts.insert(2, one_by_one.format(rate_figure(_two_digits(alone_tokens_per_s))))
    if plan.kv_bytes:
        parts.insert(1, translate("Batch", "Context of these rows: up to {0} of memory.").format(memory(plan.kv_bytes)))
    return " ".join(part for part in parts if part)


def shared_text(rows: int) -> str:
    if rows <= 1:
        return translate("Batch", "Rows are answered one at a time")
    return translate("Batch", "{0} rows share each load of a layer's weights").format(count(rows))


def planned_text(plan: JobPrediction, measured: float = 0.0) -> str:
    """The prediction, next to what a running job measures.

    Args:
        measured: tokens/s so far; 0 if unknown.  A prediction that the measurement contradicts is reported as wrong,
            and its bottleneck is left out.
    """
    low, high = _rates(plan)
    if measured > 0 and measured < plan.low:
        words = translate(
            "Batch",
            "Measured {2} tokens/s, slower than the {0} to {1} predicted: other programs may be busy, or rows longer "
            "than the first ones. The time left is based on the measured rate.",
        )
        return words.format(low, high, rate_figure(measured))
    if measured > plan.high:
        words = translate(
            "Batch",
            "Measured {2} tokens/s, faster than the {0} to {1} predicted. The time left is based on the measured rate.",
        )
        return words.format(low, high, rate_figure(measured))
    if measured > 0:
        return limit_text(plan.bottleneck)
    expected = translate("Batch", "Expected: {0} to {1} tokens/s.").format(low, high)
    return f"{expected} {limit_text(plan.bottleneck)}".strip()


def limit_text(bottleneck: str) -> str:
    words: dict[str, str] = {
        Bottleneck.ARITHMETIC: translate("Batch", "Limited by CPU compute."),
        Bottleneck.WEIGHTS: translate("Batch", "Limited by reading weights from RAM."),
        Bottleneck.ATTENTION: translate("Batch", "Limited by attention on the CPU."),
        Bottleneck.DISK: translate("Batch", "Limited by reading experts from disk."),
        Bottleneck.LINK: translate("Batch", "Limited by the link to the card."),
        Bottleneck.CARD: translate("Batch", "Limited by GPU compute."),
    }
    return words.get(bottleneck, "")


def _rates(plan: JobPrediction) -> tuple[str, str]:
    return rate_figure(_two_digits(plan.low)), rate_figure(_two_digits(plan.high))


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _off(plan: JobPrediction) -> float:
    both = plan.low + plan.high
    return round((plan.high - plan.low) / both, 2) + 1e-9 if both > 0 else 0.0


def state_text(job: JobEntry) -> str:
    if job.state is JobState.RUNNING:
        share = job.share
        return translate("Batch", "running") if share is None else percent(share)
    return {
        JobState.QUEUED: translate("Batch", "waiting") if job.turn < 2 else translate("Batch", "waiting, place {0}"),
        JobState.STOPPING: translate("Batch", "stopping"),
        JobState.PAUSED: translate("Batch", "paused"),
        JobState.STOPPED: translate("Batch", "stopped"),
        JobState.FINISHED: translate("Batch", "done"),
        JobState.FAILED: translate("Batch", "failed"),
        JobState.ELSEWHERE: translate("Batch", "runs elsewhere"),
    }[job.state].format(job.turn)


def job_text(job: JobEntry) -> str:
    return f"{job.input.name} → {job.output.name}, {state_text(job)}. {rows_text(job)}"


def rows_text(job: JobEntry) -> str:
    if job.total is None:
        text = translate("Batch", "1 row done") if job.done == 1 else translate("Batch", "{0} rows done", "", job.done)
    else:
        text = translate("Batch", "{0} of {1} rows", "", job.total)
    parts = [text.format(count(job.done), count(job.total or 0))]
    if job.failed:
        parts.append(translate("Batch", "{0} failed").format(count(job.failed)))
    if job.cut_off:
        parts.append(translate("Batch", "{0} cut off").format(count(job.cut_off)))
    return SEPARATOR.join(parts)


def pace_text(job: JobEntry) -> tuple[str, str]:
    if job.state is not JobState.RUNNING or (job.beside_chat and not job.job.is_remote):
        return "", ""
    rate = translate("Batch", "{0} tokens/s").format(rate_figure(job.tokens_per_s)) if job.tokens_per_s else ""
    if job.ends_high_s is None:
        return rate, ""
    last = clock_text(job.ends_high_s)
    if job.ends_low_s is None:
        return rate, translate("Batch", "done by {0} at the latest").format(last)
    first = clock_text(job.ends_low_s)
    if first == last:
        return rate, translate("Batch", "done at about {0}").format(first)
    return rate, translate("Batch", "done between {0} and {1}").format(first, last)


def status_text(job: JobEntry) -> str:
    """The line under the bar: what is happening, or why nothing is, and what to do."""
    if job.state is JobState.RUNNING:
        if job.blocked:
            return job.blocked
        if job.beside_chat and not job.job.is_remote:
            return translate("Batch", "Shares the engine with your chat until the answer is complete.")
        if job.total is None and not job.done:
            return translate("Batch", "Reading the file…")
        if job.job.is_remote:
            return _elsewhere_text(job)
        return _running_text(job)
    if job.state is JobState.QUEUED:
        if not job.needs_model:
            return said(job.reason) or translate("Batch", "Starts when the engine is ready.")
        return said(job.reason) or translate("Batch", "Starts when a job before it is done and a model is loaded.")
    if job.state is JobState.STOPPING:
        if not job.needs_model:
            return translate("Batch", "Saving finished rows…")
        return translate("Batch", "Finishing the current layer and saving finished rows…")
    if job.state is JobState.ELSEWHERE:
        return translate("Batch", "Another program is working on this job, such as “switchyard batch”.")
    if job.state is JobState.FINISHED:
        end = translate("Batch", "All rows are in {0}.").format(job.result_file.name)
        failed = ""
        if job.failed and job.errors:
            failed = translate("Batch", "{0} says why rows failed.").format(Path(job.errors).name)
        elif job.failed:
            failed = translate("Batch", "Column “problem” says why rows failed.")
        return " ".join(part for part in (end, failed, _ran_text(job), job.note) if part)
    if job.state is JobState.STOPPED:
        stopped = translate("Batch", "Stopped: the answered rows are in {0}.").format(job.result_file.name)
        return " ".join(part for part in (stopped, job.note) if part)
    resume = translate("Batch", "Resume continues where it stopped.")
    if job.state is not JobState.PAUSED:
        return said(job.reason) or resume
    return " ".join(part for part in (said(job.reason), said(job.note), resume) if part)


def _ran_text(job: JobEntry) -> str:
    if job.ran_tokens <= 0 or job.ran_s <= 0:
        return ""
    minutes, seconds = divmod(round(job.ran_s), 60)
    span = translate("Batch", "{0} min {1} s").format(count(minutes), seconds)
    words = translate("Batch", "{0} tokens in {1}, {2} tokens/s.")
    short = translate("Batch", "{0} s").format(number(job.ran_s, 1) if job.ran_s < 10 else round(job.ran_s))
    rate = rate_figure(job.ran_tokens / job.ran_s)
    return words.format(count(job.ran_tokens), span if minutes else short, rate)


def _elsewhere_text(job: JobEntry) -> str:
    hosts = [named_at(place.name, place.host) for place in job.places if place.host]
    if not hosts and job.job.ray:
        return translate("Batch", "Connecting to the Ray cluster…")
    if not hosts:
        return translate("Batch", "Asking the servers which models they have…")
    words = translate("Batch", "Rows are sent to {0}.")
    if _stays_here(job):
        words = translate("Batch", "Rows are sent to {0} on this PC; no text leaves it.")
    sent = words.format(translate("Batch", " and to ").join(hosts))
    if not job.needs_model:
        return sent
    here = translate("Batch", "Chats go first on this PC.")
    if job.beside_chat:
        here = translate("Batch", "This PC answers your chat first.")
    return f"{sent} {here}"


def _stays_here(job: JobEntry) -> bool:
    """Whether all servers that a job names are known to be on this PC; a cluster's nodes come and go."""
    others = {place.name: place.host for place in job.places if place.host}
    named = set(job.job.endpoints) - {HERE}
    return not job.job.ray and others.keys() >= named and all(map(is_host_here, others.values()))


def _running_text(job: JobEntry) -> str:
    first = "" if job.done else translate("Batch", "The first rows are being answered.")
    rows = job.under_way or (job.plan.batch_rows if job.plan is not None else 0)
    shared = f"{shared_text(rows)}." if rows else ""
    expected = planned_text(job.plan, job.tokens_per_s) if job.plan is not None else ""
    others = {0: "", 1: translate("Batch", "Another job shares the engine.")}.get(
        job.beside_jobs, translate("Batch", "{0} other jobs share the engine.").format(job.beside_jobs)
    )
    chat = translate("Batch", "Chats go on beside it.")
    return " ".join(part for part in (first, shared, expected, others, chat) if part)


def end_text(row: BatchRow) -> str:
    if row.problem:
        return translate("Batch", "failed")
    return {
        "stop": translate("Batch", "complete"),
        "length": translate("Batch", "cut off"),
        "context": translate("Batch", "context full"),
    }.get(row.finish_reason, row.finish_reason)


def host_text(endpoint: Endpoint) -> str:
    parts = [endpoint.host] if endpoint.name != endpoint.host else []
    models = (endpoint.model,) if endpoint.model else endpoint.found.models
    if len(models) == 1:
        parts.append(models[0])
    return SEPARATOR.join(parts)


def sent_text(endpoints: Sequence[Endpoint]) -> str:
    away = [called(each) for each in endpoints if not each.is_here]
    if not endpoints:
        return translate("Batch", "No text leaves this PC.")
    if not away:
        return translate("Batch", "The rows are sent to a server on this PC; no text leaves it.")
    return translate("Batch", "The text of every row may be sent to {0}.").format(
        translate("Batch", " and to ").join(away)
    )


def cluster_sent_text(address: str) -> str:
    where = translate("Batch", "that this PC belongs to") if address == "auto" else translate("Batch", "at {0}")
    return translate("Batch", "The text of every row is sent to the nodes of the Ray cluster {0}.").format(
        where.format(address)
    )


def place_name(place: PlacePace) -> str:
    return place.name or translate("Batch", "This PC")


def place_text(place: PlacePace) -> str:
    if place.state == "out":
        return translate("Batch", "Not asked: {0}").format(place.why)
    if place.state == "starting":
        return place.why
    if place.state == "resting":
        return translate("Batch", "Paused, and asked again later: {0}").format(place.why)
    rate = translate("Batch", "{0} tokens/s").format(rate_figure(place.tokens_per_s)) if place.tokens_per_s else ""
    asked = (
        translate("Batch", "{0} rows at once", "", place.under_way).format(count(place.under_way))
        if place.under_way
        else ""
    )
    if place.under_way == 1:
        asked = translate("Batch", "1 row at once")
    return SEPARATOR.join(filter(None, (rate, asked, place.why)))


def cost_text(place: PlacePace) -> str:
    if place.cost is None:
        return ""
    return f"{number(place.cost, 2 if place.cost >= 1 or not place.cost else 4)} {place.currency}".strip()


def sampled_text(sampled: BatchSampled, rows: int | None) -> str:
    """What a trial at endpoints says of all rows.

    Args:
        rows: all of them; None while unknown.
    """
    words = translate(
        "Batch", "Measured there on {0} rows: {1} s for a row, {2} tokens read and {3} written.", "", sampled.rows
    ).format(
        sampled.rows,
        number(sampled.row_s, 1 if sampled.row_s < 10 else 0),
        count(round(sampled.prompt_tokens)),
        count(round(sampled.generated_tokens)),
    )
    if rows is None:
        return words
    minutes = rows * sampled.row_s / 60
    most = number(minutes, 1 if minutes < 10 else 0)
    parts = [
        words,
        translate("Batch", "All rows take {0} min at most; asked at once, they take less.").format(most),
    ]
    if sampled.cost is not None:
        cost = rows * sampled.cost
        shown = f"{number(cost, 2 if cost >= 1 else 4)} {sampled.currency}".strip()
        parts.append(translate("Batch", "They cost about {0}.").format(shown))
    return " ".join(parts)


def sample_text(rate: SampleRate) -> str:
    one, more = (
        translate("Batch", "{0} row took {1} s, at {2} tokens/s."),
        translate("Batch", "{0} rows took {1} s, at {2} tokens/s.", "", rate.rows),
    )
    return (one if rate.rows == 1 else more).format(
        rate.rows,
        number(rate.seconds, 1 if rate.seconds < 10 else 0),
        rate_figure(rate.tokens / rate.seconds),
    )
