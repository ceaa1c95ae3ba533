"""What if: how the same model would run on other hardware."""

from __future__ import annotations

from PySide6.QtCore import QEvent, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QSizePolicy, QWidget

from app.services.planning import PlanAnswer, Planning, PlanQuestion
from app.views.tune.phrases import plan_summary, tier_bars
from app.widgets.fields import DoubleSpinBox, FindBox, SpinBox
from app.widgets.flow_layout import Flow
from app.widgets.plan_bars import PlanBars
from app.widgets.quantities import figures, rough
from app.widgets.scaffold import Card, add_items, hbox, muted_label, push_button, set_message, text_label
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.hardware.assumptions import card_choices, find_card
from engine.planner.plan_parts import Plan
from engine.planner.what_helps import Change
from engine.tuning.machine_state import MachineLook

_GAP_PX = 8
_GIB = 2**30
_ALIKE = 0.08
"""A prediction that differs by less says that nothing changes."""


class WhatIfCard(Card):
    """Signals: `close_wanted`."""

    close_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("What if this machine had…"))
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
        """The actual machine, its configuration, and its predicted speed."""
        self._look, self._config, self._before = look, config, plan
        self._ask()

    def clear(self) -> None:
        """Resets everything to the actual machine."""
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
