"""No error is passed over in silence: whoever catches everything says so, in the log at least."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.common.falls import Falls, passed_over

_ROOT = Path(__file__).parents[2]
_ALL = {"Exception", "BaseException"}
_SILENT_ANSWERS = {
    ("engine/untrusted_text/child.py", "_count"): "the library raises bare exceptions for what it cannot read",
    ("engine/runtime/load/foresight.py", "answers"): "asks whether something works",
    ("engine/runtime/load/library_models.py", "_without_compiler"): "asks whether something works",
}
"""Where an answer tells that it did not work, by file and function, and why that is enough."""


def _names(node: ast.expr | None) -> set[str]:
    if node is None:
        return {"BaseException"}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Continue | ast.Break)


def _is_plain_return(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Return) and (
        statement.value is None or isinstance(statement.value, ast.Constant | ast.Name)
    )


def silent_places(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, function, what) of each place where an error of any kind vanishes."""

    def look(node: ast.AST, function: str) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        is_suppress = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress"
        if is_suppress and any(_names(each) & _ALL for each in node.args):
            yield node.lineno, function, "suppress"
        if isinstance(node, ast.ExceptHandler) and _names(node.type) & _ALL:
            if all(map(_is_nothing, node.body)):
                yield node.lineno, function, "pass"
            elif len(node.body) == 1 and _is_plain_return(node.body[0]):
                yield node.lineno, function, "return"
        for child in ast.iter_child_nodes(node):
            yield from look(child, function)

    yield from look(ast.parse(source), "")


@pytest.mark.parametrize("package", ["engine", "app", "benchmarks", "installers"])
def test_nothing_is_passed_over_in_silence(package: str) -> None:
    found = []
    for path in sorted((_ROOT / package).rglob("*.py")):
        name = path.relative_to(_ROOT).as_posix()
        for line, function, what in silent_places(path.read_text(encoding="utf-8")):
            if what != "return" or (name, function) not in _SILENT_ANSWERS:
                found.append(f"{name}:{line} {what}")
    assert found == [], "use engine.common.falls.passed_over, or say what gave way with FALLS.say"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("with suppress(Exception):\n    f()", ["suppress"]),
        ("with contextlib.suppress(OSError, BaseException):\n    f()", ["suppress"]),
        ("with suppress(OSError):\n    f()", []),
        ("try:\n    f()\nexcept Exception:\n    pass", ["pass"]),
        ("try:\n    f()\nexcept:\n    ...", ["pass"]),
        ("for _ in x:\n    try:\n        f()\n    except (OSError, Exception):\n        continue", ["pass"]),
        ("def g():\n    try:\n        f()\n    except BaseException:\n        return None", ["return"]),
        ("try:\n    f()\nexcept Exception as error:\n    log(error)", []),
        ("try:\n    f()\nexcept OSError:\n    pass", []),
    ],
)
def test_what_the_rule_finds(source: str, what: list[str]) -> None:
    assert [each for _, _, each in silent_places(source)] == what


def test_what_is_passed_over_is_in_the_log_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), passed_over("The keyring was not read"):
        raise ValueError("a prompt")
    assert "The keyring was not read: ValueError" in caplog.text
    assert "a prompt" not in caplog.text


def test_falls_are_said_once_and_the_newest_reason_counts(caplog: pytest.LogCaptureFixture) -> None:
    falls = Falls()
    for why in ("it is full", "it is full", "it is gone."):
        falls.say("The pipeline", "one row after the other", why)
    falls.say("A card", "the others", "it stopped responding")
    assert falls.note == (
        "The pipeline gives way to one row after the other: it is gone. "
        "A card gives way to the others: it stopped responding."
    )
    assert len(caplog.records) == 3
    falls.is_over("The pipeline")
    assert falls.note.startswith("A card")
    for number in range(20):
        falls.say(f"Kernel {number}", "another", "it is wrong")
    assert falls.note.count(".") == 6
    falls.clear()
    assert falls.note == ""
