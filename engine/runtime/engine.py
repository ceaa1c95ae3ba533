"""One model at a time, and all requests to it: what the worker and the command line drive."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.prepared_job import PreparedJob
from engine.checkpoint.embedding import refuse_embedding
from engine.checkpoint.library import note_use, reading, resolve
from engine.checkpoint.profile import suggested_sampling
from engine.common import clock
from engine.common.chat import ChatMessage, Tool
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.falls import FALLS
from engine.common.model_info import ModelInfo
from engine.devices.card_proof import prove_cards
from engine.devices.device import Device
from engine.devices.memory_budget import MemoryCategory
from engine.experts.file_image import EARLY_READS, remember
from engine.runtime.decode.generation import (
    BatchRequest,
    GenerationResult,
    OnEnd,
    Outcome,
    TextCallback,
    ignore_text,
)
from engine.runtime.decode.prompt import encode
from engine.runtime.load.devices import ModelDevices
from engine.runtime.load.kept_context import open_kept
from engine.runtime.load.model import load_model, open_compute_devices
from engine.runtime.loaded_model import LoadedModel, OnPhase, ignore_phase
from engine.runtime.schedule.scheduler import Scheduler
from engine.runtime.telemetry.experts import RoutingRecorder
from engine.runtime.telemetry.model_telemetry import ModelTelemetry
from engine.tuning.result import DecodeRate
from engine.tuning.saved_results import apply_tuning

if TYPE_CHECKING:
    from engine.batch_files.rows import Answer, RowRequest
    from engine.common.config import BatchJob
    from engine.runtime.batch.job_plan import JobPlan
    from engine.runtime.batch.model_rows import ModelRows
    from engine.runtime.batch.whole_job import HostedModel


_log = logging.getLogger(__name__)

_FEWER = "{0} stopped responding, so the model runs on {1} now."
_TAKEN_OF_ONE = "Other programs use the memory of {0}, so the model runs on {1} until they leave it."
_LOST = "The graphics card stopped responding, so the model runs on the CPU now."
_TAKEN = "Other programs use the graphics card's memory, so the model runs on the CPU until they leave it."
_BACK = "The graphics card works again: reload the model to use it."
TIMED_PROMPT = (
    "A railway switchyard sorts freight cars. Explain in plain words how the hump, the switches and the retarders work."
)
_FEWEST_TOKENS = 4
_FIRST_S = 10.0
"""A card that the model left is asked so long after that, and then after twice as long each time."""
_MOST_S = 600.0
_SOON_S = 900.0
"""A card that the model leaves again within this time after it returned is waited for twice as long."""


class Engine:
    """Holds at most one loaded model and the requests to it.  Not for several threads at once."""

    def __init__(self) -> None:
        self._loaded: LoadedModel | None = None
        self._scheduler: Scheduler | None = None
        self._telemetry: ModelTelemetry | None = None
        self._asked: EngineConfig | None = None
        self._exact = EngineConfig("")  # with what was tuned
        self._place = Path()
        self._memory_note = self._tuned_note = ""
        self._failback: Failback | None = None
        self.on_news: Callable[[], None] = lambda: None
        """Called on any thread when `serve` has something to do for a job."""
        self.on_moved: Callable[[ModelInfo], None] = lambda _info: None
        """Called when the model has been loaded elsewhere, because a card no longer responds or does again, and when
        others take memory of its card or leave it."""
        self._held = contextlib.ExitStack()  # keeps others from moving or removing the loaded model

    @property
    def telemetry(self) -> ModelTelemetry | None:
        return self._telemetry

    @property
    def info(self) -> ModelInfo | None:
        return self._loaded.info if self._loaded is not None else None

    @property
    def asked(self) -> EngineConfig | None:
        """The settings that the loaded model was asked for with; None while none is loaded."""
        return self._asked if self._loaded is not None else None

    @property
    def kv_tokens(self) -> int:
        return self._scheduler.kv_tokens if self._scheduler is not None else 0

    @property
    def kv_bytes(self) -> int:
        return self._scheduler.kv_bytes if self._scheduler is not None else 0

    @property
    def device_memory(self) -> tuple[int, int, int]:
        """Bytes of the devices that the model runs on: total, used, and used for experts; zeros on the CPU."""
        devices = self._loaded.devices if self._loaded is not None else None
        return devices.memory() if devices is not None else (0, 0, 0)

    def load(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        on_phase: OnPhase = ignore_phase,
    ) -> ModelInfo:
        """Load a model in place of the one loaded, which is freed first, even if the new one cannot be loaded.

        Settings left to the engine are those that tuning found for this model on this machine, if there are any.

        Raises:
            EngineError: there is no such model, or it cannot be loaded here; the message says why.
            RequestCancelled: `cancelled()` was true; no model is loaded then.
        """
        self.unload()
        try:
            return self._load_tuned(config, on_progress, cancelled, on_phase)
        finally:
            EARLY_READS.drop()

    def _load_tuned(
        self,
        config: EngineConfig,
        on_progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        on_phase: OnPhase,
    ) -> ModelInfo:
        path = resolve(config.model)
        refuse_embedding(path)
        tuned = apply_tuning(config, path)
        note = tuned.note
        try:
            info = self.load_exactly(tuned.config, on_progress=on_progress, cancelled=cancelled, on_phase=on_phase)
        except EngineError as error:
            if not tuned.is_tuned or error.code not in (ErrorCode.NOT_ENOUGH_MEMORY, ErrorCode.DEVICE_UNAVAILABLE):
                raise
            note = f"The tuned settings are not possible now: {error.message}"
            info = self.load_exactly(config, on_progress=on_progress, cancelled=cancelled, on_phase=on_phase)
        assert self._loaded is not None
        remember(config.model, config.asked, self._loaded.prepared)
        self._tuned_note = note
        said = " ".join(filter(None, (info.device_note, note)))
        is_hampered = info.is_hampered or (bool(note) and not note.startswith("Tuned"))
        self._loaded.info = replace(info, device_note=said, is_hampered=is_hampered)
        self._asked = config
        return self._loaded.info

    def load_exactly(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        on_phase: OnPhase = ignore_phase,
    ) -> ModelInfo:
        """The same with these settings and no others: nothing that was tuned is looked for."""
        self.unload()
        path = resolve(config.model)
        with contextlib.ExitStack() as held:
            held.enter_context(reading(path))
            at_path = replace(config, model=str(path))
            loaded = load_model(at_path, on_progress=on_progress, cancelled=cancelled, on_phase=on_phase)
            self._place, self._held = path, held.pop_all()
        self._has(loaded)
        self._scheduler = Scheduler(loaded, lambda: self.on_news(), self, self._has_note)
        self._asked = self._exact = config
        self._tuned_note = ""
        if loaded.devices is not None and all(device.meter is None for device in loaded.devices.devices):
            self._failback = Failback(loaded.devices, lambda: open_compute_devices(config))
        return loaded.info

    def _has(self, loaded: LoadedModel) -> None:
        self._memory_note = ""
        note_use(self._place, _how(loaded.info))
        loaded.kept = open_kept(loaded)
        self._loaded = loaded
        self._telemetry = ModelTelemetry(loaded, lambda: self.kv_bytes)

    def _has_note(self, note: str) -> None:
        """A sentence about the devices' memory stands before all others while it is true."""
        loaded = self._ready()
        if note == self._memory_note:
            return
        kept = loaded.info.device_note.removeprefix(self._memory_note).strip()
        self._memory_note = note
        said = " ".join(filter(None, (note, kept)))
        loaded.info = replace(loaded.info, device_note=said, is_hampered=loaded.info.is_hampered or bool(note))
        self.on_moved(loaded.info)

    def without_card(self, *, is_lost: bool) -> LoadedModel:
        """Frees the model, and loads it without its card.

        Args:
            is_lost: whether the card does not respond; otherwise others have taken its memory.
        """
        lost, others = self._lost_and_others(is_lost=is_lost)
        fewer, none = (_FEWER, _LOST) if is_lost else (_TAKEN_OF_ONE, _TAKEN)
        why = fewer.format(" and ".join(lost), " and ".join(others)) if others else none
        _log.error("%s is no longer used: %s", " and ".join(lost) or self._ready().info.device, why)
        if self._failback is not None:
            self._failback.left(monotonic(), is_lost=is_lost)
        if others:
            try:
                return self._elsewhere(why, ",".join(others), needs_restart=is_lost)
            except EngineError as error:
                _log.warning("the model cannot run on what is left of the cards: %s", error.message)
        return self._elsewhere(none, "cpu", needs_restart=is_lost)

    def _lost_and_others(self, *, is_lost: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(names of cards that do not respond any more, or have too little memory, names of the others)."""
        devices = self._loaded.devices if self._loaded is not None else None
        if devices is None:
            return (), ()
        short = set() if is_lost else set(devices.short)
        able = {each.name: each.responds() if is_lost else each not in short for each in devices.devices}
        return tuple(name for name in able if not able[name]), tuple(name for name in able if able[name])

    def may_return(self) -> bool:
        """Whether the card that the model left is of use again; asked before a request while nothing is under way."""
        self._tell_of_card()
        return self._failback is not None and self._failback.is_open(monotonic())

    def with_card(self) -> LoadedModel:
        """Frees the model, and loads it where it was at first, or once more without its card."""
        left = self._ready().info
        _log.warning("loading the model on the graphics card again, which is of use again")
        try:
            loaded = self._reloaded(self._exact, self._tuned_note)
        except Exception:  # the card went away meanwhile
            _log.warning("the model could not return to the graphics card", exc_info=True)
            return self._elsewhere(_LOST if left.needs_restart else _TAKEN, "cpu", needs_restart=left.needs_restart)
        if loaded.devices is None:  # it had no room there after all
            loaded.info = replace(loaded.info, needs_restart=left.needs_restart)
        elif self._failback is not None:
            self._failback.returned(monotonic())
        self.on_moved(loaded.info)
        return loaded

    def _elsewhere(self, why: str, device: str, *, needs_restart: bool) -> LoadedModel:
        """The model on what is left: the CPU alone, or fewer cards.

        Args:
            why: a sentence for the user.
        """
        assert self._asked is not None
        try:
            loaded = self._reloaded(replace(self._asked, device=device), "")
        except BaseException:
            if device == "cpu":
                self._scheduler = None
                self._held.close()
            raise
        FALLS.tell("The graphics card", why)
        self._memory_note = FALLS.note
        note = " ".join(filter(None, (FALLS.note, loaded.info.device_note)))
        loaded.info = replace(loaded.info, device_note=note, is_hampered=True, needs_restart=needs_restart)
        self.on_moved(loaded.info)
        return loaded

    def _reloaded(self, config: EngineConfig, note: str) -> LoadedModel:
        """The loaded model, freed and loaded with other settings."""
        lost, self._loaded = self._loaded, None
        telemetry, self._telemetry = self._telemetry, None
        if telemetry is not None:
            telemetry.stop()
        if lost is not None:
            lost.close()
        at_path = replace(config, model=str(self._place))
        loaded = load_model(at_path, on_progress=lambda _done, _total: None, cancelled=never_cancelled)
        loaded.info = replace(loaded.info, device_note=" ".join(filter(None, (loaded.info.device_note, note))))
        self._has(loaded)
        return loaded

    def _tell_of_card(self) -> None:
        """Says once that a new process could use the card that this one lost."""
        loaded = self._loaded
        if loaded is None or self._failback is None or loaded.info.card_is_back or not self._failback.is_proven:
            return
        loaded.info = replace(loaded.info, device_note=_BACK, card_is_back=True)
        self.on_moved(loaded.info)

    def time_decode(
        self, tokens: int, seconds: float, on_token: Callable[[int, float], None], cancelled: Callable[[], bool]
    ) -> DecodeRate:
        """Times up to `tokens` tokens of the loaded model, for about `seconds` at most.

        What is held of conversations is given up.
        """
        loaded = self._ready()
        self.scheduler.forget()
        prompt = encode(loaded.tokenizer, TIMED_PROMPT, special=True, cancelled=cancelled)
        prompt = prompt[: max(1, loaded.context_tokens // 2)]
        return time_decode(loaded, prompt, tokens, seconds=seconds, on_token=on_token, cancelled=cancelled)

    def record_routing(self) -> RoutingRecorder:
        return RoutingRecorder(self._ready())

    def unload(self) -> None:
        """Free the model's memory; without effect if none is loaded."""
        loaded, self._loaded = self._loaded, None
        telemetry, self._telemetry = self._telemetry, None
        failback, self._failback = self._failback, None
        if failback is not None:
            failback.close()
        try:
            scheduler, self._scheduler = self._scheduler, None
            if scheduler is not None:
                scheduler.close()
            if telemetry is not None:
                telemetry.stop()
            if loaded is not None:
                loaded.close()
        finally:
            self._held.close()

    def default_sampling(self) -> SamplingParams:
        return suggested_sampling(Path(self._ready().info.path))

    def generate(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        *,
        on_progress: Callable[[int, int], None],
        on_text: TextCallback,
        cancelled: Callable[[], bool],
        on_reasoning: TextCallback = ignore_text,
        tools: tuple[Tool, ...] = (),
    ) -> GenerationResult:
        """Answer the last of `messages`, and whatever else is asked meanwhile."""
        ended: list[Outcome] = []
        request = BatchRequest(
            0,
            tuple(messages),
            sampling=sampling,
            tools=tools,
            splits=True,
            on_progress=on_progress,
            on_text=on_text,
            on_reasoning=on_reasoning,
            cancelled=cancelled,
        )
        self.begin(request, ended.append)
        self.scheduler.serve(lambda: bool(ended))
        if isinstance(ended[0], BaseException):
            raise ended[0]
        return ended[0]

    def begin(self, request: BatchRequest, on_end: OnEnd, on_begin: Callable[[], None] = lambda: None) -> None:
        """Takes a chat that the scheduler answers; see `Scheduler.submit`."""
        how = _how(self._ready().info)

        def ended(outcome: Outcome) -> None:
            on_end(outcome)
            if isinstance(outcome, GenerationResult):
                note_use(self._place, how, outcome.tokens_per_s, outcome.generated_tokens)
            self._tell_of_card()

        self.scheduler.submit(request, ended, on_begin)

    @property
    def scheduler(self) -> Scheduler:
        self._ready()
        assert self._scheduler is not None
        return self._scheduler

    @property
    def is_answering(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether the scheduler has anything to do, for requests or for jobs."""
        return self._scheduler is not None and (self._scheduler.is_busy or self._scheduler.background.is_busy)

    def run_batch(self, prepared: PreparedJob, watcher: JobWatcher) -> JobEnding:
        """Answers a job's rows with the loaded model on this thread; nothing else is answered meanwhile."""
        from engine.runtime.batch.whole_job import OwnHost, run_whole_job  # which the first chat need not wait for

        return run_whole_job(prepared, OwnHost(self._ready(), self.scheduler.moved), watcher)

    def open_rows(self, job: BatchJob, asked: Iterable[tuple[float, RowRequest | Answer]]) -> tuple[JobPlan, ModelRows]:
        """Answers rows of a job that others keep, on this thread, until it is closed; nothing else is answered then.

        Args:
            asked: its first rows, each with the share of the input read so far.
        """
        from engine.runtime.batch.whole_job import open_rows

        return open_rows(job, asked, self._ready())

    def job_runner(self) -> Callable[[PreparedJob, JobWatcher], JobEnding]:
        """Runs a job, on a thread of its own, whose rows are answered in `serve` together with other jobs' rows."""
        from engine.runtime.batch.whole_job import SharedHost, run_whole_job

        self.scheduler.return_to_card()
        host = SharedHost(self.scheduler.background, self.scheduler.moved)
        return lambda prepared, watcher: run_whole_job(prepared, host, watcher)

    def hosted_model(self, *, beside_others: bool) -> HostedModel:
        """The loaded model for some of a job's rows, `beside_others` as in `job_runner`, else as in `run_batch`."""
        from engine.runtime.batch.whole_job import HostedModel, OwnHost, SharedHost

        loaded, scheduler = self._ready(), self.scheduler
        host = SharedHost(scheduler.background, scheduler.moved) if beside_others else OwnHost(loaded, scheduler.moved)
        return HostedModel(host)

    def sample_batch(self, prepared: PreparedJob, rows: int, watcher: JobWatcher) -> None:
        """Answers the first rows of a job and keeps nothing; see `run_sample`."""
        from engine.runtime.batch.whole_job import run_sample

        run_sample(prepared, self._ready(), rows, watcher)

    def _ready(self) -> LoadedModel:
        if self._loaded is None:
            raise EngineError(ErrorCode.INVALID_REQUEST, "No model is loaded: choose one first.")
        return self._loaded


def _how(info: ModelInfo) -> str:
    return f"{info.device}, {info.precision}"


def time_decode(
    loaded: LoadedModel,
    prompt: Sequence[int],
    tokens: int,
    *,
    seconds: float = float("inf"),
    speculates: bool = False,
    on_token: Callable[[int, float], None] = lambda _count, _rate: None,
    cancelled: CancelCheck = never_cancelled,
) -> DecodeRate:
    """Continues a prompt greedily by `tokens` tokens after the first, past any end token.

    Args:
        seconds: a slow model is stopped after so long, with the tokens that it has made, four at the least.
        speculates: whether coming tokens may be guessed; what repeats itself would be timed as if all answers did.
        on_token: called with their number, and the rate since the first.
    """
    arrivals: list[tuple[int, float]] = []
    begun = clock.now()

    def on_text(_text: str, count: int) -> None:
        if arrivals and count == arrivals[-1][0]:
            return  # what was held back of the text: no further token
        arrivals.append((count, clock.now()))
        first, since = arrivals[0]
        if count > first:
            on_token(count - first, (count - first) / (arrivals[-1][1] - since))

    def enough() -> bool:
        if cancelled():
            return True
        return bool(arrivals) and arrivals[-1][0] > _FEWEST_TOKENS and clock.now() - arrivals[0][1] > seconds

    scheduler = Scheduler(replace(loaded, speculates=speculates, kept=None))
    sampling = SamplingParams(max_tokens=tokens + 1)
    try:
        scheduler.answer(
            BatchRequest(
                0, ids=tuple(prompt), sampling=sampling, end_ids=frozenset(), on_text=on_text, cancelled=enough
            )
        )
    finally:
        scheduler.close()
    if not arrivals:
        return DecodeRate(0.0, 0.0, 0)
    # Not every token completes a text.
    (first, first_s), (last, last_s) = arrivals[0], arrivals[-1]
    rate = (last - first) / (last_s - first_s) if last > first else 0.0
    return DecodeRate(rate, first_s - begun, last - first)


class Failback:
    """Asks the cards that a model was loaded on whether they compute, and have memory for it.

    A process whose card has failed cannot use it again on most systems, even where another process can.  So a process
    of its own tries cards that do not answer this one, while requests go on.

    Args:
        devices: of the model, just loaded.
        open_devices: opens them anew; their owner closes them.

    Attributes:
        is_proven: whether the cards compute again, but only for a process that begins now.
    """

    def __init__(self, devices: ModelDevices, open_devices: Callable[[], tuple[Sequence[Device], str]]) -> None:
        self._open, self._prove = open_devices, prove_cards
        uses = {device.name: device.memory.use() for device in devices.devices}
        # With half of its experts a model is worth moving.
        self._needed = {name: use.used - use.by_category[MemoryCategory.EXPERTS] // 2 for name, use in uses.items()}
        self._wait_s, self._next_s = _FIRST_S, float("inf")
        self._returned_s = float("-inf")
        self._proving: threading.Thread | None = None
        self._is_lost = self.is_proven = False

    def left(self, now_s: float, *, is_lost: bool) -> None:
        """The model has left the cards.

        Args:
            now_s: of a clock that never goes back.
            is_lost: whether a card does not respond any more; otherwise others have taken its memory.
        """
        self._is_lost = is_lost
        self._wait_s = min(2 * self._wait_s, _MOST_S) if now_s < self._returned_s + _SOON_S else _FIRST_S
        self._next_s = now_s + self._wait_s

    def returned(self, now_s: float) -> None:
        """The model is on the cards again."""
        self._returned_s, self._next_s, self.is_proven = now_s, float("inf"), False

    def is_open(self, now_s: float) -> bool:
        """Whether the model may return now; nothing is asked before it is time."""
        if now_s < self._next_s or self.is_proven:
            return False
        self._wait_s = min(2 * self._wait_s, _MOST_S)
        self._next_s = now_s + self._wait_s
        try:
            with contextlib.ExitStack() as opened:
                devices, _ = self._open()
                for device in devices:
                    opened.callback(device.close)
                answering = {device.name: device for device in devices if device.responds()}
                if answering.keys() >= self._needed.keys():
                    return all(_has_room(answering[name], nbytes) for name, nbytes in self._needed.items())
        except (EngineError, RuntimeError) as error:
            _log.info("the graphics card does not answer yet: %s", error)
        if self._is_lost and (self._proving is None or not self._proving.is_alive()):
            self._proving = threading.Thread(target=self._try_apart, name="card proof", daemon=True)
            self._proving.start()
        return False

    def close(self) -> None:
        """What a process of its own says is not wanted any more."""
        self._next_s, self._proving = float("inf"), None

    def _try_apart(self) -> None:
        proofs = self._prove() or []
        if self._proving is threading.current_thread():
            self.is_proven = sum(not proof.failed for proof in proofs) >= len(self._needed)


def _has_room(device: Device, nbytes: int) -> bool:
    if device.memory.total < nbytes:
        return False
    return device.watch is None or device.watch.free >= nbytes + device.watch.reserve
