"""How full the context of a chat is, and the card behind that figure: how long it is, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
from PySide6.QtCore import QSignalBlocker, QSize, Qt, Signal
from PySide6.QtGui import QIcon
from PySide6.QtWidgets import QGridLayout, QLabel, QProgressBar, QPushButton, QWidget

from app.icons import icon
from app.models.conversation import ContextUse, Level
from app.theme import set_look, use_tabular_figures
from app.widgets.fields import Slider, SpinBox
from app.widgets.page import Popover
from app.widgets.quantities import count, memory, percent
from app.widgets.scaffold import LEFT, add_items, push_button, text_label
from engine.common.config import LEAST_CONTEXT

ICON_PX = 14
LEAST_PX = 24
"""Of a page that is not shown, which must not widen the window; where it is shown `fit` takes care."""
FRAME_PX = 14
"""Beside the words, as in the style sheet."""
WIDTH_PX = 400


@dataclass(frozen=True, slots=True)
class ContextLength:
    """How long the context of who answers is, and may be made.

    Attributes:
        tokens: as it is now.
        wanted: as it is to be once the model is loaded again.
        longest: the model's own limit; 0 where the length is not ours to set.
        bytes_per_token: of keys and values.
        place: the memory that they lie in: `RAM` or `VRAM`.
        owner: who sets it, where we do not.
    """

    tokens: int
    wanted: int = 0
    longest: int = 0
    bytes_per_token: int = 0
    place: str = "RAM"
    owner: str = ""


class ContextMeter(QPushButton):
    """Tokens used of the context's length.  Its colour, its icon and its words say how full that is."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("kind", "meter")
        self.setIconSize(QSize(ICON_PX, ICON_PX))
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        use_tabular_figures(self)
        self._forms: tuple[str, ...] = ("",)
        self.use: ContextUse | None = None
        self._mark = QIcon()
        self.setAccessibleName(self.tr("Context"))
        self.setMinimumWidth(LEAST_PX)
        self.hide()

    def show_use(self, use: ContextUse | None) -> None:
        self.use = use
        if use is None:
            self._forms = ("",)
            self.setToolTip("")
        else:
            whole = self._words(use)
            short = f"{count(use.used)} / {count(use.limit)}"
            self._forms = (whole, short, percent(min(1.0, use.share)), "")
            estimate = self.tr("Estimate, including your draft; the engine counts with the next answer.")
            exact = self.tr("Counted by the engine after the last answer.")
            more = self.tr("Click to see and change the length.")
            self.setToolTip(f"{whole}\n{estimate if use.is_about else exact}\n{more}")
        level = use.level if use is not None else Level.FREE
        colour = {Level.NEAR: "cpu", Level.FULL: "danger", Level.OVER: "danger"}.get(level)
        self._mark = icon("warning", colour) if colour is not None else QIcon()  # type: ignore[arg-type]
        self.setIcon(self._mark)
        set_look(self, "level", level.value)
        self.setAccessibleName(self._forms[0] or self.tr("Context"))

    def _words(self, use: ContextUse) -> str:
        words = {
            Level.FREE: (self.tr("context {0} of {1}"), self.tr("context about {0} of {1}")),
            Level.NEAR: (self.tr("context filling up: {0} of {1}"), self.tr("context filling up: about {0} of {1}")),
            Level.FULL: (self.tr("context almost full: {0} of {1}"), self.tr("context almost full: about {0} of {1}")),
            Level.OVER: (self.tr("context exceeded: {0} of {1}"), self.tr("context exceeded: about {0} of {1}")),
        }[use.level][use.is_about]
        return words.format(count(use.used), count(use.limit))

    @property
    def least_width(self) -> int:
        return self._width_of(self._forms[-2]) if self.use is not None else 0

    @property
    def _has_icon(self) -> bool:
        return self.use is not None and self.use.level is not Level.FREE

    def _width_of(self, form: str, *, has_icon: bool = True) -> int:
        words = self.fontMetrics().size(Qt.TextFlag.TextShowMnemonic, form).width()  # as a button measures it
        return words + FRAME_PX + (ICON_PX + 4 if self._has_icon and has_icon else 0)

    def fit(self, room: int) -> None:
        share = self._forms[-2] if len(self._forms) > 1 else ""
        form = next((form for form in self._forms if form and self._width_of(form) <= room), "")
        shows_icon = self._has_icon
        if not form and self._width_of(share, has_icon=False) <= room:
            form, shows_icon = share, False
        if self.icon().isNull() == shows_icon:
            self.setIcon(self._mark if shows_icon else QIcon())
        if form != self.text():
            self.setText(form)
        shown = bool(form) or (shows_icon and self._width_of("") <= room)
        if shown == self.isHidden():
            self.setVisible(shown)


