"""Keeps the translations with the code: `python installers/translations.py` adds new texts to every `.ts` file, removes
those that are gone, and says what waits to be translated.

Qt's own `lupdate` is not used: it misses plurals outside of `tr`, and texts whose number is not a plain name.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDER = CHECKOUT / "resources" / "translations"
FORMS = {"de": 2, "es": 2, "fr": 2, "ja": 1, "zh_CN": 1}
"""How many forms a text with a number has."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text to translate: where it is said, and whether its words depend on a number."""

    context: str
    source: str
    has_number: bool = False


@dataclass(frozen=True, slots=True)
class Translation:
    """Its forms; one, if they do not depend on a number."""

    forms: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return bool(self.forms) and all(self.forms)


def texts(checkout: Path = CHECKOUT) -> list[Text]:
    """Every text of the window and of the catalogue, each once for a context, in order."""
    found: dict[tuple[str, str], Text] = {}
    for path in sorted((checkout / "app").rglob("*.py")):
        for text in _texts_in(ast.parse(path.read_text(encoding="utf-8")), ""):
            key = (text.context, text.source)
            if key not in found or text.has_number:
                found[key] = text
    for context, said in _words_of_entries(checkout):
        found[context, said] = Text(context, said)
    for entry in json.loads((checkout / "resources" / "catalogue" / "catalogue.json").read_text("utf-8"))["models"]:
        for said in (entry["strengths"], entry["languages"]):
            found["Catalogue", said] = Text("Catalogue", said)
    return sorted(found.values(), key=lambda text: text.context)


def _words_of_entries(checkout: Path) -> Iterator[tuple[str, str]]:
    """(context, text) of what the window shows of the entries of settings and of lanes."""
    sys.path.insert(0, str(checkout))
    try:
        from engine.common.config import SamplingParams
        from engine.common.kept_context import KeptContextSettings
        from engine.common.lanes import LANES, SENSOR_LANES
        from engine.common.schema import Choice, Number, settings_of
        from engine.common.settings import LANGUAGES, kept_settings
    finally:
        sys.path.remove(str(checkout))
    said = ["Automatic"]
    for setting in (*kept_settings().values(), *settings_of(SamplingParams), *settings_of(KeptContextSettings)):
        if setting.name:
            said += [setting.card, setting.name, setting.help]
            if isinstance(setting.kind, Choice):
                said += [name for name in setting.kind.names.values() if name not in LANGUAGES.values()]
            elif isinstance(setting.kind, Number):
                said.append(setting.kind.special)
    for lane in (*LANES, *SENSOR_LANES):
        yield from (("Lane", text) for text in (lane.title, lane.help))
        yield from (("Lane", text) for track in lane.tracks for text in (track.words, track.short) if text)
    yield from (("Setting", text) for text in said if text)


def _texts_in(node: ast.AST, around: str) -> Iterator[Text]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield from _text_of(child, around)
        yield from _texts_in(child, child.name if isinstance(child, ast.ClassDef) else around)


def _text_of(call: ast.Call, around: str) -> Iterator[Text]:
    """`self.tr(text, "", n)` belongs to the class around it, `translate(context, text, "", n)` to the context."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    said = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if name == "tr" and said and isinstance(call.args[0], ast.Constant):
        yield Text(around, said[0], has_number=len(call.args) == 3)
    elif name in ("translate", "QT_TRANSLATE_NOOP") and len(said) > 1 and isinstance(call.args[1], ast.Constant):
        yield Text(said[0], said[1], has_number=len(call.args) == 4)


def read(path: Path) -> dict[tuple[str, str], Translation]:
    """What is translated in a `.ts` file, by context and source."""
    found: dict[tuple[str, str], Translation] = {}
    if path.exists():
        for context in ElementTree.parse(path).getroot().iter("context"):
            for message in context.iter("message"):
                said = message.find("translation")
                forms = () if said is None else [form.text or "" for form in said.iter("numerusform")]
                key = (context.findtext("name", ""), message.findtext("source", ""))
                found[key] = Translation(tuple(forms) or ((said.text if said is not None else "") or "",))
    return found


def write(path: Path, language: str, wanted: Iterable[Text], known: dict[tuple[str, str], Translation]) -> int:
    """Writes the file, whole or not at all; returns how many texts wait to be translated."""
    root = ElementTree.Element("TS", version="2.1", language=language, sourcelanguage="en")
    contexts: dict[str, list[Text]] = defaultdict(list)
    for text in wanted:
        contexts[text.context].append(text)
    waiting = 0
    for name, inside in contexts.items():
        context = ElementTree.SubElement(root, "context")
        ElementTree.SubElement(context, "name").text = name
        for text in inside:
            message = ElementTree.SubElement(context, "message", {"numerus": "yes"} if text.has_number else {})
            ElementTree.SubElement(message, "source").text = text.source
            said = ElementTree.SubElement(message, "translation")
            forms = FORMS[language] if text.has_number else 1
            translation = known.get((text.context, text.source), Translation(()))
            if not translation.is_whole or len(translation.forms) != forms:
                said.set("type", "unfinished")
                waiting += 1
            padded = (*translation.forms, *[""] * forms)[:forms]
            if text.has_number:
                for form in padded:
                    ElementTree.SubElement(said, "numerusform").text = form
            else:
                said.text = padded[0]
    ElementTree.indent(root, "    ")
    begun = path.with_name(f"{path.name}.new")
    head = '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE TS>\n'
    begun.write_text(head + ElementTree.tostring(root, encoding="unicode") + "\n", encoding="utf-8")
    begun.replace(path)
    return waiting


def main() -> int:
    """Updates every file; 1 if something waits."""
    wanted, left = texts(), 0
    for language in FORMS:
        path = FOLDER / f"switchyard_{language}.ts"
        waiting = write(path, language, wanted, read(path))
        left += waiting
        sys.stdout.write(f"{path.name}: {len(wanted)} texts, {waiting} to be translated\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
