"""The documents show commands and links that exist, and stay as short as they are meant to be."""

import argparse
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from engine.cli import VERBS

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((CHECKOUT / "docs").glob("*.md")),
    CHECKOUT / "docs" / "cards" / "README.md",
]
_CODE = re.compile(r"^```.*?^```|`(?:[^`\n]|\n(?!\n))+`|^ {4}\S.*$", re.MULTILINE | re.DOTALL)
_SWITCHYARD = re.compile(r"(?:^|\s|/)switchyard +(?P<rest>[^#]+)")
_PYTHON = re.compile(r"\bpython3? +(?:-m +(?P<module>[\w.]+)|(?P<script>installers/\w+\.py))(?P<rest>[^#]*)")


def _commands(document: Path) -> Iterator[str]:
    """Each on a line, as it stands in code."""
    for code in _CODE.findall(document.read_text(encoding="utf-8")):
        whole = code.replace("\\\n", " ") if code.startswith("```") else code.replace("\n", " ")
        for line in whole.splitlines():
            yield line.strip("` ").replace(r"\|", "|")


@lru_cache
def _parser_of(verb: str) -> argparse.ArgumentParser:
    parsers = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"engine.verbs.{verb}").add_parser(parsers)
    return parsers.choices[verb]


def _kinds(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def _options(parser: argparse.ArgumentParser) -> set[str]:
    own = {option for action in parser._actions for option in action.option_strings}
    return own.union(*map(_options, _kinds(parser).values()))


def _wrong_with(rest: str) -> str:
    """What a `switchyard` with these words after it names that is not there; empty if nothing is."""
    verb, *words = rest.split()
    if not re.fullmatch(r"[a-z]+", verb):
        return ""  # an option, or whatever stands for a verb
    if verb not in VERBS:
        return verb
    parser = _parser_of(verb)
    kinds = _kinds(parser)
    kind = words[0] if words else ""
    if kinds and re.fullmatch(r"[a-z-]+[a-z]", kind):
        if kind not in kinds:
            return f"{verb} {kind}"
        parser = kinds[kind]
    known = _options(parser) | _options(_parser_of(verb)) if parser is not _parser_of(verb) else _options(parser)
    return " ".join(sorted({*re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)} - known))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_are_shown_exist(document: Path) -> None:
    wrong = []
    for line in _commands(document):
        for found in _SWITCHYARD.finditer(line):
            wrong += [f"{line}: {what}" for what in [_wrong_with(found["rest"])] if what]
        for found in _PYTHON.finditer(line):
            script, module = found["script"], found["module"]
            if script and not (CHECKOUT / script).is_file():
                wrong.append(line)
            if module and module.split(".")[0] in ("engine", "app", "tests") and not importlib.util.find_spec(module):
                wrong.append(line)
    assert not wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    for line in _commands(document):
        for name in re.findall(r"(?<![\w/.-])(?:app|engine|installers|tests)/[\w/.*-]*\w", line):
            assert list(CHECKOUT.glob(name)) or re.search(r"/[A-Z]+\b", name), name  # `NAME.py` stands for one
        # One beside another is named without its folder.
        if re.fullmatch(r"(?:[a-z_]+/)*[a-z_]+\.py", line):
            assert any(path.endswith(f"/{line}") for path in _modules()), line


@lru_cache
def _modules() -> list[str]:
    folders = ("app", "engine", "installers", "tests")
    return [f"/{path.relative_to(CHECKOUT).as_posix()}" for each in folders for path in (CHECKOUT / each).rglob("*.py")]


def _missing_tests(text: str) -> list[str]:
    """`tests/...py::test_name` in code that are not there."""
    named = {(file, name) for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)}
    return [
        f"{file}::{name}"
        for file, name in sorted(named)
        if not (CHECKOUT / file).is_file()
        or not re.search(rf"^(async )?def {name}\(", (CHECKOUT / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    assert not _missing_tests(document.read_text(encoding="utf-8"))
    assert _missing_tests("`tests/unit/test_documents.py::test_nothing`")


def test_each_claim_about_how_it_works_is_short_and_names_the_tests_that_hold_it() -> None:
    title, aim, *blocks = (CHECKOUT / "docs" / "how-it-works.md").read_text(encoding="utf-8").rstrip().split("\n\n")
    assert title.startswith("#")
    assert not aim.startswith("**")
    claim: list[str] = []
    for block in blocks:
        if block.startswith("> "):
            assert claim, f"nothing stands before {block.splitlines()[0]}"
            assert re.match(r"> Held by `tests/[\w/]+\.py", block), claim[0]
            assert sum(len(each.split()) for each in claim if not each.startswith("Code: ")) <= 240, claim[0]
            claim = []
        elif not block.startswith("## "):
            # What begins in bold, or under a heading, is another claim: the one before it is held by then.
            assert not (claim and block.startswith("**")), claim[0]
            claim.append(block)
        else:
            assert not claim, claim[0]
    assert not claim, claim[0]


def test_what_does_not_exist_is_seen() -> None:
    assert _wrong_with("dance --now") == "dance"
    assert _wrong_with("models dance") == "models dance"
    assert _wrong_with("serve --model M --dance") == "--dance"
    assert not _wrong_with("bench prefill --peers --model M")


def test_commands_of_the_readme_are_those_of_set_up() -> None:
    sys.path.insert(0, str(CHECKOUT / "installers"))
    try:
        start = importlib.import_module("start")
    finally:
        sys.path.pop(0)
    shown = [line for line in _commands(CHECKOUT / "README.md") if "installers/start.py" in line]
    assert len(shown) == 2
    for line in shown:
        words = shlex.split(line, comments=True)[2:]
        assert all(hasattr(start, word) for word in words)


def test_pull_requests_run_the_command_that_the_readme_shows_for_tests() -> None:
    workflow = (CHECKOUT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    command = "python3 installers/start.py test"
    assert command in (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert f"run: {command}\n" in workflow
    assert "pull_request:\n" in workflow
    for system in ("ubuntu", "windows", "macos"):
        assert f"on: {system}-" in workflow


def test_no_workflow_may_write_but_where_a_release_is_made() -> None:
    for workflow in (CHECKOUT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text(encoding="utf-8")
        assert "\npermissions:\n  contents: read\n" in text
        assert "pull_request_target" not in text
        writing = [line for line in text.splitlines() if re.search(r"^\s*[\w-]+: write\b", line)]
        assert len(writing) == (workflow.name == "packages.yml")


def _anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ +(.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = _CODE.sub("", document.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_the_changelog_fits_a_screen() -> None:
    lines = (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= 130
