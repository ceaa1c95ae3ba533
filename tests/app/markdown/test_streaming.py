"""What streams in looks in the end like what is set at once, and is drawn once."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from pytestqt.qtbot import QtBot

from app.widgets.markdown_view import MarkdownView
from app.widgets.markdown_view.code_card import CodeCard
from tests.app.markdown.markdown_looks import ViewMaker, heights, look
from tests.unit.markdown_texts import EVERYTHING, chunked_texts


def test_streaming_looks_like_the_whole_at_every_step(make_view: ViewMaker) -> None:
    view = make_view()
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
    assert heights(view) == heights(whole)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunked_texts())
def test_streaming_any_blocks_looks_like_the_whole(
    shared_view: tuple[MarkdownView, MarkdownView], case: tuple[str, list[str]]
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
    assert heights(streamed) == heights(whole)


def test_updates_come_by_themselves(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view()
    view.append_markdown("hello")
    qtbot.waitUntil(lambda: len(view.column.panes) == 1)
    view.append_markdown(" there\n\n---\n")
    view.finish()
    qtbot.waitUntil(lambda: len(view.column.panes) == 2)


def test_finished_blocks_are_drawn_once(make_view: ViewMaker) -> None:
    view = make_view()
    for number in range(40):
        view.append_markdown(f"Paragraph {number} has some words in it.\n\n- and a list\n- of two\n\n")
        view.flush()
    # A paragraph, its list and the items of the list: each written again only while it is the open end.
    assert view.column.written_segments <= 40 * 3 * 2
    characters = len(view.markdown())
    assert view.parser.parsed_characters <= 8 * characters


def test_a_streamed_answer_costs_its_open_block_only(make_view: ViewMaker) -> None:
    view = make_view()
    words = EVERYTHING.replace("[late]", "late").split(" ")
    tokens = [word + " " for word in words * 6][:512]
    costs = []
    for token in tokens:
        before = view.parser.parsed_characters, view.column.written_segments
        view.append_markdown(token)
        view.flush()
        costs.append(
            (view.parser.parsed_characters - before[0], view.column.written_segments - before[1]),
        )
    longest_block = 400
    assert max(parsed for parsed, _ in costs) <= 4 * longest_block
    assert max(written for _, written in costs) <= 8
    assert sum(written for _, written in costs) <= 3 * len(tokens)


def test_code_that_grows_keeps_its_card(make_view: ViewMaker) -> None:
    view = make_view()
    view.append_markdown("Look:\n\n```python\nx = 1")
    view.flush()
    [_, card] = view.column.panes
    for _ in range(5):
        view.append_markdown("\ny = 2")
        view.flush()
    view.append_markdown("\n```\n\nDone.")
    view.finish()
    view.flush()
    assert view.column.panes[1] is card
    assert isinstance(card, CodeCard)
    assert card.code == "x = 1" + "\ny = 2" * 5


def test_a_selection_survives_streaming(make_view: ViewMaker) -> None:
    view = make_view()
    view.append_markdown("First words.\n\nSecond")
    view.flush()
    view.column.browsers()[0].select(0, 5)
    view.append_markdown(" words go on.\n\nThird")
    view.flush()
    assert view.selected_text() == "First"


def shows_cursor(view: MarkdownView) -> list[bool]:
    return [browser.has_stream_cursor for browser in view.column.browsers()]


def test_a_cursor_stands_at_the_end_while_streaming(make_view: ViewMaker) -> None:
    view = make_view()
    view.append_markdown("One\n\n```\ncode")
    view.flush()
    assert shows_cursor(view) == [False, True]
    view.append_markdown("\n```\n\nTwo")
    view.flush()
    assert shows_cursor(view) == [False, False, True]
    view.finish()
    view.flush()
    assert shows_cursor(view) == [False, False, False]


def test_the_cursor_is_inside_the_pane(make_view: ViewMaker) -> None:
    view = make_view()
    view.show()
    for _ in range(60):
        view.append_markdown("word ")
        view.flush()
        pane = view.column.browsers()[0]
        assert pane.viewport().rect().contains(pane.stream_cursor_rect().toRect())


def test_long_work_is_done_in_slices(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view()
    view.set_markdown("A paragraph with *some* words.\n\n---\n\n" * 600)
    view._update()
    assert 0 < len(view.column.shown) < 1_200
    qtbot.waitUntil(lambda: len(view.column.shown) == 1_200, timeout=60_000)
