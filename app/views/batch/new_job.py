"""The form for a new job: input, prompt, answer settings, output, a trial of three rows, Start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QWidget

from app.services.background import LatestTask, sentence_of
from app.services.batch_input import InputPreview, count_rows, look_at
from app.services.batch_sample import BatchForecasts, BatchSample, SampleRate
from app.services.engine_client import EngineClient, has_ray, offered_endpoints
from app.views.batch.answer_card import AnswerCard, SampleCard, TemplateCard
from app.views.batch.input_card import InputCard, OutputCard, PlacesCard
from app.views.batch.phrases import plan_text, sample_text, sampled_text
from app.widgets.page import BatchDraft
from app.widgets.scaffold import Card, PageBody, hbox, muted_label, push_button, set_message, vbox, warning_label
from engine.batch_files.opening import InputForm
from engine.batch_files.prepared_job import prepare
from engine.common.config import BatchJob
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.planner.batch_prediction import JobPrediction
from engine.protocol import BatchPlanned, BatchRow, BatchSampled
from engine.remote.endpoint import Endpoint
from engine.tuning.batch_forecast import Forecast, ForecastQuestion

WIDTH_PX = 860
_LAID_OUT_MS = 60
"""After the layout of what was just added."""


class FormFoot(QWidget):
    start_wanted = Signal()
    cancelled = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("formFoot")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.plan = muted_label(self)
        self.trouble = warning_label(self)
        self.cancel = push_button(self, self.tr("Cancel"), self.cancelled)
        self.start = push_button(self, self.tr("Start"), self.start_wanted, kind="primary")
        hbox(
            (vbox(self.trouble, self.plan, gap=2), 1),
            self.cancel,
            self.start,
            into=self,
            margins=(20, 10, 20, 10),
            gap=12,
        )

    def show_state(self, *, able: bool, checking: bool, why_not: str, words: str) -> None:
        self.start.setEnabled(able and not checking)
        self.start.setText(self.tr("Checking…") if checking else self.tr("Start"))
        self.start.setToolTip(why_not)
        set_message(self.plan, words)


class NewJob(QWidget):
    """Signals:
    start_wanted: a checked `BatchJob`, and its total rows (None until counted).
    replace_wanted: a `BatchJob` whose output already exists; total rows as above.
    cancelled: close the form.
    file_wanted: choose another input.
    model_wanted: the rows are to be answered by the model on this PC, and none is loaded.
    """

    start_wanted = Signal(object, object)
    replace_wanted = Signal(object, object)
    cancelled = Signal()
    file_wanted = Signal()
    model_wanted = Signal()

    def __init__(
        self,
        client: EngineClient,
        sample: BatchSample,
        page: QWidget,
        *,
        clock: Callable[[], float] = time.time,
        offered: Callable[[], Sequence[Endpoint]] = offered_endpoints,
    ) -> None:
        super().__init__(page)
        self._client, self._sampler, self._clock = client, sample, clock
        self._offered = offered
        self._preview: InputPreview | None = None
        self._path = Path()
        self._shown_input = Path()
        self._total: int | None = None
        self._looking, self._checks = LatestTask(self), LatestTask(self)
        self._left = threading.Event()
        self._checking = False
        self._opening = False
        self._planned: JobPrediction | None = None
        self._sampled: BatchSampled | None = None
        self._forecast: Forecast | None = None
        self._forecasts = BatchForecasts(self)
        self.input = InputCard(self)
        self.template = TemplateCard(self)
        self.answers = AnswerCard(page, self)
        self.output = OutputCard(self)
        self.places = PlacesCard(self)
        self.sample = SampleCard(self)
        self.foot = FormFoot(self)
        self._lay_out()
        self._connect(sample)

    def open(self, path: Path) -> None:
        self._path = path
        self._opening = True
        self.places.set_endpoints(self._offered())
        self.places.offer_cluster(has_ray())
        self._scroll.verticalScrollBar().setValue(0)  # the form may still be scrolled down from the last job
        self.input.reset_form()
        self._open(InputForm())

    def take_draft(self, draft: BatchDraft) -> None:
        """What a chat asks is asked of every row, of this input or the next."""
        self.template.hand(draft.template, draft.system)
        if draft.sampling is not None:
            self.answers.take(draft.sampling)
        if self._preview is not None:
            preview = self._preview
            self.template.set_columns(preview.columns, preview.template, _wordiest(preview), preview.image_column)

    def job(self) -> BatchJob:
        """The job as entered."""
        form = self.input.form()
        openai = self._preview is not None and self._preview.openai
        schema, choices = ("", ()) if openai else self.answers.constraint()
        return BatchJob(
            input=str(self._path),
            output=str(self.output.path),
            template="" if openai else self.template.template,
            image_column="" if openai else self.template.image_column,
            system="" if openai else self.template.system_prompt,
            sampling=self.answers.sampling,
            schema=schema,
            choices=choices,
            encoding=form.encoding,
            separator=form.separator,
            whole_files=form.whole_files,
            sheet=form.sheet,
            endpoints=self.places.names,
            ray=self.places.ray,
            ask_twice=self.places.twice.isChecked() and len(self.places.names) > 1,
            name_endpoints=self.places.column.isChecked() and len(self.places.names) > 1,
        )

    def refuse(self, sentence: str) -> None:
        self._tell(sentence)

    def leave(self) -> None:
        self._left.set()
        self._looking.forget()
        self._checks.forget()
        self._checking = False
        self._forecasts.forget()
        self._sampler.stop()

    def close_down(self) -> None:
        self.leave()
        self._forecasts.close()
        for task in (self._looking, self._checks):
            task.close()

    # --- the file ---------------------------------------------------------------------------------

    def _open(self, form: InputForm) -> None:
        path = self._path
        self._left.set()
        self._left = threading.Event()
        self._preview, self._total = None, None
        self._forget_plan()
        self.input.show_loading(path.name)
        self.sample.clear()
        self._show_state()
        self._looking.ask(lambda: look_at(path, form), self._on_preview, self._on_unreadable)

    def _on_preview(self, preview: InputPreview) -> None:
        another = self.output.path.parent != preview.path.parent or self._shown_input != preview.path
        self._preview = preview
        self._shown_input = preview.path
        self.input.show_preview(preview)
        self.sample.set_rows(len(preview.rows))
        self.template.setVisible(not preview.openai)
        self.template.set_columns(preview.columns, preview.template, _wordiest(preview), preview.image_column)
        self.answers.set_openai(preview.openai)
        if another:
            self.output.suggest(preview)
        for card in self._cards:
            hidden = (card is self.template and preview.openai) or (card is self.places and not self.places.is_offered)
            card.setVisible(not hidden)
        self._show_state()
        if self._opening:
            self._opening = False
            self._focus_first_field(self.answers.max_tokens if preview.openai else self.template.edit)
        path, form, left = preview.path, preview.form, self._left
        self._looking.ask(lambda: count_rows(path, form, left.is_set), self._on_counted)

    def _focus_first_field(self, field: QWidget) -> None:
        self._scroll.column.activate()  # widgets just shown have no geometry before that
        self._scroll.verticalScrollBar().setValue(0)
        bottom = field.mapTo(self._scroll.inside, field.rect().bottomLeft()).y()
        nobody_went_on = self.window().focusWidget() is self.input.change
        if nobody_went_on and bottom <= self._scroll.viewport().height():
            field.setFocus()

    def _on_unreadable(self, error: Exception) -> None:
        self._opening = False
        self.input.show_failure(self._path, sentence_of(error))
        for card in self._cards[1:]:
            card.setVisible(False)
        self._show_state()

    def _on_counted(self, total: int | None) -> None:
        self._total = total
        self.input.show_total(total)
        self._show_state()

    # --- trying three rows --------------------------------------------------------------------------

    def _try(self) -> None:
        try:
            # Nothing is written, so an existing output does not matter; a cluster runs the model that is loaded here.
            job = replace(self.job(), start="resume", ray="")
        except EngineError as error:
            self.sample.fail(error.message)
            return
        self.sample.begin()
        self._planned = self._sampled = None
        self._sampler.start(job)

    def _on_row_tried(self, rows: Sequence[BatchRow]) -> None:
        self.sample.add(rows)
        # It may be below the visible part: lay out first, then scroll to it.
        bar = self._scroll.verticalScrollBar()
        left = self._left

        def show() -> None:
            if not left.is_set():  # the form may show another job by now
                bar.setValue(max(bar.value(), self.sample.y() - 18))

        QTimer.singleShot(_LAID_OUT_MS, self, show)

    def _on_sampled(self, rate: SampleRate | None) -> None:
        self.sample.end("" if rate is None else sample_text(rate))
        self._show_state()

    def _on_planned(self, event: BatchPlanned) -> None:
        self._planned = event.prediction
        self._show_state()

    def _on_sampled_elsewhere(self, sampled: BatchSampled) -> None:
        self._sampled = sampled
        self._show_state()

    def _on_forecast(self, forecast: Forecast | None) -> None:
        self._forecast = forecast
        self._show_state()

    def _on_sample_failed(self, sentence: str) -> None:
        self.sample.fail(sentence)
        self._show_state()

    # --- starting -----------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            job = self.job()
        except EngineError as error:
            self._tell(error.message)
            return
        self._checking = True
        self._show_state()
        there = self.output.path
        self._checks.ask(
            lambda: (_check(job), there.exists()), lambda found: self._on_checked(job, *found), self._on_wrong
        )

    def _on_checked(self, job: BatchJob, taken: bool, exists: bool) -> None:
        self._checking = False
        self._show_state()
        self._sampler.stop()
        (self.replace_wanted if taken or exists else self.start_wanted).emit(job, self._total)

    def _on_wrong(self, error: Exception) -> None:
        self._checking = False
        self._show_state()
        self._tell(sentence_of(error))

    # --- inside -------------------------------------------------------------------------------------

    def _on_changed(self) -> None:
        self._tell("")
        if self.sample.answers and not self._sampler.is_running:
            self.sample.clear()  # the trial no longer matches the settings
            self._planned = self._sampled = None
        self._show_state()

    def _show_state(self) -> None:
        ready = self._preview is not None
        openai = self._preview is not None and self._preview.openai
        wrong = [] if openai else [self.template.problem(), self.answers.problem()]
        wrong += [self.places.problem(), self.output.problem()]
        problem = next((text for text in wrong if text), "") if ready else ""
        loaded = self._client.model is not None or not self.places.needs_model
        model = self._client.model
        is_blind = model is not None and not model.sees and self.places.needs_model and not self.places.is_remote
        self.template.show_blind(model.name if model is not None and is_blind else "")
        if ready and not loaded:
            self.model_wanted.emit()
        can_try = loaded or self.places.is_remote
        self.sample.set_able(
            ready and not problem and can_try, problem or ("" if can_try else self.tr("No model is loaded."))
        )
        shown = self.template.trouble.text() or self.answers.trouble.text()  # already shown beside its field
        words = problem if problem != shown else ""
        if ready and not problem:
            words = self._plan_words() if loaded else self.tr("The job starts when a model is loaded.")
        able = ready and not problem
        self.foot.show_state(able=able, checking=self._checking, why_not=problem, words=words)
        self._ask_forecast(wanted=able and not (self.places.is_remote or self.places.ray))

    def _plan_words(self) -> str:
        if self.places.is_remote:
            untried = self.tr("A trial of the first rows says how long a row takes there, and what it costs.")
            return untried if self._sampled is None else sampled_text(self._sampled, self._total)
        if self.places.ray:
            return self.tr("Each node plans for itself; how fast it is shows when rows are answered.")
        alone = self._forecast.alone_tokens_per_s if self._forecast is not None else 0.0
        if self._planned is not None:
            return plan_text(self._planned, self._clock())
        return plan_text(self._forecast.plan, self._clock(), alone) if self._forecast is not None else ""

    def _ask_forecast(self, *, wanted: bool) -> None:
        model = self._client.model
        if not wanted or model is None:
            self._forecast = None
            self._forecasts.forget()
            return
        try:
            job = self.job()
        except EngineError:
            return
        self._forecasts.ask(ForecastQuestion(job, model, self._client.config, self._total))

    def _forget_plan(self) -> None:
        self._planned = self._forecast = self._sampled = None
        self._forecasts.forget()

    def _tell(self, sentence: str) -> None:
        set_message(self.foot.trouble, sentence)

    def _connect(self, sample: BatchSample) -> None:
        self.input.form_changed.connect(self._open)
        self.input.change_wanted.connect(self.file_wanted)
        for card in (self.template, self.answers, self.places, self.output):
            card.changed.connect(self._on_changed)
        self.sample.wanted.connect(self._try)
        self.sample.stop_wanted.connect(sample.stop)
        sample.answered.connect(self._on_row_tried)
        sample.planned.connect(self._on_planned)
        sample.sampled.connect(self._on_sampled_elsewhere)
        sample.ended.connect(self._on_sampled)
        sample.failed.connect(self._on_sample_failed)
        self.foot.start_wanted.connect(self._start)
        self.foot.cancelled.connect(self.cancelled)
        self._forecasts.answered.connect(self._on_forecast)
        self._client.state_changed.connect(self._show_state)
        self._client.model_loaded.connect(self._on_model)
        self.answers.popover.set_model(self._client.model)
        self._show_state()

    def _on_model(self, model: ModelInfo) -> None:
        self.answers.popover.set_model(model)
        self._show_state()

    def _lay_out(self) -> None:
        self._cards: tuple[Card, ...] = (
            self.input,
            self.template,
            self.answers,
            self.places,
            self.output,
            self.sample,
        )
        for card in self._cards:
            card.setVisible(card is self.input)
        self._scroll = PageBody(self, *self._cards, widest_px=WIDTH_PX + 40)
        vbox((self._scroll, 1), self.foot, into=self, gap=0)
        self.setTabOrder(self.sample.button, self.foot.cancel)
        self.setTabOrder(self.foot.cancel, self.foot.start)


def _wordiest(preview: InputPreview) -> str:
    lengths = [sum(len(row[place]) for row in preview.rows) for place in range(len(preview.columns))]
    return preview.columns[lengths.index(max(lengths))] if lengths else ""


def _check(job: BatchJob) -> bool:
    """Whether an earlier job has this output; a file that may never be replaced is an error."""
    from engine.batch_files.journal import journal_path

    prepare(replace(job, start="restart")).require_own_files()
    return journal_path(Path(job.output)).exists()
