"""What streams in looks in the end like what is set at once, is written once, and is timed."""

import random

from hypothesis import HealthCheck, given, settings
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.formulas import Formulas, formulas
from app.streaming_report import update_times_ms
from app.widgets.answer_text import AnswerView
from tests.app.answer_text.looks import ViewMaker, look
from tests.unit.markdown_texts import EVERYTHING, chunked_texts


def test_streaming_looks_like_the_whole_in_the_end(make_view: ViewMaker) -> None:
    view = make_view("")
    chooser = random.Random(3)
    start = 0
    while start < len(EVERYTHING):
        end = start + chooser.randint(1, 9)
        view.append_markdown(EVERYTHING[start:end])
        view.flush()
        start = end
    view.finish()
    view.flush()
    whole = make_view(EVERYTHING)
    assert look(view) == look(whole)
    assert view.heightForWidth(640) == whole.heightForWidth(640)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunked_texts())
def test_streaming_any_blocks_looks_like_the_whole(
    shared_view: tuple[AnswerView, AnswerView], case: tuple[str, list[str]]
) -> None:
    text, chunks = case
    streamed, whole = shared_view
    streamed.set_markdown("")
    streamed.flush()
    for chunk in chunks:
        streamed.append_markdown(chunk)
        streamed.flush()
    streamed.finish()
    streamed.flush()
    whole.set_markdown("")
    whole.flush()
    whole.set_markdown(text)
    whole.flush()
    assert look(streamed) == look(whole)
    assert streamed.plain_text() == whole.plain_text()


def test_streamed_formulas_look_like_those_of_the_whole(make_view: ViewMaker, drawn: Formulas, qtbot: QtBot) -> None:
    text = (
        "An $x^2$ and $$y$$ so.\n\n\\[\n\\frac{a}{b}\n\\]\n\n"
        "| $a$ | b |\n|---|---|\n| $b$ | $a$ |\n\n- it is $x^2$, then $a$"
    )
    view = make_view("")
    for start in range(0, len(text), 3):
        view.append_markdown(text[start : start + 3])
        view.flush()
        qtbot.wait(5)
    view.finish()
    view.flush()
    qtbot.waitUntil(lambda: not drawn.is_busy, timeout=30_000)
    whole = make_view(text)
    assert look(view) == look(whole)
    assert view.selected_text() == whole.selected_text() == ""
    view.select_all()
    assert view.selected_text() == text.replace("\n| $b", "\n$b").replace("| $a$ | b |\n|---|---|", "$a$\tb").replace(
        "$b$ | $a$ |", "$b$\t$a$"
    )


def test_a_streamed_answer_costs_its_open_block_only(make_view: ViewMaker) -> None:
    view = make_view("")
    words = EVERYTHING.replace("[late]", "late").split(" ")
    tokens = [word + " " for word in words * 6][:512]
    costs = []
    for token in tokens:
        before = view.parser.parsed_characters, view.writer.written_segments
        view.append_markdown(token)
        view.flush()
        costs.append((view.parser.parsed_characters - before[0], view.writer.written_segments - before[1]))
    longest_block = 400
    assert max(parsed for parsed, _ in costs) <= 4 * longest_block
    assert max(written for _, written in costs) <= 8
    assert sum(written for _, written in costs) <= 3 * len(tokens)


def test_a_selection_survives_streaming(make_view: ViewMaker) -> None:
    view = make_view("")
    view.append_markdown("First words.\n\nSecond")
    view.flush()
    cursor = view.textCursor()
    cursor.setPosition(0)
    cursor.setPosition(len("First words.\nSecond"), cursor.MoveMode.KeepAnchor)
    view.setTextCursor(cursor)
    view.append_markdown(" words **go")
    view.flush()
    view.append_markdown(" on**.\n\nThird")
    view.flush()
    assert view.selected_text() == "First words.\n\nSecond"


def test_long_work_is_done_in_slices(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("")
    view.set_markdown("A paragraph with *some* words.\n\n---\n\n" * 600)
    view._update()
    assert 0 < len(view.writer.shown) < 1_200
    qtbot.waitUntil(lambda: len(view.writer.shown) == 1_200, timeout=60_000)


def test_the_stream_cursor_is_inside_the_view(make_view: ViewMaker) -> None:
    view = make_view("")
    view.show()
    for _ in range(60):
        view.append_markdown("word ")
        view.flush()
        assert view.viewport().rect().contains(view.stream_cursor_rect().toRect())


def test_each_token_is_timed(qapp: QApplication) -> None:
    assert len(update_times_ms(120)) == 120
    assert formulas().is_busy or formulas().is_running
    formulas().forget()
