"""MCP servers as the user enters them, in the form that other programs use.

The values of their variables and headers, which are keys as a rule, stand in no file of Switchyard's: they are in the
system's keyring where there is one, else for this run, and each server is given those that were entered for its command
or address. A value with `${NAME}` is no secret: it is read from the environment when the server starts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from engine.common.chat import Tool
from engine.common.settings import ask_keyring, forget_in_keyring, tell_keyring
from engine.common.untrusted import DEEPEST, parse_json

SERVERS, ALLOWED = "tool_servers", "allowed_tools"
"""Keys of the settings: the servers, and the tools that may run unasked."""
MOST_SERVERS = 32
_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_FROM_ENVIRONMENT = re.compile(r"\$\{(\w+)\}")
Pairs = tuple[tuple[str, str | None], ...]
"""Names with their values; None where `with_values` knows them."""


class ServerError(ValueError):
    """What is wrong with an entry, in one sentence."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A server: a command that is started here, or an address.

    Attributes:
        is_on: whether chats offer its tools.
        vault: under which the values of its variables or headers are kept.
        tools: what it listed last, in a fixed order; None if it never did.
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Pairs = ()
    url: str = ""
    headers: Pairs = ()
    is_on: bool = True
    vault: str = ""
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
        known = None if self.tools is None else [[each.name, each.description, each.parameters] for each in self.tools]
        return {**self.entry, "on": self.is_on, "tools": known, "vault": self.vault}

    @property
    def lacks_values(self) -> bool:
        """Whether `with_values` is to be asked before it starts."""
        return any(value is None or _FROM_ENVIRONMENT.search(value) for _name, value in self.pairs)

    @property
    def pairs(self) -> Pairs:
        return (*self.env, *self.headers)

    def is_same_place(self, other: ToolServer) -> bool:
        """Whether both are one program, whatever the values of its variables or headers."""
        return self.place == other.place and dict(self.pairs).keys() == dict(other.pairs).keys()


def server_of(name: str, raw: Any, *, is_kept: bool = False) -> ToolServer:
    """One entry of the usual form; `is_kept`: of the settings, which hold no values."""
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
    env, headers = (_pairs(name, raw.get(key), is_kept=is_kept) for key in ("env", "headers"))
    is_on = raw.get("on", not raw.get("disabled", False)) is not False
    vault = str(raw.get("vault") or "") if is_kept else ""
    return ToolServer(name, command.strip(), tuple(args), env, url.strip(), headers, is_on, vault)


def _pairs(name: str, raw: Any, *, is_kept: bool) -> Pairs:
    if raw is None:
        return ()
    kinds = str | int | float | None if is_kept else str | int | float
    if not isinstance(raw, dict) or not all(isinstance(each, kinds) for each in raw.values()):
        raise ServerError(f"The variables or headers of {name} are not names with texts: correct them.")
    return tuple((str(key), None if value is None else str(value)) for key, value in raw.items())


def servers_of(text: str) -> tuple[ToolServer, ...]:
    """Servers from JSON in the usual form, `{"mcpServers": {"name": {"command": ..., "args": [...]}}}`."""
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
    found = []
    for entry in raw[:MOST_SERVERS]:
        try:
            server = server_of(entry["name"], entry, is_kept=True)
            tools = entry.get("tools")
            known = None if tools is None else tuple(Tool(*map(str, each)) for each in tools)
            if known is not None and not all(isinstance(json.loads(each.parameters), dict) for each in known):
                known = None
            found.append(replace(server, tools=known))
        except (ServerError, LookupError, TypeError, ValueError, AttributeError):
            continue
    return tuple(found)


# --- values of variables and headers ---

_this_run: dict[str, str] = {}
"""By vault: what was entered in this run or read from the keyring, which could open a dialog if it was asked again."""


def put_aside(server: ToolServer) -> ToolServer:
    """The server as the settings keep it; the values that it brings are known to this process from now on."""
    given = {name: value for name, value in server.pairs if value is not None and not _FROM_ENVIRONMENT.search(value)}
    if not given:
        return server
    if not server.vault:
        server = replace(server, vault=uuid.uuid4().hex)
    _this_run[server.vault] = json.dumps({"place": server.place, "values": {**_values(server, asks=False), **given}})
    env, headers = (
        tuple((name, None if name in given else value) for name, value in each) for each in (server.env, server.headers)
    )
    return replace(server, env=env, headers=headers)


def store_values(server: ToolServer) -> bool:
    """Keeps what was put aside; whether it stays after this run.  May wait for people who unlock the keyring."""
    if not server.vault:
        return True
    text = json.dumps({"place": server.place, "values": _values(server)})
    tell_keyring(_account(server), text)
    _this_run[server.vault] = text
    return ask_keyring(_account(server)) == text


def with_values(server: ToolServer) -> ToolServer:
    """The server as it is started.  May wait for people who unlock the keyring.

    Raises:
        ServerError: a value is not known any more.
    """
    known = _values(server) if server.vault else {}
    whole: list[list[tuple[str, str | None]]] = []
    for pairs in (server.env, server.headers):
        whole.append([])
        for name, value in pairs:
            found = known.get(name) if value is None else _filled(server, value)
            if found is None:
                raise ServerError(
                    f"{server.name} needs its {name} again, which was kept for one run only: edit the server."
                )
            whole[-1].append((name, found))
    return replace(server, env=tuple(whole[0]), headers=tuple(whole[1]))


def forget_values(server: ToolServer) -> None:
    """Removes what `store_values` kept."""
    if server.vault:
        _this_run.pop(server.vault, None)
        forget_in_keyring(_account(server))


def _account(server: ToolServer) -> str:
    return f"tools {server.vault}"


def _filled(server: ToolServer, value: str) -> str:
    """A value with what it takes from the environment."""
    for name in _FROM_ENVIRONMENT.findall(value):
        if name not in os.environ:
            raise ServerError(f"{server.name} needs {name} in the environment, where it is not set: set it.")
    return _FROM_ENVIRONMENT.sub(lambda found: os.environ[found[1]], value)


def _values(server: ToolServer, *, asks: bool = True) -> dict[str, str]:
    """Those of its variables and headers that are known for its command or address."""
    values = _of(_this_run.get(server.vault, ""), server)
    if asks and any(value is None and name not in values for name, value in server.pairs):
        values = _of(ask_keyring(_account(server)), server) | values
        _this_run[server.vault] = json.dumps({"place": server.place, "values": values})
    return {name: values[name] for name, _value in server.pairs if name in values}


def _of(text: str, server: ToolServer) -> dict[str, str]:
    try:
        kept = json.loads(text or "{}")
        is_for_it = kept["place"] == server.place
        return {str(name): str(value) for name, value in kept["values"].items()} if is_for_it else {}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def switch_of(built_in: str) -> str:
    """The key of the setting whether a tool that is built in is offered."""
    return f"tool_{built_in}"


def plain_name(name: str) -> str:
    """A name as every interface takes it."""
    return _NAME.sub("_", name).strip("_")[:60] or "tool"
