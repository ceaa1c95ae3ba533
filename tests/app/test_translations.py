"""Every text of the window can be translated: the tool finds it, and what was translated is shown."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import PySide6
import pytest
from PySide6.QtCore import QLocale
from PySide6.QtWidgets import QApplication, QPushButton
from pytestqt.qtbot import QtBot

from app.main import install_translations, translations_dir
from app.services.api_server import ApiServer
from app.services.endpoints import Endpoints
from app.services.loading_pace import LoadingPace
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.chat.model_picker import loading_words
from app.views.settings import SettingsPage
from app.widgets.quantities import SEPARATOR
from engine.protocol import LoadPhase, Progress
from tests.app.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(PySide6.__file__).parent
SUFFIX = ".exe" if sys.platform == "win32" else ""

SHOWS_TEXT = frozenset(
    (
        "setText", "setToolTip", "setAccessibleName", "setAccessibleDescription", "setPlaceholderText", "setTitle",
        "setWindowTitle", "setInformativeText", "setSuffix", "setPrefix", "setSpecialValueText", "addAction",
        "addButton", "addItem", "add_action", "set_heading", "show_notes", "show_text", "set_message",
        "muted_label", "Card", "QLabel", "QPushButton", "QToolButton", "QCheckBox", "QRadioButton", "QAction",
    )
)  # fmt: skip
SAME_EVERYWHERE = frozenset(("Switchyard", "Esc", "https://huggingface.co"))


def _tool(name: str) -> str:
    """Qt's translation tools come with PySide6; on Linux and macOS in different folders."""
    for place in (TOOLS / f"{name}{SUFFIX}", TOOLS / "Qt" / "libexec" / f"{name}{SUFFIX}"):
        if place.is_file():
            return str(place)
    pytest.skip(f"this PySide6 has no {name}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Every text that the tool finds."""
    target = tmp_path / "switchyard_de.ts"
    files = [str(path) for path in sorted((ROOT / "app").rglob("*.py"))]
    subprocess.run([_tool("lupdate"), *files, "-ts", str(target)], check=True, capture_output=True)
    return target


def test_every_text_has_a_context(source: Path) -> None:
    contexts = ElementTree.parse(source).getroot().findall("context")
    assert len(contexts) > 10
    assert [m.findtext("source") for c in contexts if not c.findtext("name") for m in c.findall("message")] == []


def test_every_phase_of_loading_has_words_that_can_be_translated(source: Path) -> None:
    contexts = ElementTree.parse(source).getroot().findall("context")
    (loading,) = [context for context in contexts if context.findtext("name") == "Loading"]
    found = {message.findtext("source") for message in loading.findall("message")}
    words = set()
    for phase in get_args(LoadPhase):
        pace = LoadingPace()
        pace.note(Progress("load", phase, 1, 2))
        words.add(loading_words(pace).split(SEPARATOR)[0])
    assert len(words) == len(get_args(LoadPhase))
    assert words <= found


def test_no_text_is_translated_in_a_spelling_that_the_tool_misreads() -> None:
    """A bare `tr("…")` would be filed under the class around it, and looked up under another name."""
    wrong = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "app").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("tr", "_tr")
    ]
    assert wrong == []


def _calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(where, name of what is called, the call) of all code of the window."""
    for path in sorted((ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                yield f"{path.name}:{node.lineno}", name, node


def test_the_tool_finds_every_text(source: Path) -> None:
    """A text that is put together before it is translated is found by nobody."""
    found = {message.findtext("source") for message in ElementTree.parse(source).getroot().iter("message")}
    missed = []
    for where, name, call in _calls():
        takes_text = (name == "tr" and len(call.args) == 1) or (name == "translate" and len(call.args) == 2)
        if takes_text and (name == "tr" or isinstance(getattr(call.args[0], "value", 0), str)):
            text = call.args[-1]
            if not isinstance(text, ast.Constant) or text.value not in found:
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


def test_a_translation_is_shown(
    source: Path, qapp: QApplication, qtbot: QtBot, settings: Settings, theme: ThemeController
) -> None:
    tree = ElementTree.parse(source)
    for message in tree.getroot().iter("message"):
        translation = message.find("translation")
        if translation is not None:
            translation.text = f"«{message.findtext('source')}»"
            translation.attrib.clear()
    tree.write(source, encoding="utf-8", xml_declaration=True)
    subprocess.run([_tool("lrelease"), str(source)], check=True, capture_output=True)
    installed = install_translations(qapp, QLocale("de_CH"), source.parent)
    try:
        page = SettingsPage(settings, theme, ApiServer(ScriptedEngine(), settings), Endpoints(settings))  # type: ignore[arg-type]
        qtbot.addWidget(page)
        texts = {button.text() for button in page.findChildren(QPushButton)}
        assert {"«System»", "«Light»", "«Dark»", "«Licences»"} <= texts
        assert all(text.startswith("«") for text in texts if text)
    finally:
        for translator in installed:
            qapp.removeTranslator(translator)
            translator.deleteLater()


def test_without_a_translation_the_text_is_english(qapp: QApplication, tmp_path: Path) -> None:
    before = qapp.translate("AboutCard", "About")
    installed = install_translations(qapp, QLocale("en_GB"), tmp_path)
    assert qapp.translate("AboutCard", "About") == before == "About"
    for translator in installed:
        qapp.removeTranslator(translator)
    assert translations_dir().is_dir()
