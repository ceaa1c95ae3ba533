"""What to tune and how thoroughly; during a run, its progress and a Cancel button."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QCoreApplication, QSize, Signal
from PySide6.QtGui import QMouseEvent, QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QButtonGroup,
    QProgressBar,
    QPushButton,
    QWidget,
)

from app.theme import set_look
from app.widgets.fields import FindBox
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import (
    Card,
    add_items,
    hbox,
    muted_label,
    push_button,
    set_message,
    text_label,
    vbox,
    warning_label,
)
from app.widgets.starter_offer import StarterOffer
from engine.common.settings import STARTER
from engine.tuning.result import TuningKind

_STEPS = 1000


class CancelButton(QPushButton):
    """Takes the place of the start button: the second click of a double-click on that one must not cancel the run."""

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        event.accept()  # no press event, so no click on release


class RunCard(Card):
    """Signals: `model_chosen(str)`, `run_wanted`, `measuring_wanted`, `cancel_wanted`, `keep_wanted`, `models_wanted`
    (to get others)."""

    model_chosen = Signal(str)
    run_wanted = Signal()
    measuring_wanted = Signal()
    cancel_wanted = Signal()
    keep_wanted = Signal()
    models_wanted = Signal()

    def __init__(self, model: str, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.heading.hide()
        self.caption.hide()
        self.setAccessibleName(self.tr("Tuning"))
        self._model, self.is_on_this_pc, self._names = model, True, [model]
        self._catalogue: tuple[str, ...] = ()
        self.models = FindBox(self.tr("A model, by a few letters of its name"), self)
        self.models.setAccessibleName(self.tr("Model"))
        self.models.setToolTip(
            self.tr("A model on this PC, one of the catalogue, or a hub id such as Qwen/Qwen3-30B-A3B"),
        )
        self.models.setMinimumWidth(200)
        self.quick = self._segment(self.tr("Quick, 10 s"), self.tr("Quick: measures for about ten seconds"))
        self.thorough = self._segment(self.tr("Thorough, 2 min"), self.tr("Thorough: measures for about two minutes"))
        self.quick.setChecked(True)
        group = QButtonGroup(self)
        group.addButton(self.quick)
        group.addButton(self.thorough)
        self.measure_only = push_button(self, self.tr("Measure only"), self.measuring_wanted, kind="quiet")
        self.start = push_button(self, self.tr("Tune"), self.run_wanted, kind="primary")
        self.start.setMinimumWidth(104)
        self.cancel = CancelButton(self.tr("Cancel"), self)
        self.cancel.setToolTip("Esc")
        self.doing = text_label(self, wrap=True)
        self.bar = QProgressBar(self)
        self.bar.setRange(0, _STEPS)
        self.bar.setAccessibleName(self.tr("Progress"))
        self.notes = muted_label(self)
        self.notes.hide()
        self.unsaved = warning_label(self)
        self.keep = push_button(
            self,
            self.tr("Save anyway"),
            self.keep_wanted,
            tip=self.tr("Saves figures that are too low because other programs were busy"),
        )
        self.keep.hide()
        self.others = push_button(self, do=self.models_wanted)
        self._lay_out()
        self._show_running(running=False)
        self.show_models([model])
        self.models.chosen.connect(self._on_chosen)
        self.cancel.clicked.connect(self.cancel_wanted)

    @property
    def model(self) -> str:
        return self._model

    @property
    def kind(self) -> TuningKind:
        return "thorough" if self.thorough.isChecked() else "quick"

    def add_starter(self, offer: StarterOffer) -> None:
        self.starter = offer
        self._missing.add(offer, first=True)
        self._show_can_run()

    starter: StarterOffer | None = None

    def show_models(self, names: Sequence[str], catalogue: Sequence[str] = ()) -> None:
        """Updates the models that are there, and those of the catalogue, which can be planned for; keeps the
        selection."""
        self._here = set(names)
        self._names = list(dict.fromkeys((STARTER, *names, *([self._model] if self.is_on_this_pc else []))))
        self._catalogue = tuple(name for name in catalogue if name not in self._names)
        self.models.clear()
        self.models.addItems([_shown(name) for name in self._names])
        if self._catalogue:
            self.models.insertSeparator(self.models.count())
            self.models.addItems(self._catalogue)
        self._show_model()

    def choose(self, model: str) -> None:
        """Selects a model of the library; emits nothing."""
        self._model, self.is_on_this_pc = model, True
        if model not in self._names:
            self._names.append(model)
            self.models.insertItem(len(self._names) - 1, _shown(model))
        self._show_model()

    def show_waiting(self, text: str) -> None:
        self._show_running(running=True)
        self.cancel.setEnabled(True)
        self.cancel.setText(self.tr("Cancel"))
        self.bar.setRange(0, 0)
        self.doing.setText(text)
        self.notes.hide()
        self.show_unsaved("")

    def show_progress(self, sentence: str, done: float) -> None:
        self.bar.setRange(0, _STEPS)
        self.bar.setValue(round(_STEPS * done))
        self.bar.setAccessibleDescription(sentence)
        if self.cancel.isEnabled():
            self.doing.setText(sentence)

    def show_cancelling(self) -> None:
        self.cancel.setEnabled(False)
        self.cancel.setText(self.tr("Cancelling"))
        self.doing.setText(self.tr("Cancelling. The previous model is loaded again."))

    def show_idle(self, again: bool) -> None:
        """No run is in progress; `again`: there was one before."""
        self.start.setText(self.tr("Tune again") if again else self.tr("Tune"))
        self._show_running(running=False)
        self._show_can_run()

    def show_notes(self, *notes: str) -> None:
        """Sentences below, until the next ones replace them."""
        said = [note for note in dict.fromkeys(notes) if note]
        self.notes.setText("\n".join(said))
        self.notes.setVisible(bool(said))

    def show_unsaved(self, sentence: str) -> None:
        set_message(self.unsaved, sentence)
        self.keep.setVisible(bool(sentence))

    def set_primary(self, *, primary: bool) -> None:
        """A page has one primary button: this one, unless something else is to be done first."""
        kind = "primary" if primary else ""
        set_look(self.start, "kind", kind)

    def minimumSizeHint(self) -> QSize:
        # The width of two lines; the actual width then decides whether one is enough.
        size = super().minimumSizeHint()
        return QSize(min(size.width(), 380), size.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        buttons = (self.quick, self.thorough, self.measure_only, self.start, self.models)
        wanted = sum(max(button.sizeHint().width(), button.minimumWidth()) for button in buttons) + 120
        one_line = event.size().width() >= wanted
        direction = QBoxLayout.Direction.LeftToRight if one_line else QBoxLayout.Direction.TopToBottom
        if direction != self._row.direction():
            self._row.setDirection(direction)

    # --- inside -----------------------------------------------------------------------------------

    def _segment(self, text: str, spoken: str) -> QPushButton:
        return push_button(self, text, kind="segment", checkable=True, name=spoken)

    def _lay_out(self) -> None:
        self.choices = QWidget(self)
        self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight, self.choices)
        self._row.setContentsMargins(0, 0, 0, 0)
        self._row.setSpacing(12)
        add_items(
            self._row,
            (self.models, 1),
            Flow(self.quick, self.thorough, self.measure_only, self.start, parent=self.choices, ends_right=True),
        )
        self.running = QWidget(self)
        hbox((vbox(self.doing, self.bar, gap=6), 1), self.cancel, into=self.running, gap=16)
        add_items(self.body, self.choices, self.running, self.notes)
        self._missing = Flow(self.others, parent=self)
        self.body.addWidget(self._missing)
        below = hbox((self.unsaved, 1), self.keep, gap=16)
        self.body.addLayout(below)

    def _show_running(self, *, running: bool) -> None:
        self.choices.setVisible(not running)
        self.running.setVisible(running)

    def _show_model(self) -> None:
        shown = _shown(self._model) if self.is_on_this_pc else self._model
        self.models.setCurrentIndex(self.models.findText(shown))
        self.models.setEditText(shown)
        self._show_can_run()

    def _show_can_run(self) -> None:
        is_missing = self.is_on_this_pc and self._model not in self._here
        for button in (self.start, self.measure_only):
            button.setEnabled(self.is_on_this_pc)
        tip = "" if self.is_on_this_pc else self.tr("Only models on this PC can be timed; of this one you see a plan.")
        self.start.setToolTip(tip)
        is_listed = self._model in self._catalogue
        self.others.setText(self.tr("Get it on the Models page…") if is_listed else self.tr("Get another model…"))
        self.others.setVisible(is_missing or is_listed)
        if self.starter is not None:
            self.starter.setVisible(is_missing and self._model == STARTER)

    def _on_chosen(self, text: str) -> None:
        here = {_shown(name).casefold(): name for name in self._names}
        name = here.get(text.casefold())
        if not text:
            self._show_model()
        else:
            self._take(name or text, in_library=name is not None)

    def _take(self, model: str, *, in_library: bool) -> None:
        if (model, in_library) == (self._model, self.is_on_this_pc):
            return
        self._model, self.is_on_this_pc = model, in_library
        self._show_model()
        self.model_chosen.emit(model)


def _shown(name: str) -> str:
    return QCoreApplication.translate("Tune", "Starter") if name == STARTER else name
