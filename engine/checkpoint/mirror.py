"""The hub's address where a mirror is asked instead: chosen once, for the window and the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, private_folder, write_private
from engine.common.foreign import parse_json, read_foreign
from engine.common.paths import config_dir
from engine.common.plain_text import quoted

_MOST_BYTES = 2**16
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def mirror_of_environment() -> str:
    """What the user's own environment says (`HF_ENDPOINT`), which wins; empty for nothing."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/")


def chosen_mirror() -> str:
    """The mirror that `use_mirror` keeps; empty for none, or if its file is damaged."""
    try:
        address = parse_json(read_foreign(_file(), _MOST_BYTES))["mirror"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return address if isinstance(address, str) and _is_address(address) else ""


def use_mirror(address: str) -> str:
    """Asks the hub at this address from now on; empty for the hub's own.  Returns the address as it is kept.

    Raises:
        EngineError: `INVALID_REQUEST` (it cannot be a hub's address), or the disk's.
    """
    address = address.strip().rstrip("/")
    if address and not _is_address(address):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{quoted(address[:80])} is not a mirror's address: give one such as https://mirror.example.",
        )
    with disk_errors_explained(config_dir()):
        private_folder(config_dir())
        write_private(_file(), json.dumps({"mirror": address}) + "\n")
    return address


def _is_address(address: str) -> bool:
    """Tokens and models go through it: without encryption only to this machine."""
    try:
        url = urlsplit(address)
        host, _port = url.hostname or "", url.port
    except ValueError:
        return False
    is_plain = not (url.username or url.password or url.query or url.fragment) and not set(address) & set(' \\"<>')
    is_safe = url.scheme == "https" or (url.scheme == "http" and host in _THIS_MACHINE)
    return bool(host) and is_plain and is_safe and address.isascii() and address.isprintable()


def _file() -> Path:
    return config_dir() / "hub.json"
