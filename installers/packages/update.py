"""Newer versions for installed packages: the window as a zip file, and the signed list that names it.

`engine/parts/updates.py` says what they look like, and what an installed package believes. The private key never lies
in the checkout; its public half belongs into resources/updates.json of every version that is to believe it.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import re
import zipfile
from pathlib import Path
from urllib.parse import quote

from packages.bundle import Bundle, python_of
from packages.project import PackagingError, read_project

_LIST = "latest.json"
_ABOUT = ".about.json"
"""After a window's name: its entry in the list, without an address."""


def write_window(bundle: Bundle, target: Path) -> Path:
    """`switchyard-window-VERSION-PLATFORM-pyX.Y.zip` of a program's folder, and beside it what the list says of it."""
    python = python_of(bundle)
    file = target / f"switchyard-window-{bundle.project.version}-{bundle.platform.name}-py{python}.zip"
    unfinished = file.with_suffix(".new")
    root = bundle.root
    entries = [(path, path.relative_to(root / "window")) for path in sorted((root / "window").rglob("*"))]
    inside = Path("switchyard-update")
    entries += [(wheel, inside / "wheels" / wheel.name) for wheel in sorted((root / "wheels").iterdir())]
    entries.append((root / "engine-lock.json", inside / "engine-lock.json"))
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path, name in entries:
            if path.is_file():
                zipped.write(path, name.as_posix())
    unfinished.replace(file)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    about = {"platform": bundle.platform.name, "python": python, "sha256": digest, "bytes": file.stat().st_size}
    file.with_suffix(_ABOUT).write_text(json.dumps(about), encoding="utf-8")
    return file


def write_list(folder: Path, address: str, key: Path, notes: str = "") -> Path:
    """`latest.json` of all windows of this version in a folder, and its signature.

    Args:
        address: where the files will be, for everybody to fetch.
        key: see `new_key`.
        notes: a line on what is new.

    Raises:
        PackagingError: no windows, no key, or an address that is not encrypted.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if not re.match(r"https://|http://(127\.0\.0\.1|localhost)[:/]", address):
        raise PackagingError(f"Updates must come from an https address, and {address or 'none'} was given (--address).")
    version = read_project().version
    windows = []
    for about in sorted(folder.glob(f"switchyard-window-{version}-*{_ABOUT}")):
        name = about.name.removesuffix(_ABOUT) + ".zip"
        said = json.loads(about.read_text(encoding="utf-8"))
        windows.append({**said, "url": f"{address.rstrip('/')}/{quote(name)}"})
    if not windows:
        raise PackagingError(f"{folder} has no window of version {version}: run `release.py window` first.")
    try:
        private = load_pem_private_key(key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise PackagingError(f"{key} is no key for signing: `release.py key --key FILE` makes one.") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise PackagingError(f"{key} is a key of another kind than Ed25519: `release.py key --key FILE` makes one.")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    document = {"format": 1, "version": version, "published": today, "notes": notes, "windows": windows}
    content = (json.dumps(document, indent=1) + "\n").encode()
    (folder / f"{_LIST}.sig").write_bytes(base64.b64encode(private.sign(content)) + b"\n")
    file = folder / _LIST
    file.write_bytes(content)
    return file


def new_key(file: Path) -> str:
    """Writes a new private key, which only its owner can read; returns its public half for resources/updates.json.

    Raises:
        PackagingError: the file exists: what was signed with it could not be replaced.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise PackagingError(f"{file} exists: a key that was used is not replaced. Choose another name.") from error
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()