class ContextPopover(Popover):
    """Signals: `length_changed` (tokens), `reload_wanted`, `fold_wanted`, `drop_wanted`."""

    length_changed = Signal(int)
    reload_wanted = Signal()
    fold_wanted = Signal()
    drop_wanted = Signal()

    def __init__(self, page: QWidget) -> None:
        super().__init__(self.tr("Context"), page)
        self.least_width = WIDTH_PX
        self._length: ContextLength | None = None
        self._steps: list[int] = []
        self.used = self._label("body")
        self.bar = QProgressBar(self)
        self.bar.setTextVisible(False)
        self.bar.setRange(0, 1000)
        self.slider = Slider(self, name=self.tr("Length of the context, in steps"))
        self.slider.valueChanged.connect(self._on_slider)
        self.tokens = SpinBox(self)
        self.tokens.setGroupSeparatorShown(True)
        self.tokens.setSuffix(self.tr(" tokens"))
        self.tokens.setSingleStep(1024)
        self.tokens.lineEdit().setTextMargins(8, 0, 0, 0)
        self.tokens.setKeyboardTracking(False)
        self.tokens.setAccessibleName(self.tr("Length of the context"))
        self.tokens.valueChanged.connect(self._on_tokens)
        self.cost = self._label("secondary")
        self.reload_note = self._label("secondary")
        self.reload_button = push_button(self, self.tr("Reload model"))
        self.reload_button.clicked.connect(self.reload_wanted)
        self.reload_button.clicked.connect(self.hide)
        self.fold_button = push_button(self, self.tr("Fold earlier turns into a summary"))
        self.fold_button.clicked.connect(self.hide)
        self.fold_button.clicked.connect(self.fold_wanted)
        self.drop_button = push_button(self, self.tr("Leave out the oldest turns"))
        self.drop_button.clicked.connect(self.hide)
        self.drop_button.clicked.connect(self.drop_wanted)
        add_items(self.column, self.used, self.bar)
        self.fields = QWidget(self)
        grid = QGridLayout(self.fields)
        grid.setContentsMargins(0, 4, 0, 0)
        grid.setSpacing(8)
        name = text_label(self, self.tr("Length"), buddy=self.tokens)
        grid.addWidget(name, 0, 0)
        grid.addWidget(self.slider, 0, 1)
        grid.addWidget(self.tokens, 0, 2)
        grid.setColumnStretch(1, 1)
        add_items(
            self.column,
            self.fields,
            self.cost,
            self.reload_note,
            (self.reload_button, LEFT),
            4,
            self.fold_button,
            self.drop_button,
        )

    def edit(self, use: ContextUse, length: ContextLength, button: QWidget, *, folds: bool) -> None:
        self._length = length
        words = (
            self.tr("About {0} of {1} tokens are used ({2}).")
            if use.is_about
            else self.tr("{0} of {1} tokens used ({2}).")
        )
        self.used.setText(words.format(count(use.used), count(use.limit), percent(use.share)))
        self.bar.setValue(round(1000 * min(1.0, use.share)))
        self.bar.setAccessibleName(self.used.text())
        self._fill(length)
        for button_ in (self.fold_button, self.drop_button):
            button_.setEnabled(folds)
            button_.setToolTip("" if folds else self.tr("There is no earlier answer to fold yet."))
        self.open_at(button)
        (self.tokens if length.longest else self.fold_button).setFocus()

    def _fill(self, length: ContextLength) -> None:
        is_ours = bool(length.longest)
        self.fields.setVisible(is_ours)
        if is_ours:
            self._steps = _steps(length.longest)
            with QSignalBlocker(self.tokens):
                self.tokens.setRange(LEAST_CONTEXT, max(length.longest, LEAST_CONTEXT))
                self.tokens.setValue(length.wanted or length.tokens)
            with QSignalBlocker(self.slider):
                self.slider.setRange(0, len(self._steps) - 1)
            self._follow_tokens()
        self._show_cost()

    def _show_cost(self) -> None:
        length = self._length
        if length is None:
            return
        if not length.longest:
            self.cost.setText(self.tr("The length is set by {0}.").format(length.owner))
            self.reload_note.hide()
            self.reload_button.hide()
            return
        tokens = self.tokens.value()
        amount = tokens * length.bytes_per_token
        words = [
            self.tr("Keys and values of {0} tokens take {1} of {2} ({3} each).").format(
                count(tokens), memory(amount), length.place, _small(length.bytes_per_token)
            )
        ]
        free = psutil.virtual_memory().available
        if length.place == "RAM" and amount > free:
            words.append(self.tr("That is more than is free now ({0}).").format(memory(free)))
        self.cost.setText(" ".join(words))
        must_reload = tokens != length.tokens
        self.reload_note.setVisible(must_reload)
        self.reload_button.setVisible(must_reload)
        note = self.tr("The model is loaded with {0} tokens: the change needs it loaded again.")
        self.reload_note.setText(note.format(count(length.tokens)))

    def _on_slider(self, step: int) -> None:
        self.tokens.setValue(self._steps[step])

    def _on_tokens(self, tokens: int) -> None:
        self._follow_tokens()
        self._show_cost()
        self.length_changed.emit(tokens)

    def _follow_tokens(self) -> None:
        tokens = self.tokens.value()
        with QSignalBlocker(self.slider):
            self.slider.setValue(min(range(len(self._steps)), key=lambda step: abs(self._steps[step] - tokens)))

    def _label(self, role: str) -> QLabel:
        return text_label(self, role=role, wrap=True, tabular=True)


def _steps(longest: int) -> list[int]:
    steps = [LEAST_CONTEXT]
    while steps[-1] * 2 < longest:
        steps.append(steps[-1] * 2)
    return [*steps, longest] if longest > steps[-1] else steps


def _small(amount: int) -> str:
    return f"{count(round(amount / 1024))} kB" if amount >= 1024 else f"{count(amount)} B"
