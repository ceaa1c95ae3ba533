"""Every text of the window, also the engine's, is translated whole into every language, and is shown so at once."""

import ast
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PySide6.QtCore import QLocale, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLabel, QPushButton, QScrollArea
from pytestqt.qtbot import QtBot

from app.engine_words import FORMS, said
from app.languages import (
    ENGLISH,
    LANGUAGES,
    SYSTEM,
    Languages,
    compile_translation,
    language_for,
    locale_for,
    missing_words,
    translations_dir,
)
from app.main import speak_as_set
from app.services.api_server import ApiServer
from app.services.endpoints import Endpoints
from app.services.engine_request import LoadingPace
from app.services.settings import Settings
from app.services.tools import Tools
from app.theme import ThemeController
from app.views.chat.model_picker import loading_words
from app.views.settings.page import SettingsPage
from app.widgets.page import BATCH, CHAT, MODELS, MONITOR, SETTINGS, TUNE
from app.widgets.quantities import SEPARATOR, file_size, number, percent
from app.widgets.scaffold import WrappedLabel
from engine.protocol import LoadPhase, Progress
from engine.tools import rounds
from tests.app.scripted_engine import ScriptedEngine
from tests.app.stage import SCENES, Stage, staged

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "installers"))
try:
    import translations as maker
finally:
    sys.path.remove(str(ROOT / "installers"))

TRANSLATED = tuple(language for language in LANGUAGES if language != ENGLISH)

SHOWS_TEXT = frozenset(
    (
        "setText", "setToolTip", "setAccessibleName", "setAccessibleDescription", "setPlaceholderText", "setTitle",
        "setWindowTitle", "setInformativeText", "setSuffix", "setPrefix", "setSpecialValueText", "addAction",
        "addButton", "addItem", "add_action", "set_heading", "show_notes", "show_text", "set_message",
        "muted_label", "Card", "QLabel", "QPushButton", "QToolButton", "QCheckBox", "QRadioButton", "QAction",
    )
)  # fmt: skip
SAME_EVERYWHERE = frozenset(("Switchyard", "Esc", "https://huggingface.co"))


@cache
def all_texts() -> Any:
    """Not when this is imported, which every worker does: all of the window's source is read for them."""
    return maker.texts(ROOT)


@cache
def known_in(language: str) -> Any:
    return maker.read(translations_dir() / f"switchyard_{language}.ts")


@pytest.fixture
def speak(qapp: QApplication) -> Iterator[Callable[..., Languages]]:
    """Has the application speak a language; as before after the test."""
    made: list[Languages] = []
    before = QLocale()

    def make(choice: str = SYSTEM, system: str = "C", folder: Path | None = None) -> Languages:
        made.append(Languages(qapp, choice, system=QLocale(system), folder=folder))
        return made[-1]

    yield make
    for languages in made:
        languages.uninstall()
        languages.deleteLater()
    QLocale.setDefault(before)


# --- what is found ----------------------------------------------------------------------------------


def test_every_text_has_a_context() -> None:
    assert len({text.context for text in all_texts()}) > 100
    assert [text for text in all_texts() if not text.context or not text.source.strip()] == []


def test_every_phase_of_loading_has_words_that_can_be_translated() -> None:
    found = {text.source for text in all_texts() if text.context == "Loading"}
    words = set()
    for phase in get_args(LoadPhase):
        pace = LoadingPace()
        pace.note(Progress("load", phase, 1, 2))
        words.add(loading_words(pace).split(SEPARATOR)[0])
    assert len(words) == len(get_args(LoadPhase))
    assert words <= found


