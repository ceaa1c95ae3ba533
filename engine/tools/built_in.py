"""Tools of our own: functions of their arguments, and of the folders that a chat has attached."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.common.chat import Tool
from engine.common.config import BatchJob
from engine.common.paths import data_dir
from engine.common.untrusted import reason

MOST_RESULT = 60_000
"""Characters of a result that a model is given."""
MOST_EXPRESSION = 500
MOST_POWER_BITS = 100_000
MOST_ROWS = 1000
"""Of a batch that a model may start."""


class ToolError(Exception):
    """Why a tool has no result, as a sentence."""


def shortened(text: str) -> str:
    """A result as a model is given it."""
    if len(text) <= MOST_RESULT:
        return text
    return f"{text[:MOST_RESULT]}\n[cut off here: {len(text):,} characters in all]"


def _schema(properties: dict[str, Any], *required: str) -> str:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return json.dumps(schema)


_TEXT = {"type": "string"}
CALCULATOR = Tool(
    "calculator",
    "Computes an arithmetic expression exactly, such as (17.5 * 3) ** 2 / 4 or sqrt(2) + log(10).",
    _schema({"expression": _TEXT}, "expression"),
)
CLOCK = Tool("clock", "Says the date, the weekday, the time and the time zone of this computer.", _schema({}))
READ_FILE = Tool(
    "read_file",
    "Reads a text file of the folders that the user attached to this chat, by its path within the folder.",
    _schema({"path": _TEXT}, "path"),
)
SEARCH = Tool(
    "search_documents",
    "Finds the passages of the documents attached to this chat that fit a question best.",
    _schema({"question": _TEXT}, "question"),
)
RUN_BATCH = Tool(
    "run_batch",
    "Starts a batch job in this program that answers the same prompt for each row, and returns at once. {text} in the "
    "prompt stands for the row.",
    _schema(
        {"prompt": _TEXT, "rows": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MOST_ROWS}},
        "prompt",
        "rows",
    ),
)
BUILT_IN = (CALCULATOR, CLOCK, READ_FILE, RUN_BATCH, SEARCH)
"""In the order of their names."""
UNASKED = frozenset((CALCULATOR.name, CLOCK.name, SEARCH.name))
"""Those that change nothing and read no more than what a chat sends anyway."""


def run_built_in(name: str, arguments: dict[str, Any], folders: tuple[str, ...]) -> str:
    """What a tool returns.  Takes a moment: not for the window's thread.

    Raises:
        ToolError: there is no result.
    """
    if name == CALCULATOR.name:
        return calculate(str(arguments.get("expression", "")))
    if name == CLOCK.name:
        return time.strftime("%A, %Y-%m-%d %H:%M:%S %Z (UTC%z)")
    if name == READ_FILE.name:
        return read_file(str(arguments.get("path", "")), folders)
    if name == SEARCH.name:
        raise ToolError("No documents are attached to this chat.")
    raise ToolError(f"There is no tool named {name[:60]!r}.")


def begin_batch(arguments: dict[str, Any]) -> tuple[BatchJob, int, str]:
    """Writes the rows of a batch; returns the job to queue, how many rows it has, and a sentence about it.

    Raises:
        ToolError: there is nothing to answer, or no place for it.
    """
    prompt, rows = str(arguments.get("prompt", "")), arguments.get("rows")
    if not prompt.strip() or not isinstance(rows, list) or not 0 < len(rows) <= MOST_ROWS:
        raise ToolError(f"A batch has a prompt and 1 to {MOST_ROWS:,} rows.")
    folder = data_dir() / "batches-of-chats"
    name = time.strftime("%Y-%m-%d-%H%M%S")
    text = io.StringIO()
    csv.writer(text).writerows([["text"], *([str(row)] for row in rows)])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = len(list(folder.glob(f"{name}*")))
        rows_file = folder / f"{name}-{taken}.csv"
        rows_file.write_text(text.getvalue(), encoding="utf-8", newline="")
    except OSError as error:
        raise ToolError(f"The rows cannot be written to {folder} ({reason(error)}).") from None
    template = prompt.replace("{{text}}", "{text}")
    template = template.replace("{text}", "{{text}}") if "{text}" in template else f"{template}\n\n{{{{text}}}}"
    result = rows_file.with_name(f"{rows_file.stem}-answers.csv")
    told = f"The job with {len(rows):,} rows has begun; the page Batch shows it, and its answers come into {result}."
    return BatchJob(str(rows_file), str(result), template=template), len(rows), told


def read_file(path: str, folders: tuple[str, ...]) -> str:
    """The text of a file in one of the folders, links that lead out of it excepted.

    Raises:
        ToolError: there is none that may be read.
    """
    if not folders:
        raise ToolError("No folder is attached to this chat: attach one first.")
    for folder in folders:
        root = Path(folder).resolve()
        try:
            place = (root / path.removeprefix(f"{root.name}/")).resolve()
            if not place.is_file():
                place = (root / path).resolve()
            if not place.is_relative_to(root) or not place.is_file():
                continue
            with place.open("rb") as file:
                content = file.read(4 * MOST_RESULT)
        except (OSError, ValueError) as error:
            raise ToolError(f"The file {path[:120]} cannot be read ({reason(error)}).") from None
        if b"\0" in content[:4096]:
            raise ToolError(f"The file {path[:120]} is no text.")
        return shortened(content.decode("utf-8", "replace"))
    raise ToolError(f"No attached folder has a file {path[:120]!r}.")


# Arithmetic


def _power(base: Any, exponent: Any) -> Any:
    are_whole = isinstance(base, int) and isinstance(exponent, int)
    if are_whole and abs(exponent) * max(1, base.bit_length()) > MOST_POWER_BITS:
        raise ToolError("The result has too many digits.")
    return base**exponent


def _times(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_POWER_BITS:
        raise ToolError("The result has too many digits.")
    return left * right


def _factorial(number: Any) -> Any:
    if not isinstance(number, int) or not 0 <= number <= 1000:
        raise ToolError("A factorial is of a whole number from 0 to 1000.")
    return math.factorial(number)


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_NAMES: dict[str, Any] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin")},
    **{name: getattr(math, name) for name in ("acos", "atan", "atan2", "degrees", "radians", "floor", "ceil", "gcd")},
    "factorial": _factorial,
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression.

    Raises:
        ToolError: it is none, or has none.
    """
    expression = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if not expression or len(expression) > MOST_EXPRESSION:
        raise ToolError(f"An expression has 1 to {MOST_EXPRESSION} characters.")
    try:
        value = _value(ast.parse(expression, mode="eval").body)
        if isinstance(value, complex):
            raise ToolError("The result is no real number.")
        return f"{value:.15g}" if isinstance(value, float) else str(value)
    except ZeroDivisionError:
        raise ToolError("The expression divides by zero.") from None
    except SyntaxError as error:
        raise ToolError(f"The expression cannot be read ({error.msg}).") from None
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise ToolError(f"The expression cannot be computed ({str(error)[:80]}).") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if isinstance(node, ast.Call) and called in _FUNCTIONS and not node.keywords:
        return _FUNCTIONS[called](*map(_value, node.args))
    raise ToolError("Only numbers, + - * / // % **, and functions such as sqrt, log, sin and round are computed.")
