"""From a job's settings and a loaded model to its result: what the command line and the worker call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

from engine.batch_files.answer import Answer
from engine.batch_files.background import StoppedError, run_in_background
from engine.batch_files.job_list import read_job
from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.journal import journal_path
from engine.batch_files.pace import Pace
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.stop_request import StopRequest
from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.shards import read_tensors
from engine.runtime.batch.executor import BatchExecutor
from engine.runtime.batch.feed import Asking, question_of
from engine.runtime.batch.job import JobRun
from engine.runtime.batch.job_plan import SweepClock, plan_job, predicted_after
from engine.runtime.batch.request import BatchAnswer, BatchRequest, Outcome
from engine.runtime.decode.constrained import ConstrainedAnswers
from engine.runtime.decode.sequence import end_token_ids
from engine.runtime.loaded_model import LoadedModel


def run_whole_job(prepared: PreparedJob, loaded: LoadedModel, watcher: JobWatcher) -> JobEnding:
    """Answers the rows of a job and writes its result.

    Raises:
        EngineError: the job cannot be begun or gone on with; what was answered is kept.
    """
    directory = Path(loaded.info.path)
    digest = str(fingerprint(directory, read_tensors(directory).values())["headers"])
    so_far = read_job(journal_path(prepared.output)) if prepared.job.start != "restart" else None
    known = Pace(so_far.done if so_far else 0, so_far.failed if so_far else 0, None, 0.0, None, None)
    try:
        manifest = run_in_background(
            lambda between: prepared.manifest(digest, loaded.info.precision, between),
            watcher,
            lambda share: watcher.on_pace(known, f"Reading the input: {share:.0%}"),
        )
    except StoppedError:
        return JobEnding(False, known, 0)
    with closing(prepared.open_journal(manifest, loaded.info.path)) as journal, StopRequest(journal.path) as stop:
        here = watcher.cancelled
        watcher = replace(watcher, cancelled=lambda: here() or stop.is_made())
        plan = plan_job(prepared, loaded)
        if plan.prediction is not None:
            watcher.on_plan(plan.prediction)
        with closing(BatchExecutor(loaded, plan.policy)) as executor:
            ending = JobRun(prepared, manifest, journal, executor, lambda: _constrained(loaded), watcher).run()
            return replace(ending, note=" ".join(filter(None, (ending.note, executor.note))))


def run_sample(prepared: PreparedJob, loaded: LoadedModel, rows: int, watcher: JobWatcher) -> None:
    """Answers the first rows of a job, and keeps nothing; whoever has priority waits for no more than a layer.

    Args:
        watcher: told each answer with the message that it answers, in any order, and at the end how fast the whole job
            will be: as predicted, corrected by what these rows took.  It hears of no pace.
    """
    on_answer, cancelled = watcher.on_answer, watcher.cancelled
    asking = Asking(prepared.job.tries, lambda: _constrained(loaded))

    def runnable(request: BatchRequest | Answer, question: str) -> Iterator[BatchRequest]:
        if isinstance(request, Answer):
            on_answer(request, question)
        else:
            yield request

    def requests() -> Iterator[BatchRequest]:
        for _share, asked in islice(prepared.asked(), rows):
            if isinstance(asked, Answer):
                on_answer(asked, "")
            else:
                yield from runnable(asking.ask(asked), question_of(asked))

    def again() -> Iterator[BatchRequest]:
        for request in asking.again():
            yield from runnable(request, "")

    timed = list[BatchAnswer]()

    def answered(answer: BatchAnswer) -> None:
        timed.append(answer)
        ended = asking.ended(answer)
        if ended is not None:
            on_answer(*ended)

    executor = BatchExecutor(loaded)
    clock = SweepClock(lambda: executor.under_way)

    def should_yield() -> bool:
        clock.look()
        return watcher.should_yield()

    def run(asked: Iterator[BatchRequest]) -> None:
        while executor.run(asked, answered, should_yield, cancelled) is Outcome.YIELDED:
            clock.leave(watcher.give_way)

    try:
        run(requests())
        while asking.waiting and not cancelled():
            run(again())
        taken = clock.time()
    finally:
        executor.close()
    if not cancelled():
        prediction = predicted_after(prepared, loaded, timed, taken)
        if prediction is not None:
            watcher.on_plan(prediction)


def _constrained(loaded: LoadedModel) -> ConstrainedAnswers:
    vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
    return ConstrainedAnswers(loaded.tokenizer, vocabulary, end_token_ids(loaded.model, loaded.tokenizer))
