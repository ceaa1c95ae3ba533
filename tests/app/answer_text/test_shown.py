"""An answer's text as it is shown: headings, lists, tables, code, formulas; and what copying it gives."""

import threading
from collections.abc import Callable

import pytest
from PySide6.QtCore import QEvent, QEventLoop, QPoint, QPointF, QRect, Qt, QUrl
from PySide6.QtGui import QAccessible, QColor, QFont, QGuiApplication, QImage, QMouseEvent, QTextCursor, QTextDocument
from PySide6.QtWidgets import QApplication, QScrollArea, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.services.formula_process import draw
from app.services.formulas import Formula, Formulas, Picture
from app.theme import DARK, LIGHT, Theme, ThemeController
from app.widgets.answer_text import AnswerView, InertDocument, Style, formulas_in, read_markdown, write_markdown
from app.widgets.answer_text.highlighting import find_lexer
from app.widgets.answer_text.maths import OBJECT
from app.widgets.answer_text.parser import MAX_COLUMNS
from app.widgets.answer_text.style import COLOURED
from app.widgets.answer_text.writer import CODE
from engine.common.errors import RequestCancelled
from tests.app.answer_text.looks import ViewMaker, blocks, look
from tests.unit.markdown_texts import EVERYTHING


def test_the_source_comes_back_as_it_was_given(make_view: ViewMaker) -> None:
    view = make_view("a\r\n\x00*b*")
    assert view.markdown() == "a\r\n\x00*b*"
    view.append_markdown(" c")
    assert view.markdown() == "a\r\n\x00*b* c"
    assert view.plain_text() == "a\n\ufffdb c"


def test_screen_readers_get_the_text_with_its_markers(make_view: ViewMaker) -> None:
    view = make_view("# Title\n\nSome **bold** words\n\n- item\n\n```\ncode\n```")
    assert view.accessibleName() == "Answer"
    assert view.accessibleDescription() == "Title\n\nSome bold words\n\n- item\n\ncode"
    read = QAccessible.queryAccessibleInterface(view)
    assert read.text(QAccessible.Text.Value).split() == ["Title", "Some", "bold", "words", "•", "item", "code"]


def test_the_height_follows_the_width(make_view: ViewMaker) -> None:
    view = make_view("word " * 400)
    assert view.hasHeightForWidth()
    narrow, wide = view.heightForWidth(200), view.heightForWidth(900)
    assert narrow > 3 * wide
    assert view.heightForWidth(200) == narrow


def test_a_layout_that_lags_behind_cannot_squeeze_the_answer(qtbot: QtBot) -> None:
    outer = QWidget()
    qtbot.addWidget(outer)
    layout = QVBoxLayout(outer)
    view = AnswerView()
    layout.addWidget(view)
    outer.resize(400, 200)
    outer.show()
    view.append_markdown("word " * 300)
    view.flush()
    # The window is lower than the answer: it becomes as high as the answer needs rather than cut its last lines off.
    qtbot.waitUntil(lambda: view.height() >= view.heightForWidth(view.width()))


def test_in_a_scroll_area_only_the_area_scrolls(qtbot: QtBot) -> None:
    area = QScrollArea()
    qtbot.addWidget(area)
    content = QWidget()
    layout = QVBoxLayout(content)
    view = AnswerView()
    layout.addWidget(view)
    layout.addStretch()
    area.setWidget(content)
    area.setWidgetResizable(True)
    area.resize(500, 300)
    area.show()
    view.set_markdown(EVERYTHING + "\n\n" + "word " * 900 + "treasure")
    view.flush()
    qtbot.waitUntil(lambda: area.verticalScrollBar().maximum() > 0)
    for width in (300, 700, 420):
        area.resize(width, 300)
        qtbot.waitUntil(lambda: view.height() == view.heightForWidth(view.width()))
        assert view.verticalScrollBar().maximum() == 0
    [_] = view.find_matches("treasure")
    view.show_match(0)
    assert area.verticalScrollBar().value() > area.verticalScrollBar().maximum() * 0.9


