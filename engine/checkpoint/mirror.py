"""How the network is reached: a mirror of the hub, one of Python's packages, and a proxy.

Chosen once, for the window and the command line; what the environment says wins.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, private_folder, write_private
from engine.common.paths import config_dir
from engine.common.plain_text import quoted
from engine.common.untrusted import read_record

_MOST_BYTES = 2**16
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
PACKAGES_VARIABLE = "SWITCHYARD_PACKAGES"
"""Of the environment: a mirror of Python's packages."""
_PROXY_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY")


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an address is of, in the words of a message."""

    called: str
    example: str
    is_proxy: bool = False


_KINDS = {
    "mirror": _Kind("a mirror's", "https://mirror.example"),
    "packages": _Kind("a mirror's", "https://mirror.example/pypi"),
    "updates": _Kind("an update server's", "https://updates.example"),
    "proxy": _Kind("a proxy's", "http://proxy.example:3128", is_proxy=True),
}


def mirror_of_environment() -> str:
    """What the user's own environment says (`HF_ENDPOINT`), which wins; empty for nothing."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/")


def chosen_mirror() -> str:
    """The mirror that `use_mirror` keeps; empty for none, or if its file is damaged."""
    return _chosen("mirror")


def use_mirror(address: str) -> str:
    """Asks the hub at this address from now on; empty for the hub's own.  Returns the address as it is kept.

    Raises:
        EngineError: `INVALID_REQUEST` (it cannot be a hub's address), or the disk's.
    """
    return _use("mirror", address)


def packages_mirror() -> str:
    return os.environ.get(PACKAGES_VARIABLE, "").rstrip("/") or _chosen("packages")


def use_packages_mirror(address: str) -> str:
    """Fetches Switchyard's engine from this address from now on.  As `use_mirror`."""
    return _use("packages", address)


def mirrored_package(url: str) -> str:
    """Where a package of Python's index, or of PyTorch's, is fetched from; others stay where they are.

    A mirror has `packages/...` as files.pythonhosted.org does, and `whl/...` as download.pytorch.org.
    """
    mirror, parts = packages_mirror(), urlsplit(url)
    is_known = parts.hostname in ("files.pythonhosted.org", "download.pytorch.org")
    return f"{mirror}{parts.path}" if mirror and is_known else url


def updates_address() -> str:
    """Where people have Switchyard look for newer versions; empty for its makers' own server."""
    return _chosen("updates")


def use_updates_address(address: str) -> str:
    """Looks for newer versions there from now on.  As `use_mirror`."""
    return _use("updates", address)


def chosen_proxy() -> str:
    """The proxy that `use_proxy` keeps; empty for the system's."""
    return _chosen("proxy")


def use_proxy(address: str) -> str:
    """Reaches all but this machine through this proxy from now on; empty for the system's.  Returns what is kept."""
    before = chosen_proxy()
    kept = _use("proxy", address)
    for name in _PROXY_VARIABLES:
        if before and os.environ.get(name) == before:
            del os.environ[name]
    begin_with_proxy()
    return kept


def begin_with_proxy() -> None:
    """Has this process, and those that it starts, use the chosen proxy, unless the environment names one."""
    proxy = chosen_proxy()
    if proxy and not any(os.environ.get(name) or os.environ.get(name.lower()) for name in _PROXY_VARIABLES):
        os.environ.update(dict.fromkeys(_PROXY_VARIABLES, proxy))
        os.environ.setdefault("NO_PROXY", ",".join(_THIS_MACHINE))


def _chosen(name: str) -> str:
    address = read_record(_file(), _MOST_BYTES).get(name, "")
    return address if isinstance(address, str) and _is_address(address, _KINDS[name]) else ""


def _use(name: str, address: str) -> str:
    kind = _KINDS[name]
    address = address.strip().rstrip("/")
    if address and not _is_address(address, kind):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{quoted(address[:80])} is not {kind.called} address: give one such as {kind.example}.",
        )
    with disk_errors_explained(config_dir()):
        private_folder(config_dir())
        write_private(_file(), json.dumps({**read_record(_file(), _MOST_BYTES), name: address}) + "\n")
    return address


def _is_address(address: str, kind: _Kind) -> bool:
    """Tokens and models go through it: without encryption only to this machine, or to a proxy, which passes it on."""
    try:
        url = urlsplit(address)
        host, _port = url.hostname or "", url.port
    except ValueError:
        return False
    names_someone = bool(url.username or url.password) and not kind.is_proxy
    is_plain = not (names_someone or url.query or url.fragment) and not set(address) & set(' \\"<>')
    is_safe = url.scheme == "https" or (url.scheme == "http" and (kind.is_proxy or host in _THIS_MACHINE))
    return bool(host) and is_plain and is_safe and address.isascii() and address.isprintable()


def _file() -> Path:
    return config_dir() / "hub.json"
