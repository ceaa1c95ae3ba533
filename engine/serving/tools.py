"""Tools that a client offers, and the calls in an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.batch_files.openai_requests import BadRequestError
from engine.common.chat import Tool, ToolChoice
from engine.common.untrusted import json_text
from engine.families.replies.reader import Part, ReplyReader, reply_reader
from engine.protocol import Began, Token
from engine.serving.asking import AnswerEvent

MOST_TOOLS = 128


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What may be called.

    Attributes:
        is_legacy: they were offered as OpenAI's `functions`, whose calls have another form.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    is_legacy: bool = False

    def with_several(self, several: bool) -> ToolUse:
        """The same, where several calls are wanted or not."""
        return replace(self, choice=replace(self.choice, several=several))


class Reading:
    """The parts of an answer that may call tools, as its events come."""

    def __init__(self, uses: ToolUse) -> None:
        self._uses = uses
        self._reader: ReplyReader | None = None

    def parts(self, event: AnswerEvent) -> list[Part]:
        """What an event adds."""
        if isinstance(event, Began):
            uses = self._uses
            several = uses.choice.several
            self._reader = reply_reader(
                event.family, uses.tools, thinks=event.thinks, is_call=event.is_call, several=several
            )
            return []
        if self._reader is None:
            return []
        return self._reader.feed(event.text) if isinstance(event, Token) else self._reader.end()


def read_tool(name: Any, description: Any, parameters: Any) -> Tool:
    """A tool by its name, its description and the JSON schema of its arguments.

    Raises:
        BadRequestError: one of them is not what it should be.
    """
    if not isinstance(name, str) or not name:
        raise BadRequestError("has a tool without a name")
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(schema, Mapping):
        raise BadRequestError(f"has a tool {name[:40]!r} whose parameters are not a JSON schema")
    return Tool(name, description if isinstance(description, str) else "", json_text(schema))


def tool_use(tools: list[Tool], choice: str, named: str = "") -> ToolUse:
    """What `choice` makes of the tools.

    Args:
        choice: `none`, `auto`, `required`, or `named` for the tool of that name.

    Raises:
        BadRequestError: they contradict each other.
    """
    if len(tools) > MOST_TOOLS:
        raise BadRequestError(f"offers {len(tools):,} tools; at most {MOST_TOOLS} are taken")
    if choice == "none":
        return ToolUse()
    if choice == "auto":
        return ToolUse(tuple(tools))
    if not tools:
        raise BadRequestError("requires a tool call, but offers no tools")
    if choice == "named" and named not in [tool.name for tool in tools]:
        raise BadRequestError(f"requires a call of {named[:40]!r}, which is not among its tools")
    return ToolUse(tuple(tools), ToolChoice(must=True, names=(named,) if choice == "named" else ()))


def openai_tools(body: Mapping[str, Any], *, flat: bool = False) -> ToolUse:
    """What a request in OpenAI's format offers.

    Args:
        flat: in the form of the responses interface, where a tool's fields are not under `function`, and where tools
            of other types than functions are skipped: they are offers to servers that can run them.

    Raises:
        BadRequestError: it makes no sense.
    """
    functions, call = body.get("functions"), body.get("function_call")
    if functions or call not in (None, "none", "auto"):
        if body.get("tools") or not isinstance(functions, list):
            raise BadRequestError("has functions that are not a list, or tools as well; leave one of them out")
        offered = [{"type": "function", "function": function} for function in functions]
        named = {"function": call} if isinstance(call, Mapping) else call
        uses = openai_tools({"tools": offered, "tool_choice": named, "parallel_tool_calls": False})
        return replace(uses, is_legacy=True)
    offered = body.get("tools") or []
    if not isinstance(offered, list) or not all(isinstance(entry, Mapping) for entry in offered):
        raise BadRequestError("has tools that are not a list of objects")
    tools = []
    for entry in offered:
        function = entry if flat else entry.get("function")
        if entry.get("type") == "function" and isinstance(function, Mapping):
            tools.append(read_tool(function.get("name"), function.get("description"), function.get("parameters")))
        elif not flat or not isinstance(entry.get("type"), str):
            kind = str(entry.get("type"))[:40]
            raise BadRequestError(f"offers a tool of the type {kind!r}; only functions can be called")
    return _chosen(tools, body, flat=flat).with_several(body.get("parallel_tool_calls") is not False)


def _chosen(tools: list[Tool], body: Mapping[str, Any], *, flat: bool) -> ToolUse:
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, Mapping):
        function = choice if flat else choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise BadRequestError("has a tool_choice that names no function")
        return tool_use(tools, "named", name)
    if choice not in ("none", "auto", "required"):
        raise BadRequestError(f"has the tool_choice {str(choice)[:40]!r}; use none, auto, required or a function")
    return tool_use(tools, choice)
