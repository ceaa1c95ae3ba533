"""The library's record of a model's files: names, sizes and SHA-256, written when the model is added."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.common.errors import RequestCancelled
from engine.common.untrusted import open_untrusted, parse_json, read_untrusted

MANIFEST_NAME = "switchyard-manifest.json"
_CHUNK_BYTES = 4 * 2**20
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a model, `path` relative to its folder with forward slashes."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model's files; `source` is its origin (a recipe's identity, or a path)."""

    source: str
    files: tuple[FileRecord, ...]

    @property
    def total_bytes(self) -> int:
        return sum(record.bytes for record in self.files)


def sha256_of(
    path: Path,
    *,
    on_bytes: Callable[[int], None] = lambda *_: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> str:
    """SHA-256 of a file, in hex.

    Raises:
        OSError: if it cannot be read.
        RequestCancelled: `cancelled()` returned true.
    """
    digest = hashlib.sha256()
    with open_untrusted(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            if cancelled():
                raise RequestCancelled
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def describe_files(folder: Path, cancelled: Callable[[], bool] = lambda: False) -> tuple[FileRecord, ...]:
    """Records of all files under `folder`, sorted by path, without the manifest itself."""
    return tuple(
        FileRecord(path.relative_to(folder).as_posix(), path.stat().st_size, sha256_of(path, cancelled=cancelled))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    try:
        raw = parse_json(read_untrusted(folder / MANIFEST_NAME, _MAX_BYTES))
        files = tuple(FileRecord(str(item["path"]), int(item["bytes"]), str(item["sha256"])) for item in raw["files"])
        return Manifest(str(raw["source"]), files)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def counted(
    on_progress: Callable[[int, int], None], total: int, cancelled: Callable[[], bool] = lambda: False
) -> Callable[[int], None]:
    """Reports the sum of the bytes that it is called with; raises `RequestCancelled` if that was asked for."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        if cancelled():
            raise RequestCancelled
        done += count
        on_progress(done, total)

    return advance


def damaged_files(
    folder: Path,
    manifest: Manifest,
    *,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Differences from the manifest: path -> `missing`, `N bytes instead of M`, `contents changed` or `unreadable`.

    Raises:
        RequestCancelled: `cancelled()` returned true.
    """
    advance, damage = counted(on_progress, manifest.total_bytes), dict[str, str]()
    for record in manifest.files:
        path = folder / record.path
        try:
            size = path.stat().st_size
            if size != record.bytes:
                damage[record.path] = f"{size} bytes instead of {record.bytes}"
            elif sha256_of(path, on_bytes=advance, cancelled=cancelled) != record.sha256:
                damage[record.path] = "contents changed"
        except FileNotFoundError:
            damage[record.path] = "missing"
        except OSError as error:
            damage[record.path] = f"unreadable: {error.strerror or error}"
    return damage
