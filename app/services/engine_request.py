"""An engine request as a Qt object: its events, and its single end."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from engine.batch_files.messages import BatchPlanned, BatchProgress, BatchRows, BatchSampled, SampleBatch, StartBatch
from engine.protocol import Called, Generate, LoadModel, Message, Progress, TerminalEvent, Token, UnloadModel
from engine.tuning.messages import StartTuning, TuningMeasured, TuningPlans, TuningProgress, TuningTimed

RequestCommand = LoadModel | UnloadModel | Generate | StartBatch | SampleBatch | StartTuning

_SIGNAL_OF: dict[type, str] = {
    Progress: "progress",
    Token: "token",
    Called: "called",
    BatchPlanned: "planned",
    BatchSampled: "sampled",
    BatchProgress: "progressed",
    BatchRows: "answered",
    TuningProgress: "progressed",
    TuningMeasured: "measured",
    TuningPlans: "planned",
    TuningTimed: "timed",
}


class Request(QObject):
    """Made by `EngineClient` for every accepted request; deleted once it has ended.

    Signals:
        progress(Progress): of loading a model or reading a prompt.
        finished(TerminalEvent): exactly once, also if the engine dies; the client's state is already up to date.
    """

    progress = Signal(object)
    finished = Signal(object)

    command: RequestCommand

    def __init__(
        self, command: RequestCommand, cancel: Callable[[Request], None], parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self.command = command
        self._cancel = cancel

    @property
    def id(self) -> str:
        return self.command.request_id

    def cancel(self) -> None:
        """Stop it, running or waiting; `finished` still follows.  No effect once it has ended."""
        self._cancel(self)

    def deliver(self, event: Message) -> None:
        """For the client: emits an event of this request; events that it has no signal for are dropped."""
        signal = getattr(self, _SIGNAL_OF.get(type(event), ""), None)
        if signal is not None:
            signal.emit(event)

    def end(self, event: TerminalEvent) -> None:
        """For the client: emits its last event."""
        self.finished.emit(event)
        self.deleteLater()


class ChatAnswer(Request):
    """An answer to a chat.  Ends in `Finished` or `Failed`.

    Signals: token(Token), called(Called).
    """

    token = Signal(object)
    called = Signal(object)

    command: Generate


class BatchRun(Request):
    """A job, or a sample of one.  Ends in `BatchFinished` or `Failed`.

    Signals: planned(BatchPlanned), progressed(BatchProgress), answered(BatchRows), sampled(BatchSampled).
    """

    planned = Signal(object)
    sampled = Signal(object)
    progressed = Signal(object)
    answered = Signal(object)

    command: StartBatch | SampleBatch


class TuningRun(Request):
    """Measuring, planning and timing.  Ends in `TuningFinished` or `Failed`.

    Signals: progressed(TuningProgress), measured(TuningMeasured), planned(TuningPlans), timed(TuningTimed).
    """

    progressed = Signal(object)
    measured = Signal(object)
    planned = Signal(object)
    timed = Signal(object)

    command: StartTuning
