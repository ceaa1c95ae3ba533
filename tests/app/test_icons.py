"""Icons take the theme's colour and as many pixels as the screen has."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QSize
from PySide6.QtGui import QColor, QIcon, QImage
from PySide6.QtWidgets import QApplication

from app.icons import icon, logo, pixmap
from app.theme import DARK, LIGHT
from engine.common.paths import resources_dir

NAMES = sorted(path.stem for path in (resources_dir() / "icons").glob("*.svg"))
USED = (
    *("logo", "chat", "batch", "monitor", "tune", "models", "settings", "plus", "search", "pin", "trash", "edit"),
    *("copy", "check", "stop", "send", "refresh", "chevron-left", "chevron-right", "chevron-up", "chevron-down"),
    *("more", "export", "import", "branch", "undo", "warning", "info", "close", "folder"),
)


def _colours(image: QImage) -> set[str]:
    """Colours of the pixels that are fully covered."""
    found = set()
    for y in range(image.height()):
        for x in range(image.width()):
            colour = image.pixelColor(x, y)
            if colour.alpha() == 255:
                found.add(colour.name().upper())
    return found


def test_every_icon_of_the_vocabulary_is_there() -> None:
    assert set(USED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_drawn_in_the_theme_s_colour(name: str, qapp: QApplication) -> None:
    image = icon(name, DARK).pixmap(QSize(48, 48), 1.0).toImage()
    colours = _colours(image)
    assert colours
    if not name.startswith("logo"):
        assert colours == {DARK.text}


def test_it_has_as_many_pixels_as_the_screen(qapp: QApplication) -> None:
    for ratio in (1.0, 1.25, 2.0, 3.0):
        drawn = icon("copy", LIGHT).pixmap(QSize(24, 24), ratio)
        assert drawn.width() == round(24 * ratio)
        assert drawn.devicePixelRatio() == ratio
    assert pixmap("copy", LIGHT.text, 16, 2.0).width() == 32


def test_states_have_their_own_colours(qapp: QApplication) -> None:
    drawn = icon("stop", LIGHT, LIGHT.muted, LIGHT.accent)
    size = QSize(48, 48)
    states = (
        (QIcon.Mode.Normal, QIcon.State.Off, LIGHT.muted),
        (QIcon.Mode.Normal, QIcon.State.On, LIGHT.accent),
        (QIcon.Mode.Disabled, QIcon.State.Off, LIGHT.faint),
    )
    for mode, state, wanted in states:
        middle = drawn.pixmap(size, 1.0, mode, state).toImage().pixelColor(24, 24)
        assert middle == QColor(wanted)


def test_a_copy_of_an_icon_is_the_same(qapp: QApplication) -> None:
    drawn = QIcon(icon("chat", LIGHT))
    drawn.addPixmap(pixmap("chat", LIGHT.accent, 16))  # detaches, which clones the engine
    assert not drawn.pixmap(QSize(24, 24)).isNull()


def test_the_logo_is_brighter_in_the_dark(qapp: QApplication) -> None:
    size = QSize(48, 48)
    assert logo(LIGHT).pixmap(size).toImage() != logo(DARK).pixmap(size).toImage()


def test_a_name_that_is_not_there_is_told_at_once(qapp: QApplication) -> None:
    with pytest.raises(FileNotFoundError):
        icon("no-such-icon", LIGHT)
