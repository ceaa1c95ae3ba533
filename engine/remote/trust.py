"""What an endpoint's certificate must be signed by, and how people trust a server's own."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, write_private
from engine.common.http import system_trust
from engine.common.paths import config_dir
from engine.common.plain_text import plain_line
from engine.remote.endpoint import Endpoint, plain_name
from engine.remote.failures import connection_error


def trust_of(endpoint: Endpoint) -> ssl.SSLContext:
    """What its certificate must be signed by: what the system trusts, or what the endpoint's own file holds too."""
    if not endpoint.url.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody; the system's list takes a while to read
    if not endpoint.ca_file:
        return system_trust()
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
    """The SHA-256 of the first certificate in PEM, as people compare it: `AB:CD:...`."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        der = x509.load_pem_x509_certificates(pem)[0].public_bytes(Encoding.DER)
    except ValueError:
        raise EngineError(ErrorCode.INVALID_REQUEST, "This file holds no certificate in PEM.") from None
    return ":".join(f"{byte:02X}" for byte in hashlib.sha256(der).digest())


def offered_certificate(endpoint: Endpoint, patience_s: float = 10.0) -> bytes:
    """The certificate that a server shows, in PEM, which is not to be trusted before people have compared it."""
    parts = urlsplit(endpoint.url)
    try:
        return ssl.get_server_certificate((parts.hostname or "", parts.port or 443), timeout=patience_s).encode("ascii")
    except (OSError, ValueError) as error:
        raise connection_error(endpoint, error) from None


def keep_certificate(endpoint: Endpoint, pem: bytes) -> Path:
    """Keeps a server's own certificate, for `Endpoint.ca_file`."""
    file = config_dir() / "certificates" / f"{plain_name(endpoint.name)}.pem"
    with disk_errors_explained(file.parent):
        write_private(file, pem)
    return file
