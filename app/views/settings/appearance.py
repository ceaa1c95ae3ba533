"""Theme and text size."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QLabel, QPushButton, QWidget

from app.services.settings import Settings, ThemeChoice
from app.theme import ThemeController, use_tabular_figures
from app.views.settings.card import SettingsCard
from app.widgets.fields import Slider

SMALLEST_PX, LARGEST_PX = 12, 20
SLIDER_WIDTH_PX = 180


class AppearanceCard(SettingsCard):
    """Changes take effect immediately."""

    def __init__(self, settings: Settings, theme: ThemeController, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Appearance"))
        self._settings = settings
        self._theme = theme
        self.add_row(self.tr("Theme"), self.tr("System follows the desktop's setting."), self._themes())
        self._size = Slider(self)
        self._size.setRange(SMALLEST_PX, LARGEST_PX)
        self._size.setPageStep(1)
        self._size.setFixedWidth(SLIDER_WIDTH_PX)
        self._size.setValue(settings.font_px)
        self._figure = QLabel(self)
        self._figure.setProperty("role", "secondary")
        use_tabular_figures(self._figure)
        self._show_figure(self._size.value())
        self._size.valueChanged.connect(self._show_figure)
        self._size.valueChanged.connect(self._maybe_apply)
        self._size.sliderReleased.connect(self._apply_size)
        self.add_row(self.tr("Text size"), "", self._size, self._figure)

    def _themes(self) -> QWidget:
        choices: tuple[tuple[ThemeChoice, str], ...] = (
            ("system", self.tr("System")),
            ("light", self.tr("Light")),
            ("dark", self.tr("Dark")),
        )
        holder = QWidget(self)
        row = QHBoxLayout(holder)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        self.theme_buttons = QButtonGroup(holder)
        for index, (choice, label) in enumerate(choices):
            button = QPushButton(label, holder)
            button.setCheckable(True)
            button.setProperty("kind", "segment")
            button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
            button.setAccessibleName(self.tr("Theme: {0}").format(label))
            button.setChecked(self._settings.theme == choice)
            button.toggled.connect(lambda on, c=choice: self._choose_theme(c) if on else None)
            self.theme_buttons.addButton(button, index)
            row.addWidget(button)
        return holder

    def _choose_theme(self, choice: ThemeChoice) -> None:
        self._settings.theme = choice
        self._theme.set_choice(choice)

    def _show_figure(self, size: int) -> None:
        self._figure.setText(self.tr("{0} px").format(size))

    def _maybe_apply(self) -> None:
        # While the handle is dragged, a new text size would resize the slider under the pointer.
        if not self._size.isSliderDown():
            self._apply_size()

    def _apply_size(self) -> None:
        self._settings.font_px = self._size.value()
        self._theme.set_font_px(self._size.value())
