"""Tokens of hubs, each for one host: in the system's keyring where there is one, else for this run alone.

A token is for the host it was saved for. It goes into no log, no file of Switchyard's and no other host's requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from pathlib import Path
from urllib.parse import urlsplit

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import private_folder, write_private
from engine.common.keyring_store import ask_keyring, forget_in_keyring, tell_keyring
from engine.common.paths import config_dir
from engine.common.plain_text import plain_line
from engine.common.untrusted import parse_json, read_untrusted

_VARIABLE = "SWITCHYARD_HUB_TOKENS"
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")
_MOST_BYTES = 2**16
_HUGGINGFACE, _MODELSCOPE = "huggingface.co", ("modelscope.cn", "www.modelscope.cn")

_this_run: dict[str, str] = {}
_of_keyring: dict[str, str] = {}
"""What the keyring said; an empty string where it had nothing: asking again could open a dialog of the system's."""
_refused: set[tuple[str, str]] = set()
"""Hosts and tokens that these did not accept."""
_asking = threading.Lock()


def read_token(host: str) -> str:
    """The token for a host such as `huggingface.co`, or an empty string.

    What was saved here comes first, then what the hub's own programs would use. The keyring is asked once per host, so
    this may wait for it, and for people who unlock it.
    """
    host = host.lower()
    for found in (_this_run.get, _inherited().get, _in_keyring, _of_other_programs):
        token = found(host)
        if token and (host, token) not in _refused:
            return token
    return ""


def set_aside(host: str, token: str) -> None:
    """Does without a token for the rest of this run: the host does not accept it, and gives without it."""
    _refused.add((host.lower(), token))


def save_token(host: str, token: str) -> bool:
    """Keeps a token for a host; returns whether it stays after this run.

    Raises:
        EngineError: `INVALID_REQUEST` (this cannot be a token).
    """
    host, token = host.lower(), token.strip()
    if not _TOKEN.fullmatch(token):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, "This is not a token: copy it again from the hub's settings page, in one piece."
        )
    _this_run[host] = token
    tell_keyring(host, token)
    _refused.discard((host, token))
    with _asking:
        _of_keyring.pop(host, None)
    stays = _in_keyring(host) == token  # a backend may accept and keep nothing
    if stays:
        _note_hosts({*_noted_hosts(), host})
    return stays


def forget_token(host: str) -> None:
    """Removes what `save_token` kept."""
    host = host.lower()
    _this_run.pop(host, None)
    forget_in_keyring(host)
    with _asking:
        _of_keyring.pop(host, None)
    if host in (noted := _noted_hosts()):
        _note_hosts({*noted} - {host})


def hosts_with_tokens() -> tuple[str, ...]:
    """The hosts that `save_token` keeps a token for, sorted.  The keyring is not asked: it may be locked."""
    return tuple(sorted({*_noted_hosts(), *_this_run}))


def _hosts_file() -> Path:
    return config_dir() / "token-hosts.json"


def _noted_hosts() -> frozenset[str]:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        hosts = parse_json(read_untrusted(_hosts_file(), _MOST_BYTES))["hosts"]
        return frozenset(host for host in hosts if isinstance(host, str) and plain_line(host) == host)
    return frozenset()


def _note_hosts(hosts: set[str]) -> None:
    """Which hosts have one in the keyring, which cannot list them; never the tokens themselves."""
    with contextlib.suppress(OSError):  # then it can still be removed with `models forget-token`
        private_folder(config_dir())
        write_private(_hosts_file(), json.dumps({"hosts": sorted(hosts)}) + "\n")


def for_child() -> dict[str, str]:
    """Environment variables that hand this run's tokens to a process started by this one."""
    tokens = {**_inherited(), **_this_run}
    return {_VARIABLE: json.dumps(tokens)} if tokens else {}


def _inherited() -> dict[str, str]:
    with contextlib.suppress(ValueError, AttributeError):
        return {str(host): str(token) for host, token in json.loads(os.environ.get(_VARIABLE) or "{}").items()}
    return {}


def _in_keyring(host: str) -> str:
    with _asking:  # many connections begin at once
        if host not in _of_keyring:
            _of_keyring[host] = ask_keyring(host)
        return _of_keyring[host]


def _of_other_programs(host: str) -> str:
    """What `hf auth login` stored for the hub itself; for a mirror only what stands beside it in the environment."""
    if host in _MODELSCOPE:
        return os.environ.get("MODELSCOPE_API_TOKEN", "").strip()
    if host == _HUGGINGFACE:
        from huggingface_hub import get_token

        return get_token() or ""
    mirror = urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname or ""
    return os.environ.get("HF_TOKEN", "").strip() if host == mirror else ""
