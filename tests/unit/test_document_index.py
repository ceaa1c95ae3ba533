"""Documents are cut into pieces, found again by what is asked, and forgotten without a trace."""

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.services.chat_store import Attachment
from app.services.documents import index as index_module
from app.services.documents import prompts
from app.services.documents.index import MOST_CHARACTERS, DocumentIndex, FileState, asked_words, chunked, match_for
from app.services.documents.prompts import Asked
from engine.batch_files.documents import Document, Part
from tests.unit.long_documents import TITLES, written

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=120)
LONG = st.lists(
    st.one_of(TEXT, st.sampled_from(["\n\n", "\n", ". ", " ", "。", "word " * 400, "x" * 3000])), max_size=12
)


@pytest.fixture
def index(tmp_path: Path) -> DocumentIndex:
    return DocumentIndex(tmp_path / "documents.sqlite3", "now")


def put(index: DocumentIndex, document: str, *texts: str, name: str = "a.txt") -> None:
    index.put(document, name, FileState(1, 1), Document(tuple(Part(text) for text in texts)))


@settings(deadline=None, max_examples=75)
@given(st.lists(st.builds(Part, LONG.map("".join), st.integers(0, 9), st.sampled_from(["", "A", "B"])), max_size=5))
def test_pieces_have_every_character_in_order_and_none_is_large(parts: list[Part]) -> None:
    chunks = list(chunked(parts))
    assert "".join(chunk.text for chunk in chunks) == "".join(part.text for part in parts)
    assert all(0 < len(chunk.text) <= MOST_CHARACTERS for chunk in chunks)
    at = iter(chunks)
    for part in parts:
        left = part.text
        while left:
            chunk = next(at)
            assert (chunk.page, chunk.heading) == (part.page, part.heading)
            assert left.startswith(chunk.text)
            left = left[len(chunk.text) :]


def test_pieces_end_where_a_paragraph_or_a_sentence_does() -> None:
    paragraph = "One sentence of a few words. " * 20
    texts = [chunk.text for chunk in chunked([Part("\n\n".join([paragraph] * 6))])]
    assert all(text.endswith("\n\n") for text in texts[:-1])
    texts = [chunk.text for chunk in chunked([Part(paragraph * 6)])]
    assert all(text.endswith(". ") for text in texts[:-1])


@settings(deadline=None, max_examples=150)
@given(st.one_of(TEXT, st.sampled_from(['"', "NEAR(", "a AND", "* OR NOT", "x:y", "^a", "{}", "-", "'; DROP", "\x00"])))
def test_any_question_can_be_asked(question: str) -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE VIRTUAL TABLE words USING fts5 (text)")
    match = match_for(asked_words(question))
    if match:
        connection.execute("SELECT * FROM words WHERE words MATCH ?", (match,)).fetchall()
    connection.close()


def test_words_that_are_everywhere_are_not_searched_for_unless_there_are_no_others() -> None:
    assert asked_words("What is the capacity of the Denham reservoir?") == ["capacity", "denham", "reservoir"]
    assert asked_words("Was ist das für ein Kessel?") == ["kessel"]
    assert asked_words("What is it?") == ["what", "is", "it"]


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Das Café in Zürich öffnet um neun.", "wann öffnet das cafe in zurich"),
        ("東京の水道局は午前九時に開きます。", "水道局はいつ開きますか"),
        ("Водохранилище было построено в 1931 году.", "Когда построено водохранилище?"),
        ("ห้องสมุดเปิดเวลาเก้าโมงเช้า", "ห้องสมุดเปิดกี่โมง"),
        ("The valves were replaced.", "replacing a valve"),
        ("call read_rows() twice", "what does read_rows do"),
    ],
)
def test_questions_in_other_scripts_and_forms_find_their_text(index: DocumentIndex, text: str, question: str) -> None:
    put(index, "other", *(f"Something else, number {number}." for number in range(30)))
    put(index, "d", "Nothing here.", text)
    assert index.search(["d", "other"], question)[0].text == text
    index.close()


