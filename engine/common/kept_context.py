"""What was computed of chats, kept on disk: where, whether and how much of it, whose it is, and how it is removed.

Chats go on at once after a restart with what is kept.  It is made of what was written in them, so it is as private as
they are, and dies with them: each chat has a folder of its own, made when it is first answered and removed when it is
deleted.  Whoever writes makes no folder, so nothing comes back of a chat that is gone.  Files are encrypted; the key
is in the system's keyring where there is one, else in a file of the settings, which only the user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.common.files import is_locked, new_folder, private_folder, take_lock, write_private
from engine.common.paths import cache_dir, config_dir
from engine.common.schema import Number, Switch, entry
from engine.common.settings import ask_keyring, tell_keyring

SUFFIX = ".kept"
PART = ".part"
STANDARD_BYTES = 4 * 10**9
LEAST_BYTES, MOST_BYTES = 100 * 10**6, 10**12
LEFT_FREE_BYTES = 2 * 10**9
"""Of the disk, left to others: a faster answer is worth less than a full disk costs."""
OTHER_PROGRAMS = "requests of other programs"
"""Stands for a chat where `switchyard serve` was told to keep what it reads."""
_PATIENCE_S = 2.0
_OURS = re.compile(r"[0-9a-f]{32}\.(kept|part)")
_CHATS = re.compile(r"[0-9a-f]{32}")
_GONE = re.compile(r"gone-[0-9a-f]{16}")
_REQUESTS = re.compile(r"requests-\d+\.lock")
_KEY_NAME, _KEY = "kept-context", re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptContextSettings:
    """What the user wants of it.

    Attributes:
        on_disk: whether anything is kept on disk.
        disk_bytes: the most that it takes there, of all models together.
    """

    on_disk: bool = entry(
        True,
        Switch(),
        name="Keep chats' computed context on disk",
        help="A chat then goes on at once after another one or a restart: what the model has read need not be read "
        "again. It is made of your prompts and answers, encrypted, and removed with its chat. The key is in "
        "the system's keyring; where there is none it is a file beside the settings, and whoever can read your "
        "files can decrypt it. Turning this off removes what is kept.",
    )
    disk_bytes: int = entry(
        STANDARD_BYTES,
        Number(LEAST_BYTES, MOST_BYTES, common=tuple(each * 10**9 for each in (1, 2, 4, 8, 16, 32, 64)), unit="bytes"),
        name="At most",
        help="What was of no use for longest is removed first. 2 GB of the disk always stay free.",
    )


@dataclass(frozen=True, slots=True)
class KeptFile:
    path: Path
    nbytes: int
    used_ns: int


def kept_context_dir() -> Path:
    """Where it lies, for all models; not created here."""
    return cache_dir() / "context"


def kept_context_settings() -> KeptContextSettings:
    """As saved; what is missing or makes no sense is as if never set."""
    usual = KeptContextSettings()
    try:
        saved = json.loads(_settings_file().read_text(encoding="utf-8"))
        on_disk, disk_bytes = saved["on_disk"], saved["disk_bytes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return usual
    if type(on_disk) is not bool or type(disk_bytes) is not int:
        return usual
    return KeptContextSettings(on_disk, min(max(disk_bytes, LEAST_BYTES), MOST_BYTES))


def save_kept_context_settings(settings: KeptContextSettings) -> None:
    """Holds from now on, for programs that run as well."""
    write_private(_settings_file(), json.dumps(asdict(settings)) + "\n")


# --- chats ----------------------------------------------------------------------------------------


def folder_of(chat: str, folder: Path) -> Path:
    return folder / hashlib.blake2b(chat.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def keep_chat(chat: str, folder: Path | None = None) -> None:
    """What is computed of a chat may be kept from now on, until `forget_chat`, if the settings allow it."""
    if kept_context_settings().on_disk:
        folder = folder or kept_context_dir()
        with contextlib.suppress(OSError):  # nothing is kept of it then
            private_folder(folder)
            new_folder(folder_of(chat, folder))


def forget_chat(chat: str) -> None:
    """Removes all that is kept of a chat, also while it is being written; never fails."""
    _remove([folder_of(chat, kept_context_dir())], kept_context_dir())


@contextlib.contextmanager
def keeping_requests(*, wanted: bool) -> Iterator[None]:
    """While the body runs, `OTHER_PROGRAMS` are kept, if that is wanted.  If it is not, what an earlier server kept is
    removed, unless one that keeps it is still running."""
    folder = kept_context_dir()
    path, lock = folder / f"requests-{os.getpid()}.lock", None
    if wanted:
        keep_chat(OTHER_PROGRAMS)
        with contextlib.suppress(OSError):  # nothing can be kept there either
            lock = take_lock(path)
    elif not any(is_locked(folder / name) for name in _names(folder) if _REQUESTS.fullmatch(name)):
        forget_chat(OTHER_PROGRAMS)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
            path.unlink(missing_ok=True)


def forget_other_chats(chats: Iterable[str]) -> None:
    """Removes what is kept of all but these chats, and what earlier versions kept; never fails."""
    folder = kept_context_dir()
    known = {folder_of(chat, folder).name for chat in (*chats, OTHER_PROGRAMS)}
    names = _names(folder)
    _remove([folder / name for name in names if _CHATS.fullmatch(name) and name not in known], folder)
    for name in filter(_OURS.fullmatch, names):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def clear_kept_context() -> int:
    """Removes all of it; returns how many bytes that were.  Programs that run only compute again what they need."""
    folder = kept_context_dir()
    before = kept_context_bytes()
    forget_other_chats(())
    forget_chat(OTHER_PROGRAMS)
    for file in kept_files(folder):  # what is left
        file.path.unlink(missing_ok=True)
    return before


def _remove(chats: list[Path], folder: Path) -> None:
    """Renames these folders first: whoever is about to write into one no longer finds it."""
    chats = [chat for chat in chats if os.path.isdir(chat) and not os.path.islink(chat)]  # these never raise
    if not chats and not _gone(folder):
        return
    try:
        with changing(folder):
            for chat in chats:
                with contextlib.suppress(OSError):  # on Windows, while a file in it is open
                    chat.rename(folder / f"gone-{secrets.token_hex(8)}")
            for path in (*chats, *_gone(folder)):
                shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        _log.warning("kept context cannot be removed: %s", error)
    if any(map(os.path.lexists, chats)):
        _log.warning("some kept context is in use and will be removed at the next start")


def _gone(folder: Path) -> list[Path]:
    """What could not be removed entirely so far."""
    return [folder / name for name in _names(folder) if _GONE.fullmatch(name)]


# --- files ----------------------------------------------------------------------------------------


def kept_files(folder: Path) -> list[KeptFile]:
    """Finished ones of all chats, in any order; none where the folder cannot be read."""
    return [found for path in _ours(folder) if path.suffix == SUFFIX and (found := _as_found(path)) is not None]


def _ours(folder: Path) -> Iterator[Path]:
    """All our files in the folders of chats, and what earlier versions left beside these."""
    for inner in (folder, *(folder / name for name in _names(folder) if _CHATS.fullmatch(name))):
        yield from (inner / name for name in _names(inner) if _OURS.fullmatch(name))


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _as_found(path: Path) -> KeptFile | None:
    with contextlib.suppress(OSError):  # another program may have removed it just now
        status = path.stat(follow_symlinks=False)
        return KeptFile(path, status.st_size, status.st_mtime_ns)
    return None


def kept_context_bytes() -> int:
    """What it takes on disk now."""
    return sum(file.nbytes for file in kept_files(kept_context_dir()))


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[bool]:
    """Within it no other program adds or removes files here; it may get false, if one takes very long.

    Raises:
        OSError: the folder cannot be written to.
    """
    new_folder(folder)
    private_folder(folder)
    lock = take_lock(folder / "lock", _PATIENCE_S)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def remove_parts(folder: Path) -> None:
    """Removes what killed programs left half written; only within `changing`."""
    for path in _ours(folder):
        if path.suffix == PART:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def room_on_disk(folder: Path, held: int) -> int:
    """The most bytes that may be kept in a folder that holds `held` of them: by the setting and by the free space."""
    settings = kept_context_settings()
    if not settings.on_disk:
        return 0
    return max(0, min(settings.disk_bytes, held + shutil.disk_usage(folder).free - LEFT_FREE_BYTES))


# --- the key --------------------------------------------------------------------------------------


def kept_context_key() -> bytes:
    """The 32 bytes that files are encrypted with, made at the first call on this machine.  May wait for people who
    unlock the keyring.

    Raises:
        OSError: there is no keyring, and its file can be neither read nor written.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(changing(kept_context_dir()))  # two programs may be about to make it
        return _found_key()


def _found_key() -> bytes:
    file, kept = _key_file(), ask_keyring(_KEY_NAME)
    if _KEY.fullmatch(kept):
        file.unlink(missing_ok=True)
        return bytes.fromhex(kept)
    key = ""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        key = file.read_text(encoding="ascii").strip()
    if not _KEY.fullmatch(key):
        key = secrets.token_hex(32)
    tell_keyring(_KEY_NAME, key)
    if ask_keyring(_KEY_NAME) == key:  # a backend may accept and keep nothing
        file.unlink(missing_ok=True)
    else:
        write_private(file, key + "\n")
    return bytes.fromhex(key)


def is_key_in_file() -> bool:
    """Whether there was no keyring to keep the key in."""
    return _key_file().exists()


def _key_file() -> Path:
    return config_dir() / "kept-context.key"


def _settings_file() -> Path:
    return config_dir() / "kept-context.json"