@cache
def _calls() -> list[tuple[str, str, ast.Call]]:
    """(where, name of what is called, the call) of all code of the window."""
    found = []
    for path in sorted((ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                found.append((f"{path.name}:{node.lineno}", name, node))
    return found


def test_every_text_is_found() -> None:
    """A text that is put together before it is translated is found by nobody.

    A bare `tr("…")` would be filed under the class around it, and looked up under another name.
    """
    found = {text.source for text in all_texts()}
    elsewhere = {"Engine", "Catalogue", "Setting", "Lane"}  # found where they are listed
    missed = []
    for where, name, call in _calls():
        if isinstance(call.func, ast.Name) and name in ("tr", "_tr"):
            missed.append(f"{where} {ast.unparse(call)[:60]}")
        if isinstance(call.args[:1] and call.args[0], ast.Constant) and call.args[0].value in elsewhere:
            continue
        at = {"tr": 0, "translate": 1}.get(name, -1)
        if 0 <= at < len(call.args) and (name == "tr" or isinstance(getattr(call.args[0], "value", 0), str)):
            text = call.args[at]
            if not isinstance(text, ast.Constant) or text.value not in found or call.keywords:
                missed.append(f"{where} {ast.unparse(text)[:60]}")
    assert missed == []


def test_no_text_is_shown_without_its_translation() -> None:
    missed = []
    for where, name, call in _calls():
        if name in SHOWS_TEXT:
            for text in call.args:
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    said = text.value
                    if re.search(r"[A-Za-z]{2,}", said) and said not in SAME_EVERYWHERE:
                        missed.append(f"{where} {said!r}")
    assert missed == []


# --- what is translated -----------------------------------------------------------------------------


@pytest.mark.parametrize("language", TRANSLATED)
def test_nothing_waits_to_be_translated(language: str) -> None:
    """`python installers/translations.py` says what does."""
    known = known_in(language)
    forms = {text: maker.FORMS[language] if text.has_number else 1 for text in all_texts()}
    assert [text for text in all_texts() if (text.context, text.source) not in known] == []
    assert [text for text in all_texts() if not known[text.context, text.source].is_whole] == []
    assert [text for text in all_texts() if len(known[text.context, text.source].forms) != forms[text]] == []
    assert set(known) == {(text.context, text.source) for text in all_texts()}


def _marks(text: str) -> Counter[str]:
    """What code puts in, and what Qt reads: `{0}`, `{name}`, `%n`, `<b>`, tabs before keys, suffixes of file names."""
    places = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    return Counter(places + re.findall(r"%n|%\d|</?\w+>|\t|\n|\\n|\*\.\w+|\{\{|\}\}|“switchyard [^”]*”", text))


@pytest.mark.parametrize("language", TRANSLATED)
def test_what_is_put_into_a_text_has_its_place_in_every_language(language: str) -> None:
    wrong = []
    for text in all_texts():
        for form in known_in(language)[text.context, text.source].forms:
            mine, its = _marks(form), _marks(text.source)
            commands = {mark for mark in (*mine, *its) if mark.startswith("“")}
            if any(mine[mark] != its[mark] for mark in {*mine, *its} - commands):
                wrong.append((text.source, form))
            if any(command[1:-1] not in form for command in commands):
                wrong.append((text.source, form))
            if text.source.endswith("…") != form.endswith("…"):
                wrong.append((text.source, form))
    assert wrong == []


@pytest.mark.parametrize("language", TRANSLATED)
def test_one_word_of_the_interface_is_called_the_same_everywhere(language: str) -> None:
    """A page is named as its heading is; an accelerator is named by nobody."""
    said = {text.source: known_in(language)[text.context, text.source].forms[0] for text in all_texts()}
    for context, source in (("SettingsPage", "Settings"), ("TunePage", "Tune"), ("BatchPage", "Batch")):
        assert known_in(language)["Pages", source] == known_in(language)[context, source]
    assert not [form for form in said.values() if re.search(r"&\w", form)]


def test_plurals_are_right_in_number(speak: Callable[..., Languages], qapp: QApplication) -> None:
    for language, expected in (
        ("de", {1: "1 Thread", 2: "2 Threads", 0: "0 Threads"}),
        ("fr", {1: "1 thread", 2: "2 threads", 0: "0 thread"}),
    ):
        speak(language)
        for n, words in expected.items():
            assert qapp.translate("Tune", "best with {0} threads", "", n).format(n).endswith(words)


# --- what is shown ----------------------------------------------------------------------------------


def test_a_translation_is_shown(
    tmp_path: Path,
    qapp: QApplication,
    qtbot: QtBot,
    settings: Settings,
    theme: ThemeController,
    speak: Callable[..., Languages],
) -> None:
    forms = {text: maker.FORMS["de"] if text.has_number else 1 for text in all_texts()}
    made = {(text.context, text.source): maker.Translation((f"«{text.source}»",) * forms[text]) for text in all_texts()}
    assert maker.write(tmp_path / "switchyard_de.ts", "de", all_texts(), made) == 0
    assert speak(system="de_CH", folder=tmp_path).language == "de"
    server = ApiServer(ScriptedEngine(), settings)  # type: ignore[arg-type]
    tools = Tools(settings, lambda: pytest.fail("no documents here"), lambda _job, _rows: None)
    page = SettingsPage(settings, theme, server, Endpoints(settings), tools)
    qtbot.addWidget(page)
    texts = {button.text() for button in page.findChildren(QPushButton)}
    assert {"«System»", "«Light»", "«Dark»", "«Licences»"} <= texts
    assert all(text.startswith("«") for text in texts if text)
    page.close_down()


def test_without_a_translation_the_text_is_english(
    qapp: QApplication, tmp_path: Path, speak: Callable[..., Languages]
) -> None:
    languages = speak(system="pl_PL", folder=tmp_path)
    assert (languages.language, languages.missing) == (ENGLISH, "polski")
    assert qapp.translate("AboutCard", "About") == "About"
    assert "polski" in missing_words(languages.missing)
    assert number(1.5, 1) == "1,5"  # as the system has it
    assert speak(system="en_GB").missing == ""


FOLLOWED = {
    "de_AT": "de", "fr_CA": "fr", "es_MX": "es", "ja_JP": "ja", "zh_CN": "zh_CN", "zh_SG": "zh_CN",
    "zh_TW": None, "pl_PL": None, "C": ENGLISH, "en_US": ENGLISH,
}  # fmt: skip


@pytest.mark.parametrize(("system", "language"), FOLLOWED.items())
def test_the_language_follows_the_systems(system: str, language: str | None) -> None:
    assert language_for(QLocale(system)) == language


def test_numbers_are_as_the_language_and_the_territory_have_them(speak: Callable[..., Languages]) -> None:
    assert locale_for("de", QLocale("de_CH")).name() == "de_CH"
    assert locale_for("fr", QLocale("en_CA")).name() == "fr_CA"
    assert locale_for("ja", QLocale("en_US")).name() == "ja_JP"
    speak("de", system="de_DE")
    assert (file_size(12_345_000_000), percent(0.5)) == ("12,3\xa0GB", "50\xa0%")
    speak("fr", system="fr_FR")
    assert (file_size(12_345_000_000), percent(0.5)) == ("12,3\xa0Go", "50\xa0%")


def test_a_language_that_nobody_knows_is_the_systems(speak: Callable[..., Languages], settings: Settings) -> None:
    settings.set("language", "xx")
    assert settings.language == SYSTEM
    assert speak("xx", system="de_DE").language == "de"


def test_a_translation_that_cannot_be_compiled_leaves_the_window_english(
    qapp: QApplication, tmp_path: Path, speak: Callable[..., Languages]
) -> None:
    (tmp_path / "switchyard_de.ts").write_text("<TS", encoding="utf-8")
    speak("de", folder=tmp_path)
    assert qapp.translate("AboutCard", "About") == "About"
    assert not compile_translation(tmp_path / "none.ts", tmp_path / "none.qm")
    assert not [path for path in tmp_path.rglob("*") if ".qm" in path.name]


@pytest.mark.qt_log_ignore("does not support", extend=True)  # the offscreen platform has no pop-up windows
def test_the_language_is_chosen_by_mouse_and_nothing_is_lost(
    settings: Settings, theme: ThemeController, tmp_path: Path, speak: Callable[..., Languages]
) -> None:
    languages = speak(ENGLISH)
    with staged(settings, theme, tmp_path) as stage:
        window = stage.window
        stage.show(window.size())
        speak_as_set(languages, settings, window)
        stage.open_conversation()
        stage.chat.presenter.regenerate(stage.chat.presenter.model.last.id)
        stage.engine.write("Half of an ")
        answering, chat = stage.chat.presenter.answering_id, stage.chat.presenter.conversation.id
        QTest.keyClicks(stage.chat.composer.box, "a draft")
        for name in (BATCH, MONITOR, TUNE, MODELS):
            window.show_page(name)
            stage.breathe(20)
        SCENES["settings"](stage)
        page = window.page(SETTINGS)
        assert isinstance(page, SettingsPage)
        choose(stage, page, "Deutsch")
        stage.until(lambda: window.page(SETTINGS) is not page)
        page = window.page(SETTINGS)
        assert (settings.language, languages.language) == ("de", "de")
        stage.until(page.cards["Appearance"].controls["language"].hasFocus)
        assert window.sidebar.button(SETTINGS).accessibleName() == "Einstellungen"
        assert "Darstellung" in {label.text() for label in page.findChildren(QLabel)}
        stage.engine.write("answer.")
        window.show_page(CHAT)
        stage.breathe(60)
        assert stage.chat.composer.text == "a draft"
        assert stage.chat.presenter.conversation.id == chat
        assert stage.chat.presenter.answering_id == answering
        assert "Half of an answer." in stage.chat.presenter.model.last.content
        stage.engine.finish()
        stage.until(lambda: stage.chat.presenter.answering_id is None)
        for name in (BATCH, MONITOR, TUNE, MODELS):
            window.show_page(name)
            stage.breathe(20)
        heads = {label.text() for label in window.pages.currentWidget().findChildren(QLabel)}
        assert "Modelle" in heads
        window.show_page(SETTINGS)
        choose(stage, page, "English")
        stage.until(lambda: window.sidebar.button(SETTINGS).accessibleName() == "Settings")


def test_what_is_half_done_stays_until_it_is_done(
    settings: Settings, theme: ThemeController, tmp_path: Path, speak: Callable[..., Languages]
) -> None:
    languages = speak(ENGLISH)
    with staged(settings, theme, tmp_path) as stage:
        window = stage.window
        stage.show(window.size())
        speak_as_set(languages, settings, window)
        stage.fill_form()
        form = stage.batch.form
        form.template.edit.setPlainText("Say {{text}} again")
        window.show_page(CHAT)
        stage.chat.new_scratch()
        scratch = stage.chat.presenter.conversation.id
        stage.chat.composer.set_text("never stored")
        stage.chat.presenter.set_draft("never stored")
        window.show_page(SETTINGS)
        settings.language = "fr"
        stage.until(lambda: window.sidebar.button(BATCH).accessibleName() == "Lots")
        window.show_page(BATCH)
        assert stage.batch.form is form
        assert form.template.template == "Say {{text}} again"
        form.foot.cancel.click()
        window.show_page(CHAT)
        assert (stage.chat.presenter.conversation.id, stage.chat.presenter.is_scratch) == (scratch, True)
        assert stage.chat.composer.text == "never stored"
        window.show_page(BATCH)
        assert stage.batch.form is not form


def choose(stage: Stage, page: SettingsPage, name: str) -> None:
    """Chooses a language as people do."""
    box = page.cards["Appearance"].controls["language"]
    area = page.findChild(QScrollArea)
    area.ensureWidgetVisible(box)
    QTest.mouseClick(box, Qt.MouseButton.LeftButton)
    stage.breathe(QApplication.doubleClickInterval() + 50)  # until then the list takes a click for that which opened it
    view = box.view()
    row = view.visualRect(box.model().index(box.findText(name), 0))
    QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=row.center())


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
