"""An engine request as a Qt object: its events, and its single end."""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from engine.protocol import (
    BatchPlanned,
    BatchProgress,
    BatchRows,
    BatchSampled,
    Called,
    Generate,
    Message,
    Progress,
    SampleBatch,
    StartBatch,
    StartTuning,
    TerminalEvent,
    Token,
    TuningMeasured,
    TuningPlans,
    TuningProgress,
    TuningTimed,
)
from engine.protocol import Request as RequestCommand

_LEAST_S = 1.0
"""Of a phase, before its rate is believed."""


class LoadingPace:
    """The progress that was told last, and the rate of its phase.

    Attributes:
        progress: None if nothing is loading, or it is not known how much there is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = (0.0, 0)
        self.progress: Progress | None = None

    def note(self, progress: Progress | None) -> None:
        before, self.progress = self.progress, progress if progress is not None and progress.total > 0 else None
        if self.progress is not None and (before is None or before.phase != self.progress.phase):
            self._since = self._clock(), self.progress.done

    @property
    def share(self) -> float | None:
        return None if self.progress is None else min(self.progress.done / self.progress.total, 1.0)

    @property
    def left_s(self) -> float | None:
        """Seconds left at the rate of this phase; None while it is too young to tell."""
        begun_s, begun = self._since
        if self.progress is None or self._clock() - begun_s < _LEAST_S or self.progress.done <= begun:
            return None
        rate = (self.progress.done - begun) / (self._clock() - begun_s)
        return max(0.0, (self.progress.total - self.progress.done) / rate)


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
