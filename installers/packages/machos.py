"""Whether folders for macOS are complete, told without a Mac: every library that a file names is in them or in macOS.

A Mach-O file names its libraries with paths: `@loader_path` is the folder of the file itself, `@executable_path` that
of the program, and `@rpath` each of the file's own search paths.
"""

from __future__ import annotations

import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_THIN, _FAT, _FAT_WIDE = 0xFEEDFACF, 0xCAFEBABE, 0xCAFEBABF
_ARM64 = 0x0100000C
_LIBRARY, _REEXPORTED, _RPATH = 0x0C, 0x8000001F, 0x8000001C
_OF_MACOS = ("/usr/lib/", "/System/Library/")


@dataclass(frozen=True)
class MachO:
    """What a library or program for Apple's processors says of itself.

    Attributes:
        libraries: that it does not start without.
        rpaths: where to look for those that begin with `@rpath`.
    """

    libraries: tuple[str, ...]
    rpaths: tuple[str, ...]


def missing_libraries(*folders: Path) -> dict[str, set[str]]:
    """Libraries that nobody brings -> the files that name them, relative.

    Args:
        folders: that one process looks into.
    """
    found: dict[str, set[str]] = {}
    files = {path: (read, folder) for folder in folders for path in _files(folder) if (read := read_macho(path))}
    search = {where for path, (read, _) in files.items() for where in _search_paths(path, read)}
    for path, (read, folder) in files.items():
        for name in (each for each in read.libraries if not _is_there(each, path, search)):
            found.setdefault(name, set()).add(path.relative_to(folder).as_posix())
    return found


def missing_for_wheels(wheels: Iterable[Path]) -> dict[str, set[str]]:
    """The same of wheels that are unpacked into one folder."""
    with tempfile.TemporaryDirectory(prefix="switchyard-machos-") as name:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as zipped:
                zipped.extractall(name, [each for each in zipped.namelist() if not each.endswith((".py", ".h"))])
        return missing_libraries(Path(name))


def read_macho(file: Path) -> MachO | None:
    """What a file says for Apple's processors; None if it is nothing for them, or no such file at all."""
    with file.open("rb") as opened:
        head = opened.read(8)
        if len(head) < 8:
            return None
        start, (magic, count) = 0, struct.unpack(">II", head)
        if magic in (_FAT, _FAT_WIDE) and count < 64:  # of many systems' files, Java's begin so, too
            entry = ">iiQQii" if magic == _FAT_WIDE else ">iiIII"
            size = struct.calcsize(entry)
            table = opened.read(count * size)
            slices = struct.iter_unpack(entry, table[: len(table) // size * size])
            starts = [each[2] for each in slices if each[0] == _ARM64]
            if not starts:
                return None
            start = starts[0]
        opened.seek(start)
        header = opened.read(32)
        if len(header) < 32 or struct.unpack("<II", header[:8]) != (_THIN, _ARM64):
            return None
        count, size = struct.unpack("<II", header[16:24])
        return _commands(opened.read(size), count)


def _commands(data: bytes, count: int) -> MachO:
    libraries: list[str] = []
    rpaths: list[str] = []
    at = 0
    for _ in range(count):
        kind, size = struct.unpack_from("<II", data, at)
        command = data[at : at + size]
        if kind in (_LIBRARY, _REEXPORTED, _RPATH):
            (offset,) = struct.unpack_from("<I", command, 8)
            text = command[offset:].split(b"\0", 1)[0].decode()
            (rpaths if kind == _RPATH else libraries).append(text)
        at += size
    return MachO(tuple(libraries), tuple(rpaths))


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix not in (".py", ".pyc", ".a", ".o"):
            yield path


def _search_paths(path: Path, read: MachO) -> Iterator[Path]:
    for each in read.rpaths:
        if each.startswith(("@loader_path", "@executable_path")):
            yield (path.parent / each.partition("/")[2]).resolve()


def _is_there(name: str, path: Path, search: Iterable[Path]) -> bool:
    """A file is looked for in the search paths of those that load it, too: all of a process count."""
    place, _, rest = name.partition("/")
    if name.startswith(_OF_MACOS):
        return True
    if place == "@loader_path":
        return (path.parent / rest).exists()
    if place in ("@rpath", "@executable_path"):
        return any((where / rest).exists() for where in search)
    return False
