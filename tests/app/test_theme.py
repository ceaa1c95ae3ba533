"""One set of tokens feeds everything, icons too; it can be read, and follows the system and the font size."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QSize, Qt
from PySide6.QtGui import QColor, QGuiApplication, QIcon, QImage, QPalette
from PySide6.QtWidgets import QApplication, QCompleter, QLabel, QLineEdit, QPushButton, QWidget
from pytestqt.qtbot import QtBot

from app.icons import IconMark, icon, logo
from app.services.settings import Settings
from app.theme import (
    DARK,
    LIGHT,
    MAX_FONT_PX,
    MIN_FONT_PX,
    Theme,
    ThemeController,
    body_px,
    colours,
    scaled,
    style_sheet,
    themed,
    use_tabular_figures,
)
from app.views.batch.answer_card import TemplateEdit
from engine.common.paths import resources_dir
from tests.app.stage import SCENES, staged

BOTH = pytest.mark.parametrize("theme_tokens", [LIGHT, DARK], ids=lambda theme: theme.name)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@BOTH
def test_text_can_be_read(theme_tokens: Theme) -> None:
    t = theme_tokens
    pairs = [
        (text, behind)
        for text in (t.text, t.muted, t.accent_text)
        for behind in (t.background, t.surface, t.raised, t.sunken, t.hover, t.accent_background)
    ]
    pairs += [(t.danger, behind) for behind in (t.background, t.surface, t.raised, t.hover)]
    pairs += [(t.on_accent, t.accent), (t.on_accent, t.accent_hover)]
    assert [pair for pair in pairs if _contrast(*pair) < 4.5] == []


@BOTH
def test_the_focus_ring_stands_out(theme_tokens: Theme) -> None:
    for behind in (theme_tokens.background, theme_tokens.surface, theme_tokens.raised):
        assert _contrast(theme_tokens.accent, behind) >= 3


@BOTH
def test_the_style_sheet_has_every_name_filled_in(theme_tokens: Theme) -> None:
    sheet = style_sheet(theme_tokens, 14)
    assert "$" not in sheet
    assert theme_tokens.accent in sheet


def test_a_choice_is_applied_everywhere(theme: ThemeController, qtbot: QtBot) -> None:
    theme.set_choice("dark")
    assert colours() is DARK
    assert themed("gpu").name().upper() == DARK.gpu
    palette = QGuiApplication.palette()
    assert palette.color(QPalette.ColorRole.Window).name().upper() == DARK.background
    label = QLabel("text")
    qtbot.addWidget(label)
    label.ensurePolished()
    assert label.palette().color(label.foregroundRole()).name().upper() == DARK.text


class Restyled(QLabel):
    """Notes what it could have been painted with at each change of style."""

    def __init__(self) -> None:
        super().__init__("text")
        self.seen: list[tuple[Theme, int]] = []

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self.seen.append((colours(), body_px()))


@pytest.mark.parametrize("shown", [True, False])
def test_every_widget_hears_of_a_change_and_finds_the_new_colours(
    theme: ThemeController, qtbot: QtBot, shown: bool
) -> None:
    label = Restyled()
    qtbot.addWidget(label)
    label.setVisible(shown)
    label.seen.clear()
    theme.set_choice("dark")
    assert label.seen
    assert set(label.seen) == {(DARK, 14)}
    label.seen.clear()
    theme.set_font_px(20)
    assert set(label.seen) == {(DARK, 20)}
    assert scaled(100) == 143


def test_it_follows_the_system_while_the_window_is_open(theme: ThemeController) -> None:
    theme.set_choice("system")
    hints = QGuiApplication.styleHints()
    hints.colorSchemeChanged.emit(Qt.ColorScheme.Dark)  # the offscreen platform has no scheme of its own
    assert theme.theme is DARK
    hints.colorSchemeChanged.emit(Qt.ColorScheme.Light)
    assert theme.theme is LIGHT


def test_an_own_choice_does_not_follow_the_system(qapp: QApplication) -> None:
    QGuiApplication.styleHints().colorSchemeChanged.emit(Qt.ColorScheme.Dark)
    assert colours() is LIGHT


def test_the_font_size_reaches_the_widgets_and_is_held_in_bounds(theme: ThemeController, qtbot: QtBot) -> None:
    label = QLabel("text")
    qtbot.addWidget(label)
    label.show()
    before = label.fontMetrics().height()
    theme.set_font_px(20)
    assert label.fontMetrics().height() > before
    theme.set_font_px(1)
    assert theme.font_px == MIN_FONT_PX
    theme.set_font_px(1000)
    assert theme.font_px == MAX_FONT_PX


def test_inter_is_bundled(qapp: QApplication) -> None:
    label = QLabel("text")
    label.ensurePolished()
    assert label.fontInfo().family() == "Inter"
    label.deleteLater()


def test_figures_stay_tabular_when_the_theme_changes(theme: ThemeController, qtbot: QtBot) -> None:
    label = QLabel("1111")
    label.setProperty("role", "caption")
    qtbot.addWidget(label)
    label.show()
    use_tabular_figures(label)
    for choice in ("dark", "light"):
        theme.set_choice(choice)
        assert label.fontMetrics().horizontalAdvance("1111") == label.fontMetrics().horizontalAdvance("0000")


def test_a_focused_button_looks_different(qtbot: QtBot) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    button = QPushButton("Go", window)
    window.show()
    before = button.grab().toImage()
    button.setFocus(Qt.FocusReason.TabFocusReason)
    window.activateWindow()
    qtbot.waitUntil(button.hasFocus)
    assert button.grab().toImage() != before


@pytest.mark.qt_log_ignore("This plugin does not support", extend=True)
@pytest.mark.parametrize("choice", ["light", "dark"])
def test_what_a_completer_offers_has_the_colours_of_the_theme(
    theme: ThemeController, qtbot: QtBot, choice: Literal["light", "dark"]
) -> None:
    theme.set_choice(choice)
    edit = QLineEdit()
    qtbot.addWidget(edit)
    completer = QCompleter(["one", "other"], edit)
    edit.setCompleter(completer)
    edit.show()
    completer.setCompletionPrefix("o")
    completer.complete()
    popup = completer.popup()
    image = popup.grab().toImage()
    assert image.pixelColor(image.width() - 12, image.height() - 3).name() == QColor(theme.theme.raised).name()
    popup.hide()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("scene", ["chat-conversation", "batch-running", "monitor", "tune-start"])
def test_a_window_that_is_open_is_recoloured(
    theme: ThemeController, settings: Settings, qtbot: QtBot, tmp_path: Path, scene: str
) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(1280, 800))
        SCENES[scene](stage)
        stage.settle()
        light = {LIGHT.background, LIGHT.sunken, LIGHT.hover, LIGHT.border, LIGHT.accent_background, LIGHT.text}
        assert _seen(stage.window) & light
        theme.set_choice("dark")
        stage.settle()
        assert not _seen(stage.window) & light


def _seen(window: QWidget) -> set[str]:
    image = window.grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
    colours = np.unique(np.frombuffer(image.constBits(), np.uint32)) & 0xFFFFFF
    return {f"#{colour:06X}" for colour in colours}


def test_another_theme_is_no_edit_of_a_template(theme: ThemeController, qtbot: QtBot) -> None:
    edit = TemplateEdit()
    qtbot.addWidget(edit)
    edit.setPlainText("Translate {{text}}")
    with qtbot.assertNotEmitted(edit.textChanged):
        theme.set_choice("dark")


NAMES = sorted(path.stem for path in (resources_dir() / "icons").glob("*.svg"))


def _colours(image: QImage) -> set[str]:
    """Colours of the pixels that are fully covered."""
    found = set()
    for y in range(image.height()):
        for x in range(image.width()):
            colour = image.pixelColor(x, y)
            if colour.alpha() == 255:
                found.add(colour.name().upper())
    return found


@pytest.mark.takes_turns(11)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_drawn_in_the_theme_s_colour(name: str, theme: ThemeController) -> None:
    theme.set_choice("dark")
    image = icon(name).pixmap(QSize(48, 48), 1.0).toImage()
    colours = _colours(image)
    assert colours
    if not name.startswith("logo"):
        assert colours == {DARK.text}


def test_it_has_as_many_pixels_as_the_screen(qapp: QApplication) -> None:
    for ratio in (1.0, 1.25, 2.0, 3.0):
        drawn = icon("copy").pixmap(QSize(24, 24), ratio)
        assert drawn.width() == round(24 * ratio)
        assert drawn.devicePixelRatio() == ratio


def test_states_have_their_own_colours(qapp: QApplication) -> None:
    drawn = icon("stop", "muted", "accent")
    size = QSize(48, 48)
    states = (
        (QIcon.Mode.Normal, QIcon.State.Off, LIGHT.muted),
        (QIcon.Mode.Normal, QIcon.State.On, LIGHT.accent),
        (QIcon.Mode.Disabled, QIcon.State.Off, LIGHT.faint),
    )
    for mode, state, wanted in states:
        middle = drawn.pixmap(size, 1.0, mode, state).toImage().pixelColor(24, 24)
        assert middle == QColor(wanted)


def test_an_icon_that_is_there_follows_the_theme(theme: ThemeController, qtbot: QtBot) -> None:
    size, mark, drawn = QSize(48, 48), logo(), icon("chat", "muted")
    window = QWidget()
    qtbot.addWidget(window)
    by_itself = IconMark("copy", "text", 48, window)
    by_itself.resize(48, 48)
    before = mark.pixmap(size).toImage()
    assert _colours(drawn.pixmap(size, 1.0).toImage()) == {LIGHT.muted}
    theme.set_choice("dark")
    assert mark.pixmap(size).toImage() != before
    assert _colours(drawn.pixmap(size, 1.0).toImage()) == {DARK.muted}
    assert DARK.text in _colours(by_itself.grab().toImage())
