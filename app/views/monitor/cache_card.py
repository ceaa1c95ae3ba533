"""The expert cache: each tier's hit rate, the prediction for other sizes, and a handle to resize it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QCoreApplication, QSignalBlocker, QSize, Qt, Signal
from PySide6.QtWidgets import QButtonGroup, QPushButton, QSizePolicy, QWidget

from app.models.cache_figures import NO_FORECAST, CacheForecast, forecast, hit_rate, room_slots, sound
from app.theme import themed, use_tabular_figures
from app.widgets.chart import Chart, hit_colour
from app.widgets.fields import SpinBox
from app.widgets.flow_layout import Flow
from app.widgets.miss_ratio_plot import MissRatioPlot
from app.widgets.quantities import number
from app.widgets.scaffold import Card, add_items, hbox, muted_label, push_button, set_message, text_label, vbox
from engine.protocol import CacheReport, CacheTier, TierReport

translate = QCoreApplication.translate


_LONGEST = 40


def policy_name(policy: str) -> str:
    known = {
        "lru": "LRU",
        "lfu": "LFU",
        "lfru": "LFRU",
        "fifo": "FIFO",
        "random": translate("Cache", "random"),
        "static": translate("Cache", "static popularity"),
    }
    return known.get(policy, policy[:_LONGEST])


def policy_tip(policy: str) -> str:
    known = {
        "lru": translate("Cache", "Evicts the least recently used expert."),
        "lfu": translate("Cache", "Evicts the least frequently used expert."),
        "lfru": translate("Cache", "Evicts an expert that is used rarely and not recently."),
        "fifo": translate("Cache", "Evicts the oldest expert."),
        "random": translate("Cache", "Evicts a random expert."),
        "static": translate("Cache", "Keeps the most popular experts."),
    }
    return known.get(policy, "")


def predictor_name(predictor: str) -> str:
    known = {
        "previous": translate("Cache", "previous token"),
        "gate": translate("Cache", "next layer's gate"),
        "correlation": translate("Cache", "correlation table"),
        "mlp": translate("Cache", "trained network"),
    }
    return known.get(predictor, predictor[:_LONGEST])


VALUES = 180
"""One per second: three minutes."""


class RateLine(Chart):
    """From 0 at the bottom to 1 at the top; unknown values leave a gap."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._values: deque[float] = deque(maxlen=VALUES)
        self._line = pg.PlotCurveItem(connect="finite")
        self._bounds = [pg.InfiniteLine(at, angle=0) for at in (0, 1)]
        for item in (*self._bounds, self._line):
            self.view.addItem(item, ignoreBounds=True)
        self.view.setRange(xRange=(1 - VALUES, 0), yRange=(-0.08, 1.08), padding=0)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.dress()

    def dress(self) -> None:
        super().dress()
        for bound in self._bounds:
            bound.setPen(self.pen(themed("border")))
        self._line.setPen(self.pen(hit_colour(), 1.5))

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self._values)

    def add(self, value: float | None) -> None:
        self._values.append(np.nan if value is None else value)
        # The newest is at the right edge, however few there are.
        self._line.setData(np.arange(1 - len(self._values), 1), np.array(self._values))

    def clear(self) -> None:
        self._values.clear()
        self._line.setData([], [])

    def sizeHint(self) -> QSize:
        return QSize(110, 22)

    def minimumSizeHint(self) -> QSize:
        return QSize(40, 18)


class TierRow(QWidget):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._name = text_label(self, role="secondary")
        self._now = text_label(self, role="heading")
        self._rest = text_label(self, role="secondary")
        for label in (self._name, self._now, self._rest):
            use_tabular_figures(label)
        self.line = RateLine(self)
        self.line.setToolTip(self.tr("Hit rate of the last three minutes of decoding, 0 to 100%"))
        hbox(self._name, self._now, (self.line, 1), self._rest, into=self)
        self._last: float | None = None

    def show_tier(self, tier: TierReport, *, is_new: bool) -> None:
        recent = tier.recent_hit_rate if tier.recent_hit_rate >= 0 else None
        if is_new and recent is not None:
            self.line.add(recent)
        self._last = recent if recent is not None else self._last
        place = tier_name(tier)
        self._name.setText(self.tr("{0} hits").format(place))
        now = "–" if self._last is None else self.tr("{0}%").format(number(100 * self._last, 0))
        self._now.setText(now)
        overall = hit_rate(tier)
        self._rest.setText("" if overall is None else self.tr("{0}% overall").format(number(100 * overall, 0)))
        held = self.tr("{0} of {1} experts").format(number(tier.slots, 0), number(tier.most_slots, 0))
        self._rest.setToolTip(
            self.tr("Since the model was loaded: {0} of {1} lookups").format(
                number(tier.hits, 0), number(tier.lookups, 0)
            )
        )
        self.setAccessibleName(f"{self._name.text()} {now}, {self._rest.text()}, {held}")

    def forget(self) -> None:
        self._last = None
        self.line.clear()


