"""The cards of the Tune page, and which of them each step shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from PySide6.QtCore import QEvent, QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QButtonGroup, QGridLayout, QLabel, QSizePolicy, QWidget

from app.engine_words import said
from app.models.plan_table import PlanTable
from app.services.planning import PlanAnswer, Planning, PlanQuestion
from app.theme import use_tabular_figures
from app.views.tune.machine_boxes import Found, driver_trouble, machine_boxes
from app.views.tune.phrases import (
    disk_warning,
    measured_name,
    number_words,
    plan_summary,
    speed_headline,
    speed_range,
    tier_bars,
)
from app.views.tune.run_card import RaceCard, RunCard
from app.widgets.fields import DoubleSpinBox, FindBox, SpinBox
from app.widgets.flow_layout import Flow
from app.widgets.machine_picture import MachinePicture
from app.widgets.plan_bars import PlanBars
from app.widgets.quantities import figures, rough, translate
from app.widgets.roofline_plot import RooflinePlot
from app.widgets.scaffold import STRETCH, Card, add_items, hbox, muted_label, push_button, set_message, text_label, vbox
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.hardware.machine import Origin, card_choices, find_card
from engine.hardware.measured import Measurements
from engine.hardware.probe import is_busy
from engine.planner.plan_parts import Plan
from engine.planner.plan_words import Change
from engine.protocol import Measured, TuningNumber
from engine.tuning.machine_state import MachineLook
from engine.tuning.result import busy_note, day

MACHINE, MEASURE, PLAN, TIMED = range(4)


class StepBar(QWidget):
    """Signals: `chosen(int)`, when the user picks a step."""

    chosen = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(self.tr("Steps"))
        row = hbox(into=self, gap=4)
        self._group = QButtonGroup(self)
        self._short = False
        self._names = (self.tr("Your machine"), self.tr("Measure"), self.tr("Plan"), self.tr("Timed tokens"))
        for at, name in enumerate(self._names):
            if at:
                between = text_label(self, "›", role="secondary")
                row.addWidget(between)
            button = push_button(
                self,
                f"{at + 1} {name}",
                kind="chip",
                checkable=True,
                name=self.tr("Step {0}: {1}").format(at + 1, name),
                tip=self.tr("Alt+{0}").format(at + 1),
            )
            self._group.addButton(button, at)
            row.addWidget(button)
        row.addStretch(1)
        self._group.idClicked.connect(self.chosen)

    def show_step(self, step: int) -> None:
        """Marks a step; emits nothing."""
        self._group.button(step).setChecked(True)
        self._name_them()

    def show_short(self, *, short: bool) -> None:
        if short != self._short:
            self._short = short
            self._name_them()

    def minimumSizeHint(self) -> QSize:
        # Of the short names: the full ones are shown only where they fit.
        widest = max(self.fontMetrics().horizontalAdvance(name) for name in self._names)
        return QSize(widest + 44 + 3 * 56, super().minimumSizeHint().height())

    def full_width(self) -> int:
        texts = [self._text(at, short=False) for at in range(len(self._names))]
        return sum(self.fontMetrics().horizontalAdvance(text) + 44 for text in texts)

    def _name_them(self) -> None:
        for at in range(len(self._names)):
            button = self._group.button(at)
            button.setText(self._text(at, short=self._short))
            button.setShortcut(f"Alt+{at + 1}")  # setting a text clears the shortcut

    def _text(self, at: int, *, short: bool) -> str:
        button = self._group.button(at)
        return f"{at + 1} {self._names[at]}" if not short or button.isChecked() else str(at + 1)


_GAP_PX = 8
_GIB = 2**30
_ALIKE = 0.08
"""A prediction that differs by less says that nothing changes."""


class WhatIfCard(Card):
    close_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("WhatIfCard", "What if this machine had…"), parent)
        self._look: MachineLook | None = None
        self._config: EngineConfig | None = None
        self._before: Plan | None = None
        self.planning = Planning(self)
        self.card = FindBox(self.tr("A few letters, such as 4090"), self)
        self.card.addItem(self.tr("Graphics card as it is"))
        for choice in card_choices():
            self.card.addItem(choice.name)
        self.vram = self._size(self.tr(" GB of VRAM"), self.tr("VRAM as it is"))
        self.ram = self._size(self.tr(" GB of RAM"), self.tr("RAM as it is"))
        self.link = self._speed(self.tr(" GB/s to the card"), self.tr("Link as it is"))
        self.disk = self._speed(self.tr(" GB/s from disk"), self.tr("Disk as it is"))
        for widget, name in (
            (self.card, self.tr("Graphics card")),
            (self.vram, self.tr("VRAM")),
            (self.ram, self.tr("RAM")),
            (self.link, self.tr("Link to the card")),
            (self.disk, self.tr("Disk")),
        ):
            widget.setAccessibleName(name)
            widget.setMinimumWidth(130)
            widget.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)  # all of one height
        self.reset = push_button(self, self.tr("Reset"), self.clear)
        self.close_button = push_button(self, self.tr("Close"), self.close_wanted, kind="quiet")
        self.result = text_label(self, role="title", wrap=True, tabular=True)
        self.words = muted_label(self)
        self.bars = PlanBars(self)
        fields = QWidget(self)
        self._grid = QGridLayout(fields)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(_GAP_PX)
        fields.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self._columns = 0
        self._place_fields()
        buttons = QWidget(self)
        hbox(self.reset, self.close_button, into=buttons)
        self.head.removeWidget(self.heading)
        self.head.insertWidget(0, Flow(self.heading, buttons, parent=self, ends_right=True), 1)
        self.caption.hide()
        add_items(self.body, fields, 2, self.result, self.words, self.bars)
        self.card.chosen.connect(self._ask)
        for box in (self.vram, self.ram, self.link, self.disk):
            box.valueChanged.connect(self._ask)
        self.planning.planned.connect(self._on_planned)
        self.setTabOrder(self.card, self.vram)
        self._show("", "")

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._place_fields()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and self.isVisible():
            self._place_fields()

    def _place_fields(self) -> None:
        """As many side by side as there is room for, three at most; the card is twice as wide."""
        boxes = (self.vram, self.ram, self.link, self.disk)
        margins = self.body.contentsMargins()
        room = self.width() - margins.left() - margins.right() + _GAP_PX
        widest = max(box.sizeHint().width() for box in boxes) + _GAP_PX
        columns = max(1, min(3, room // widest))
        if columns == self._columns:
            return
        self._columns = columns
        for column in range(3):
            self._grid.setColumnStretch(column, column < columns)
        self._grid.addWidget(self.card, 0, 0, 1, min(columns, 2))
        for at, box in enumerate(boxes, 2 if columns > 1 else 1):
            self._grid.addWidget(box, at // columns, at % columns)

    def show_base(self, look: MachineLook, config: EngineConfig, plan: Plan | None) -> None:
        self._look, self._config, self._before = look, config, plan
        self._ask()

    def clear(self) -> None:
        self.card.setCurrentIndex(0)
        for box in (self.vram, self.ram, self.link, self.disk):
            box.setValue(0)
        self._ask()

    def change(self) -> Change | None:
        """What differs from the actual machine; None if nothing does.

        Raises:
            EngineError: the typed name is not a known card.
        """
        typed = self.card.currentText().strip()
        change = Change(
            gpu=find_card(typed).machine if typed and typed != self.card.itemText(0) else None,
            vram_bytes=self.vram.value() * _GIB or None,
            ram_bytes=self.ram.value() * _GIB or None,
            link_bytes_per_s=self.link.value() * 1e9 or None,
            disk_bytes_per_s=self.disk.value() * 1e9 or None,
        )
        return None if change == Change() else change

    # --- inside -----------------------------------------------------------------------------------

    def _size(self, suffix: str, special: str) -> SpinBox:
        box = SpinBox(self)
        box.setRange(0, 4096)
        box.setSingleStep(4)
        box.setSuffix(suffix)
        box.setSpecialValueText(special)
        box.lineEdit().setTextMargins(10, 0, 0, 0)
        return box

    def _speed(self, suffix: str, special: str) -> DoubleSpinBox:
        box = DoubleSpinBox(self)
        box.setRange(0, 1000)
        box.setDecimals(1)
        box.setSuffix(suffix)
        box.setSpecialValueText(special)
        box.lineEdit().setTextMargins(10, 0, 0, 0)
        return box

    def _ask(self, *_news: object) -> None:
        if self._look is None or self._config is None or self.isHidden():
            return
        try:
            change = self.change()
        except EngineError as error:
            self._show("", error.message)
            return
        if change is None:
            self._show("", self.tr("Change something above to see its effect."))
            return
        if change.gpu is None and change.link_bytes_per_s is not None and self._look.profile.gpu is None:
            self._show("", self.tr("The link needs a graphics card: choose one first."))
            return
        self._show("", self.tr("Planning…"))
        self.planning.ask(PlanQuestion(self._look, self._config, change))

    def _on_planned(self, answer: PlanAnswer) -> None:
        if answer.plan is None:
            self._show("", answer.problem)
            return
        after = answer.plan
        rate = rough(after.speed.decode_tokens_per_s)
        if self._before is None:
            text = self.tr("It would fit, at about {0} tokens/s").format(rate)
        else:
            before = self._before.speed
            now = before.decode_tokens_per_s
            times = after.speed.decode_tokens_per_s / now if now else 0.0
            if abs(times - 1) < _ALIKE:
                words = self.tr("About {1} tokens/s: as fast as now")
            elif before.timed_at:
                words = self.tr("{0} tokens/s now, measured → about {1} predicted, {2} times as fast")
            else:
                words = self.tr("About {0} → about {1} tokens/s, {2} times as fast")
            text = words.format(figures(now) if before.timed_at else rough(now), rate, rough(times))
        self._show(text, "\n".join(filter(None, (plan_summary(after), after.sharing_words, after.bottleneck))))
        self.bars.show_tiers(tier_bars(after, None))
        self.bars.show()

    def _show(self, result: str, words: str) -> None:
        set_message(self.result, result)
        set_message(self.words, words)
        self.bars.hide()


WIDE_PX = 860
THIRDS = 3


def arrange(grid: QGridLayout, cards: Iterable[QWidget], shown: Sequence[tuple[QWidget, int]], *, wide: bool) -> None:
    for card in cards:
        grid.removeWidget(card)
        card.setVisible(any(card is one for one, _thirds in shown))
    for column in range(THIRDS):
        grid.setColumnStretch(column, 1 if wide else 0)
    row = at = 0
    for card, thirds in shown:
        span = thirds if wide else THIRDS
        if at + span > THIRDS:
            row, at = row + 1, 0
        grid.addWidget(card, row, at, 1, span)
        at += span


_ORDER: tuple[Measured, ...] = (
    "ram", "cpu_experts", "cpu_flops", "gpu_memory", "gpu_experts", "gpu_flops", "h2d", "d2h", "disk",
)  # fmt: skip


class NumbersCard(Card):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("NumbersCard", "Measurements"), parent)
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(12)
        self._grid.setVerticalSpacing(6)
        self._grid.setColumnStretch(0, 1)
        self._rows: dict[str, tuple[QLabel, QLabel]] = {}
        self.words = muted_label(self)
        add_items(self.body, self.words, self._grid)
        self.notes = muted_label(self)
        add_items(self.body, self.notes, STRETCH)

    def show_kept(self, look: MachineLook) -> None:
        measured = look.measurements
        if measured is None:
            self.words.setText(
                self.tr(
                    "Not measured yet. Numbers with “about” are assumed, from data sheets of similar hardware; "
                    "measuring takes ten seconds."
                )
            )
            self._show({})
            self._show_notes(())
            return
        kind = self.tr("quick") if measured.kind == "quick" else self.tr("thorough")
        self.words.setText(self.tr("Measured on {0}, {1}. The best of each kind:").format(day(measured.taken_at), kind))
        self._show(best_numbers(look, measured))
        names: dict[str, list[str]] = {}
        for name, why in measured.skipped.items():
            names.setdefault(why, []).append(name)
        skipped = [self.tr("Skipped: {0} ({1}).").format(", ".join(left), why) for why, left in names.items()]
        unsteady = [
            self.tr("{0} varied by {1}% in every repeat.").format(name, round(100 * by))
            for name, by in measured.unsteady.items()
        ]
        busy = (busy_note(measured.others),) if is_busy(measured.others) else ()
        self._show_notes((*busy, *measured.notes, *unsteady, *skipped))

    def show_found(self, found: Found) -> None:
        self.words.setText(
            self.tr("Each is measured several times; the best of each kind so far:")
            if found
            else self.tr("Numbers appear here as they are measured.")
        )
        self._show(
            {measured_name(what): (number_words(found[what]), found[what].detail) for what in _ORDER if what in found}
        )
        self._show_notes(())

    def _show_notes(self, notes: tuple[str, ...]) -> None:
        self.notes.setText("\n".join(notes))
        self.notes.setVisible(bool(notes))

    def _show(self, numbers: dict[str, tuple[str, str]]) -> None:
        for name in [name for name in self._rows if name not in numbers]:
            for label in self._rows.pop(name):
                self._grid.removeWidget(label)
                label.hide()
                label.deleteLater()
        for at, (name, (value, detail)) in enumerate(numbers.items()):
            if name not in self._rows:
                self._rows[name] = (QLabel(name, self), QLabel(self))
                use_tabular_figures(self._rows[name][1])
                self._rows[name][1].setAlignment(Qt.AlignmentFlag.AlignRight)
            left, right = self._rows[name]
            right.setText(value)
            for label in (left, right):
                label.setToolTip(detail)
                label.setAccessibleDescription(detail)
            self._grid.addWidget(left, at, 0)
            self._grid.addWidget(right, at, 1)


def best_numbers(look: MachineLook, measured: Measurements) -> dict[str, tuple[str, str]]:
    profile = look.profile
    paths: tuple[tuple[Measured, str, float, str], ...] = (
        ("ram", "cpu.ram_bytes_per_s", profile.cpu.ram_bytes_per_s, "bytes/s"),
        ("cpu_experts", "cpu.weights_bytes_per_s", max(profile.cpu.weights_bytes_per_s.values(), default=0), "bytes/s"),
        ("cpu_flops", "cpu.flops", profile.cpu.flops, "flop/s"),
        ("gpu_memory", "gpu.bytes_per_s", profile.gpu.bytes_per_s if profile.gpu else 0, "bytes/s"),
        ("gpu_flops", "gpu.flops", profile.gpu.flops if profile.gpu else 0, "flop/s"),
        ("h2d", "link.h2d", profile.link.h2d, "bytes/s"),
        ("d2h", "link.d2h", profile.link.d2h, "bytes/s"),
        ("disk", "disk_bytes_per_s", profile.disk_bytes_per_s, "bytes/s"),
    )
    found = {}
    for what, path, value, unit in paths:
        if value and profile.origins.get(path) is Origin.MEASURED:
            number = TuningNumber(what, "", value, "flop/s" if unit == "flop/s" else "bytes/s")
            found[measured_name(what)] = (number_words(number), day(measured.taken_at))
    return found


class PlanCard(Card):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("PlanCard", "Plan"), parent)
        self.speed = text_label(self, role="title", tabular=True)
        self.range = muted_label(self)
        self.summary = muted_label(self)
        self.bars = PlanBars(self)
        self.bottleneck = muted_label(self, role="")
        self.helps = muted_label(self)
        self.others = muted_label(self)
        self.problem = muted_label(self, role="")
        add_items(
            self.body,
            self.speed,
            self.range,
            self.summary,
            4,
            self.bars,
            self.bottleneck,
            self.helps,
            self.others,
            self.problem,
            STRETCH,
        )
        self.show_busy("")

    def show_busy(self, model: str) -> None:
        self._fill(None, self.tr("Planning…"), model)

    def show_problem(self, model: str, sentence: str) -> None:
        self._fill(None, sentence, model)

    def show_plan(self, plan: Plan, model: str, look: MachineLook | None) -> None:
        self._fill(plan, "", model)
        self.speed.setText(speed_headline(plan))
        self.range.setText(speed_range(plan))
        self.summary.setText(plan_summary(plan))
        self.bars.show_tiers(tier_bars(plan, look))
        warning = disk_warning(plan, look)
        self.bottleneck.setText("\n".join(filter(None, (warning, plan.sharing_words, plan.bottleneck))))
        self.helps.setText(plan.what_helps)
        here = [one for one in plan.alternatives if one.runs_here][:3]
        if here:
            others = ", ".join(
                self.tr("{0} {1}: {2}").format(
                    said(plan.words(one.precision)), said(one.policy), rough(one.speed.decode_tokens_per_s)
                )
                for one in here
            )
            self.others.setText(self.tr("Alternatives, in tokens/s: {0}.").format(others))
        self.others.setVisible(bool(here))

    def _fill(self, plan: Plan | None, problem: str, model: str) -> None:
        self.set_heading(self.tr("Plan for {0}").format(model) if model else self.tr("Plan"))
        for widget in (self.speed, self.range, self.summary, self.bars, self.bottleneck, self.helps, self.others):
            widget.setVisible(plan is not None)
        set_message(self.problem, problem)


class TuneCards(QWidget):
    def __init__(self, model: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.run = RunCard(model, self)
        self.machine = Card(self.tr("Your machine"), self)
        self.machine.caption.setText(self.tr("Wider links have more bandwidth; hollow ones are assumed."))
        self.picture = MachinePicture(self)
        self.machine_note = muted_label(self, self.tr("Looking up the hardware…"))
        add_items(self.machine.body, self.picture, self.machine_note, STRETCH)
        self.numbers = NumbersCard(self)
        self.plan = PlanCard(self)
        self.work = Card(self.tr("Where to compute"), self)
        self.roofline = RooflinePlot(self)
        self.work.body.addWidget(self.roofline, 1)
        self.what_if = WhatIfCard(self)
        self.table = PlanTable(self)
        self.race = RaceCard(self.table, self)
        self._all = (self.machine, self.numbers, self.plan, self.work, self.what_if, self.race)
        self._grid = QGridLayout()
        self._grid.setSpacing(14)
        vbox(self.run, self._grid, into=self, gap=14)

    def show_machine(self, look: MachineLook, found: Found) -> None:
        self.picture.show_machine(*machine_boxes(look, found))
        note = driver_trouble(look)
        set_message(self.machine_note, note)

    def show_step(self, step: int, *, what_if: bool, wide: bool) -> None:
        machine: list[tuple[QWidget, int]] = [(self.machine, 2), (self.numbers, 1)]
        plan: list[tuple[QWidget, int]] = [(self.plan, 2), (self.work, 1)]
        places: dict[int, list[tuple[QWidget, int]]] = {
            MACHINE: [*machine, *plan],
            MEASURE: [*machine, *plan],
            PLAN: [*plan, *machine],
            TIMED: [(self.race, 3), *plan],
        }
        shown = list(places[step])
        if what_if and step in (PLAN, TIMED):
            shown.insert(0, (self.what_if, 3))
        arrange(self._grid, self._all, shown, wide=wide)
