"""The models behind the chat page, without a window."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtTest import QAbstractItemModelTester

from app.models.conversation import ROW_ROLE, ConversationModel
from app.models.conversation_list import ConversationListModel
from app.services.chat_store import Conversation, Message, MessageTree, SearchHit
from app.services.chat_store.records import MAX_TITLE, title_from
from app.services.kept import Preset, preset_of
from engine.common.chat import Picture
from engine.common.config import SamplingParams

NOW = datetime(2026, 11, 20, 9, 30)


def conversation(id_: str, days: float = 0, *, pinned: bool = False, title: str = "") -> Conversation:
    at = (NOW - timedelta(days=days)).timestamp()
    return Conversation(id_, title or id_, pinned, at, at)


@pytest.fixture
def list_model(qapp: object) -> Iterator[ConversationListModel]:
    model = ConversationListModel(lambda group: group.value, "untitled", now=lambda: NOW)
    tester = QAbstractItemModelTester(model, QAbstractItemModelTester.FailureReportingMode.Fatal)
    yield model
    tester.deleteLater()


def shown(model: ConversationListModel) -> list[str]:
    return [model.data(model.index(row)) for row in range(model.rowCount())]


def test_conversations_are_grouped_by_day(list_model: ConversationListModel) -> None:
    list_model.set_conversations(
        [
            conversation("a"),
            conversation("b", 0.3),
            conversation("c", 1),
            conversation("d", 6),
            conversation("e", 30),
            conversation("p", 90, pinned=True),
        ]
    )
    assert shown(list_model) == ["pinned", "p", "today", "a", "b", "yesterday", "c", "week", "d", "older", "e"]


def test_search_hits_replace_the_groups_until_it_ends(list_model: ConversationListModel) -> None:
    list_model.set_conversations([conversation("a"), conversation("b")])
    list_model.show_hits([SearchHit(conversation("b"), "…", "m")])
    assert shown(list_model) == ["b"]
    list_model.put(replace(conversation("b"), title="new"))
    assert shown(list_model) == ["new"]
    list_model.remove("b")
    assert shown(list_model) == []
    list_model.show_hits(None)
    assert shown(list_model) == ["today", "a"]


moves = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12), st.booleans(), st.booleans()), max_size=25)


@given(moves)
def test_any_change_leaves_a_list_that_a_fresh_one_would_be(moves: list[tuple[str, int, bool, bool]]) -> None:
    model = ConversationListModel(lambda group: group.value, "untitled", now=lambda: NOW)
    tester = QAbstractItemModelTester(model, QAbstractItemModelTester.FailureReportingMode.Fatal)
    held: dict[str, Conversation] = {}
    for id_, days, pinned, removes in moves:
        if removes:
            held.pop(id_, None)
            model.remove(id_)
        else:
            held[id_] = conversation(id_, days, pinned=pinned)
            model.put(held[id_])
        fresh = ConversationListModel(lambda group: group.value, "untitled", now=lambda: NOW)
        fresh.set_conversations(held.values())
        assert model.entries == fresh.entries
    tester.deleteLater()


def message(id_: str, parent: str | None, role: str = "user", **fields: object) -> Message:
    return Message(id_, "c", parent, role, id_, **fields)  # type: ignore[arg-type]


@pytest.fixture
def model(qapp: object) -> Iterator[ConversationModel]:
    model = ConversationModel()
    tester = QAbstractItemModelTester(model, QAbstractItemModelTester.FailureReportingMode.Fatal)
    model.show(conversation("c"), MessageTree([message("q", None), message("a", "q", "assistant")]))
    yield model
    tester.deleteLater()


def path(model: ConversationModel) -> list[tuple[str, int, int]]:
    rows = [model.data(model.index(number), ROW_ROLE) for number in range(model.rowCount())]
    return [(row.message.id, row.version, row.versions) for row in rows]


def test_rows_are_the_visible_path(model: ConversationModel) -> None:
    model.add(message("b", "q", "assistant"))
    assert path(model) == [("q", 1, 1), ("b", 2, 2)]
    model.add(message("q2", "b"))
    model.choose("a")
    assert path(model) == [("q", 1, 1), ("a", 1, 2)]
    model.choose("b")
    assert path(model) == [("q", 1, 1), ("b", 2, 2), ("q2", 1, 1)]
    assert model.row_of("q2") == 2
    assert model.row_of("a") is None


def test_pictures_are_those_of_the_visible_path(model: ConversationModel) -> None:
    red, blue = Picture("image/png", "cmVk"), Picture("image/png", "Ymx1ZQ==")
    model.add(message("q2", "a", pictures=(red, blue)))
    assert model.pictures == (red, blue)
    model.update(replace(message("q2", "a"), content="longer", pictures=(red, blue)))
    assert model.pictures == (red, blue)
    model.add(message("b", "q", "assistant"))
    assert (model.pictures, model.last) == ((), model.tree["b"])
    model.choose("a")
    assert model.pictures == (red, blue)
    model.show(conversation("d"), MessageTree())
    assert (model.pictures, model.last, model.row_of("q2")) == ((), None, None)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("What is the capital of France?", "What is the capital of France?"),
        ("\n\n# Heading\nmore", "Heading"),
        ("   a   b  ", "a b"),
        ("?!", "?!"),
    ],
)
def test_a_title_is_the_first_line_with_words(text: str, title: str) -> None:
    assert title_from(text) == title


def test_presets_are_recognised() -> None:
    own = SamplingParams(temperature=0.3, dry_multiplier=0.8, dry_range=500)
    assert preset_of(Preset.CREATIVE.value, own) is Preset.CREATIVE
    assert preset_of(Preset.CREATIVE.beside(own), own) is Preset.CREATIVE
    assert Preset.CREATIVE.beside(own).dry_range == 500
    assert preset_of(replace(Preset.PRECISE.value, top_k=3), own) is None
    assert preset_of(replace(Preset.PRECISE.value, dry_multiplier=0.5), own) is None


@given(st.text(min_size=1, max_size=300))
def test_a_title_is_short_and_one_line(text: str) -> None:
    title = title_from(text)
    assert len(title) <= MAX_TITLE + 1
    assert len(title.splitlines()) <= 1