def tier_name(tier: TierReport) -> str:
    return translate("Fit", "VRAM") if tier.tier == "vram" else translate("Fit", "RAM")


_TIERS: tuple[CacheTier, ...] = ("vram", "ram")


_SETTLED_REPORTS = 5
"""Seconds of decoding before the new size is judged: until then the cache fills."""


class SizeChooser(QWidget):
    """A field, a button, and undo.

    Signals:
        moved(int): experts in the field, before they are requested.
        chosen(int): the button was pressed.
        undone: revert to the previous size.
    """

    moved = Signal(int)
    chosen = Signal(int)
    undone = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.field = SpinBox(self, name=self.tr("Experts kept in this tier"))
        label = text_label(self, self.tr("Experts kept"), role="secondary", buddy=self.field)
        self.field.setKeyboardTracking(False)
        self.field.setGroupSeparatorShown(True)
        self.field.lineEdit().setTextMargins(8, 0, 0, 0)  # the style sheet's padding does not apply here
        self.button = push_button(
            self,
            self.tr("Resize"),
            lambda: self.chosen.emit(self.field.value()),
            tip=self.tr("Lasts until the model is reloaded; Tune sets a permanent size."),
        )
        self.undo = push_button(self, self.tr("Undo"), lambda: self.undone.emit(), kind="quiet")
        self.undo.hide()
        self._outcome = muted_label(self)
        vbox(Flow(label, self.field, self.button, self.undo, parent=self), self._outcome, into=self, gap=6)
        self._outcome.hide()
        self._present = 0
        self.field.valueChanged.connect(self._on_value)

    @property
    def outcome(self) -> str:
        return self._outcome.text()

    def show_tier(self, tier: TierReport, slots: int) -> None:
        self._present = tier.slots
        if not self.field.hasFocus() or self.field.value() == slots:
            self.set_slots(slots, tier.most_slots)

    def set_slots(self, slots: int, most: int) -> None:
        with QSignalBlocker(self.field):
            self.field.setRange(1, max(1, most))
            self.field.setSingleStep(max(1, most // 100))
            self.field.setValue(slots)
        self.button.setEnabled(self.field.value() != self._present)

    def say(self, outcome: str, *, undoable: bool) -> None:
        set_message(self._outcome, outcome)
        self.undo.setVisible(undoable)

    def _on_value(self, slots: int) -> None:
        self.button.setEnabled(slots != self._present)
        self.moved.emit(slots)


@dataclass
class Resizing:
    """One change of size, from its request on.

    Attributes:
        before: the tier as it was.
        asked: experts requested.
        speed_before: tokens per second before; 0 if nothing was decoded.
        predicted: tokens per second with the requested size; None if unknown.
    """

    before: TierReport
    asked: int
    speed_before: float
    predicted: float | None
    now: TierReport | None = None
    reports: int = 0
    decoded: int = 0
    speed: float = 0.0

    @property
    def tier(self) -> CacheTier:
        return self.before.tier

    @property
    def is_answered(self) -> bool:
        # The first report may predate the command.
        return self.now is not None and (self.now.slots != self.before.slots or self.reports > 1)

    def on_report(self, report: CacheReport) -> None:
        now = next((tier for tier in report.tiers if tier.tier == self.tier), None)
        if now is None:
            return
        self.now = now
        self.reports += 1
        if report.steps_per_s > 0 and now.slots != self.before.slots:
            self.decoded += 1
            self.speed = report.steps_per_s

    def sentence(self) -> str:
        if self.now is None or not self.is_answered:
            return translate("Resizing", "Requested {0} experts…").format(number(self.asked, 0))
        has, had = number(self.now.slots, 0), number(self.before.slots, 0)
        if self.now.slots == self.before.slots:
            no_room = translate("Resizing", "Stays at {0} experts: no room for {1}.")
            no_size = translate("Resizing", "Stays at {0} experts: {1} is not a valid size, or too few for a step.")
            text = no_room if self.asked > self.now.slots else no_size
            return text.format(has, number(self.asked, 0))
        # Sizes are whole sets: a few less than requested still meets the request.
        if self.now.slots < 0.9 * self.asked:
            text = translate("Resizing", "Now {0} experts, was {1}; no room for {2}.")
            return self._with_gain(text.format(has, had, number(self.asked, 0)))
        return self._with_gain(translate("Resizing", "Now {0} experts, was {1}.").format(has, had))

    def _with_gain(self, text: str) -> str:
        if self.now is None or self.decoded < _SETTLED_REPORTS:
            return text
        gains = []
        if self.now.recent_hit_rate >= 0 and self.before.recent_hit_rate >= 0:
            gains.append(
                translate("Resizing", "hits {0}%, was {1}%").format(
                    number(100 * self.now.recent_hit_rate, 0), number(100 * self.before.recent_hit_rate, 0)
                )
            )
        if self.speed_before > 0:
            gain = translate("Resizing", "{0} tokens/s, was {1}").format(
                number(self.speed, 1), number(self.speed_before, 1)
            )
            if self.predicted is not None:
                gain += " " + translate("Resizing", "(predicted: {0})").format(number(self.predicted, 1))
            gains.append(gain)
        return " ".join((text, translate("Resizing", "Measured: {0}.").format("; ".join(gains)))) if gains else text


class CacheCard(Card):
    """Signals: `resize_wanted(str, int)`, a tier and its new number of experts."""

    resize_wanted = Signal(str, int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("CacheCard", "Cache"), parent)
        self.setAccessibleName(self.tr("Expert cache"))
        self.explain(
            self.tr(
                "The cache keeps the most used experts where they can be reached fastest. A hit is an expert that "
                "was already there when it was needed; a miss has to be copied from slower memory first, or computed "
                "there."
            )
        )
        self._event: CacheReport | None = None
        self._report: CacheReport | None = None
        self._decoding: CacheReport | None = None
        self._forecasts: dict[CacheTier, CacheForecast] = {}
        self._chosen: CacheTier = "vram"
        self._resizing: Resizing | None = None
        self._free_ram: int | None = None
        self.is_recorded = False
        """Whether a recording is shown: it cannot be resized."""
        self._tabs = QButtonGroup(self)
        self._buttons: dict[CacheTier, QPushButton] = {}
        for tier, text in zip(_TIERS, (self.tr("VRAM"), self.tr("RAM")), strict=True):
            button = push_button(
                self,
                text,
                lambda _checked=False, tier=tier: self._choose_tier(tier),
                kind="chip",
                checkable=True,
                tip=self.tr("Show this tier's size"),
            )
            self._tabs.addButton(button)
            self._buttons[tier] = button
            self.head.addWidget(button)
        self.rows: dict[CacheTier, TierRow] = {tier: TierRow(self) for tier in _TIERS}
        self.plot = MissRatioPlot(self)
        self.size_field = SizeChooser(self)
        self._note = muted_label(self)
        add_items(self.body, *self.rows.values(), (self.plot, 1), self.size_field, self._note)
        self.body.addStretch(0)  # takes the remaining height where there is no plot
        self.plot.moved.connect(self._on_handle)
        self.plot.chosen.connect(self._resize)
        self.size_field.moved.connect(self.plot.set_slots)
        self.size_field.chosen.connect(self._resize)
        self.size_field.undone.connect(self._undo)
        self.show_report(None)

    @property
    def tier(self) -> TierReport | None:
        tiers = self._report.tiers if self._report is not None else ()
        return next((tier for tier in tiers if tier.tier == self._chosen), tiers[0] if tiers else None)

    def show_report(self, report: CacheReport | None, free_ram: int | None = None) -> None:
        """The latest report; None while no engine runs."""
        is_new = report is not None and report is not self._event
        self._event = report
        if report is None:
            self._forget()
        elif is_new:
            self._take(sound(report))
        self._free_ram = free_ram
        self._show(is_new=is_new)

    def show_past(self, reports: Sequence[CacheReport]) -> None:
        """A recorded session's reports up to a moment; nothing can be resized."""
        self.is_recorded = True
        self._forget()
        self._event = reports[-1] if reports else None
        for report in reports[-VALUES:]:
            for tier in sound(report).tiers:
                if tier.tier in self.rows:
                    self.rows[tier.tier].show_tier(tier, is_new=True)
        if reports:
            self._take(sound(reports[-1]))
        self._free_ram = None
        self._show(is_new=False)

    def _take(self, report: CacheReport) -> None:
        self._report = report
        if not report.tiers:
            self._decoding, self._forecasts, self._resizing = None, {}, None
            return
        # While nothing is being decoded, keep the prediction from the last time something was.
        if report.steps_per_s > 0 or self._decoding is None or not self._decoding.curve_slots:
            self._decoding = report
            self._forecasts = {tier.tier: forecast(report, place) for place, tier in enumerate(report.tiers)}
        if self._resizing is not None:
            self._resizing.on_report(report)

    def _forget(self) -> None:
        self._report = self._decoding = self._resizing = None
        self._forecasts = {}
        for row in self.rows.values():
            row.forget()

    def _show(self, *, is_new: bool) -> None:
        report, tier = self._report, self.tier
        tiers = {each.tier: each for each in report.tiers} if report is not None else {}
        for name, row in self.rows.items():
            row.setVisible(name in tiers)
            if name in tiers:
                row.show_tier(tiers[name], is_new=is_new)
            self._buttons[name].setVisible(len(tiers) > 1)
            self._buttons[name].setChecked(tier is not None and name == tier.tier)
        self.plot.setVisible(tier is not None)
        self.size_field.setVisible(tier is not None and not self.is_recorded)
        self.plot.setEnabled(not self.is_recorded)
        if report is None or tier is None:
            self.plot.show_tier(None, NO_FORECAST, 0, None)
            self.caption.setText("" if report is None else self.tr("nothing to cache"))
            self._say(self._calm(report))
            return
        measured = tier.recent_hit_rate if tier.recent_hit_rate >= 0 else hit_rate(tier)
        known = self._forecasts.get(tier.tier, NO_FORECAST)
        self.plot.show_tier(tier, known, room_slots(report, tier, self._free_ram), measured)
        self.size_field.show_tier(tier, self.plot.slots)
        adopted = self.tr("policy {0}, adopted") if tier.is_adaptive else self.tr("policy {0}")
        self.caption.setText(adopted.format(policy_name(tier.policy)))
        self.caption.setToolTip(self.tr("Chosen while running, by each policy's hit rate") if tier.is_adaptive else "")
        self._say_outcome()
        notes = [tier.note, report.note]
        if known.gains_nothing:
            notes.insert(0, self.tr("Here a miss costs no more than a hit, so another size would not be faster."))
        self._say(" ".join(filter(None, notes)))

    def _calm(self, report: CacheReport | None) -> str:
        if report is None:
            return self.tr("Load a model with experts to see its hit rate and the effect of other cache sizes.")
        on_device = any(part.place != "ram" and part.purpose == "experts" and part.nbytes for part in report.memory)
        in_ram = any(part.place == "ram" and part.purpose == "experts" and part.nbytes for part in report.memory)
        if on_device:
            text = self.tr("All experts are in the graphics card's memory: every one is a hit, and nothing is cached.")
        elif in_ram:
            text = self.tr("All experts are in RAM and computed by the CPU, so there is nothing to cache.")
        else:
            text = self.tr("This model has no experts, so there is nothing to cache.")
        return " ".join(filter(None, (text, report.note)))

    def _say(self, text: str) -> None:
        set_message(self._note, text)

    # --- resizing ---------------------------------------------------------------------------------

    def _choose_tier(self, tier: CacheTier) -> None:
        self._chosen = tier
        self.plot.put_back()
        self._show(is_new=False)

    def _on_handle(self, slots: int) -> None:
        if self.tier is not None:
            self.size_field.set_slots(slots, self.tier.most_slots)

    def _resize(self, slots: int) -> None:
        tier, report = self.tier, self._decoding or self._report
        if tier is None or report is None or self.is_recorded:
            return
        speed = self._forecasts.get(tier.tier, NO_FORECAST).tokens_per_s_at(slots)
        self._resizing = Resizing(tier, slots, report.steps_per_s, speed)
        self.plot.put_back()
        self.resize_wanted.emit(tier.tier, slots)
        self._show(is_new=False)

    def _undo(self) -> None:
        done, self._resizing = self._resizing, None
        if done is not None and not self.is_recorded:
            self._chosen = done.tier
            self._resizing = Resizing(done.now or done.before, done.before.slots, 0.0, None)
            self.resize_wanted.emit(done.tier, done.before.slots)
            self._show(is_new=False)

    def _say_outcome(self) -> None:
        done = self._resizing
        is_done = done is not None and done.now is not None and done.now.slots != done.before.slots
        self.size_field.say(done.sentence() if done is not None else "", undoable=is_done)
        if done is not None and done.is_answered and not self.plot.is_moved and self.tier is not None:
            self.size_field.set_slots(self.tier.slots, self.tier.most_slots)
