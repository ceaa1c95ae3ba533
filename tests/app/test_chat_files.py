"""Chats to files and back, off the window's thread."""

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pypdfium2
import pytest
from PySide6.QtPrintSupport import QPrinter
from pytestqt.qtbot import QtBot

from app.services.chat_files import ChatFiles
from app.services.chat_store import ChatStore, Conversation, Folder, Message
from app.services.chat_store.database import ChatDatabase
from app.services.formulas import Formula, formulas
from app.views.chat.chat_transfer import chat_html, put_on_paper, write_pdf
from tests.unit.test_chats_of_other_programs import conversation

Open = Callable[[str], tuple[ChatStore, ChatFiles]]


@pytest.fixture
def open_files(qtbot: QtBot, tmp_path: Path) -> Iterator[Open]:
    opened: list[tuple[ChatStore, ChatFiles]] = []

    def build(name: str) -> tuple[ChatStore, ChatFiles]:
        store = ChatStore(tmp_path / name)
        opened.append((store, ChatFiles(store)))
        return opened[-1]

    yield build
    for store, files in opened:
        files.close()
        store.close()


def everything(store: ChatStore) -> dict[str, object]:
    return store.ask(lambda database: {c.id: (c, database.messages(c.id)) for c in database.conversations()}).result(9)


def fill(store: ChatStore, count: int) -> list[str]:
    for n in range(count):
        turns = [
            Message(f"q{n}", f"c{n}", None, "user", "What?"),
            Message(f"a{n}", f"c{n}", f"q{n}", "assistant", "That.", chosen=False),
            Message(f"b{n}", f"c{n}", f"q{n}", "assistant", "This."),
        ]
        store.create(Conversation(f"c{n}", "Same: title/here", created_at=1.7e9, updated_at=1.7e9), turns)
    return [f"c{n}" for n in range(count)]


def test_all_chats_go_through_one_archive_and_are_the_same(open_files: Open, qtbot: QtBot, tmp_path: Path) -> None:
    store, files = open_files("one.sqlite3")
    ids = fill(store, 7)
    with qtbot.waitSignal(files.exported):
        files.export(ids, tmp_path / "all.zip")
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        names = archive.namelist()
    assert len(names) == len(set(names)) == 14
    assert all("/" in name and ":" not in name for name in names)
    other, others = open_files("two.sqlite3")
    for counts in ((7, 0), (0, 7)):
        with qtbot.waitSignal(others.imported) as heard:
            others.import_files([tmp_path / "all.zip"])
        assert (heard.args[0].added, heard.args[0].known) == counts
        assert everything(other) == everything(store)


def test_an_export_has_its_folder_and_nothing_of_what_was_deleted(
    open_files: Open, qtbot: QtBot, tmp_path: Path
) -> None:
    store, files = open_files("one.sqlite3")
    store.put_folder(Folder("f", "Work"))
    store.put_folder(Folder("g", "Other"))
    (chat,) = fill(store, 1)
    store.change(chat, folder_id="f")
    store.add_message(Message("more", chat, "b0", "user", "the secret of it"))
    store.set_message_deleted("more", 5.0)
    store.set_message_deleted("q0", 5.0)
    for name in ("all.zip", "one.json", "one.md"):
        with qtbot.waitSignal(files.exported):
            files.export([chat], tmp_path / name)
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        written = [archive.read(name).decode() for name in archive.namelist()]
    written += [(tmp_path / name).read_text("utf-8") for name in ("one.json", "one.md")]
    assert not any("secret" in text or "What?" in text for text in written)
    assert all("This." in text for text in written)
    other, others = open_files("two.sqlite3")
    with qtbot.waitSignal(others.merged) as heard, qtbot.waitSignal(others.imported):
        others.import_files([tmp_path / "all.zip"])
    assert heard.args[0].folders == (Folder("f", "Work"),)
    assert other.ask(lambda database: database.folders()).result(9) == (Folder("f", "Work"),)
    assert [chat.folder_id for chat in heard.args[0].added] == ["f"]


def test_chatgpts_export_is_imported_in_steps_and_told(open_files: Open, qtbot: QtBot, tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([conversation(n) for n in range(120)]), encoding="utf-8")
    store, files = open_files("one.sqlite3")
    merged: list[object] = []
    files.merged.connect(merged.append)
    with qtbot.waitSignal(files.imported) as heard:
        files.import_files([file])
    assert heard.args[0].added == 120
    assert len(merged) > 1
    assert len(everything(store)) == 120


