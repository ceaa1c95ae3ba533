"""The window's batch jobs: some run, others are queued, and none is lost if the engine or the window ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask, TaskQueue, timer
from app.services.batch_job import RESUMABLE, UNDER_WAY, JobEntry, JobState, key_of, load_jobs, save_jobs
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import BatchRun
from engine.batch_files.journal import discard
from engine.common.config import BatchJob, BatchStart, EngineConfig
from engine.common.errors import ErrorCode
from engine.formats import AUTO, is_precision
from engine.protocol import BatchFinished, BatchPlanned, BatchProgress, BatchRows, Failed

_log = logging.getLogger("switchyard.batch")

WATCH_MS = 2000
"""How often other processes' jobs are checked."""


class BatchJobs(QObject):
    """Sends jobs to the engine in the order of the queue, a few at a time.

    Args:
        at_once: how many may run at the same time.

    Signals:
        changed: a `JobEntry` that is new or has changed.
        removed: the key of a job that is no longer listed.
        answered: a job's key and its newly finished `BatchRow`s.
        listed: the jobs of earlier sessions have been read.
        trouble: one sentence on what could not be saved.
        model_wanted: a job waits for the model on this PC.
    """

    changed = Signal(object)
    removed = Signal(str)
    answered = Signal(str, object)
    listed = Signal()
    trouble = Signal(str)
    model_wanted = Signal()

    def __init__(
        self,
        client: EngineClient,
        parent: QObject | None = None,
        *,
        clock: Callable[[], float] = time.time,
        at_once: Callable[[], int] = lambda: 1,
    ) -> None:
        super().__init__(parent)
        self._client, self._clock, self._at_once = client, clock, at_once
        self._entries: dict[str, JobEntry] = {}
        self._turns: list[str] = []
        self._runs: dict[str, BatchRun] = {}
        self._wishes: dict[str, JobState] = {}
        """What is to become of a running job once it has stopped, if not paused."""
        self._were_running: list[str] = []
        """When the queue was last held."""
        self._held = self._is_listed = False
        self._bin: dict[str, JobEntry] = {}
        self._listing, self._saving, self._discarding = LatestTask(self), LatestTask(self), TaskQueue(self)
        self._watch = timer(self, self.list_again, WATCH_MS)
        client.state_changed.connect(self._on_state)
        client.model_loaded.connect(self.start_more)

    # --- state ------------------------------------------------------------------------------------

    @property
    def entries(self) -> list[JobEntry]:
        return sorted(self._entries.values(), key=lambda entry: -entry.created_s)

    def entry(self, key: str) -> JobEntry | None:
        return self._entries.get(key)

    @property
    def running(self) -> list[JobEntry]:
        return [self._entries[key] for key in self._runs]

    def list_again(self) -> None:
        """Reads the journals; `listed` follows."""
        # The check for a running process briefly takes a job's lock: not while a job of ours may need it.
        # Nor while a removed job is still being deleted: it would be listed again.
        busy = any(task.is_busy for task in (self._listing, self._saving, self._discarding))
        if not busy and not self._runs:
            self._listing.ask(load_jobs, self._on_listed)

    # --- actions ----------------------------------------------------------------------------------

    def add(self, job: BatchJob, total: int | None = None) -> str:
        key = key_of(job.output)
        self._bin.pop(key, None)
        self._turns.append(key)
        self._put(JobEntry(key, job, JobState.QUEUED, self._clock(), total=total))
        self.start_more()
        return key

    def resume(self, key: str, start: BatchStart = "resume") -> None:
        entry = self._entries[key]
        if entry.state in RESUMABLE or (entry.state is JobState.FINISHED and start != "resume"):
            again = {"restart": entry.done, "retry_failed": entry.failed, "redo_cut_off": entry.cut_off}.get(start, 0)
            failed = 0 if start in ("restart", "retry_failed") else entry.failed
            cut_off = 0 if start in ("restart", "redo_cut_off") else entry.cut_off
            entry = replace(entry, done=entry.done - again, failed=failed, cut_off=cut_off)
            job = replace(entry.job, start=start)
            self._turns.append(key)
            if start == "restart":
                entry = replace(entry, result="", errors="")
            self._put(replace(entry, job=job, state=JobState.QUEUED, reason="", note=""))
            self.start_more()

    def config_to_resume(self, key: str) -> EngineConfig | None:
        """The configuration that a job needs to be resumed; None if the loaded one will do.

        A model that was tuned since then, or that fits better now, may have another precision: the rows of one job are
        not mixed from two.
        """
        entry, model, config = self._entries[key], self._client.model, self._client.config
        if not entry.done or model is None or config is None or not entry.begun_model:
            return None
        precision = entry.begun_precision if is_precision(entry.begun_precision) else AUTO
        if entry.job.is_remote:
            return None  # who may go on with it is decided by who answers
        same_model = entry.begun_model == model.path
        if same_model and entry.begun_precision == model.precision:
            return None
        return replace(config, model=config.model if same_model else entry.begun_model, precision=precision)

    def pause(self, key: str) -> None:
        self._end_by_wish(key, JobState.PAUSED)

    def stop(self, key: str) -> None:
        self._end_by_wish(key, JobState.STOPPED)

    def move(self, key: str, places: int) -> None:
        if key in self._turns:
            place = self._turns.index(key)
            self._turns.remove(key)
            self._turns.insert(max(0, place + places), key)
            self._update_turns()

    def remove(self, key: str) -> None:
        entry = self._entries[key]
        if entry.state not in UNDER_WAY and entry.state is not JobState.ELSEWHERE:
            self._bin[key] = self._entries.pop(key)
            if key in self._turns:
                self._turns.remove(key)
            self.removed.emit(key)
            self._save()
            self._update_turns()

    def restore(self, key: str) -> None:
        entry = self._bin.pop(key, None)
        if entry is not None:
            paused = entry.state is JobState.QUEUED
            self._put(replace(entry, state=JobState.PAUSED) if paused else entry)

    def empty_bin(self) -> None:
        for entry in self._bin.values():
            self._discarding.add(
                partial(discard, entry.journal),
                failed=lambda error: _log.warning("a journal could not be deleted: %s", type(error).__name__),
            )
        self._bin.clear()

    # --- holding the queue ------------------------------------------------------------------------

    def hold(self) -> None:
        self._held, self._were_running = True, list(self._runs)
        for entry in self.running:
            if entry.state is JobState.RUNNING and entry.needs_model:
                self._wishes[entry.key] = JobState.QUEUED
                self._runs[entry.key].cancel()

    def release(self) -> None:
        self._held = False
        self.start_more()

    def close_down(self) -> None:
        self._watch.stop()
        self.empty_bin()
        for task in (self._saving, self._listing, self._discarding):
            task.close()
        if not self._is_listed and not self._entries:
            return  # the saved jobs have not been read yet
        try:
            save_jobs(self._entries.values())  # directly: the event loop is about to end
        except OSError as error:
            self._on_not_saved(error)

    # --- the queue --------------------------------------------------------------------------------

    def start_more(self, *_: object) -> None:
        if any(self._entries[key].needs_model or self._entries[key].job.ray for key in self._turns):
            self.model_wanted.emit()  # the nodes of a cluster run the model that is loaded here
        for key in list(self._turns):
            if not self._held and self._can_start(key):
                self._turns.remove(key)
                self._start(key)
        for entry in self.running:
            others = sum(other.needs_model for other in self.running) - 1 if entry.needs_model else 0
            if entry.beside_jobs != others:
                self._put(replace(entry, beside_jobs=others), to_file=False)

    def _can_start(self, key: str) -> bool:
        state, needs_model = self._client.state, self._entries[key].needs_model
        if self._entries[key].job.ray and self._client.config is None:
            return False  # nobody has said which model
        if not needs_model:
            return state not in (EngineState.STOPPED, EngineState.DIED)
        at_work = sum(self._entries[other].needs_model for other in self._runs)
        able = state in (EngineState.READY, EngineState.BUSY) and self._client.model is not None
        return able and at_work < self._at_once()

    def _start(self, key: str) -> None:
        entry = self._entries[key]
        model = self._client.model.name if self._client.model is not None else ""
        job = entry.job
        # However this run ends, the next one resumes from its answers.
        beside_chat = self._client.state is EngineState.BUSY
        resumed = replace(job, start="resume")
        info = self._client.model
        if not entry.needs_model:
            model, beside_chat = ", ".join(job.endpoints) or model, False
        elif info is not None and not (entry.done and job.goes_on):
            entry = replace(entry, begun_model=info.path, begun_precision=info.precision)
        self._runs[key] = run = self._client.start_batch(job)
        self._put(replace(entry, job=resumed, state=JobState.RUNNING, model=model, beside_chat=beside_chat))
        run.planned.connect(partial(self._on_planned, key))
        run.progressed.connect(partial(self._on_progressed, key))
        run.answered.connect(partial(self._on_answered, key))
        run.finished.connect(partial(self._on_finished, key))

    def _end_by_wish(self, key: str, state: JobState) -> None:
        entry = self._entries[key]
        if key in self._runs:
            self._wishes[key] = state
            self._put(replace(entry, state=JobState.STOPPING))
            self._runs[key].cancel()
        elif entry.state is JobState.QUEUED:
            self._turns.remove(key)
            self._put(replace(entry, state=state))
        elif entry.state in RESUMABLE:
            self._put(replace(entry, state=state, reason=""))

    # --- events of the engine ---------------------------------------------------------------------

    def _on_state(self, state: EngineState) -> None:
        # Jobs alone leave the engine READY; what makes it BUSY is a chat, with which they share the engine.
        beside_chat = state is EngineState.BUSY
        for entry in self.running:
            if entry.needs_model and entry.beside_chat != beside_chat:
                self._put(replace(entry, beside_chat=beside_chat), to_file=False)
        self.start_more()

    def _on_planned(self, key: str, event: BatchPlanned) -> None:
        self._put(replace(self._entries[key], plan=event.prediction), to_file=False)

    def _on_answered(self, key: str, event: BatchRows) -> None:
        self.answered.emit(key, event.rows)

    def _on_progressed(self, key: str, event: BatchProgress) -> None:
        entry, pace, now = self._entries[key], event.pace, self._clock()
        low, high = pace.remaining_low_s, pace.remaining_high_s
        total = entry.total if pace.total is None else pace.total
        new = replace(
            entry,
            done=pace.done,
            failed=pace.failed,
            cut_off=pace.cut_off,
            total=total,
            tokens_per_s=pace.tokens_per_s,
            ends_low_s=None if low is None else now + low,
            ends_high_s=None if high is None else now + high,
            under_way=pace.under_way,
            blocked=event.blocked,
            places=pace.places,
        )
        self._put(new, to_file=total != entry.total)

    def _on_finished(self, key: str, event: BatchFinished | Failed) -> None:
        entry = self._entries[key]
        del self._runs[key]
        wish = self._wishes.pop(key, JobState.PAUSED)
        entry = replace(
            entry, blocked="", beside_chat=False, beside_jobs=0, under_way=0, ends_low_s=None, ends_high_s=None
        )
        if isinstance(event, BatchFinished):
            entry = self._ended(entry, event, wish)
        elif event.code in (ErrorCode.ENGINE_DIED, ErrorCode.DISK_FULL):
            entry = replace(entry, state=JobState.PAUSED, reason=event.message)
        else:
            entry = replace(entry, state=JobState.FAILED, reason=event.message)
        if entry.state is JobState.QUEUED:
            before = self._were_running[: self._were_running.index(key)] if key in self._were_running else []
            self._turns.insert(sum(other in self._turns for other in before), key)
        self._put(entry)
        self.start_more()

    def _ended(self, entry: JobEntry, event: BatchFinished, wish: JobState) -> JobEntry:
        entry = replace(entry, ran_tokens=event.tokens, ran_s=event.seconds)
        if event.done:  # a job stopped before it began reports nothing about earlier runs
            entry = replace(entry, done=event.done, failed=event.failed, cut_off=event.cut_off)
        if event.output:
            entry = replace(entry, result=event.output, errors=event.errors, note=event.note)
        if event.finished:
            return replace(entry, state=JobState.FINISHED, total=event.done, note=event.note)
        if entry.state is not JobState.STOPPING and wish is JobState.PAUSED:
            why = self.tr("The engine was needed for something else, such as another model; no answered row is lost.")
            return replace(entry, state=JobState.PAUSED, reason=why)
        return replace(entry, state=wish)

    # --- saving -----------------------------------------------------------------------------------

    def _put(self, entry: JobEntry, *, to_file: bool = True) -> None:
        before = self._entries.get(entry.key)
        entry = replace(entry, turn=self._turn(entry.key))
        self._entries[entry.key] = entry
        if to_file:
            self._save()
        self.changed.emit(entry)
        if before is None or before.turn != entry.turn:
            self._update_turns()

    def _turn(self, key: str) -> int:
        return self._turns.index(key) + 1 if key in self._turns else 0

    def _update_turns(self) -> None:
        for key in list(self._turns):
            entry = self._entries.get(key)
            if entry is not None and entry.turn != self._turn(key):
                self._entries[key] = entry = replace(entry, turn=self._turn(key))
                self.changed.emit(entry)

    def _save(self) -> None:
        entries = tuple(self._entries.values())
        self._saving.ask(lambda: save_jobs(entries), failed=self._on_not_saved)

    def _on_not_saved(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error)
        self.trouble.emit(self.tr("The list of jobs could not be saved ({0}).").format(reason))

    def _on_listed(self, found: list[JobEntry]) -> None:
        self._is_listed = True
        ours = {key for key, entry in self._entries.items() if entry.state is not JobState.ELSEWHERE}
        for entry in found:
            if entry.key not in ours and entry.key not in self._bin and entry != self._entries.get(entry.key):
                self._entries[entry.key] = entry
                self.changed.emit(entry)
        watched = any(entry.state is JobState.ELSEWHERE for entry in self._entries.values())
        if watched != self._watch.isActive():
            self._watch.start() if watched else self._watch.stop()
        self.listed.emit()
