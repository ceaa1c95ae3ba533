"""Servers elsewhere: how one is named and found, what people said of it, and what it said of itself.

The list is one file beside the settings, which the window and the command line share.  Keys are not in it: each is
kept for one server's address, in the system's keyring where there is one, else for this run.  It goes into no log, no
file of Switchyard's, and no request to another host: an endpoint that is given another address has none.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, holding, private_folder, write_private
from engine.common.json_fields import from_fields
from engine.common.paths import config_dir
from engine.common.plain_text import plain_line, quoted
from engine.common.settings import ask_keyring, forget_in_keyring, tell_keyring
from engine.common.untrusted import parse_json, read_untrusted

REMOTE = "endpoint:"
"""What a model of an endpoint begins with where models are named by one string: `endpoint:NAME/MODEL-ID`."""

Server = Literal["", "switchyard", "vllm", "sglang", "llama.cpp", "llama-cpp-python", "ollama", "openai", "other"]
Lack = Literal["stream", "usage", "tools", "schema", "sampling"]
"""What a server cannot do: send an answer as it is written, count its tokens, call tools, keep to a schema, or take
more of sampling than OpenAI's interface has."""

_NAME = re.compile(r"[^\s/#,](?:[^\x00-\x1f\x7f/#,]{0,38}[^\s/#,])?")
_HOST = re.compile(r"[0-9a-z_](?:[0-9a-z_.-]{0,251}[0-9a-z_])?|\[[0-9a-f:.%]+\]")
_ENDS = ("/chat/completions", "/completions", "/models", "/responses")
_MOST_BYTES = 2**20
_PATIENCE_S = 5.0
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Found:
    """What a server said of itself when it was last looked at.

    Attributes:
        version: of the server, empty if it does not say.
        models: their ids; contexts: the longest context of each in tokens, 0 if unknown.
        lacks: what it was seen not to do.
        blind: ids of models that read no pictures, as it says, or as was seen.
    """

    server: Server = ""
    version: str = ""
    models: tuple[str, ...] = ()
    contexts: tuple[int, ...] = ()
    lacks: tuple[Lack, ...] = ()
    blind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that speaks OpenAI's interface.

    Attributes:
        name: unique; what people call it.
        url: its base, without a slash at the end.
        model: the one to ask; empty: the only one there, or asked later.
        at_once: requests at the same time; None: as measured.
        requests_per_minute, tokens_per_minute: what may be asked of it; None: no limit.
        price_in, price_out: of a million tokens read and written, in `currency`; None: not known.
        ca_file: a file of certificates in PEM to trust besides the system's; or the server's own, which alone is then
            trusted for it, whatever names it bears.
    """

    name: str
    url: str
    model: str = ""
    at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    price_in: float | None = None
    price_out: float | None = None
    currency: str = ""
    ca_file: str = ""
    found: Found = Found()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or plain_line(self.name) != self.name:
            raise _wrong(
                f"An endpoint cannot be called {quoted(self.name)}: use up to 40 characters without / # and ,."
            )
        if normal_url(self.url) != self.url:
            raise _wrong(f"{quoted(self.url)} is not an endpoint's address in its plain form: add it again.")
        for what, count in (
            ("at the same time", self.at_once),
            ("requests a minute", self.requests_per_minute),
            ("tokens a minute", self.tokens_per_minute),
        ):
            if count is not None and not 1 <= count < 2**31:
                raise _wrong(f"The limit of {self.name} ({what}) is {count}, but must be 1 or more.")
        for price in (self.price_in, self.price_out):
            if price is not None and not (math.isfinite(price) and 0 <= price < 1e9):
                raise _wrong(f"A price of {self.name} is {price}, but must be 0 or more.")

    @property
    def host(self) -> str:
        """Its host, with the port if that is not the usual one, for people."""
        return urlsplit(self.url).netloc

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, so that nothing leaves it."""
        return is_loopback(urlsplit(self.url).hostname or "")

    @property
    def root(self) -> str:
        """The address without a path."""
        return "{0.scheme}://{0.netloc}".format(urlsplit(self.url))

    @property
    def is_plain(self) -> bool:
        """Whether what is sent can be read on the way."""
        return self.url.startswith("http:") and not self.is_here


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """Who is to answer: one of an endpoint's models.

    Attributes:
        model: its id; empty for the endpoint's own choice.
        key: one that was given to this process and is kept nowhere; empty: the one that is kept, if any.
        chosen: see `RemoteRequest`.
    """

    endpoint: Endpoint
    model: str = ""
    key: str = field(default="", repr=False)
    chosen: tuple[str, ...] | None = None

    @property
    def is_blind(self) -> bool:
        """Whether it is known to read no pictures."""
        return self.model in self.endpoint.found.blind