def test_a_table_too_wide_for_any_wrapping_can_be_scrolled(make_view: ViewMaker) -> None:
    cells = "|" + "abc|" * 90
    view = make_view(f"{cells}\n|{'---|' * 90}\n{cells}")
    view.show()
    assert view.horizontalScrollBar().maximum() > 0
    assert view.verticalScrollBar().maximum() == 0


def test_themes_and_fonts_change_everything_at_once(make_view: ViewMaker, theme: ThemeController) -> None:
    view = make_view(EVERYTHING)
    light = look(view)
    view.selectAll()
    selected = view.selected_text()
    theme.set_choice("dark")
    view.flush()
    assert LIGHT.text.lower() not in repr(look(view)).lower()
    assert view.selected_text() == selected
    heights_of_sizes = []
    for size in (14, 22, 14):
        font = QFont(view.font())
        font.setPixelSize(size)
        view.setFont(font)
        view.flush()
        heights_of_sizes.append(view.heightForWidth(640))
    assert heights_of_sizes[0] == heights_of_sizes[2] < heights_of_sizes[1]
    theme.set_choice("light")
    view.flush()
    assert look(view) == light


def test_a_table_of_thousands_of_columns_is_shown_as_it_was_written(make_view: ViewMaker) -> None:
    line = f"|{'|'.join(f'c{number}' for number in range(MAX_COLUMNS + 1))}|"
    text = f"{line}\n|{'---|' * (MAX_COLUMNS + 1)}\n{line}\n"
    view = make_view(text)
    assert view.document().rootFrame().childFrames() == []
    assert view.plain_text().strip() == text.strip()


def test_a_letter_with_thousands_of_marks_is_shown_with_few_and_copied_whole(make_view: ViewMaker) -> None:
    dense = "a" + "\u0301\u0334" * 2000 + "b\u0301"
    view = make_view(f"{dense}\n\n```\n{dense}\n```\n\n| {dense} |\n|---|\n| x |\n")
    shown = view.toPlainText()
    assert shown.count("a" + "\u0301\u0334" * 15 + "b\u0301") == 3
    assert len(shown) < 200
    assert view.markdown().count(dense) == 3
    [button] = view.copy_buttons
    assert button.code == dense


@pytest.mark.parametrize(
    "text",
    [
        "x" * 300_000,
        "word " * 60_000,
        "line\n" * 5_000,
        "[" * 10_000,
        "*" * 10_000,
        "$" * 10_000,
        "$a$ " * 3_000,
        "$$\n" * 3_000,
        "http://a.b/c " * 3_000,
        "http://" + "a" * 50_000,
        "> " * 400 + "deep",
        "- " * 400 + "deep",
        "".join(f"{'  ' * depth}- level {depth}\n" for depth in range(60)),
        "```python\n" + "x = '''" * 2_000,
        "| a " * 300 + "|\n" + "|---" * 300 + "|\n" + "| b " * 300 + "|",
        "\x00\x01\x02\x1b[31m \ufffc \ufdd0\ufdd1 \u2028\u2029 \ud800 \ue000 \U0010ffff",
        "שלום *עולם*\n\n1. أول\n2. ثان\n\n- [x] مهمة\n\n`קוד` 日本語 한국어 👩‍👩‍👧‍👦 🏳️‍🌈 é",
        "\u202e override \u2066 isolate",
        "a\u0301" * 3_000,
    ],
    ids=lambda text: ascii(text[:6]) if isinstance(text, str) else None,
)
def test_any_text_is_shown(make_view: ViewMaker, text: str) -> None:
    view = make_view("")
    for start in range(0, len(text), 20_011):
        view.append_markdown(text[start : start + 20_011])
        QApplication.processEvents()
    view.finish()
    view.flush()
    assert view.heightForWidth(640) > 0
    view.resize(640, view.heightForWidth(640))
    for top in (0, view.heightForWidth(640) - 400):
        assert not view.grab(QRect(0, top, 640, 400)).isNull()


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


