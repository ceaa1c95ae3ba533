"""Renders chat templates like transformers, which is not imported here: that takes seconds, and torch.

A test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 2**25
"""Longest output of a template: millions of tokens more than any model's context."""
_MOST_BITS = 2**16
"""Of a power."""


class TemplateRefusedError(Exception):
    """The template cannot be rendered with these messages; the argument briefly says why."""


def render(template: str, values: Mapping[str, Any]) -> str:
    """The template's output.

    Raises:
        TemplateRefusedError: it is broken, rejects these values, or writes too much.
    """
    parts, length = [], 0
    try:
        for part in _compiled(template).generate(**values):
            parts.append(part)
            length += len(part)
            if length > MOST_CHARACTERS:
                break
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: any exception is its fault
        raise TemplateRefusedError((str(error).strip().splitlines() or [type(error).__name__])[0][:200]) from None
    if length > MOST_CHARACTERS:
        raise TemplateRefusedError(f"it writes more than {MOST_CHARACTERS:,} characters")
    return "".join(parts)


@lru_cache(4)
def literal_text(template: str) -> str:
    """The literal text of a template, joined by NUL characters; empty if it cannot be parsed."""
    try:
        tree = _environment().parse(template)
    except (jinja2.TemplateError, RecursionError):
        return ""
    pieces = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    pieces |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return "\0".join(pieces)


@lru_cache(4)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training: ignored here."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without class attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without attributes that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Environment(ImmutableSandboxedEnvironment):
    """Without powers of so many digits that they take hours in which nothing interrupts them."""

    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_BITS:
            raise OverflowError("it raises a number to a power of thousands of digits")
        return super().call_binop(context, operator, left, right)


@lru_cache(1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment
