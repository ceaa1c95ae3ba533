"""Newer versions of an installed package: a signed list of them, and a new window with the engine that belongs to it.

    ADDRESS/latest.json       {"format": 1, "version": "0.3.0", "published": "2026-12-01", "notes": "One line.",
                               "windows": [{"platform": "linux-x86_64", "python": "3.13", "url": ..., "sha256": ...,
                                            "bytes": ...}]}
    ADDRESS/latest.json.sig   its Ed25519 signature (RFC 8032), in base64

A window is a zip file of its packages, with `switchyard-update/engine-lock.json` and our own wheels for its engine in
`switchyard-update/wheels`.  Nothing of it is used before its checksum, which the signed list has, was compared and it
has tested itself; what was in use until then stays, to go back to.

    python -m engine.parts.updates VERSION      puts a fetched window in place, then its engine, then both into use

Its output is that of `engine.parts.install`; `{"needs": "engine"}` where the wheels of that engine have to be fetched.
"""

from __future__ import annotations

import base64
import binascii
import json
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from engine.checkpoint.downloads import queue
from engine.checkpoint.downloads.queue import Download
from engine.checkpoint.downloads.records import PlannedFile
from engine.checkpoint.manifest import MANIFEST_NAME
from engine.checkpoint.mirror import chosen
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, new_folder, require_space
from engine.common.installed import (
    WHOLE,
    Part,
    Whole,
    current_engine,
    newer_window,
    part,
    part_name,
    previous_parts,
    this_python,
    use_parts,
    version,
    version_order,
)
from engine.common.paths import resources_dir
from engine.parts.install import (
    CHECKING,
    FINISHING,
    TESTING,
    UNPACKING,
    OnStep,
    exclusive_access,
    finish,
    install,
    new_partial,
    print_steps,
    proven,
    sweep,
    taken_over,
)
from engine.parts.wheels import (
    EngineChoice,
    EngineSource,
    begin_download,
    choose_engine,
    downloads_folder,
    fetched_folder,
    need_bundle,
)

_MOST_BYTES, _WITHIN_S = 2**20, 60.0
_UNPACKED = 4
_MOST_FILES = 100_000
SELF_TEST = "app.self_test"


@dataclass(frozen=True, slots=True)
class Update:
    """A newer version, for this system.

    Attributes:
        notes: a line on what is new, perhaps empty.
        url, sha256, bytes: of its window.
    """

    version: str
    published: str
    notes: str
    url: str
    sha256: str
    bytes: int

    @property
    def name(self) -> str:
        """Of the window's part."""
        return part_name("window", self.version)

    @property
    def file(self) -> str:
        """Of the window's zip file."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


def updates_settings() -> dict[str, Any]:
    """`address` and `keys` (Ed25519 public keys, base64) that this version was released with."""
    try:
        found = json.loads((resources_dir() / "updates.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def can_update() -> bool:
    """Whether this is a package that was released with a key to tell real updates by, and knows where to look."""
    settings = updates_settings()
    return bool(settings.get("keys")) and bool(chosen("updates") or settings.get("address"))


def look_for_update() -> Update | None:
    """A version that is newer than the one that runs and than the one of the next start; None if there is none."""
    packed, settings = need_bundle(), updates_settings()
    address = (chosen("updates") or str(settings.get("address", ""))).rstrip("/")
    content, signature = _fetched_small(f"{address}/latest.json"), _fetched_small(f"{address}/latest.json.sig")
    if not is_signed(content, signature, settings.get("keys", ())):
        raise _untrue("is not signed by Switchyard's makers")
    newer = newer_window()
    newest = max((version(), newer.version if newer is not None else ""), key=version_order)
    found = _read(content, packed.platform)
    return found if found is not None and version_order(found.version) > version_order(newest) else None


def _fetched_small(url: str) -> bytes:
    from engine.checkpoint.downloads.source import Client, NeedsPeople, Trouble, proxy_login

    host, until, got = urlsplit(url).hostname, time.monotonic() + _WITHIN_S, bytearray()
    client = Client()
    try:
        with client.get(url) as response:
            if response.status_code == 407:
                raise NeedsPeople(proxy_login())
            if response.status_code != 200:
                raise EngineError(
                    ErrorCode.DOWNLOAD_FAILED,
                    f"{host} does not answer about newer versions (status {response.status_code}): try again later.",
                )
            for chunk in response.iter_raw():
                got += chunk
                if len(got) > _MOST_BYTES or time.monotonic() > until:
                    raise _untrue("has no end")
    except EngineError:
        raise
    except NeedsPeople as trouble:
        raise EngineError(ErrorCode.DOWNLOAD_FAILED, trouble.message) from None
    except Trouble as trouble:
        raise EngineError(
            ErrorCode.DOWNLOAD_FAILED, f"{trouble.message.partition(': ')[0]}: check the network."
        ) from None
    except Exception as error:  # the line broke, in the words of the HTTP library
        words = f"The connection to {host} broke ({type(error).__name__}): check the network."
        raise EngineError(ErrorCode.DOWNLOAD_FAILED, words) from None
    finally:
        client.close()
    return bytes(got)


def is_signed(content: bytes, signature: bytes, keys: Sequence[str]) -> bool:
    """Whether one of the keys made this signature (base64) of the content."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    for key in keys:
        try:
            Ed25519PublicKey.from_public_bytes(base64.b64decode(key, validate=True)).verify(
                base64.b64decode(signature.strip(), validate=True), content
            )
        except (InvalidSignature, ValueError, binascii.Error, TypeError):
            continue
        return True
    return False


