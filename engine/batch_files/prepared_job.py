"""A job whose settings have been checked against its input and output, before any model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from engine.batch_files.job_watcher import Between, noop
from engine.batch_files.journal import (
    JobManifest,
    Journal,
    KnownJob,
    WrittenFile,
    discard,
    is_own,
    is_there,
    journal_path,
    read_job,
    read_written,
)
from engine.batch_files.openai_format import errors_path, holds_openai_requests
from engine.batch_files.opening import InputForm, content_hash, open_source
from engine.batch_files.prompts import (
    OpenAiPrompts,
    PictureColumn,
    Prompts,
    Template,
    TemplatePrompts,
    parse_template,
    template_of,
)
from engine.batch_files.result_file import check_output, require_a_sheet
from engine.batch_files.rows import Answer, Constraint, RowRequest, RowSource, failed, grammar_of
from engine.common.config import HERE, BatchJob, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import remove_left_over


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A validated job.

    Attributes:
        job: as requested.
        source: the input's rows.
        prompts: from a row to its prompt.
        output: the result file.
        openai: whether input and output are in OpenAI's batch format.
    """

    job: BatchJob
    source: RowSource
    prompts: Prompts
    output: Path
    openai: bool

    @property
    def most_tokens(self) -> int | None:
        """Most tokens generated for one row; None if each row has its own limit."""
        if self.openai:
            return None
        is_held = bool(self.job.schema or self.job.choices)  # then it may be retried
        return self.job.sampling.max_tokens * (self.job.tries if is_held else 1)

    def asked(self) -> Iterator[tuple[float, RowRequest | Answer]]:
        """For each row, the share of the input read so far, and its prompt or its outcome."""
        ids: set[int] = set()
        for row in self.source.rows():
            asked = self.prompts(row)
            if self.openai and isinstance(custom_id := row.fields.get("custom_id"), str):
                # Answers are matched by custom_id: 8 bytes of hash per id are enough to detect duplicates.
                digest = xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "replace"))
                if digest in ids:
                    asked = failed(row.index, "has the custom_id of an earlier row")
                ids.add(digest)
            yield row.share, asked

    @property
    def begun_precision(self) -> str:
        """What a job that goes on began with, whatever was tuned since; `AUTO` if it has no answers."""
        from engine.formats import AUTO, is_precision  # which the window and the worker start without

        found = begun(self.output) if self.job.goes_on else None
        return found.precision if found is not None and is_precision(found.precision) else AUTO

    def manifest(self, model: str, precision: str, between: Between = noop) -> JobManifest:
        """What the answers depend on; reads the whole input once.

        Args:
            model: its fingerprint.
        """
        job = self.job
        return JobManifest(
            input_hash=content_hash(self.source, between),
            template=self.prompts.template.text if isinstance(self.prompts, TemplatePrompts) else "",
            system=job.system,
            model=model,
            precision=precision,
            sampling=json.dumps({**_sampling(job.sampling), **_changed_attention(job)}),
            constraint=json.dumps([job.schema, job.choices, job.tries]),
            # Jobs of earlier versions had no sheet and no pictures.
            form=json.dumps(
                [
                    *(job.encoding, job.separator, _are_whole(job)),
                    *([job.sheet] if job.sheet else []),
                    *([{"pictures": job.image_column}] if job.image_column else []),
                ]
            ),
        )

    def open_journal(self, manifest: JobManifest, model: str, servers: Sequence[Mapping[str, str]] = ()) -> Journal:
        """Opens the journal of this job according to its `start`.

        Args:
            model: its name, for lists of jobs.
            servers: name, address, model and version of each that answers now or did earlier; none: this machine alone.
        """
        path = journal_path(self.output)
        self.require_own_files()
        given: list[WrittenFile] = []
        if self.job.start == "restart":
            given = [file for file in read_written(path) if file.is_at(Path(file.path))]
            if is_there(self.output) and not is_own(self.output, given):
                given.append(WrittenFile.as_it_is(self.output))
            discard(path)
        settings = json.dumps({"model": model, "job": asdict(self.job), "servers": list(servers)})
        journal = Journal(path, manifest, settings)
        for file in given:
            journal.remember(file)
        try:
            if self.job.start == "retry_failed":
                journal.redo_failed()
            elif self.job.start == "redo_cut_off":
                journal.redo_cut_off(self.job.more_tokens)
        except EngineError:
            journal.close()
            raise
        for written in self._files:
            remove_left_over(written)
        return journal

    def require_own_files(self) -> None:
        """Refuses to overwrite a file that this job did not write, or that was changed since."""
        written = read_written(journal_path(self.output))
        for file in self._files:
            if file == self.output and self.job.start == "restart":  # the user asked to replace it
                continue
            if is_there(file) and not is_own(file, written):
                raise EngineError(
                    ErrorCode.INVALID_REQUEST,
                    f"{file} was not written by this job, or was changed since, and is not overwritten: move or rename "
                    f"it, and start again.",
                )

    @property
    def _files(self) -> tuple[Path, ...]:
        """All files that the job will write, unless the names are taken meanwhile."""
        return (self.output, errors_path(self.output)) if self.openai else (self.output,)


