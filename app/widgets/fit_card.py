"""A repository before the download: its files, how each would run here, and what changes with context and cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from PySide6.QtCore import QSignalBlocker, Signal
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.widgets.fields import Slider
from app.widgets.fit_table import TOO_LARGE, FitTable, Presence, files_words, first_token_words, fit_bars, picture_words
from app.widgets.plan_bars import PlanBars
from app.widgets.quantities import SEPARATOR, count, memory
from app.widgets.scaffold import STRETCH, muted_label, push_button, set_message, text_label, vbox, warning_label
from engine.checkpoint.hub.contents import candidate_named
from engine.planner.plan_parts import Limits
from engine.tuning.fit import FitCard, FitRow
from engine.tuning.machine_state import MachineLook

_FIRST_CONTEXT = 2048
_USUAL_CONTEXT = 8192
_SHARES = 20
"""Steps of the memory slider; the last one takes all that is free."""


class FitCardView(QWidget):
    """Its buttons are placed by whoever shows it, where they can be seen without scrolling.

    Signals:
    limits_changed: another context or budget is wanted; ask for a new card.
    download_wanted(FitRow): to be downloaded, or loaded if it is here already.
    anyway_wanted(FitRow): the same for a file that is too large for this machine.
    """

    limits_changed = Signal()
    download_wanted = Signal(object)
    anyway_wanted = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._look: MachineLook | None = None
        self._contexts: tuple[int, ...] = (_USUAL_CONTEXT,)
        self._presence: Mapping[str, Presence] = {}
        self._context_text, self._memory_text = self._value(), self._value()
        self.context = self._slider(self.tr("Context in tokens"))
        self.memory = self._slider(self.tr("Memory for the expert cache"))
        self.memory.setRange(1, _SHARES)
        self.memory.setValue(_SHARES)
        self._memory_name = text_label(self, self.tr("VRAM to use"))
        self._asked, self._is_named = "", False
        self.progress = muted_label(self)
        self.which = muted_label(self)
        self.trouble = warning_label(self)
        self.why = muted_label(self)
        self.table = FitTable(self)
        self.details = muted_label(self)
        self.bars = PlanBars(self)
        self.download = push_button(self, self.tr("Download"), self._on_button, kind="primary")
        self.anyway = push_button(self, self.tr("Load anyway…"), self._on_button)
        self._lay_out()
        self.context.valueChanged.connect(self._on_slider)
        self.memory.valueChanged.connect(self._on_slider)
        self.table.chosen.connect(self._show_row)
        self.table.opened.connect(self._on_button)
        self.clear()

    # --- what is shown --------------------------------------------------------------------------------

    def show_machine(self, look: MachineLook) -> None:
        self._look = look
        has_card = self._has_card
        self._memory_name.setText(self.tr("VRAM to use") if has_card else self.tr("RAM to use"))
        self._show_values()

    def clear(self) -> None:
        self.table.show_card(FitCard((), None, ""))
        for widget in (self.table, self.bars, self.download, self.anyway, self._sliders):
            widget.hide()
        self._asked, self._is_named = "", False
        for label in (self.progress, self.which, self.trouble, self.why, self.details):
            set_message(label, "")

    def ask_for(self, what: str) -> None:
        self._asked, self._is_named = what, True
        if self.rows:  # the repository was shown already
            self.show_card(self.table.card)

    def show_reading(self, read: int, total: int) -> None:
        set_message(self.trouble, "")
        if not total:
            set_message(self.progress, self.tr("Reading what the repository holds…"))
        elif read < total:
            set_message(self.progress, self.tr("Reading headers: {0} of {1} files…").format(read, total))
        else:
            set_message(self.progress, "")

    def show_trouble(self, sentence: str) -> None:
        self.clear()
        set_message(self.trouble, sentence)

    def show_models(self, context_tokens: int) -> None:
        contexts = [_FIRST_CONTEXT]
        while contexts[-1] * 2 < context_tokens:
            contexts.append(contexts[-1] * 2)
        if context_tokens > contexts[-1]:
            contexts.append(context_tokens)
        if tuple(contexts) == self._contexts:
            return
        wanted = self.wanted_context if len(self._contexts) > 1 else _USUAL_CONTEXT
        self._contexts = tuple(contexts)
        with QSignalBlocker(self.context):
            self.context.setRange(0, len(contexts) - 1)
            self.context.setValue(max(at for at, tokens in enumerate(contexts) if tokens <= max(wanted, contexts[0])))
        self._show_values()

    def show_card(self, card: FitCard) -> None:
        self._sliders.setVisible(any(row.speed is not None or not row.candidate.problem for row in card.rows))
        self.table.setVisible(bool(card.rows))
        set_message(self.why, card.why)
        asked = candidate_named(self._asked, [row.candidate for row in card.rows]) if self._asked else None
        self.table.show_card(card, asked.label if asked is not None else "")
        self._show_row()

    def show_presence(self, presence: Mapping[str, Presence]) -> None:
        if presence != self._presence:
            self._presence = dict(presence)
            self._show_row()

    @property
    def rows(self) -> tuple[FitRow, ...]:
        return self.table.card.rows

    # --- what is wanted -------------------------------------------------------------------------------

    @property
    def wanted_context(self) -> int:
        return self._contexts[min(self.context.value(), len(self._contexts) - 1)]

    def wanted(self, limits: Limits) -> Limits:
        limits = replace(limits, context_tokens=self.wanted_context)
        budget = self._budget
        if budget is None:
            return limits
        return replace(limits, vram_bytes=budget) if self._has_card else replace(limits, ram_bytes=budget)

    # --- inside ---------------------------------------------------------------------------------------

    @property
    def _has_card(self) -> bool:
        return self._look is not None and bool(self._look.device) and self._look.profile.gpu is not None

    @property
    def _total(self) -> int:
        if self._look is None:
            return 0
        gpu = self._look.profile.gpu
        return int(gpu.memory_bytes) if self._has_card and gpu is not None else self._look.probe.ram_bytes

    @property
    def _budget(self) -> int | None:
        share = self.memory.value()
        return None if share == _SHARES or not self._total else self._total * share // _SHARES

    def _on_slider(self) -> None:
        self._show_values()
        self.limits_changed.emit()

    def _show_values(self) -> None:
        tokens = self.tr("{0} tokens").format(count(self.wanted_context))
        budget = self._budget
        share = self.tr("all that is free") if budget is None else self.tr("at most {0}").format(memory(budget))
        for label, slider, text in (
            (self._context_text, self.context, tokens),
            (self._memory_text, self.memory, share),
        ):
            label.setText(text)
            slider.setAccessibleDescription(text)

    def _show_row(self) -> None:
        row = self.table.row
        shown = row is not None and not self.table.isHidden()
        problem = row.candidate.problem if row is not None else ""
        too_large = row is not None and row.verdict == TOO_LARGE
        self.bars.setVisible(shown and not problem)
        self.download.setVisible(shown and not problem and not too_large)
        self.anyway.setVisible(shown and not problem and too_large)
        if row is None or not shown:
            set_message(self.details, "")
            return
        self._say_which(row)
        self.bars.show_tiers(fit_bars(row))
        said = [files_words(row.candidate), problem or row.why]
        if row.speed is not None:
            said += [
                first_token_words(row.speed),
                self.tr("runs in {0}").format(row.precision) if row.precision else "",
            ]
        if row.kv_at_context and not problem:
            said.append(self.tr("keys and values of that context: {0}").format(memory(row.kv_at_context)))
        if row.pictures is not None and not problem:
            said.append(picture_words(row.pictures))
        if too_large:
            said.append(row.load_anyway)
        set_message(self.details, SEPARATOR.join(filter(None, said)))
        presence = self._presence.get(row.candidate.reference)
        words = {
            None: self.tr("Download {0}"),
            "downloading": self.tr("Downloading {0}"),
            "here": self.tr("Load {0}"),
        }[presence]
        self.download.setText(words.format(row.candidate.label))
        for button in (self.download, self.anyway):
            button.setEnabled(presence != "downloading")
        self.anyway.setAccessibleName(self.tr("Load {0} anyway").format(row.candidate.label))

    def _say_which(self, row: FitRow) -> None:
        words = ""
        asked = candidate_named(self._asked, [each.candidate for each in self.rows]) if self._asked else None
        able = [each for each in self.rows if not each.candidate.problem]
        if self._is_named and self._asked and asked is None and self.progress.isHidden():
            words = self.tr("There is no {0} here. {1} would be downloaded: choose another row to take that one.")
            words = words.format(self._asked, row.candidate.label)
        elif self._is_named and not self._asked and len(able) > 1:
            words = self.tr("No file was named. {0} would be downloaded: choose another row to take that one.")
            words = words.format(row.candidate.label)
        set_message(self.which, words)

    def _on_button(self) -> None:
        row = self.table.row
        if row is not None and not row.candidate.problem and self.download.isEnabled():
            (self.anyway_wanted if row.verdict == TOO_LARGE else self.download_wanted).emit(row)

    def _slider(self, name: str) -> Slider:
        slider = Slider(self, name=name)
        slider.setPageStep(1)
        slider.setMinimumWidth(90)
        return slider

    def _value(self) -> QLabel:
        return text_label(self, role="secondary", tabular=True)

    def _lay_out(self) -> None:
        self._sliders = QWidget(self)
        grid = QGridLayout(self._sliders)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(2)
        context_name = text_label(self, self.tr("Context"))
        for row, (name, slider, value) in enumerate(
            ((context_name, self.context, self._context_text), (self._memory_name, self.memory, self._memory_text))
        ):
            name.setProperty("role", "secondary")
            name.setBuddy(slider)
            grid.addWidget(name, row, 0)
            grid.addWidget(slider, row, 1)
            grid.addWidget(value, row, 2)
        grid.setColumnStretch(1, 1)
        grid.setColumnMinimumWidth(2, self.fontMetrics().averageCharWidth() * 15)
        vbox(
            self.progress,
            self.trouble,
            self._sliders,
            self.which,
            self.why,
            self.table,
            self.details,
            self.bars,
            STRETCH,
            into=self,
        )