def test_what_was_imported_before_it_was_cancelled_stays(open_files: Open, qtbot: QtBot, tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([conversation(n) for n in range(2000)]), encoding="utf-8")
    store, files = open_files("one.sqlite3")
    files.merged.connect(lambda _merged: files.cancel())
    with qtbot.waitSignal(files.imported) as heard:
        files.import_files([file])
    report = heard.args[0]
    assert report.is_cancelled
    assert 0 < len(everything(store)) < 2000
    with qtbot.waitSignal(files.imported):  # the next one is not cancelled
        files.import_files([tmp_path / "none.json"])


def test_a_cancelled_export_leaves_no_file(open_files: Open, qtbot: QtBot, tmp_path: Path) -> None:
    store, files = open_files("one.sqlite3")
    ids = fill(store, 3)
    (tmp_path / "out").mkdir()
    with qtbot.waitSignal(files.failed) as heard:
        files.export(ids, tmp_path / "out" / "all.zip")
        files.cancel()
    assert "cancelled" in heard.args[0]
    assert not list((tmp_path / "out").iterdir())


def test_closing_ends_an_import_that_waits_for_the_disk(open_files: Open, qtbot: QtBot, tmp_path: Path) -> None:
    store, files = open_files("one.sqlite3")
    fill(store, 1)
    assert store.flush()

    def never(_database: ChatDatabase) -> None:
        raise OSError("the disk is gone")

    store.ask(never, writes=True)
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([conversation()]), encoding="utf-8")
    files.import_files([file])
    files.close()


NASTY = "![x](http://tracker/x.png) <img src=http://tracker/y> <script>alert(1)</script>\n\n[a](javascript:alert(1))"


def test_documents_refer_to_nothing_that_loads(qtbot: QtBot, tmp_path: Path) -> None:
    chat = Conversation("c", "<b>title</b>", system_prompt=NASTY)
    turns = [Message("q", "c", None, "user", NASTY), Message("a", "c", "q", "assistant", NASTY, reasoning=NASTY)]
    page = chat_html(chat, turns, lambda _wanted: {})
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>" not in page
    assert "javascript:" not in page.replace("[a](javascript:alert(1))", "")
    assert "default-src 'none'" in page
    write_pdf(chat, turns, tmp_path / "chat.pdf", lambda _wanted: {})
    assert (tmp_path / "chat.pdf").stat().st_size > 1000


def test_paper_has_formulas_and_numbered_pages(open_files: Open, qtbot: QtBot, tmp_path: Path) -> None:
    chat = Conversation("c", "Sums")
    said = "The sum $\\alpha_1$ is\n\n$$\\frac{a}{b}$$\n\n" + "\n\n".join(f"Line {n}." for n in range(120))
    turns = [Message("q", "c", None, "user", "Sum $up$"), Message("a", "c", "q", "assistant", said)]
    store, files = open_files("one.sqlite3")
    store.create(chat, turns)
    shared, wanted = formulas(), {Formula("\\alpha_1"), Formula("\\frac{a}{b}", display=True)}
    asked: list[set[Formula]] = []

    def write(conversation: Conversation, messages: Sequence[Message], cancelled: Callable[[], bool]) -> None:
        def draw(some: Iterable[Formula]) -> Mapping[Formula, str]:
            asked.append(set(some))
            return shared.draw_all(asked[-1], cancelled)

        write_pdf(conversation, messages, tmp_path / "chat.pdf", draw)
        (tmp_path / "chat.html").write_text(chat_html(conversation, messages, draw), "utf-8")

    try:
        files.with_chat("c", write)
        qtbot.waitUntil(lambda: not files.is_busy, timeout=60_000)
    finally:
        shared.forget()
    assert asked == [wanted, wanted]
    page = (tmp_path / "chat.html").read_text("utf-8")
    assert page.count('<img class="maths"') == 2
    assert page.count("data:image/svg+xml;base64,") == 2
    with pypdfium2.PdfDocument(tmp_path / "chat.pdf") as paper:
        texts = [sheet.get_textpage().get_text_bounded() for sheet in paper]
    assert len(texts) > 2
    assert all("".join(text.split()).startswith(f"{n}/{len(texts)}") for n, text in enumerate(texts, 1))
    assert "frac" not in texts[0]
    assert "Line 119." in texts[-1]


def test_a_chat_is_printed_off_the_windows_thread(open_files: Open, qtbot: QtBot, tmp_path: Path) -> None:
    store, files = open_files("one.sqlite3")
    (chat,) = fill(store, 1)
    printer = QPrinter(QPrinter.PrinterMode.HighResolution)
    printer.setOutputFormat(QPrinter.OutputFormat.PdfFormat)
    printer.setOutputFileName(str(tmp_path / "paper.pdf"))
    files.with_chat(
        chat,
        lambda conversation, messages, _cancelled: put_on_paper(conversation, messages, printer, lambda _wanted: {}),
    )
    qtbot.waitUntil(lambda: not files.is_busy)
    assert (tmp_path / "paper.pdf").read_bytes().startswith(b"%PDF")