def begin_update(update: Update) -> Download:
    """Puts the new window into the queue of downloads, as the first one."""
    folder = downloads_folder()
    with disk_errors_explained(folder):
        new_folder(folder)
    require_space(folder, (1 + _UNPACKED) * update.bytes)
    if all(each.reference.rpartition(":")[2] != update.name for each in queue.downloads()):
        shutil.rmtree(folder / update.name, ignore_errors=True)
    file = PlannedFile(update.file, update.file, update.bytes, update.sha256, update.url)
    return queue.add_part(update.name, f"Switchyard {update.version}", [file], folder)


def install_update(
    of_version: str, on_step: OnStep = lambda _step: None, choose: Callable[..., EngineChoice] = choose_engine
) -> EngineChoice | None:
    """Puts a fetched window in place, then its engine, and then both into use for the next start.

    Returns:
        The engine, if its wheels have to be fetched first; then nothing has been put into use.

    Raises:
        EngineError: a sentence; what was in use still is.
    """
    name = part_name("window", of_version)
    window = _window(name, of_version, on_step)
    source = EngineSource.of_window(window)
    choice = choose(source=source)
    if part(choice.name) is None and choice.reused is None and fetched_folder(choice.name) is None:
        return choice
    install(choice, on_step=on_step, in_use=False)
    on_step(FINISHING)
    running = current_engine()
    with disk_errors_explained(downloads_folder()), exclusive_access():
        if running is not None:  # by name, so that there is something to go back to
            use_parts(engine=running.name)
        use_parts(engine=choice.name, window=name)
        sweep()
    return None


def begin_engine(of_version: str) -> Download:
    """Puts the wheels of an update's engine into the queue, once its window is in place."""
    window = part(part_name("window", of_version))
    if window is None:
        raise EngineError(ErrorCode.DOWNLOAD_FAILED, "The new version has not been fetched yet: fetch it first.")
    return begin_download(choose_engine(source=EngineSource.of_window(window)))


def go_back() -> str:
    """Has the next start use what was in use before; returns that version."""
    before = previous_parts()
    if before is None:
        raise EngineError(ErrorCode.INVALID_REQUEST, "There is no earlier version on this computer to go back to.")
    with disk_errors_explained(downloads_folder()), exclusive_access():
        use_parts(**before)
    found = part(before["engine"])
    return found.version if found is not None else ""


def _window(name: str, of_version: str, on_step: OnStep) -> Part:
    packed = need_bundle()
    with disk_errors_explained(downloads_folder()), exclusive_access():
        if part(name) is None and not taken_over(name):
            with new_partial(name) as partial:
                on_step(CHECKING)
                file = _fetched(name)
                require_space(partial, _UNPACKED * file.stat().st_size)
                on_step(UNPACKING)
                _unpack(file, partial)
                on_step(TESTING)
                said = proven(packed, partial, SELF_TEST)
                if said.get("version") not in (None, of_version):
                    raise _untrue(f"holds version {said['version']} where {of_version} was promised")
                finish(partial, Whole(name, of_version, packed.platform, this_python(), proven=said))
    window = part(name)
    if window is None:
        raise _untrue("does not fit this computer")
    return window


def _fetched(name: str) -> Path:
    """The zip file that was fetched; its checksum was compared when it arrived."""
    folder = fetched_folder(name)
    files = [path for path in folder.iterdir() if path.name != MANIFEST_NAME] if folder is not None else []
    if len(files) != 1:
        raise EngineError(ErrorCode.DOWNLOAD_FAILED, "The new version has not been fetched yet: fetch it first.")
    return files[0]


def _unpack(file: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(file) as packed:
            members = packed.infolist()
            names = [each.filename for each in members]
            is_safe = all(
                ".." not in name.split("/") and not name.startswith("/") and "\\" not in name for name in names
            )
            if is_safe and len(members) <= _MOST_FILES and WHOLE not in names:
                packed.extractall(target)
                return
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError):
        shutil.rmtree(file.parent, ignore_errors=True)  # a disk that lost something: only a new download helps
        raise EngineError(
            ErrorCode.DOWNLOAD_FAILED,
            "The new version was damaged on the disk, and nothing has changed: fetch it again.",
        ) from None
    shutil.rmtree(file.parent, ignore_errors=True)  # its makers may replace it
    raise _untrue("has files where none belong")


def _read(content: bytes, platform: str) -> Update | None:
    try:
        said = json.loads(content)
        if said["format"] != 1:
            return None  # for versions to come, which know more
        of_version = str(said["version"])
        part_name("window", of_version)
        for window in said["windows"]:
            if (window["platform"], window["python"]) == (platform, this_python()):
                sha256 = str(window["sha256"])
                if len(sha256) != 64:
                    raise ValueError("a checksum")
                about = str(said.get("published", ""))[:20], str(said.get("notes", ""))[:300]
                return Update(of_version, *about, str(window["url"]), sha256, int(window["bytes"]))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _untrue("makes no sense") from None
    return None


def _untrue(what: str) -> EngineError:
    return EngineError(ErrorCode.DOWNLOAD_FAILED, f"What the server of updates sent {what}: nothing has changed.")


def main(arguments: Sequence[str]) -> int:
    def work(on_step: OnStep) -> dict[str, str]:
        needs_engine = install_update(arguments[0], on_step) is not None
        return {"needs": "engine"} if needs_engine else {"installed": arguments[0]}

    return print_steps(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
