"""What to tune and how thoroughly; during a run, its progress and a Cancel button.

And the plans that are timed, with the result: before and after, and which plan is in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import (
    QCoreApplication,
    QEvent,
    QModelIndex,
    QPersistentModelIndex,
    QPointF,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QFont, QFontMetricsF, QMouseEvent, QPainter, QPen, QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QButtonGroup,
    QFrame,
    QHeaderView,
    QProgressBar,
    QPushButton,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QWidget,
)

from app.models.headed_table import ROW_ROLE
from app.models.plan_table import BAR, NAME, PREDICTED, TIMED, PlanRow, PlanTable
from app.theme import set_look, tabular, themed
from app.widgets.chip import small_font
from app.widgets.fields import FindBox
from app.widgets.flow_layout import Flow
from app.widgets.quantities import figures, number, translate
from app.widgets.scaffold import (
    STRETCH,
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
from app.widgets.text_table import show_whole_rows
from engine.common.settings import STARTER
from engine.tuning.result import TuningKind, TuningResult, day, verdict

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


_PAD = 8.0
_BAR_PX = 12.0


class RaceView(QTableView):
    """As high as its rows; it does not scroll."""

    def __init__(self, table: PlanTable, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._table = table
        self.name_width = 200
        self.setModel(table)
        self.setItemDelegate(RaceDelegate(table, self))
        show_whole_rows(self, self.tr("Plans, predicted and measured"))
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        head = self.horizontalHeader()
        head.setSectionsClickable(False)
        head.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        head.setSectionResizeMode(NAME, QHeaderView.ResizeMode.Stretch)
        table.modelReset.connect(self._fit)
        table.dataChanged.connect(lambda *_: self._fit())
        self._fit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _fit(self) -> None:
        metrics = QFontMetricsF(self.font())
        number = round(metrics.horizontalAdvance("Predicted") + 2 * _PAD)
        self.setColumnWidth(PREDICTED, number)
        self.setColumnWidth(TIMED, number)
        self.setColumnWidth(BAR, max(110, round(0.3 * self.viewport().width())))
        self.name_width = self.viewport().width() - sum(self.columnWidth(at) for at in (PREDICTED, TIMED, BAR))
        self.resizeRowsToContents()
        rows = sum(self.rowHeight(at) for at in range(self._table.rowCount()))
        self.setFixedHeight(self.horizontalHeader().sizeHint().height() + rows + 4)


class RaceDelegate(QStyledItemDelegate):
    def __init__(self, table: PlanTable, view: RaceView) -> None:
        super().__init__(view)
        self._table, self._view = table, view

    def sizeHint(self, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex) -> QSize:
        row: PlanRow = index.data(ROW_ROLE)
        width = self._view.name_width - 2 * _PAD
        high = self._heights(option.font, row, width)
        return QSize(40, round(high[0] + high[1] + 16))

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        row: PlanRow = index.data(ROW_ROLE)
        area = QRectF(option.rect)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        selected = bool(option.state & QStyle.StateFlag.State_Selected) and self._view.hasFocus()
        if selected or row.is_winner:
            painter.fillRect(option.rect, themed("accent_background" if row.is_winner else "hover"))
        painter.setPen(QPen(themed("border"), 1))
        painter.drawLine(area.bottomLeft() + QPointF(0, -0.5), area.bottomRight() + QPointF(0, -0.5))
        if index.column() == NAME:
            self._paint_name(painter, option.font, row, area)
        elif index.column() == BAR:
            self._paint_bar(painter, row, area.adjusted(_PAD, 0, -_PAD, 0), float(index.data(PlanTable.MOST)))
        else:
            font = tabular(option.font)
            if index.column() == TIMED:
                font.setWeight(QFont.Weight.DemiBold)
            painter.setFont(font)
            painter.setPen(themed("text" if index.column() == TIMED and not row.problem else "muted"))
            flags = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(area.adjusted(_PAD, 0, -_PAD, 0), flags, index.data())
        painter.restore()

    # --- the plan ---------------------------------------------------------------------------------

    def _second_line(self, row: PlanRow) -> str:
        said = self._table.marks(row)
        if row.problem:
            said.append(row.problem)
        elif row.doing:
            said.append(row.doing)
        elif row.timed is None:
            said.append(self.tr("waits"))
        return " · ".join(said)

    def _heights(self, font: QFont, row: PlanRow, width: float) -> tuple[float, float]:
        small = small_font(font, 12)
        metrics, smaller = QFontMetricsF(_name_font(font, row)), QFontMetricsF(small)
        room = QRectF(0, 0, max(width, 60), 400)
        flags = int(Qt.TextFlag.TextWordWrap)
        first = metrics.boundingRect(room, flags, row.contestant.name).height()
        second = self._second_line(row)
        return first, smaller.boundingRect(room, flags, second).height() if second else 0.0

    def _paint_name(self, painter: QPainter, font: QFont, row: PlanRow, area: QRectF) -> None:
        inner = area.adjusted(_PAD, 0, -_PAD, 0)
        first, second = self._heights(font, row, inner.width())
        top = area.center().y() - (first + second) / 2
        flags = int(Qt.TextFlag.TextWordWrap)
        painter.setFont(_name_font(font, row))
        painter.setPen(themed("text"))
        painter.drawText(QRectF(inner.left(), top, inner.width(), first), flags, row.contestant.name)
        painter.setFont(small_font(font, 12))
        painter.setPen(themed("danger" if row.problem else "accent_text" if row.is_winner else "muted"))
        painter.drawText(QRectF(inner.left(), top + first, inner.width(), second), flags, self._second_line(row))

    # --- the bar ----------------------------------------------------------------------------------

    def _paint_bar(self, painter: QPainter, row: PlanRow, area: QRectF, most: float) -> None:
        one = row.contestant
        bar = QRectF(area.left(), area.center().y() - _BAR_PX / 2, area.width(), _BAR_PX)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(themed("border"))
        painter.drawRoundedRect(bar, 3, 3)
        if most <= 0:
            return
        per = bar.width() / most
        if row.tokens_per_s:
            painter.setBrush(themed("accent" if row.is_winner else "muted" if row.timed is None else "idle"))
            painter.drawRoundedRect(QRectF(bar.left(), bar.top(), max(3.0, per * row.tokens_per_s), _BAR_PX), 3, 3)
        if one.predicted_tokens_per_s:  # a bracket from low to high with a mark at the prediction
            y = bar.center().y()
            low, high = bar.left() + per * one.low, bar.left() + per * one.high
            painter.setPen(QPen(themed("text"), 1.2))
            painter.drawLine(QPointF(low, y), QPointF(high, y))
            for x in (low, high):
                painter.drawLine(QPointF(x, y - 3), QPointF(x, y + 3))
            at = bar.left() + per * one.predicted_tokens_per_s
            painter.setPen(QPen(themed("text"), 2.2))
            painter.drawLine(QPointF(at, bar.top() - 3), QPointF(at, bar.bottom() + 3))


def _name_font(font: QFont, row: PlanRow) -> QFont:
    """The winning plan's name is bold, and so wider: it must be measured as it is painted."""
    found = QFont(font)
    found.setWeight(QFont.Weight.DemiBold if row.is_winner else QFont.Weight.Normal)
    return found


