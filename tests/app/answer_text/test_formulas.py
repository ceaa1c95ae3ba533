"""Formulas are drawn where they stand, or show their source; nothing that they hold stops the window."""

import threading
from collections.abc import Callable

import pytest
from PySide6.QtCore import QEventLoop
from PySide6.QtGui import QImage, QTextCursor
from pytestqt.qtbot import QtBot

from app.services.formula_process import draw
from app.services.formulas import Formula, Formulas, Picture
from app.theme import LIGHT, ThemeController
from app.widgets.answer_text import AnswerView, InertDocument, Style, formulas_in, read_markdown, write_markdown
from app.widgets.answer_text.maths import OBJECT
from engine.common.errors import RequestCancelled
from tests.app.answer_text.looks import ViewMaker


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
