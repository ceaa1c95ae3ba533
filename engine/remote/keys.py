"""Keys of endpoints: each for one server's address, in the system's keyring where there is one, else for this run.

A key goes into no log, no file of Switchyard's, and no request to another host: it is kept for the address that it was
given for, so an endpoint that is given another address has none.
"""

from __future__ import annotations

import os
import re
import threading

from engine.common.errors import EngineError, ErrorCode
from engine.common.keyring_store import ask_keyring, forget_in_keyring, tell_keyring
from engine.remote.endpoint import Endpoint, plain_name, saved_endpoints

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
    return named or key_of_this_run(endpoint) or _in_keyring(_account(endpoint))


def key_of_this_run(endpoint: Endpoint) -> str:
    """What was given to this process; never waits."""
    return _this_run.get(_account(endpoint), "")


def save_key(endpoint: Endpoint, key: str) -> bool:
    """Keeps a key; returns whether it stays after this run."""
    key = check_key(endpoint, key)
    account = _account(endpoint)
    _this_run[account] = key
    tell_keyring(account, key)
    with _asking:
        _of_keyring.pop(account, None)
    return _in_keyring(account) == key  # a backend may accept and keep nothing


def forget_key(endpoint: Endpoint) -> None:
    """Removes what `save_key` kept, unless another saved endpoint has the same address."""
    account = _account(endpoint)
    if any(_account(each) == account and each.name != endpoint.name for each in saved_endpoints()):
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


def _account(endpoint: Endpoint) -> str:
    return endpoint.url


def _in_keyring(account: str) -> str:
    with _asking:
        if account not in _of_keyring:
            _of_keyring[account] = ask_keyring(account)
        return _of_keyring[account]
