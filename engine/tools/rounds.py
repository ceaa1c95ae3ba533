"""The loop of calls in an answer: what is offered, which calls of a round run, and what the model reads after them.

Whoever runs calls (the window's answer queue, `switchyard chat`) does so in its own time; what is decided about them is
decided here.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.common.chat import ChatMessage, Tool, ToolCall
from engine.tools.built_in import BUILT_IN, UNASKED
from engine.tools.servers import ToolServer, plain_name

MOST_ROUNDS, MOST_CALLS = 20, 16
"""Of tools in one answer, and of calls in one round."""
MOST_ALIKE = 3
"""Calls of one tool with the same arguments, after which a model has lost its way."""
MOST_OFFERED = 128

CallState = Literal["asked", "running", "done", "failed", "denied"]
"""Of a call: waiting to be allowed, and what became of it then.  Stored on disk: never rename one."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call of a tool in an answer.

    Attributes:
        id: by which the model's server knows it; `name` as the model called it.
        arguments: a JSON object, as text.
        result: what the tool returned, or in one sentence why it did not.
        server: where the tool is from, for people to read; empty for those built in.
        seconds: that it took.
    """

    id: str
    name: str
    arguments: str = "{}"
    result: str = ""
    state: CallState = "asked"
    server: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """What a model wrote before it went on with the results of tools: a text, what it thought, and its calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolUse, ...] = ()

    def with_use(self, call_id: str, use: Callable[[ToolUse], ToolUse]) -> Step:
        return replace(self, calls=tuple(use(each) if each.id == call_id else each for each in self.calls))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: its result, or in one sentence why there is none."""

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool under the name that models see.

    Attributes:
        server: empty for one that is built in; `name` is what the server calls it.
    """

    tool: Tool
    name: str
    server: str = ""

    @property
    def key(self) -> str:
        """By which a permission is kept; a server's tool that says something else of itself is another one."""
        if not self.server:
            return f"/{self.name}"
        said = f"{self.tool.description}\0{self.tool.parameters}".encode(errors="surrogatepass")
        return f"{self.server}/{self.name}\n{hashlib.blake2b(said, digest_size=12).hexdigest()}"

    def may_run(self, allowed: Collection[str]) -> bool:
        """Whether it runs without asking, given the keys of those that people allowed."""
        return self.key in allowed or (not self.server and self.name in UNASKED)


def offered_tools(servers: Sequence[ToolServer], is_on: Callable[[str], bool]) -> tuple[OfferedTool, ...]:
    """All that may be offered, as far as it is known, always in the same order: the prompt begins with them.

    Args:
        is_on: whether a tool that is built in is.
    """
    found = [OfferedTool(each, each.name) for each in BUILT_IN if is_on(each.name)]
    taken = {each.name for each in BUILT_IN}
    for server in servers:
        for tool in (server.tools or ()) if server.is_on else ():
            name = plain_name(tool.name)
            if name in taken:
                name = plain_name(f"{server.name}_{tool.name}")
            if name not in taken and len(found) < MOST_OFFERED:
                taken.add(name)
                found.append(OfferedTool(replace(tool, name=name), tool.name, server.name))
    return tuple(found)


def find_tool(offered: Sequence[OfferedTool], name: str) -> OfferedTool | None:
    return next((each for each in offered if each.tool.name == name), None)


DENIED = "The user did not allow this call."
NO_SUCH_TOOL = "There is no tool of this name."
ANSWER_NOW = "Answer now in words, with these results."
"""What a model is told that calls again what it has called: a small one goes on so otherwise."""
STOPPED = "The call was stopped."


@dataclass(frozen=True, slots=True)
class Round:
    """Calls that came together.

    Attributes:
        step: with what became of those that do not run; the others are `asked`.
        is_last: the model answers once more, with what it has and no tools.
    """

    step: Step
    is_last: bool


def begin_round(
    earlier: Sequence[Step], text: str, reasoning: str, calls: Sequence[ToolCall], offered: Sequence[OfferedTool]
) -> Round:
    """What is to become of the calls in which an answer ended."""
    taken = {use.id for step in earlier for use in step.calls}
    uses = []
    for number, call in enumerate(calls):
        found = find_tool(offered, call.name)
        named = f"{call.id or 'call'}-{len(earlier)}-{number}" if not call.id or call.id in taken else call.id
        use = ToolUse(named, call.name, call.arguments, server=found.server if found is not None else "")
        uses.append(use if found is not None else replace(use, state="failed", result=NO_SUCH_TOOL))
    step = Step(text, reasoning, tuple(uses))
    if why := _lost_way((*earlier, step)):
        return Round(replace(step, calls=tuple(replace(use, state="failed", result=why) for use in uses)), is_last=True)
    return Round(step, is_last=False)


def _lost_way(steps: Sequence[Step]) -> str:
    """Why an answer calls no more tools, as a sentence for the model and for people; empty if it may go on."""
    last = steps[-1].calls
    made = Counter((use.name, use.arguments) for step in steps for use in step.calls)
    for use in last:
        if made[use.name, use.arguments] >= MOST_ALIKE:
            return f"{use.name} was called with the same arguments {MOST_ALIKE} times: no more calls, answer now."
    if len(steps) > MOST_ROUNDS:
        return f"Tools were called {MOST_ROUNDS} times in a row: no more calls, answer now."
    if len(last) > MOST_CALLS:
        return f"More than {MOST_CALLS} tools were called at once: no more calls, answer now."
    return ""


def step_turns(step: Step) -> tuple[ChatMessage, ...]:
    """What a model wrote with its calls, and what they returned."""
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in step.calls)
    said = ChatMessage("assistant", step.text, step.reasoning, tool_calls=calls)
    return said, *(ChatMessage("tool", _told(call), answers=call.id) for call in step.calls)


def _told(call: ToolUse) -> str:
    return call.result or ("(nothing)" if call.state == "done" else STOPPED)


def turns_after(steps: Sequence[Step], *, is_last: bool) -> tuple[ChatMessage, ...]:
    """What the model reads of the last round, before it goes on."""
    earlier = {(use.name, use.arguments) for step in steps[:-1] for use in step.calls}
    repeats = all((use.name, use.arguments) in earlier for use in steps[-1].calls)
    return (*step_turns(steps[-1]), *((ChatMessage("user", ANSWER_NOW),) if is_last or repeats else ()))