class RaceCard(Card):
    use_wanted = Signal(str)

    def __init__(self, table: PlanTable, parent: QWidget | None = None) -> None:
        super().__init__(translate("RaceCard", "Timed on the real engine"), parent)
        self._table = table
        self._result: TuningResult | None = None
        self.in_use = ""
        self._is_saved = True
        self.empty = muted_label(
            self, self.tr("Nothing timed yet: “Tune” times the best plans and the current settings with real tokens.")
        )
        self.view = RaceView(table, self)
        self.gain = text_label(self, role="title", tabular=True)
        self.verdict = muted_label(self, role="")
        self.warning = warning_label(self)
        self.use = push_button(self, self.tr("Use winner now"), self._use, kind="primary")
        self.keep = push_button(self, self.tr("Keep as before"), self._keep)
        buttons = hbox(self.use, self.keep, STRETCH)
        self.legend = muted_label(
            self,
            self.tr("Bars: measured, which is what counts. Brackets: the predicted range."),
            role="caption",
        )
        add_items(
            self.body, self.empty, self.view, self.legend, self.gain, self.warning, self.verdict, buttons, STRETCH
        )
        table.modelReset.connect(self._show_table)
        self.show_none()

    @property
    def result(self) -> TuningResult | None:
        return self._result

    @property
    def has_offer(self) -> bool:
        return self.use.isVisibleTo(self)

    def show_none(self) -> None:
        self._result = None
        self.caption.setText("")
        for widget in (self.gain, self.verdict, self.warning, self.use, self.keep):
            widget.hide()
        self._show_table()

    def show_result(self, result: TuningResult, in_use: str, *, saved: bool = True) -> None:
        self._result, self.in_use, self._is_saved = result, in_use, saved
        self._table.show_result(result)
        if not saved:
            self._table.show_winner("")
        self.caption.setText(self.tr("{0}, {1}").format(result.model, day(result.taken_at)))
        before, won = result.before, result.won
        gained = won is not None and not won.contestant.is_before and saved and result.is_trusted
        if gained and won is not None and before is not None and before.tokens_per_s:
            words = self.tr("Before {0} → after {1} tokens/s")
            self.gain.setText(words.format(figures(before.tokens_per_s), figures(won.tokens_per_s)))
        elif won is not None:
            self.gain.setText(self.tr("{0} tokens/s").format(figures(won.tokens_per_s)))
        self.gain.setVisible(won is not None and saved)
        set_message(
            self.warning, self._doubt(result) if saved else ""
        )  # else it is shown beside the button that saves it
        notes = () if result.was_busy else result.notes  # the warning covers all of them
        self.verdict.setText("\n".join((verdict(result, saved=saved), *notes)))
        self.verdict.show()
        self._show_buttons()

    def show_in_use(self, name: str) -> None:
        self.in_use, self._is_saved = name, True
        if self._result is not None:
            set_message(self.warning, self._doubt(self._result))
        self._table.show_winner(name)
        self._show_buttons()
        chosen = next((one for one in self._table.rows if one.contestant.name == name), None)
        if chosen is not None:
            words = self.tr("This model now runs with it: {0}, {1} tokens/s.")
            self.verdict.setText(words.format(name, figures(chosen.tokens_per_s)))

    # --- inside -----------------------------------------------------------------------------------

    def _show_table(self) -> None:
        is_empty = self._table.rowCount() == 0
        self.empty.setVisible(is_empty)
        self.view.setVisible(not is_empty)
        self.legend.setVisible(not is_empty)

    def _show_buttons(self) -> None:
        best = self._best()
        before = self._result.before if self._result is not None else None
        self.use.setVisible(best is not None and self.in_use != best)
        able = self._is_saved and before is not None and not before.problem and before.contestant.name != best
        self.keep.setVisible(able and before is not None and self.in_use != before.contestant.name)

    def _doubt(self, result: TuningResult) -> str:
        if result.outrun and result.won is not None:
            return self.tr(
                "This model has since run at {0} tokens/s, much faster than the {1} timed here: the machine was "
                "busy then. Plans no longer use these figures. Tune again."
            ).format(figures(result.outrun), figures(result.won.tokens_per_s))
        if result.was_busy:
            return self.tr(
                "Other programs used {0}% of the CPU while this was timed: every figure is too low, and the "
                "wrong plan may have won. Plans do not use these figures. Tune again when those programs have "
                "finished."
            ).format(number(100 * result.others, 0))
        return ""

    def _best(self) -> str | None:
        """The winning plan, whatever was chosen since; None if the result is not saved."""
        return self._result.winner or None if self._result is not None and self._is_saved else None

    def _use(self) -> None:
        best = self._best()
        if best is not None:
            self.use_wanted.emit(best)

    def _keep(self) -> None:
        before = self._result.before if self._result is not None else None
        if before is not None:
            self.use_wanted.emit(before.contestant.name)
