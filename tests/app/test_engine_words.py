"""The engine's sentences are known by their form, and said in the window's language with what was put in."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PySide6.QtCore import QLocale
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.engine_words import FORMS, said
from app.languages import Languages
from app.widgets.scaffold import WrappedLabel
from engine.tools import rounds

ENGINE = Path(__file__).resolve().parents[2] / "engine"
BUSY = "The graphics card limits the speed: it is busy 66% of the time, reading at 21.6 GB/s."


@pytest.fixture(scope="class")
def german(qapp: QApplication) -> Iterator[None]:
    before, languages = QLocale(), Languages(qapp, "de", system=QLocale("de_DE"))
    yield
    languages.uninstall()
    languages.deleteLater()
    QLocale.setDefault(before)


def _engine_texts() -> str:
    texts = []
    for path in [*ENGINE.rglob("*.py"), ENGINE.parent / "app" / "services" / "tools.py"]:  # which tells models, too
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values))  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts).casefold()


def test_the_engine_still_says_every_form() -> None:
    engine = _engine_texts()
    pieces = {form: [piece.strip(" .") for piece in re.split(r"\{\d\}", form)] for form in FORMS}
    gone = [form for form, some in pieces.items() if any(piece.casefold() not in engine for piece in some)]
    assert gone == []


def _why_tools_fail() -> Iterator[str]:
    """What tools and their servers can say, with names in the places of what is put in."""
    for path in (ENGINE / "tools").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error"):
                said = node.args[0] if node.args else None
                begins = "notes " if node.func.id == "TroubleError" else ""
                if isinstance(said, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "7" for part in said.values)
                    yield begins + "".join(map(str, parts))
                elif isinstance(said, ast.Constant) and isinstance(said.value, str):
                    yield begins + said.value
    yield from (rounds.DENIED, rounds.NO_SUCH_TOOL, rounds.STOPPED)
    use = rounds.ToolUse("1", "clock")
    once = rounds.Step(calls=(use,))
    yield rounds._lost_way((once,) * rounds.MOST_ALIKE)
    yield rounds._lost_way(
        tuple(rounds.Step(calls=(replace(use, name=f"t{n}"),)) for n in range(rounds.MOST_ROUNDS + 1))
    )
    yield rounds._lost_way((rounds.Step(calls=tuple(replace(use, name=f"t{n}") for n in range(99))),))


def test_in_english_it_stays_as_it_is(qapp: QApplication) -> None:
    assert said(BUSY) == BUSY


@pytest.mark.usefixtures("german")
class TestInGerman:
    def test_numbers_and_sentences_one_after_another(self) -> None:
        assert (
            said(BUSY)
            == "Die Grafikkarte begrenzt das Tempo: Sie ist 66\xa0% der Zeit beschäftigt und liest mit 21,6\xa0GB/s."
        )
        both = said(f"Plan: int4\n{BUSY} The CPU limits the speed. What else there is.")
        assert both.startswith("Plan: int4\nDie Grafikkarte")
        assert both.endswith(" Die CPU begrenzt das Tempo. What else there is.")

    def test_whatever_a_tool_says_of_itself(self) -> None:
        told = list(_why_tools_fail())
        assert len(told) > 35
        assert [words for words in told if said(words) == words] == []

    def test_a_part_of_a_sentence_that_is_known(self) -> None:
        words = said("RAM that is twice as fast would help most: 95.7 tokens/s, about 1.3 times as fast.")
        assert words == "Doppelt so schneller RAM würde am meisten helfen: 95,7 Token/s, etwa 1,3-mal so schnell."

    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from(FORMS), st.text("ab/\\:.{}% (1)„«", min_size=1, max_size=12))
    def test_what_was_put_in_is_said_again(self, form: str, name: str) -> None:
        holes = len(re.findall(r"\{\d\}", form))
        if holes and form.endswith("."):
            words = said(form.format(*[f"x{name}x"] * holes))
            assert f"x{name}x" in words
            assert words != form.format(*[f"x{name}x"] * holes)

    def test_a_label_says_it(self, qtbot: QtBot) -> None:
        label = WrappedLabel("There is no file /tmp/a.gguf: check the path.")
        qtbot.addWidget(label)
        assert label.text() == "Es gibt keine Datei /tmp/a.gguf: Prüfen Sie den Pfad."


def test_japanese_breaks_anywhere_and_is_not_shortened(qtbot: QtBot) -> None:
    label = WrappedLabel("日本語の長い文章は、どこででも改行できるので省略されません。" * 3)
    qtbot.addWidget(label)
    label.resize(120, 400)
    label.show()
    assert label.shown == label.text()