def test_ninety_of_a_hundred_questions_find_their_passage_by_words_alone(index: DocumentIndex) -> None:
    documents, questions = written()
    pieces = 0
    for number, parts in enumerate(documents):
        pieces += index.put(str(number), TITLES[number], FileState(0, 0), Document(tuple(parts), len(parts)))
    assert sum(map(len, documents)) == 1000
    assert pieces == 2000  # of two to a page: what is written and searched grows with the text alone
    ids = [str(number) for number in range(len(documents))]
    first = five = passages = 0
    for question in questions:
        hits = index.search(ids, question.text, 5)
        found = [question.answer in hit.text and hit.document == str(question.document) for hit in hits]
        first += found[:1] == [True]
        five += any(found)
        attached = tuple(
            Attachment(id_, TITLES[number], characters=sum(len(part.text) for part in documents[number]), is_read=True)
            for number, id_ in enumerate(ids)
        )
        given = prompts.given(index, Asked((("m", attached),), "m", question.text, "", 3000))
        assert prompts.tokens_of(attached[0], len(given.before["m"])) < 3600
        passages += question.answer in given.before["m"]
        numbers = [source.number for source in given.sources]
        assert numbers == list(range(1, len(numbers) + 1))
        places = [(int(source.attachment), source.first) for source in given.sources]
        assert places == sorted(places)
    assert first >= 85
    assert five >= 90
    assert passages >= 90
    index.close()


def test_what_fits_is_given_whole_and_the_rest_in_passages(index: DocumentIndex) -> None:
    put(index, "short", "The keeper is Magnus.")
    put(index, "long", *(f"Night {number}: " + "dark and calm. " * 60 for number in range(60)), "The lamp burns oil.")
    short = Attachment("short", "short.txt", characters=21)
    long = Attachment("long", "long.txt", characters=60 * 900)
    asked = Asked((("m1", (short,)), ("m2", (long,))), "m3", "What does the lamp burn?", "", 4000)
    found = prompts.given(index, asked)
    assert "Magnus" in found.before["m1"]
    assert "m2" not in found.before
    assert "The lamp burns oil." in found.before["m3"]
    assert [source.number for source in found.sources] == list(range(1, len(found.sources) + 1))
    assert found.left_out == ()
    assert prompts.given(index, Asked((("m1", (long,)),), "m1", "lamp", "", 10)).left_out == ("long.txt",)
    index.close()


def test_a_further_question_is_searched_for_with_the_one_before(index: DocumentIndex) -> None:
    put(index, "d", *(f"Night {number}: " + "dark and calm. " * 60 for number in range(60)), "The lamp burns oil.")
    long = Attachment("d", "a.txt", characters=60 * 900)
    found = prompts.given(index, Asked((("m", (long,)),), "m", "Why?", "What does the lamp burn?", 2000))
    assert "The lamp burns oil." in found.before["m"]
    index.close()


def test_what_is_forgotten_is_nowhere_in_the_file(index: DocumentIndex, tmp_path: Path) -> None:
    put(index, "keep", "ordinary words")
    put(index, "gone", "a sesquipedalian secret")
    index.close()
    assert b"sesquipedalian" in (tmp_path / "documents.sqlite3").read_bytes()
    index.forget(["gone", "unknown"])
    assert index.search(["gone"], "sesquipedalian") == []
    assert not index.has("gone")
    index.close()
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"sesquipedalian" not in left
    assert b"secret" not in left
    assert b"ordinary" in left


def test_only_documents_of_chats_are_kept_and_those_of_this_session(index: DocumentIndex, tmp_path: Path) -> None:
    earlier = DocumentIndex(tmp_path / "documents.sqlite3", "before")
    put(earlier, "orphan", "words")
    put(earlier, "known", "words")
    earlier.close()
    put(index, "fresh", "words")
    index.keep_only({"known"})
    assert [index.has(one) for one in ("orphan", "known", "fresh")] == [False, True, True]
    index.close()


def test_a_changed_file_replaces_what_was_known(index: DocumentIndex) -> None:
    put(index, "d", "old words", name="a.txt")
    put(index, "d", "other words", name="b.txt")
    put(index, "d", "new words", name="a.txt")
    assert [piece.text for piece in index.pieces("d")] == ["new words", "other words"]
    assert index.search(["d"], "old") == []
    index.touch("d", "a.txt", FileState(5, 6))
    assert index.states("d")["a.txt"].mtime_ns == 6
    index.drop_files("d", ["a.txt"])
    assert index.figures("d") == index_module.Figures(1, 0, 11)
    index.close()


@pytest.mark.parametrize("damage", [b"no database", b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_damaged_index_or_one_of_another_version_is_made_anew(
    index: DocumentIndex, tmp_path: Path, damage: bytes
) -> None:
    put(index, "d", "words")
    index.close()
    path = tmp_path / "documents.sqlite3"
    path.write_bytes(damage)
    assert not index.has("d")
    put(index, "d", "words")
    assert index.search(["d"], "words")
    index.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert not index.has("d")
    index.close()


def test_others_cannot_read_the_index(index: DocumentIndex, tmp_path: Path) -> None:
    put(index, "d", "words")
    assert (tmp_path / "documents.sqlite3").stat().st_mode & 0o077 == 0
    index.close()
