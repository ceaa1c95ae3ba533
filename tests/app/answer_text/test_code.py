"""Code: copied by its button, coloured in slices, and readable in both themes."""

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFont, QGuiApplication
from pytestqt.qtbot import QtBot

from app.theme import DARK, LIGHT, Theme, ThemeController
from app.widgets.answer_text import AnswerView, Style
from app.widgets.answer_text.highlighting import find_lexer
from app.widgets.answer_text.style import COLOURED
from app.widgets.answer_text.writer import CODE
from tests.app.answer_text.looks import ViewMaker, blocks


def coloured(view: AnswerView, line: int) -> list[tuple[str, str]]:
    """(text, colour) of the coloured stretches of a line of code."""
    block = [block for block in blocks(view) if block.blockFormat().property(CODE) is not None][line]
    raw = block.text().encode("utf-16-le")
    return [
        (
            raw[2 * part.start : 2 * (part.start + part.length)].decode("utf-16-le"),
            part.format.foreground().color().name(),
        )
        for part in block.layout().formats()
    ]


def colour(name: str, theme: Theme = LIGHT) -> str:
    return Style(theme, QFont()).syntax(name).name()


def test_copy_takes_the_code_and_says_so(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("Look:\n\n```python\nx = 1\n\ny = '*'\n```\n\n- one\n  ```\n  two\n  ```")
    view.show()
    button, other = view.copy_buttons
    button._reset.setInterval(100)
    assert button.text() == "Copy"
    assert button.accessibleName() == "Copy code"
    assert button.focusPolicy() & Qt.FocusPolicy.TabFocus
    qtbot.keyClick(button, Qt.Key.Key_Space)
    assert QGuiApplication.clipboard().text() == "x = 1\n\ny = '*'"
    assert button.text() == "Copied"
    other.click()
    assert QGuiApplication.clipboard().text() == "two"
    assert view.viewport().rect().contains(button.geometry())
    assert not button.geometry().intersects(other.geometry())
    qtbot.waitUntil(lambda: button.text() == "Copy", timeout=5_000)


def test_growing_code_is_coloured_by_finished_lines_and_in_the_end_completely(
    make_view: ViewMaker, qtbot: QtBot
) -> None:
    view = make_view("")
    view.append_markdown("```python\nx0 = 0\nx1 = ")
    view.flush()
    qtbot.waitUntil(lambda: coloured(view, 0) == [("0", colour("number"))])
    assert coloured(view, 1) == []
    view.append_markdown("1\n")
    for number in range(2, 100):
        view.append_markdown(f"x{number} = {number}\n")
        view.flush()
        qtbot.wait(1)
    view.append_markdown("```\n")
    view.finish()
    view.flush()
    qtbot.waitUntil(lambda: coloured(view, 99) == [("99", colour("number"))], timeout=10_000)
    assert all(coloured(view, number) == [(str(number), colour("number"))] for number in range(100))


def test_the_names_that_models_use_are_coloured_and_another_theme_recolours(
    make_view: ViewMaker, theme: ThemeController, qtbot: QtBot
) -> None:
    names = ("python", "Python", "py", "js", "c++", "sh", "json", "rust", "{.python}", "sql", "diff")
    assert all(find_lexer(name) is not None for name in names)
    view = make_view("```c\nint x = 1;\n```")
    theme.set_choice("dark")
    view.flush()
    qtbot.waitUntil(lambda: ("1", colour("number", DARK)) in coloured(view, 0))


@pytest.mark.parametrize(
    ("code", "language"),
    [("x", "no-such-language"), ("x", ""), ("x = 1\n" * 20_000, "python"), ("x" * 6_000, "python")],
    ids=["unknown", "none", "long", "wide"],
)
def test_what_is_not_coloured(make_view: ViewMaker, code: str, language: str) -> None:
    view = make_view(f"```{language}\n{code}\n```")
    view.writer.highlighter.finish()
    assert view.writer.highlighter.scans == 0


def luminance(name: str) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(value) for value in QColor(name).getRgbF()[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_text_can_be_read(theme: Theme) -> None:
    style = Style(theme, QFont())
    on_code = [theme.text, theme.muted, *(style.syntax(name).name() for name in COLOURED)]
    assert min(contrast(name, theme.sunken) for name in on_code) >= 4.5
    assert contrast(theme.text, style.inline_code_background.name()) >= 4.5
    for text in (theme.text, theme.muted, theme.accent_text):
        assert contrast(text, theme.background) >= 4.5


@pytest.mark.parametrize("is_streaming", [True, False])
def test_code_at_the_end_has_its_whole_card(make_view: ViewMaker, is_streaming: bool) -> None:
    view = make_view("")
    view.append_markdown("Text\n```python\nM|\n")
    if not is_streaming:
        view.append_markdown("```\n")
        view.finish()
    view.flush()
    view.resize(640, view.heightForWidth(640))
    picture = view.grab().toImage()
    left = Style(LIGHT, view.font()).card_padding
    rows = [{picture.pixelColor(x, y).name() for x in range(left, left + 12)} for y in range(view.height())]
    inside = QColor(LIGHT.sunken).name()
    lines = [y for y, colours in enumerate(rows) if len(colours) == 1 and colours != {inside}]
    letters = [y for y, colours in enumerate(rows) if len(colours) > 1 and y > 0.6 * view.height()]
    header = max(y for y in lines if y < min(letters))
    assert max(lines) >= view.height() - 2
    assert abs((min(letters) - header) - (max(lines) - max(letters))) <= 4
