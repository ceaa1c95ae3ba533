"""Icons take the theme's colour and as many pixels as the screen has."""

import pytest
from PySide6.QtCore import QSize
from PySide6.QtGui import QColor, QIcon, QImage
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.icons import IconMark, icon, logo
from app.theme import DARK, LIGHT, ThemeController
from engine.common.paths import resources_dir

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
