"""The engine process: `python -m engine.worker`, started by the window, commands on stdin, events on stdout.

Three threads, and one for each job, and for each chat that another server answers.  The reader takes commands and
handles `Cancel` itself; the engine (main) thread answers chats, other programs and the rows of jobs together, and does
all else one at a time; the writer sends events.
`Ready` is sent before torch is imported, which with `WAITS` only the first request does that needs a model; where an
installed package does not have it yet, other servers are asked all the same, and everything else says what is missing.
When stdin ends, the window is gone, and this process exits a moment later, whatever it is computing.
"""

from __future__ import annotations

if __name__ == "__main__":  # first of all: torch's library is linked while Python imports what follows
    import sys

    if "--waits" not in sys.argv:  # `WAITS`, whose module takes a while itself
        from engine.process.importing import load_torch_meanwhile

        load_torch_meanwhile()

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.installed import missing_engine
from engine.common.model_info import ModelInfo
from engine.process.batch import BatchService
from engine.process.chats import PROGRESS_S, ChatService
from engine.process.failures import as_engine_error, log_failure
from engine.process.importing import begin_reading, import_engine
from engine.process.lifetime import end_process, set_up_process, trim_stderr
from engine.process.remote import RemoteRequests, needs_no_model
from engine.process.requests import RequestQueue, cancelled_event, failed
from engine.process.streams import EventWriter, claim_pipes
from engine.process.telemetry import TelemetryService
from engine.protocol import (
    PROTOCOL_VERSION,
    WAITS,
    Cancel,
    Event,
    Failed,
    Generate,
    LineReader,
    LoadModel,
    LoadPhase,
    ModelLoaded,
    ModelMoved,
    ModelUnloaded,
    Phase,
    Progress,
    Ready,
    Request,
    ResizeCache,
    SampleBatch,
    ServeOthers,
    Shutdown,
    StartBatch,
    StartTuning,
    Telemetry,
    TerminalEvent,
    TuningFinished,
    TuningProgress,
    UnloadModel,
    WatchTelemetry,
    decode,
    request_id_of,
)

if TYPE_CHECKING:
    from engine.runtime.engine import Engine
    from engine.serving.broker import RequestBroker
    from engine.serving.link import BrokerLink
    from engine.tuning.run import TunedEngine, TuningEvent

WINDOW_GONE_GRACE_S = 0.5
SHUTDOWN_GRACE_S = 1.5
TELEMETRY_S = 0.5


class ApiRequests:
    """Lets other programs' requests join the window's chats, with the model that the window has loaded.

    A request to load or free a model, or to tune, ends them.  Nothing heavy is imported until a program may ask.
    """

    def __init__(self, requests: RequestQueue) -> None:
        self._requests, self._lock = requests, threading.Lock()
        self._command: ServeOthers | None = None
        self.broker: RequestBroker | None = None
        self._link: BrokerLink | None = None
        self._model: Path | None = None

    def serve(self, command: ServeOthers) -> None:
        """Has the engine's thread connect to the server behind this link, or hang up, soon."""
        with self._lock:
            self._command = command
        self._requests.look_after_others()

    # --- the engine's thread ----------------------------------------------------------------------

    def open(self, engine: Engine) -> None:
        from engine.serving.broker import RequestBroker  # imports torch

        self.broker = RequestBroker(engine, self._requests.look_after_others)
        self.broker.model_is(self._model)

    def admit(self, engine: Engine) -> None:
        """Lets who waits join those that the engine is answering, as far as there are places."""
        if self._command is not None:
            with self._lock:
                command, self._command = self._command, None
            self._connect(engine, command)
        broker = self.broker
        if broker is None:
            return
        try:
            while (wanted := broker.next_model) is not None and wanted != self._model:
                words = "The model was changed in Switchyard's window: ask again."
                broker.refuse_waiting(EngineError(ErrorCode.MODEL_NOT_FOUND, words), wanted)
            broker.admit()
        except BaseException as error:
            log_failure(error, "answering another program")
            broker.refuse(as_engine_error(error, "answering another program"))
            broker.free()

    def leave(self) -> None:
        """The window is about to free its model; `model_is` tells the server once the memory is there for another."""
        self._model = None
        if self.broker is not None:
            self.broker.free()
            self.broker.model_is(None)

    def model_is(self, model: Path | None) -> None:
        if model is None:
            self.leave()
        elif self.broker is not None:
            self.broker.model_is(model)
        self._model = model
        if self._link is not None:
            self._link.model_is(model)

    def _connect(self, engine: Engine, command: ServeOthers) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if not command.address:
            return
        if self.broker is None:
            self.open(engine)
        from engine.serving.link import BrokerLink

        assert self.broker is not None
        try:
            self._link = BrokerLink(command.address, command.secret, self.broker)
        except EngineError as error:  # it was turned off meanwhile
            log_failure(error, "reaching the server for other programs")
            return
        self._link.model_is(self._model)


