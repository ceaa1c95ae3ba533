"""Renders chat templates like transformers, which is not imported here: that takes seconds, and torch.

A test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from engine.untrusted_text.provenance import Traced, formatted, joined, own, recased

MOST_CHARACTERS = 2**25
"""Longest output of a template: millions of tokens more than any model's context."""
_MOST_BITS = 2**16
"""Of a power."""


class TemplateRefusedError(Exception):
    """The template cannot be rendered with these messages; the argument briefly says why."""


def render(template: str, values: Mapping[str, Any]) -> Traced:
    """The template's output; what it wrote itself is marked as its own, and so is what of the values was its own.

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
    return joined(parts)


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


@jinja2.pass_eval_context
def _join(context: jinja2.nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    return jinja2.filters.sync_do_join(context, value, Traced(d) if type(d) is str else d, attribute)


def _title(value: Any) -> str:
    return recased(jinja2.filters.do_title(value), value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Marks every text in a template as its own, and keeps the marks where texts are put together."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str | list | tuple | dict):
            self.write(f"environment.own({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.own(")
        super().visit_TemplateData(node, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({super()._output_const_repr(group)})"


class _Environment(ImmutableSandboxedEnvironment):
    """Without powers of so many digits that they take hours in which nothing interrupts them."""

    intercepted_binops = frozenset({"**"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(joined)
    own = staticmethod(own)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        plain, pattern = super().wrap_str_format(value), getattr(value, "__self__", None)
        if plain is None or not isinstance(pattern, Traced):
            return plain
        formatter, is_map = SandboxedFormatter(self), value.__name__ == "format_map"

        def traced(*args: Any, **kwargs: Any) -> str:
            text = plain(*args, **kwargs)
            return formatted(text, pattern, formatter, () if is_map else args, args[0] if is_map else kwargs)

        return traced

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_BITS:
            raise OverflowError("it raises a number to a power of thousands of digits")
        return super().call_binop(context, operator, left, right)


@lru_cache(1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters.update(tojson=_to_json, join=_join, title=_title)
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment
