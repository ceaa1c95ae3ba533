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
    """What an address is of, in the words of a message; a `variable` of the environment wins over what is chosen."""

    called: str
    example: str
    is_proxy: bool = False
    variable: str = ""


_KINDS = {
    "mirror": _Kind("a mirror's", "https://mirror.example"),
    "packages": _Kind("a mirror's", "https://mirror.example/pypi", variable=PACKAGES_VARIABLE),
    "updates": _Kind("an update server's", "https://updates.example"),
    "proxy": _Kind("a proxy's", "http://proxy.example:3128", is_proxy=True),
}


def mirror_of_environment() -> str:
    """What the user's own environment says (`HF_ENDPOINT`), which wins; empty for nothing."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/")


def mirrored_package(url: str) -> str:
    """Where a package of Python's index, or of PyTorch's, is fetched from; others stay where they are.

    A mirror has `packages/...` as files.pythonhosted.org does, and `whl/...` as download.pytorch.org.
    """
    mirror, parts = chosen("packages"), urlsplit(url)
    is_known = parts.hostname in ("files.pythonhosted.org", "download.pytorch.org")
    return f"{mirror}{parts.path}" if mirror and is_known else url


def begin_with_proxy() -> None:
    """Has this process, and those that it starts, use the chosen proxy, unless the environment names one."""
    proxy = chosen("proxy")
    if proxy and not any(os.environ.get(name) or os.environ.get(name.lower()) for name in _PROXY_VARIABLES):
        os.environ.update(dict.fromkeys(_PROXY_VARIABLES, proxy))
        os.environ.setdefault("NO_PROXY", ",".join(_THIS_MACHINE))


def chosen(name: str) -> str:
    """The address that `use` keeps of one of `_KINDS`, or that the environment names; empty for none, or if its file is
    damaged."""
    kind, address = _KINDS[name], read_record(_file(), _MOST_BYTES).get(name, "")
    kept = address if isinstance(address, str) and _is_address(address, kind) else ""
    return (os.environ.get(kind.variable, "").rstrip("/") if kind.variable else "") or kept


def use(name: str, address: str) -> str:
    """Asks at this address from now on; empty for the usual one.  Returns the address as it is kept.

    Raises:
        EngineError: `INVALID_REQUEST` (it cannot be such an address), or the disk's.
    """
    kind, before = _KINDS[name], chosen(name)
    address = address.strip().rstrip("/")
    if address and not _is_address(address, kind):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{quoted(address[:80])} is not {kind.called} address: give one such as {kind.example}.",
        )
    with disk_errors_explained(config_dir()):
        private_folder(config_dir())
        write_private(_file(), json.dumps({**read_record(_file(), _MOST_BYTES), name: address}) + "\n")
    if kind.is_proxy:
        for variable in _PROXY_VARIABLES:
            if before and os.environ.get(variable) == before:
                del os.environ[variable]
        begin_with_proxy()
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