def place_of(view: AnswerView, text: str) -> QRect:
    """Where this text begins."""
    cursor = view.document().find(text)
    assert not cursor.isNull()
    cursor.setPosition(cursor.selectionStart())
    return view.cursorRect(cursor)


def select(view: AnswerView, first: str, last: str) -> None:
    start, end = view.document().find(first), view.document().find(last)
    cursor = view.textCursor()
    cursor.setPosition(start.selectionStart())
    cursor.setPosition(end.selectionEnd(), QTextCursor.MoveMode.KeepAnchor)
    view.setTextCursor(cursor)


@pytest.mark.parametrize(
    ("text", "label", "address"),
    [
        ("[manual](https://example.org/manual) and text", "manual", "https://example.org/manual"),
        ("see https://example.org/a_b_c(1).", "https", "https://example.org/a_b_c(1)"),
        ("(see http://example.org/x)", "http", "http://example.org/x"),
    ],
)
def test_a_link_is_announced_and_not_opened(
    make_view: ViewMaker, qtbot: QtBot, text: str, label: str, address: str
) -> None:
    view = make_view(text)
    view.show()
    at = place_of(view, label).center() + QPoint(4, 0)
    with qtbot.waitSignal(view.link_activated) as signal:
        qtbot.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=at)
    assert signal.args == [QUrl(address)]
    assert view.source().isEmpty()