class Worker:
    def __init__(
        self,
        requests: RequestQueue,
        writer: EventWriter,
        telemetry: TelemetryService,
        others: ApiRequests | None = None,
    ) -> None:
        self._requests = requests
        self._writer = writer
        self._telemetry = telemetry
        self._others = ApiRequests(requests) if others is None else others
        self._process = psutil.Process()
        self._sampled_s, self._written = time.monotonic(), 0

    def run(self, make_engine: Callable[[], Engine]) -> None:
        """Make the engine, then perform requests until the queue is closed."""
        try:
            engine = make_engine()
        except BaseException as error:
            failure = missing_engine(error)
            if failure is None:
                log_failure(error, "starting")
                failure = as_engine_error(error, "starting")
            while not self._requests.is_over:
                if (request := self._requests.take()) is not None:
                    self._requests.end(Failed.of(failure, request.request_id))
            return
        self._chats = ChatService(
            self._requests,
            self._writer.send,
            engine,
            self._telemetry.request_begins,
            lambda tokens: self._wrote(engine, tokens),
            lambda: self._others.admit(engine),
        )
        self._batches = BatchService(self._requests, self._writer.send, self._chats)
        engine.on_news = self._requests.look_after_others
        engine.on_moved = lambda info: self._moved(engine, info)
        while not self._requests.is_over or self._chats.are_under_way:
            self._go_on(engine)
        self._settle()

    def _go_on(self, engine: Engine) -> None:
        """Goes on with answers, or performs the next request once there are none, waiting for one if necessary."""
        self._others.admit(engine)
        self._chats.answer()
        if self._chats.are_under_way:
            request = self._requests.take_if(StartBatch, SampleBatch)
        elif engine.is_busy and not self._requests.is_closed:
            request = self._requests.take_if()
        else:
            request = self._requests.take()
        if isinstance(request, Generate):
            self._sampled_s, self._written = time.monotonic(), 0
            self._chats.begin(request)
            return
        if request is not None and (ending := self._perform(engine, request)) is not None:
            self._requests.end(ending)
        self._sample(engine, 0.0)

    def _wrote(self, engine: Engine, tokens: int) -> None:
        """Samples now and then while tokens come, and at the end of an answer."""
        self._written += tokens
        elapsed = time.monotonic() - self._sampled_s
        if not tokens and not engine.is_answering:
            self._sample(engine, 0.0)
        elif elapsed >= TELEMETRY_S:
            self._sample(engine, self._written / elapsed)

    def _settle(self) -> None:
        """Stops jobs before something that cannot be done beside them."""
        batches = self._batches
        batches.settle(lambda: self._chats.answer(lambda: not batches.are_running))

    def _perform(self, engine: Engine, request: Request) -> TerminalEvent | None:
        """How it ended; None if it has only been begun."""
        doing = {LoadModel: "loading the model", UnloadModel: "freeing the model"}.get(type(request), "answering")
        try:
            if isinstance(request, StartBatch):
                self._batches.start(engine, request)
                return None
            self._settle()
            if isinstance(request, LoadModel):
                return self._load(engine, request)
            if isinstance(request, SampleBatch):
                return self._batches.sample(engine, request)
            if isinstance(request, StartTuning):
                return self._tune(engine, request)
            self._telemetry.model_is(None)
            self._others.leave()
            try:
                engine.unload()
            finally:
                self._others.model_is(None)
            return ModelUnloaded(request.request_id)
        except RequestCancelled:
            return cancelled_event(request) or ModelUnloaded(request.request_id)
        except BaseException as error:  # whatever happened, end this request; the next one may work
            return failed(request.request_id, error, doing)

    def _load(self, engine: Engine, request: LoadModel) -> TerminalEvent:
        started = time.monotonic()
        self._model_is(engine, is_leaving=True)
        self._writer.send(Progress(request.request_id, "loading", 0, 0))  # of what is not known yet
        phase: Phase = "loading"

        def on_phase(begins: LoadPhase) -> None:
            nonlocal phase
            phase = begins

        info = engine.load(
            request.config,
            on_progress=lambda done, total: self._chats.progress(request.request_id, phase, done, total),
            cancelled=lambda: self._requests.is_cancelled(request.request_id),
            on_phase=on_phase,
        )
        self._model_is(engine)
        return ModelLoaded(request.request_id, info, time.monotonic() - started)

    def _tune(self, engine: Engine, request: StartTuning) -> TerminalEvent:
        self._model_is(engine, is_leaving=True)
        try:
            return run_tuning(engine, request, self._requests, self._writer.send)
        finally:
            self._model_is(engine)

    def _model_is(self, engine: Engine, *, is_leaving: bool = False) -> None:
        """Tells who uses the loaded model that it is another, or about to be freed."""
        info = None if is_leaving else engine.info
        self._telemetry.model_is(None if is_leaving else engine.telemetry)
        self._others.model_is(Path(info.path) if info is not None else None)

    def _moved(self, engine: Engine, info: ModelInfo) -> None:
        """Says that the model runs elsewhere now.  Requests of other programs go on, as all do."""
        self._telemetry.model_is(engine.telemetry)
        self._writer.send(ModelMoved(info))

    def _sample(self, engine: Engine, rate: float) -> None:
        self._sampled_s, self._written = time.monotonic(), 0
        try:
            weights = (engine.info.weights_bytes, engine.info.experts_bytes) if engine.info else (0, 0)
            rss, context = self._process.memory_info().rss, (engine.kv_bytes, engine.kv_tokens)
            self._writer.send(Telemetry(rss, *weights, *context, rate, *engine.device_memory))
        except Exception as error:  # a missing figure is no reason to stop
            log_failure(error, "sampling")
        trim_stderr()


