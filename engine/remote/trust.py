"""What an endpoint's certificate must be signed by."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2

from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line
from engine.remote.endpoint import Endpoint


def trust_of(endpoint: Endpoint) -> ssl.SSLContext:
    """What its certificate must be signed by: what the system trusts, or what the endpoint's own file holds too.

    Raises:
        EngineError: `INVALID_REQUEST`: that file cannot be read.
    """
    if not endpoint.url.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody; the system's list takes a while to read
    context = httpx2.create_ssl_context()
    if not endpoint.ca_file:
        return context
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
