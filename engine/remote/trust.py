"""What an endpoint's certificate must be signed by, and how people trust a server's own.

Keys of endpoints: each for one server's address, in the system's keyring where there is one, else for this run.

A key goes into no log, no file of Switchyard's, and no request to another host: it is kept for the address that it was
given for, so an endpoint that is given another address has none.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import threading
from pathlib import Path
from urllib.parse import urlsplit

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, write_private
from engine.common.http import system_trust
from engine.common.keyring_store import ask_keyring, forget_in_keyring, tell_keyring
from engine.common.paths import config_dir
from engine.common.plain_text import plain_line
from engine.remote.endpoint import Endpoint, plain_name, saved_endpoints
from engine.remote.failures import connection_error

_KEY = re.compile(r"[\x21-\x7e]{1,4096}")
_this_run: dict[str, str] = {}
_of_keyring: dict[str, str] = {}
"""What the keyring said; an empty string where it had nothing: asking again could open a dialog of the system's."""
_asking = threading.Lock()


def variable_of(endpoint: Endpoint) -> str:
    """The environment's variable that may hold its key."""
    return f"SWITCHYARD_KEY_{plain_name(endpoint.name)}"


def read_key(endpoint: Endpoint) -> str:
    """The endpoint's key, or an empty string.  The keyring is asked once, so this may wait for people who unlock it."""
    named = os.environ.get(variable_of(endpoint), "").strip()
    return named or key_of_this_run(endpoint) or _in_keyring(_account(endpoint))


def key_of_this_run(endpoint: Endpoint) -> str:
    """What was given to this process; never waits."""
    return _this_run.get(_account(endpoint), "")


def save_key(endpoint: Endpoint, key: str) -> bool:
    """Keeps a key; returns whether it stays after this run.

    Raises:
        EngineError: `INVALID_REQUEST` (this cannot be a key, or others could read it on its way).
    """
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
    """The key without white space around it.

    Raises:
        EngineError: `INVALID_REQUEST` (this cannot be a key, or others could read it on its way).
    """
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


def trust_of(endpoint: Endpoint) -> ssl.SSLContext:
    """What its certificate must be signed by: what the system trusts, or what the endpoint's own file holds too.

    Raises:
        EngineError: `INVALID_REQUEST`: that file cannot be read.
    """
    if not endpoint.url.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody; the system's list takes a while to read
    if not endpoint.ca_file:
        return system_trust()
    import httpx2  # only now: the window and the engine begin with the keys above

    context = httpx2.create_ssl_context()
    try:
        pem = Path(endpoint.ca_file).read_bytes()
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (OSError, ValueError, ssl.SSLError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it holds no certificate in PEM"
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The certificate of {endpoint.name} cannot be read from {endpoint.ca_file} ({plain_line(why)}).",
        ) from None
    if _is_own(pem):
        # Whoever shows this very certificate holds its key: nothing else is trusted, so its names say nothing more.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=pem.decode("ascii"))
    return context


def _is_own(pem: bytes) -> bool:
    """Whether the file holds one certificate that can sign no other: a server's own."""
    from cryptography import x509

    certificates = x509.load_pem_x509_certificates(pem)
    if len(certificates) != 1:
        return False
    try:
        return not certificates[0].extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return True


def fingerprint(pem: bytes) -> str:
    """The SHA-256 of the first certificate in PEM, as people compare it: `AB:CD:...`.

    Raises:
        EngineError: `INVALID_REQUEST`: there is none.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        der = x509.load_pem_x509_certificates(pem)[0].public_bytes(Encoding.DER)
    except ValueError:
        raise EngineError(ErrorCode.INVALID_REQUEST, "This file holds no certificate in PEM.") from None
    return ":".join(f"{byte:02X}" for byte in hashlib.sha256(der).digest())


def offered_certificate(endpoint: Endpoint, patience_s: float = 10.0) -> bytes:
    """The certificate that a server shows, in PEM, which is not to be trusted before people have compared it.

    Raises:
        EngineError: `RemoteError`.
    """
    parts = urlsplit(endpoint.url)
    try:
        return ssl.get_server_certificate((parts.hostname or "", parts.port or 443), timeout=patience_s).encode("ascii")
    except (OSError, ValueError) as error:
        raise connection_error(endpoint, error) from None


def keep_certificate(endpoint: Endpoint, pem: bytes) -> Path:
    """Keeps a server's own certificate, for `Endpoint.ca_file`.

    Raises:
        EngineError: it cannot be written.
    """
    file = config_dir() / "certificates" / f"{plain_name(endpoint.name)}.pem"
    with disk_errors_explained(file.parent):
        write_private(file, pem)
    return file
