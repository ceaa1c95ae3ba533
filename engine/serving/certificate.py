"""This server's own certificate, made once: for programs on other machines, which know it by its fingerprint."""

from __future__ import annotations

import ipaddress
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

from engine.common.files import disk_errors_explained, write_private
from engine.common.paths import config_dir

_YEARS = 10


def own_certificate() -> Path:
    """A PEM file with the certificate and its key, for the user alone; made now if there is none, or an old one.

    Raises:
        EngineError: it cannot be written or read.
    """
    file = config_dir() / "server-certificate.pem"
    with disk_errors_explained(file.parent):
        if not file.is_file() or _has_ended(file):
            write_private(file, _made())
    return file


def _has_ended(file: Path) -> bool:
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificates(file.read_bytes())[0]
    except (ValueError, OSError):
        return True
    return certificate.not_valid_after_utc < datetime.now(UTC) + timedelta(days=30)


def _made() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    host = socket.gethostname().partition(".")[0][:60] or "switchyard"
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"Switchyard on {host}"[:64])])
    names = [x509.DNSName(each) for each in ("localhost", *([host, f"{host}.local"] if host.isascii() else []))]
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([*names, here]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + secret