def without_sight(endpoint: Endpoint, model: str) -> Endpoint:
    """The endpoint, of which a model was seen to read no pictures."""
    found = endpoint.found
    return replace(endpoint, found=replace(found, blind=tuple(dict.fromkeys((*found.blind, model)))))


def called(endpoint: Endpoint) -> str:
    """An endpoint for people: its name, and its host if that is another."""
    return named_at(endpoint.name, endpoint.host)


def named_at(name: str, host: str) -> str:
    return name if name == host else f"{name} ({host})"


def is_host_here(host: str) -> bool:
    """Whether a host, perhaps with a port, can only be this machine."""
    return is_loopback(urlsplit(f"//{host}").hostname or "")


def is_loopback(host: str) -> bool:
    """Whether a host's name or number can only be this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def normal_url(text: str) -> str:
    """An address as it is kept: with its scheme, without the usual port, and ending in `/v1` unless it has a path."""
    text = text.strip()
    what = quoted(text)
    if "://" not in text:
        host = text.partition("/")[0].rpartition("@")[2]
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        text = f"{'http' if _is_near(name) else 'https'}://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise _wrong(f"{what} is not an address: enter one such as http://10.0.0.5:8000/v1.") from None
    scheme = parts.scheme.lower()
    if scheme not in _PORTS:
        raise _wrong(f"{what} is not an address of a server: it must begin with http:// or https://.")
    if parts.username is not None or parts.password is not None:
        raise _wrong("The address contains a name or a password before @: leave it out, and give a key instead.")
    host = (parts.hostname or "").lower()
    with suppress(UnicodeError):
        host = host if host.isascii() else host.encode("idna").decode("ascii")
    host = f"[{host}]" if ":" in host else host
    if not _HOST.fullmatch(host):
        raise _wrong(f"{what} is not an address: enter one such as http://10.0.0.5:8000/v1.")
    if parts.query:
        raise _wrong(f"{what} has a part after ?: enter the address without it.")
    path = re.sub(r"/+$", "", parts.path)
    for end in _ENDS:
        path = path.removesuffix(end)
    if re.search(r"[^\x21-\x7e]", path):
        raise _wrong(f"{what} has a space or an unusual character in its path: check it.")
    place = host if port in (None, _PORTS[scheme]) else f"{host}:{port}"
    return f"{scheme}://{place}{path or '/v1'}"


def _is_near(name: str) -> bool:
    """Whether a host without a scheme is here or in the local network, where certificates are rare."""
    with suppress(ValueError):
        return ipaddress.ip_address(name.strip("[]")).is_private
    return is_loopback(name) or "." not in name or name.endswith((".local", ".lan"))


def endpoint_at(address: str, name: str = "", **more: Any) -> Endpoint:
    """The endpoint at an address, `#MODEL-ID` behind it if wanted; named after its host if it is given no name."""
    place, _, model = address.strip().partition("#")
    url = normal_url(place)
    return Endpoint(name.strip() or urlsplit(url).netloc[-40:], url, **{"model": unquote(model), **more})


def parse_endpoint(text: str) -> Endpoint:
    """A saved endpoint by its name, or one by its address, such as `http://10.0.0.5:8000/v1#model-id`."""
    name, _, model = text.strip().partition("#")
    for each in saved_endpoints():
        if each.name.casefold() == name.strip().casefold():
            return replace(each, model=unquote(model)) if model else each
    if re.match(r"https?://|[^/]+:\d+(/|#|$)", text.strip(), re.IGNORECASE):
        return endpoint_at(text)
    raise _unknown(name)


def is_remote(model: str) -> bool:
    return model.startswith(REMOTE)


def remote_name(endpoint: Endpoint, model: str) -> str:
    return f"{REMOTE}{endpoint.name}/{model}"


def parse_remote(text: str) -> tuple[Endpoint, str]:
    """The endpoint and the model's id that `endpoint:NAME/MODEL-ID` means, or `endpoint:ADDRESS#MODEL-ID`.

    The id may be empty: the endpoint's own choice, if it has one.
    """
    rest = text.strip().removeprefix(REMOTE)
    if "://" in rest:
        endpoint = parse_endpoint(rest)
        return endpoint, endpoint.model
    name, _, model = rest.partition("/")
    endpoint = parse_endpoint(name)
    return endpoint, model or endpoint.model


# The list


def endpoints_file() -> Path:
    return config_dir() / "endpoints.json"


def saved_endpoints() -> tuple[Endpoint, ...]:
    """Those that people added, in the order of their names; entries that make no sense here are left out."""
    found: list[Endpoint] = []
    for raw in _read():
        with suppress(EngineError, LookupError, TypeError, ValueError, AttributeError):
            found.append(from_fields(Endpoint, raw))
    return tuple(sorted(found, key=lambda each: each.name.casefold()))


def save_endpoint(endpoint: Endpoint, *, instead_of: str = "") -> None:
    """Keeps an endpoint, in the place of the one of this name, or of `instead_of`."""
    mine = {plain_name(instead_of or endpoint.name)}

    def change(entries: list[Any]) -> list[Any]:
        if plain_name(endpoint.name) not in mine and any(_name_of(raw) == plain_name(endpoint.name) for raw in entries):
            raise _wrong(f"There is an endpoint called {endpoint.name} already, or nearly so: choose another name.")
        return [*(raw for raw in entries if _name_of(raw) not in mine), asdict(endpoint)]

    _change(change)


def remove_endpoint(name: str) -> None:
    """Forgets the endpoint of this name; its key stays until `forget_key`."""

    def change(entries: list[Any]) -> list[Any]:
        left = [raw for raw in entries if _name_of(raw) != plain_name(name)]
        if len(left) == len(entries):
            raise _unknown(name)
        return left

    _change(change)


def plain_name(name: str) -> str:
    """The name in capital letters, digits and underscores: what stands in the environment for its key."""
    return re.sub(r"[^0-9A-Z]", "_", name.strip().upper())


def _name_of(raw: Any) -> str:
    name = raw.get("name") if isinstance(raw, dict) else None
    return plain_name(name) if isinstance(name, str) else ""


def _change(change: Any) -> None:
    file = endpoints_file()
    with disk_errors_explained(file.parent):
        private_folder(file.parent)
        busy = "Another Switchyard is changing the list of endpoints: try again."
        with holding(file.with_name(".endpoints.lock"), _PATIENCE_S, busy):
            entries = change(_read())
            write_private(file, json.dumps({"version": 1, "endpoints": entries}, indent=2, ensure_ascii=False) + "\n")


def _read() -> list[Any]:
    file = endpoints_file()
    try:
        entries = parse_json(read_untrusted(file, _MOST_BYTES))["endpoints"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = getattr(error, "strerror", None) or "it is damaged"
        raise _wrong(f"The list of endpoints in {file} cannot be read ({why}): mend or remove that file.") from None
    return entries if isinstance(entries, list) else []


def _unknown(name: str) -> EngineError:
    there = ", ".join(each.name for each in saved_endpoints()) or "none yet"
    return EngineError(
        ErrorCode.MODEL_NOT_FOUND,
        f"There is no endpoint called {quoted(name.strip())}: there is {there}. Give one of these, an address such as "
        "http://10.0.0.5:8000/v1, or add it with `switchyard endpoints add`.",
    )


def _wrong(message: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, message)


_KEY = re.compile(r"[\x21-\x7e]{1,4096}")
_this_run: dict[str, str] = {}
_of_keyring: dict[str, str] = {}
"""What the keyring said; an empty string where it had nothing: asking again could open a dialog of the system's."""
_asking = threading.Lock()