def test_links_are_reached_by_the_keyboard(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("Read the [manual](https://example.org/manual).")
    view.show()
    view.setFocus(Qt.FocusReason.TabFocusReason)
    qtbot.keyClick(view, Qt.Key.Key_Tab)
    with qtbot.waitSignal(view.link_activated):
        qtbot.keyClick(view, Qt.Key.Key_Return)


def test_numbers_of_sources_are_links(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("It rains [1], as others say [2, 3]; `a[1]`, [9] and [manual](reference:1).\n\n```\nb[1]\n```")
    view.show()
    view.set_references({1: "weather.pdf, page 3", 2: "b.txt", 3: "c.txt"})
    opened: list[int] = []
    view.reference_activated.connect(opened.append)
    for text, along in (("[1]", 1), ("2, 3", 0), ("3]", 0), ("a[1]", 1), ("[9]", 1), ("manual", 1), ("b[1]", 1)):
        cursor = view.document().find(text)
        cursor.setPosition(cursor.selectionStart() + along)
        at = view.cursorRect(cursor).center() + QPoint(2, 0)
        if view.anchorAt(at):
            qtbot.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=at)
    assert opened == [1, 2, 3]
    view.set_markdown("Again [3].")
    view.flush()
    view.setFocus(Qt.FocusReason.TabFocusReason)
    qtbot.keyClick(view, Qt.Key.Key_Tab)
    with qtbot.waitSignal(view.reference_activated) as signal:
        qtbot.keyClick(view, Qt.Key.Key_Return)
    assert signal.args == [3]


def test_nothing_is_ever_loaded(make_view: ViewMaker, tmp_path: object) -> None:
    picture = QImage(4, 4, QImage.Format.Format_RGB32)
    picture.fill(QColor("red"))
    path = f"{tmp_path}/p.png"
    assert picture.save(path)
    view = make_view(
        f"![a]({path}) ![b](file://{path}) <img src='{path}'> ![c](http://127.0.0.1:9/x.png)\n\n```\nx\n```"
    )
    kinds = QTextDocument.ResourceType
    for kind in (kinds.ImageResource, kinds.HtmlResource, kinds.StyleSheetResource):
        assert view.loadResource(kind.value, QUrl.fromLocalFile(path)) is None
        assert view.document().resource(kind.value, QUrl.fromLocalFile(path)) is None
    assert "<img" not in view.toHtml()
    assert "[image: c]" in view.plain_text()


def test_what_is_selected_is_copied_as_it_reads(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view(
        "A *b*\n\n- c\n- [x] d\n  1. e\n\n```py\nf\n\n  g\n```\n\n> q\n\n|h|i|\n|-|-|\n|j|k|\n\n---\n\nEnd `l`"
    )
    view.show()
    qtbot.keyClick(view, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
    whole = "A b\n\n- c\n- [x] d\n  1. e\n\nf\n\n  g\n\nq\n\nh\ti\nj\tk\n\n---\n\nEnd l"
    assert view.selected_text() == whole
    qtbot.keyClick(view, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == whole
    assert view.createMimeDataFromSelection().text() == whole
    select(view, "d", "g")
    assert view.selected_text() == "d\n  1. e\n\nf\n\n  g"
    assert view.plain_text() == whole


def test_copying_without_a_selection_takes_the_whole_answer(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("A *b*")
    view.show()
    qtbot.keyClick(view, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == "A *b*"


def drag(view: AnswerView, begin: QPoint, end: QPoint) -> None:
    left, none = Qt.MouseButton.LeftButton, Qt.MouseButton.NoButton
    for kind, at, button, buttons in (
        (QEvent.Type.MouseButtonPress, begin, left, left),
        (QEvent.Type.MouseMove, begin + QPoint(30, 0), none, left),
        (QEvent.Type.MouseMove, end, none, left),
        (QEvent.Type.MouseButtonRelease, end, left, none),
    ):
        where = QPointF(view.viewport().mapToGlobal(at))
        event = QMouseEvent(kind, QPointF(at), where, button, buttons, Qt.KeyboardModifier.NoModifier)
        QApplication.sendEvent(view.viewport(), event)


def test_dragging_selects_over_text_code_and_tables(make_view: ViewMaker) -> None:
    view = make_view("First paragraph\n\n```\ncode here\n```\n\n|a|b|\n|-|-|\n|c|d|\n\nLast paragraph")
    view.resize(640, view.heightForWidth(640))
    view.show()
    drag(view, place_of(view, "First").center(), place_of(view, "Last").center() + QPoint(40, 0))
    assert view.selected_text().startswith("First paragraph\n\ncode here\n\na\tb\nc\td\n\nLast")


def test_the_keys_select(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("Some words\n\nand more")
    view.show()
    view.setFocus()
    shift = Qt.KeyboardModifier.ShiftModifier
    for _ in range(4):
        qtbot.keyClick(view, Qt.Key.Key_Right, shift)
    assert view.selected_text() == "Some"
    qtbot.keyClick(view, Qt.Key.Key_Down, shift)
    assert view.selected_text().startswith("Some words\n\n")


def test_the_menu_offers_copying(make_view: ViewMaker) -> None:
    view = make_view("Some *text*")
    menu = view.build_menu("https://example.org")
    actions = {action.text(): action for action in menu.actions() if action.text()}
    assert list(actions) == [
        "Copy",
        "Copy link",
        "Select all",
        "Copy all as plain text",
        "Copy all as Markdown",
    ]
    assert not actions["Copy"].isEnabled()
    actions["Copy all as plain text"].trigger()
    assert QGuiApplication.clipboard().text() == "Some text"
    actions["Copy all as Markdown"].trigger()
    assert QGuiApplication.clipboard().text() == "Some *text*"
    actions["Copy link"].trigger()
    assert QGuiApplication.clipboard().text() == "https://example.org"
    assert "Copy link" not in [action.text() for action in view.build_menu("").actions()]


def test_matches_are_marked_and_shown(make_view: ViewMaker) -> None:
    view = make_view("🚂 One two\n\n```\nTWO = 2\n```\n\n- and two")
    matches = view.find_matches("two")
    assert len(matches) == 3
    texts = []
    for number, match in enumerate(matches):
        view.show_match(number)
        cursor = view.textCursor()
        cursor.setPosition(match.start)
        cursor.setPosition(match.end, QTextCursor.MoveMode.KeepAnchor)
        texts.append(cursor.selectedText())
    assert texts == ["two", "TWO", "two"]
    assert len(view.extraSelections()) == 3
    assert view.find_matches("") == []
    assert view.extraSelections() == []
    assert view.find_matches("no such thing") == []


def wait(drawn: Formulas, qtbot: QtBot) -> None:
    qtbot.waitUntil(lambda: not drawn.is_busy, timeout=60_000)


def test_the_source_shows_until_the_picture_is_there(make_view: ViewMaker, drawn: Formulas, qtbot: QtBot) -> None:
    view = make_view("Here $x^2$ and \\(y\\).\n\n$$\n\\frac{a}{b}\n- c\n$$\n\nEnd")
    assert "$x^2$" in view.toPlainText()
    wait(drawn, qtbot)
    assert view.toPlainText().count(OBJECT) == 3
    view.select_all()
    assert view.selected_text() == "Here $x^2$ and \\(y\\).\n\n$$\n\\frac{a}{b}\n- c\n$$\n\nEnd"
    assert [match.end - match.start for match in view.find_matches("frac")] == [1]


def test_what_cannot_be_drawn_shows_its_source(make_view: ViewMaker, drawn: Formulas, qtbot: QtBot) -> None:
    sources = [
        r"$\foo{x}$",
        r"$\frac{a}$",
        r"$\left( x$",
        r"$\begin{nonsense} x \end{nonsense}$",
        "$" + "{" * 7 + "x" + "}" * 7 + "$",
        r"$\def\a{\a\a}\a$",
        r"\(\newcommand{\x}{\x\x} \x\)",
        "\\(" + "x" * 1_900 + "\\)",
        r"\(" + r"\sqrt" * 300 + r"\)",
    ]
    view = make_view("\n\n".join(f"A {source} z and $y$" for source in sources))
    wait(drawn, qtbot)
    assert view.toPlainText() == "\n".join(f"A {source} z and {OBJECT}" for source in sources)


def test_one_that_takes_for_ever_costs_only_itself(
    drawn: Formulas, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.services.formulas.FORMULA_MS", 300)
    assert drawn.ask(Formula("z"))
    wait(drawn, qtbot)  # the process is there
    endless = Formula(r"\frac{1}{" * 5 + r"\binom{a}{b}" * 150 + "}" * 5)
    assert drawn.ask(endless)
    assert drawn.ask(Formula("x"))
    wait(drawn, qtbot)
    assert drawn.picture(Formula("x")) is not None


def test_a_lost_process_is_started_again(drawn: Formulas, qtbot: QtBot) -> None:
    assert drawn.ask(Formula("x"))
    wait(drawn, qtbot)
    assert drawn.is_running
    drawn._process.kill()
    qtbot.waitUntil(lambda: not drawn.is_running, timeout=10_000)
    assert drawn.ask(Formula("y"))
    wait(drawn, qtbot)
    assert drawn.picture(Formula("y")) is not None
    assert not drawn.ask(Formula("y"))


def test_a_selection_stays_on_what_it_was_on(make_view: ViewMaker, drawn: Formulas, qtbot: QtBot) -> None:
    text = "Before $a$ mid $b$ after\n\nmore $a$"
    spans = [("Before", "mid"), ("$a$", "$a$"), ("mid", "mid"), ("mid", "$b$"), ("$b$", "after"), ("after", "more")]
    views = []
    for first, last in spans:
        view = make_view(text)
        cursor = view.textCursor()
        cursor.setPosition(view.document().find(first).selectionStart())
        cursor.setPosition(view.document().find(last).selectionEnd(), QTextCursor.MoveMode.KeepAnchor)
        view.setTextCursor(cursor)
        views.append((view, view.selected_text()))
    wait(drawn, qtbot)
    for view, before in views:
        assert OBJECT in view.toPlainText()
        assert view.selected_text() == before


def ink(view: AnswerView) -> set[str]:
    """The colours in a picture of it."""
    image = view.grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
    return {image.pixelColor(x, y).name() for x in range(image.width()) for y in range(image.height())}


def test_formulas_follow_the_theme_without_being_drawn_again(
    make_view: ViewMaker, drawn: Formulas, qtbot: QtBot, theme: ThemeController
) -> None:
    view = make_view("$$\\blacksquare$$")
    wait(drawn, qtbot)
    view.resize(200, view.heightForWidth(200))
    assert theme.theme.text.lower() in ink(view)
    theme.set_choice("dark")
    view.flush()
    assert not drawn.is_busy
    assert theme.theme.text.lower() in ink(view)


def test_any_document_is_written_with_its_formulas_on_any_thread(drawn: Formulas, qtbot: QtBot) -> None:
    texts = [read_markdown("# One\n\n$x$\n\n```py\nx = 1\n```"), read_markdown("- two $x$ and $\\undefined{$")]
    written: list[str] = []

    def write() -> None:
        wanted = {formula for segments in texts for formula in formulas_in(segments)}
        pictures = {formula: Picture(svg) for formula, svg in drawn.draw_all(wanted, lambda: False).items()}
        dispatcher = QEventLoop()
        document = InertDocument()
        document.setTextWidth(500)
        for segments in texts:
            write_markdown(document, segments, Style(LIGHT, document.defaultFont()), pictures)
            written.append(document.toPlainText())
        del document, dispatcher

    thread = threading.Thread(target=write)
    thread.start()
    qtbot.waitUntil(lambda: not thread.is_alive(), timeout=60_000)
    assert written[0] == f"One\n{OBJECT}\nx = 1"
    assert written[1].endswith(f"\n\t•\ttwo {OBJECT} and $\\undefined{{$")


def test_who_waits_for_formulas_stops_when_it_is_cancelled_or_they_are_given_up(drawn: Formulas, qtbot: QtBot) -> None:
    ended: list[object] = []

    def wait_for(cancelled: Callable[[], bool]) -> None:
        try:
            ended.append(drawn.draw_all([Formula("x"), Formula("y", display=True)], cancelled))
        except RequestCancelled:
            ended.append("cancelled")

    thread = threading.Thread(target=wait_for, args=(lambda: True,))
    thread.start()
    thread.join(60)  # nothing is drawn meanwhile: that is done here
    assert ended == ["cancelled"]
    thread = threading.Thread(target=wait_for, args=(lambda: False,))
    thread.start()
    qtbot.waitUntil(lambda: drawn.is_busy)
    drawn.close()
    qtbot.waitUntil(lambda: not thread.is_alive(), timeout=60_000)
    assert len(ended) == 2


@pytest.mark.parametrize(
    "tex",
    [
        r"\sum_{i=1}^n \frac{x_i}{\sqrt{2\pi}}",
        r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}",
        r"\begin{cases} 1 & x > 0 \\ 0 & x < 0 \end{cases}",
        r"\begin{aligned} a &= b \\ c &= d \end{aligned}",
        r"\text{if } x \in \mathbb{R}, \operatorname{argmax} \mathcal{L} \to \infty",
        r"\left\{ \hat{y} \mid \lVert x \rVert \le 1 \right\} \quad \xrightarrow{f} \vec{v}",
    ],
)
def test_what_models_write_is_known(tex: str) -> None:
    assert draw(tex, display=True).startswith("<svg")


def test_many_that_take_for_ever_are_given_up(drawn: Formulas, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.formulas.MOST_LOST", 2)
    told: list[object] = []
    drawn.drawn.connect(told.append)
    asked = [Formula("x" * number) for number in range(1, 30)]
    for formula in asked:
        assert drawn.ask(formula)
    for _ in range(2):
        assert drawn._process is not None
        before = len(told)
        drawn._process.kill()
        qtbot.waitUntil(lambda before=before: len(told) > before, timeout=30_000)
    wait(drawn, qtbot)
    assert len(told) == len(asked)
    assert set(told) == set(asked)
