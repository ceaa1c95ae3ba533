"""MCP servers as the user enters them, in the form that other programs use."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from engine.common.chat import Tool
from engine.common.foreign import DEEPEST, parse_json

MOST_SERVERS = 32
_NAME = re.compile(r"[^A-Za-z0-9_-]+")


class ServerError(ValueError):
    """What is wrong with an entry, in one sentence."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A server: a command that is started here, or an address.

    Attributes:
        is_on: whether chats offer its tools.
        tools: what it listed last, in a fixed order; None if it never did.
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    url: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    is_on: bool = True
    tools: tuple[Tool, ...] | None = field(default=None)

    @property
    def place(self) -> str:
        """Its command or its address, on one line."""
        parts = (self.command, *self.args)
        return self.url or (subprocess.list2cmdline(parts) if sys.platform == "win32" else shlex.join(parts))

    @property
    def entry(self) -> dict[str, Any]:
        """What the process that talks to it needs."""
        started = {"command": self.command, "args": list(self.args), "env": dict(self.env)}
        return {"name": self.name, **({"url": self.url, "headers": dict(self.headers)} if self.url else started)}

    def kept(self) -> dict[str, Any]:
        """As the settings keep it."""
        known = None if self.tools is None else [[each.name, each.description, each.parameters] for each in self.tools]
        return {**self.entry, "on": self.is_on, "tools": known}

    def is_same_place(self, other: ToolServer) -> bool:
        """Whether both are one program."""
        return self.entry == other.entry


def server_of(name: str, raw: Any) -> ToolServer:
    """One entry of the usual form.

    Raises:
        ServerError: it is none.
    """
    name = " ".join(str(name).split())[:60]
    if not name:
        raise ServerError("Give the server a name.")
    if not isinstance(raw, dict):
        raise ServerError(f"{name} has no command and no address: enter one of them.")
    command, url = raw.get("command") or "", raw.get("url") or ""
    if not isinstance(command, str) or not isinstance(url, str) or bool(command.strip()) == bool(url.strip()):
        raise ServerError(f"{name} needs either a command or an address: enter one of them.")
    if url and not re.match(r"https?://[^/\s]+", url.strip()):
        raise ServerError(f"The address of {name} does not begin with http:// or https://: correct it.")
    args = raw.get("args") or []
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise ServerError(f"The arguments of {name} are not a list of texts: correct them.")
    if "\0" in command + "".join(args):
        raise ServerError(f"The command of {name} has a character that no command can have: correct it.")
    env, headers = (_pairs(name, raw.get(key)) for key in ("env", "headers"))
    is_on = raw.get("on", not raw.get("disabled", False)) is not False
    return ToolServer(name, command.strip(), tuple(args), env, url.strip(), headers, is_on)


def _pairs(name: str, raw: Any) -> tuple[tuple[str, str], ...]:
    if raw is None:
        return ()
    if not isinstance(raw, dict) or not all(isinstance(each, str | int | float) for each in raw.values()):
        raise ServerError(f"The variables or headers of {name} are not names with texts: correct them.")
    return tuple((str(key), str(value)) for key, value in raw.items())


def servers_of(text: str) -> tuple[ToolServer, ...]:
    """Servers from JSON in the usual form, `{"mcpServers": {"name": {"command": ..., "args": [...]}}}`.

    Raises:
        ServerError: it is none.
    """
    try:
        raw = parse_json(text, deepest=DEEPEST)
    except ValueError as error:
        raise ServerError(f"This is not JSON ({str(error)[:80]}): paste the whole block.") from None
    listed = raw
    if isinstance(raw, dict):
        listed = next((raw[key] for key in ("mcpServers", "servers") if isinstance(raw.get(key), dict)), raw)
    if not isinstance(listed, dict) or not listed:
        raise ServerError('No servers are in it: it needs "mcpServers" with a name for each.')
    if isinstance(listed.get("command") or listed.get("url"), str):
        listed = {listed.get("name") or "server": listed}
    if len(listed) > MOST_SERVERS:
        raise ServerError(f"{len(listed)} servers are too many: up to {MOST_SERVERS} can be added.")
    return tuple(server_of(name, entry) for name, entry in listed.items())


def kept_servers(raw: list[Any]) -> tuple[ToolServer, ...]:
    """Those of the settings that are sound."""
    found = []
    for entry in raw[:MOST_SERVERS]:
        try:
            server = server_of(entry["name"], entry)
            tools = entry.get("tools")
            known = None if tools is None else tuple(Tool(*map(str, each)) for each in tools)
            if known is not None and not all(isinstance(json.loads(each.parameters), dict) for each in known):
                known = None
            found.append(replace(server, tools=known))
        except (ServerError, LookupError, TypeError, ValueError, AttributeError):
            continue
    return tuple(found)


def plain_name(name: str) -> str:
    """A name as every interface takes it."""
    return _NAME.sub("_", name).strip("_")[:60] or "tool"