def variable_of(endpoint: Endpoint) -> str:
    return f"SWITCHYARD_KEY_{plain_name(endpoint.name)}"


def read_key(endpoint: Endpoint) -> str:
    """The endpoint's key, or an empty string.  The keyring is asked once, so this may wait for people who unlock it."""
    named = os.environ.get(variable_of(endpoint), "").strip()
    return named or key_of_this_run(endpoint) or _in_keyring(endpoint.url)


def key_of_this_run(endpoint: Endpoint) -> str:
    """What was given to this process; never waits."""
    return _this_run.get(endpoint.url, "")


def save_key(endpoint: Endpoint, key: str) -> bool:
    """Keeps a key; returns whether it stays after this run."""
    key = check_key(endpoint, key)
    account = endpoint.url
    _this_run[account] = key
    tell_keyring(account, key)
    with _asking:
        _of_keyring.pop(account, None)
    return _in_keyring(account) == key  # a backend may accept and keep nothing


def forget_key(endpoint: Endpoint) -> None:
    """Removes what `save_key` kept, unless another saved endpoint has the same address."""
    account = endpoint.url
    if any(each.url == account and each.name != endpoint.name for each in saved_endpoints()):
        return
    _this_run.pop(account, None)
    forget_in_keyring(account)
    with _asking:
        _of_keyring.pop(account, None)


def check_key(endpoint: Endpoint, key: str) -> str:
    """The key without white space around it."""
    key = key.strip()
    if not key:
        return key
    if not _KEY.fullmatch(key):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, "This is not a key: copy it again, in one piece and without spaces."
        )
    if endpoint.is_plain:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"A key for {endpoint.host} would cross the network readable to others: use an https:// address, or do "
            "without a key.",
        )
    return key


def _in_keyring(account: str) -> str:
    with _asking:
        if account not in _of_keyring:
            _of_keyring[account] = ask_keyring(account)
        return _of_keyring[account]
