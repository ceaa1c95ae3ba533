"""A second timeline below the first, for comparison: another session, or the simulator's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from PySide6.QtCore import QCoreApplication, Signal
from PySide6.QtWidgets import QPushButton, QWidget

from app.services.background import LatestTask
from app.services.engine_client import EngineClient
from app.services.history.history import History
from app.services.predicted_timeline import (
    Predicted,
    RequestShape,
    predict,
    request_before,
)
from app.services.session_library import OpenedSession
from app.services.telemetry_hub import TelemetryHub
from app.widgets.quantities import number
from app.widgets.scaffold import Card, add_items, muted_label, push_button
from app.widgets.timeline.navigator import Navigator, duration
from app.widgets.timeline.view import TimelineView
from engine.common.config import EngineConfig
from engine.planner.predict import recorded_config, running_config
from engine.protocol import CacheReport
from engine.telemetry.lanes import DECODE


class PredictButton(QPushButton):
    """Checked while a prediction is shown: it then follows the visible request.

    Signals: `predicted(Predicted)`; `reported(str)`: why there is none; `unwanted`, once it is unchecked.
    """

    predicted = Signal(object)
    reported = Signal(str)
    unwanted = Signal()

    def __init__(
        self, client: EngineClient, hub: TelemetryHub, navigator: Navigator, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._client, self._hub, self._navigator = client, hub, navigator
        self._session: OpenedSession | None = None
        self._predicting = LatestTask(self)
        self._asked: RequestShape | None = None
        self.setText(self.tr("Predicted"))
        self.setProperty("kind", "chip")
        self.setCheckable(True)
        self.setToolTip(self.tr("The simulator's prediction for this request, below the recording"))
        self.setAccessibleName(self.tr("Show the predicted timeline"))
        self.toggled.connect(self._on_toggled)

    def show_session(self, session: OpenedSession | None) -> None:
        self._session = session
        self.setChecked(False)

    def follow(self) -> None:
        if self.isChecked() and not self._predicting.is_busy:
            shape = self._shape()
            if shape is not None and (self._asked is None or _differ(shape, self._asked)):
                self._ask(shape)

    def wait(self) -> None:
        self._predicting.close()

    def measured_tokens_per_s(self) -> float | None:
        history = self._navigator.history
        runs = history.last_request(self._navigator.viewport.end_ns) if history is not None else []
        decoded = [run for run in runs if run.phase == DECODE]
        took_ns = sum(run.end_ns - run.start_ns for run in decoded)
        return 1e9 * sum(run.tokens for run in decoded) / took_ns if took_ns else None

    def _on_toggled(self, wanted: bool) -> None:
        self._asked = None
        if not wanted:
            self._predicting.forget()
            self.unwanted.emit()
            return
        shape = self._shape()
        if shape is not None:
            self._ask(shape)
        else:
            self.reported.emit(self.tr("Nothing to predict yet: ask something in Chat first."))
            self.setChecked(False)

    def _shape(self) -> RequestShape | None:
        history: History | None = self._navigator.history
        request = request_before(history, self._navigator.viewport.end_ns) if history is not None else None
        config = self._config()
        return None if request is None or config is None else RequestShape(config[0], config[1], *request)

    def _config(self) -> tuple[EngineConfig, str] | None:
        if self._session is not None:
            about = self._session.about
            reports = [report for _, report in self._session.reports]
            return recorded_config(about, _slots(reports[-1] if reports else None)), str(about.get("model", ""))
        model = self._client.model
        if model is None:
            return None
        return running_config(model, self._client.config, _slots(self._hub.report)), model.name

    def _ask(self, shape: RequestShape) -> None:
        self._asked = shape
        self._predicting.ask(lambda: predict(shape), self.predicted.emit, self._on_failed)

    def _on_failed(self, error: Exception) -> None:
        reason = getattr(error, "message", None) or self.tr("the model's files could not be read")
        self.reported.emit(self.tr("No prediction: {0}").format(reason))
        self.setChecked(False)


def _differ(one: RequestShape, other: RequestShape) -> bool:
    if (one.config, one.prompt_tokens) != (other.config, other.prompt_tokens):
        return True
    return one.tokens > 1.3 * other.tokens + 16


def _slots(report: CacheReport | None) -> int | None:
    tiers = report.tiers if report is not None else ()
    return next((tier.slots for tier in tiers if tier.tier == "vram"), None)


_STEPS = 8
"""How many steps after a moment to search for one that can be matched: some may not be recorded singly."""


translate = QCoreApplication.translate


def speeds(predicted: Predicted, measured_tokens_per_s: float | None) -> str:
    """`154 tokens/s predicted, 98.1 measured · first token after 60 ms`."""
    speed = translate("Predicted", "{0} tokens/s predicted").format(number(predicted.tokens_per_s, 1))
    if measured_tokens_per_s:
        speed += ", " + translate("Predicted", "{0} measured").format(number(measured_tokens_per_s, 1))
    first = translate("Predicted", "first token after {0}").format(duration(predicted.ttft_s * 1e9))
    return f"{speed} · {first}"


def assumptions(predicted: Predicted) -> str:
    """Its assumptions, in one or two lines."""
    shape = predicted.shape
    parts = [
        translate("Predicted", "Simulated for {0} tokens read and {1} written, aligned at the same step.").format(
            number(shape.prompt_tokens, 0), number(shape.tokens, 0)
        )
    ]
    if predicted.measured:
        parts.append(translate("Predicted", "Measured here: {0}.").format(_named(predicted.measured)))
    if predicted.assumed:
        parts.append(
            translate("Predicted", "From data sheets, not measured by Tune: {0}.").format(_named(predicted.assumed))
        )
    if predicted.hit_rate is not None:
        parts.append(
            translate("Predicted", "Assumed: typical expert popularity, so that {0} slots hit {1}%;").format(
                number(predicted.slots, 0), number(100 * predicted.hit_rate, 0)
            )
        )
    else:
        parts.append(translate("Predicted", "Assumed: typical expert popularity;"))
    parts.append(translate("Predicted", "no other program is running."))
    return " ".join(parts)


def _named(groups: tuple[str, ...]) -> str:
    names = {
        "cpu": translate("Predicted", "processor and RAM"),
        "gpu": translate("Predicted", "graphics card"),
        "link": translate("Predicted", "PCIe"),
        "disk": translate("Predicted", "disk"),
    }
    return ", ".join(names.get(group, group) for group in groups)


def aligned_ns(history: History, start_ns: float, end_ns: float, steps_ns: Sequence[int]) -> float | None:
    """The moment of a prediction that corresponds to `start_ns` of a recording.

    A request that begins in [start, end) is aligned with the beginning of its prediction; otherwise the first decode
    step that begins there is aligned with the same step.

    Args:
        steps_ns: beginning of each predicted decode step; the prediction begins at 0.

    Returns:
        None if nothing was decoded before `end_ns`.
    """
    runs = history.last_request(end_ns)
    if not runs or not steps_ns:
        return None
    first_decode = next(run for run in runs if run.phase == DECODE)
    begin = runs[0].start_ns if runs[0] is not first_decode else first_decode.start_ns - steps_ns[0]
    if start_ns <= begin or start_ns < first_decode.start_ns:
        return start_ns - begin
    in_sight = next((run for run in reversed(runs) if run.phase == DECODE and run.start_ns <= start_ns), first_decode)
    one_ns = (in_sight.end_ns - in_sight.start_ns) / max(in_sight.tokens, 1)
    steps = history.steps_between(int(start_ns), int(start_ns + _STEPS * one_ns) + 1)
    steps = steps[(steps["name"] == DECODE) & (steps["start_ns"] >= start_ns)]
    if len(steps):
        number, at_ns = int(steps["step"][0]) - first_decode.first_step, int(steps["start_ns"][0])
    else:  # past the prediction's end, or steps no longer kept: use the mean
        number = int((start_ns - first_decode.start_ns) / max(one_ns, 1.0))
        at_ns = round(first_decode.start_ns + number * one_ns)
    return steps_ns[number % len(steps_ns)] - (at_ns - start_ns)


class SecondTimeline(Card):
    """Shows the same range as the first timeline.

    Another session is aligned at its end, a prediction at the same step of the request.

    Signals: `dismissed`, when the user has closed it.
    """

    dismissed = Signal()

    def __init__(self, first: TimelineView, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._first = first
        self.predicted: Predicted | None = None
        self.view = TimelineView(self)
        self.view.setAccessibleName(self.tr("Second timeline"))
        close = push_button(self, self.tr("Close"), self._close, kind="quiet")
        self.head.addWidget(close)
        self.said = muted_label(self)
        self.body.setContentsMargins(16, 10, 12, 10)  # so that the lanes of both line up
        self.body.setSpacing(4)
        add_items(self.body, self.said, (self.view, 1))
        first.navigator.moved.connect(self._follow)
        first.pointed.connect(self._point)
        self.hide()

    def show_history(self, title: str, caption: str, history: History) -> None:
        self.predicted = None
        self.said.hide()
        self._show(title, caption, history)

    def show_predicted(self, predicted: Predicted, measured_tokens_per_s: float | None) -> None:
        self.predicted = predicted
        self.said.setText(assumptions(predicted))
        self.said.setAccessibleName(self.said.text())
        self.said.show()
        self._show(self.tr("Predicted"), speeds(predicted, measured_tokens_per_s), predicted.history)

    def dismiss(self) -> None:
        self.hide()
        self.predicted = None
        self.view.navigator.set_source(None, recorded=True)

    def _close(self) -> None:
        self.dismiss()
        self.dismissed.emit()

    def _show(self, title: str, caption: str, history: History) -> None:
        self.heading.setText(title)
        self.caption.setText(caption)
        self.setAccessibleName(f"{title}. {caption}")
        self.view.navigator.set_source(history, recorded=True)
        self.show()
        self._follow()

    def _follow(self) -> None:
        mine, first = self.view.navigator, self._first.navigator
        theirs = first.history
        if self.isHidden() or theirs is None or theirs.end_ns is None or mine.history is None:
            return
        viewport = replace(mine.viewport, span_ns=first.viewport.span_ns)
        if self.predicted is not None:
            start_ns = aligned_ns(theirs, first.viewport.start_ns, first.viewport.end_ns, self.predicted.steps_ns)
            mine.place(replace(viewport, start_ns=start_ns or 0.0))
            return
        end_ns = mine.history.end_ns or 0
        behind = min(theirs.end_ns - first.viewport.end_ns, float(end_ns - (mine.history.start_ns or 0)))
        mine.place(viewport.ending_at(end_ns - max(behind, 0.0)))

    def _point(self, at_ns: float | None) -> None:
        if not self.isHidden():
            theirs, mine = self._first.navigator.viewport, self.view.navigator.viewport
            self.view.set_cursor(None if at_ns is None else mine.start_ns + at_ns - theirs.start_ns)