def run_tuning(
    engine: TunedEngine, request: StartTuning, requests: RequestQueue, send: Callable[[Event], object]
) -> TuningFinished:
    """Runs until done or cancelled; results are sent at once, progress as often as it can be shown."""
    from engine.tuning.run import tune  # the planner, which few sessions need

    sent_s, stage = 0.0, ""

    def tell(event: TuningEvent) -> None:
        nonlocal sent_s, stage
        if isinstance(event, TuningProgress):
            is_news = event.stage != stage or (event.number is not None and event.stage == "measuring")
            if not is_news and time.monotonic() - sent_s < PROGRESS_S:
                return
            stage, sent_s = event.stage, time.monotonic()
        send(event)

    return tune(engine, request, tell, lambda: requests.is_cancelled(request.request_id))


def read_commands(
    fd: int,
    requests: RequestQueue,
    writer: EventWriter,
    telemetry: TelemetryService,
    others: ApiRequests | None = None,
    remote: RemoteRequests | None = None,
) -> bool:
    """Handles commands until the stream ends; returns whether it ended with a `Shutdown`."""
    lines = LineReader()
    while True:
        try:
            data = os.read(fd, 65536)
            received = lines.feed(data)
        except (OSError, EngineError):
            return False
        if not data:
            return False
        for line in received:
            try:
                command = decode(line)
            except EngineError as error:
                request_id = request_id_of(line)
                if request_id is not None:
                    writer.send(Failed.of(error, request_id))
                continue
            if isinstance(command, Shutdown):
                return True
            if isinstance(command, Cancel):
                requests.cancel(command.request_id)
            elif isinstance(command, Request) and needs_no_model(command):
                if remote is not None:
                    remote.begin(command)
            elif isinstance(command, Request):
                if isinstance(command, LoadModel):
                    begin_reading(command.config)
                requests.accept(command)
            elif isinstance(command, WatchTelemetry):
                telemetry.watch(command)
            elif isinstance(command, ResizeCache):
                telemetry.resize(command)
            elif isinstance(command, ServeOthers) and others is not None:
                others.serve(command)


def serve(make_engine: Callable[[], Engine], *, at_once: bool = True) -> None:
    """Runs the engine process; does not return.

    Args:
        at_once: the engine is made before anything is asked of it, and not with the first request that needs one.
    """
    commands_fd, events_fd = claim_pipes()
    writer = EventWriter(events_fd, on_broken=lambda: end_process(0))
    writer.start()
    writer.send(Ready(PROTOCOL_VERSION, os.getpid()))
    requests = RequestQueue(writer.send)
    telemetry = TelemetryService(writer.send)
    others = ApiRequests(requests)
    remote = RemoteRequests(requests, writer.send, telemetry.is_elsewhere)

    def read() -> None:
        asked = read_commands(commands_fd, requests, writer, telemetry, others, remote)
        requests.close()
        # The engine thread may end the process sooner; if it is computing, its result is no longer wanted.
        time.sleep(SHUTDOWN_GRACE_S if asked else WINDOW_GONE_GRACE_S)
        end_process(0)

    threading.Thread(target=read, name="command-reader", daemon=True).start()
    set_up_process()
    if not at_once:
        requests.wait()
    Worker(requests, writer, telemetry, others).run(make_engine)
    writer.flush(SHUTDOWN_GRACE_S)
    end_process(0)


def main() -> None:
    serve(lambda: import_engine()(), at_once=WAITS not in sys.argv)


if __name__ == "__main__":
    main()
