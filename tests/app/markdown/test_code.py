"""The code card: copying, colours that are worked out in slices, and text that can be read in both themes."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFont, QGuiApplication, QTextDocument
from pytestqt.qtbot import QtBot

from app.theme import DARK, LIGHT, Theme, ThemeController
from app.widgets.markdown_view import MarkdownView
from app.widgets.markdown_view.code_card import CodeCard
from app.widgets.markdown_view.highlighter import CodeHighlighter, find_lexer, token_style
from app.widgets.markdown_view.style import Style

SYNTAX = ("comment", "keyword", "string", "number", "type", "inserted", "deleted")


@pytest.fixture
def view(qtbot: QtBot) -> MarkdownView:
    view = MarkdownView()
    qtbot.addWidget(view)
    view.resize(640, 480)
    return view


@pytest.fixture
def highlighter(qapp: QGuiApplication) -> tuple[QTextDocument, CodeHighlighter]:
    document = QTextDocument()
    result = CodeHighlighter(document)
    result.set_style(Style(LIGHT, QFont()))
    return document, result


def card_of(view: MarkdownView) -> CodeCard:
    return next(pane for pane in view.column.panes if isinstance(pane, CodeCard))


def coloured(document: QTextDocument, line: int) -> list[tuple[str, str]]:
    """(text, colour) of the coloured stretches of a line."""
    block = document.findBlockByNumber(line)
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


def test_copy_takes_the_code_and_says_so(view: MarkdownView, qtbot: QtBot) -> None:
    view.set_markdown("```python\nx = 1\n\ny = '*'\n```")
    view.flush()
    view.show()
    button = card_of(view).copy_button
    assert button.text() == "Copy"
    assert button.accessibleName() == "Copy code"
    assert button.focusPolicy() == Qt.FocusPolicy.StrongFocus
    qtbot.keyClick(button, Qt.Key.Key_Space)
    assert QGuiApplication.clipboard().text() == "x = 1\n\ny = '*'"
    assert button.text() == "Copied"
    qtbot.waitUntil(lambda: button.text() == "Copy", timeout=5_000)


def test_finished_code_is_coloured_once(view: MarkdownView, qtbot: QtBot) -> None:
    view.set_markdown("```python\ndef f():\n    return 'x'  # why\n```")
    view.flush()
    card = card_of(view)
    document = card.browser().document()
    qtbot.waitUntil(lambda: len(coloured(document, 1)) == 3)
    assert ("def", colour("keyword")) in coloured(document, 0)
    assert coloured(document, 1) == [
        ("return", colour("keyword")),
        ("'x'", colour("string")),
        ("# why", colour("comment")),
    ]
    view.flush()
    assert card.highlighter.scans == 1


def test_growing_code_is_coloured_seldom_and_in_the_end_completely(view: MarkdownView, qtbot: QtBot) -> None:
    view.append_markdown("```python\n")
    for number in range(100):
        view.append_markdown(f"x{number} = {number}\n")
        view.flush()
        qtbot.wait(1)
    view.append_markdown("```\n")
    view.finish()
    view.flush()
    card = card_of(view)
    document = card.browser().document()
    qtbot.waitUntil(lambda: coloured(document, 99) == [("99", colour("number"))], timeout=10_000)
    assert card.highlighter.scans <= 20
    assert all(coloured(document, number) == [(str(number), colour("number"))] for number in range(100))


def test_another_theme_recolours(view: MarkdownView, theme: ThemeController, qtbot: QtBot) -> None:
    view.set_markdown("```c\nint x = 1;\n```")
    theme.set_choice("dark")
    view.flush()
    document = card_of(view).browser().document()
    qtbot.waitUntil(lambda: ("1", colour("number", DARK)) in coloured(document, 0))


def test_colours_count_as_the_document_does(highlighter: tuple[QTextDocument, CodeHighlighter]) -> None:
    document, colours = highlighter
    code = "x = '🚂🚃'  # 🚂 comment\ny = 2"
    document.setPlainText(code)
    assert colours.start(code, "python")
    while colours.advance(1):
        pass
    assert coloured(document, 0) == [("'🚂🚃'", colour("string")), ("# 🚂 comment", colour("comment"))]
    assert coloured(document, 1) == [("2", colour("number"))]


def test_a_scan_stops_when_its_time_is_over(highlighter: tuple[QTextDocument, CodeHighlighter]) -> None:
    document, colours = highlighter
    code = "x = 1\n" * 500
    document.setPlainText(code)
    assert colours.start(code, "python")
    slices = 1
    while colours.advance(0):
        slices += 1
    assert slices > 100


@pytest.mark.parametrize(
    ("code", "language"),
    [("x", "no-such-language"), ("x", ""), ("x = 1\n" * 50_000, "python"), ("x" * 6_000, "python")],
)
def test_what_is_not_coloured(highlighter: tuple[QTextDocument, CodeHighlighter], code: str, language: str) -> None:
    _, colours = highlighter
    assert not colours.start(code, language)
    assert not colours.advance(1)


@pytest.mark.parametrize(
    "language", ["python", "Python", "py", "js", "c++", "sh", "json", "rust", "{.python}", "sql", "diff"]
)
def test_languages_by_the_names_that_models_use(language: str) -> None:
    assert find_lexer(language) is not None


def test_token_names() -> None:
    assert token_style("Token.Keyword.Type") == "type"
    assert token_style("Token.Keyword.Declaration") == "keyword"
    assert token_style("Token.Literal.String.Double") == "string"
    assert token_style("Token.Name") == ""


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
    on_code = [theme.text, theme.muted, *(style.syntax(name).name() for name in SYNTAX)]
    assert min(contrast(name, theme.sunken) for name in on_code) >= 4.5
    assert contrast(theme.text, style.inline_code_background.name()) >= 4.5
    for text in (theme.text, theme.muted, theme.accent_text):
        assert contrast(text, theme.background) >= 4.5