def begun(output: Path) -> KnownJob | None:
    """The job with this output, if it has answers."""
    found = read_job(journal_path(output))
    return found if found is not None and found.kept else None


def prepare(job: BatchJob) -> PreparedJob:
    """Opens the input and checks everything that can be checked without a model."""
    source = open_source(Path(job.input), InputForm(job.encoding, job.whole_files, job.separator, job.sheet))
    output = Path(job.output)
    openai = holds_openai_requests(source)
    check_output(output, source, openai=openai)
    _check_start(job, output)
    if output.suffix.lower() == ".xlsx" and not (job.start != "restart" and is_there(journal_path(output))):
        require_a_sheet(source)  # a job with answers continues: if necessary, it writes a csv
    prompts: Prompts
    folder = source.path if source.path.is_dir() else source.path.absolute().parent
    if openai:
        if job.template or job.system or job.schema or job.choices or job.image_column:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{source.path} has OpenAI requests, which include all settings: leave out template, system prompt, "
                f"schema, choices and the column of pictures.",
            )
        if output.suffix.lower() != ".jsonl":
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"Answers to OpenAI requests are jsonl: use {output.with_suffix('.jsonl')}."
            )
        prompts = OpenAiPrompts(job.sampling, any(name != HERE for name in job.endpoints), folder)
    else:
        pictures = PictureColumn(_image_column(job.image_column, source), folder) if job.image_column else None
        column = job.image_column
        template = _template(job.template, source, column) if job.template else template_of(source.columns, column)
        constraint = Constraint(job.schema, job.choices) if job.schema or job.choices else None
        if constraint is not None:
            grammar_of(constraint)  # report errors now, not row by row
        prompts = TemplatePrompts(template, job.system, job.sampling, constraint, pictures)
    return PreparedJob(job, source, prompts, output, openai)


def _are_whole(job: BatchJob) -> bool:
    return Path(job.input).is_dir() if job.whole_files is None else job.whole_files


def _template(text: str, source: RowSource, image_column: str) -> Template:
    try:
        return parse_template(text, source.columns, image_column)
    except EngineError:  # it may name a column of later rows
        return parse_template(text, source.all_columns(), image_column)


def _image_column(name: str, source: RowSource) -> str:
    if name not in source.columns and name not in source.all_columns():
        have = ", ".join(source.columns)
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"The input has no column {name!r} of pictures: its columns are {have}."
        )
    return name


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling settings; those that came later are omitted if unset, as jobs of earlier versions lack them."""
    plain, later = SamplingParams(), ("presence_penalty", "frequency_penalty", "logit_bias", "thinking")
    return {
        name: value
        for name, value in asdict(sampling).items()
        if not (name.startswith("dry_") or name in later) or value != getattr(plain, name)
    }


def _changed_attention(job: BatchJob) -> dict[str, Any]:
    """Settings besides sampling that change answers; omitted if unset, as jobs of earlier versions lack them."""
    plain = BatchJob(job.input, job.output)
    names = ("kv_precision", "attention_window")
    return {name: getattr(job, name) for name in names if getattr(job, name) != getattr(plain, name)}


def _check_start(job: BatchJob, output: Path) -> None:
    if job.start != "new":
        return
    if journal_path(output).exists():
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"A job with the output {output} already exists: resume it (--resume), or restart it (--restart), which "
            f"discards its answers.",
        )
    if is_there(output):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{output} already exists: choose another output, or replace it with --restart."
        )
