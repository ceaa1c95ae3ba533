"""Whether a part still has all its files: a virus scanner, a cleaner or a disk may have taken some since it was proven.

`files.json` in a part has name and size of each; it is written with `whole.json`.  Looking takes a tenth of a second
for a part with PyTorch, so that is done when something failed, or where a start depends on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import write_private
from engine.common.installed import WHOLE, bundle, parts_dir

FILES = "files.json"
_MADE_ANEW = "__pycache__"


def note_files(folder: Path) -> None:
    """Notes what a part consists of, before it is declared whole.

    Raises:
        OSError: nothing was noted.
    """
    root = str(folder)
    found = {os.path.relpath(entry.path, root).replace(os.sep, "/"): entry.stat().st_size for entry in _files(root)}
    for own in (FILES, WHOLE):
        found.pop(own, None)
    write_private(folder / FILES, json.dumps(found))


def lost_files(folder: Path) -> list[str]:
    """Files of a part that are not there any more, or have another size; none if it has no list of them."""
    try:
        noted = json.loads((folder / FILES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return [FILES]
    if not isinstance(noted, dict):
        return [FILES]
    return [name for name, size in noted.items() if _size(os.path.join(folder, name)) != size]


def give_up_damaged(folder: Path) -> EngineError | None:
    """Has nobody use a part that has lost files, so that the next start gets it anew; None if it has lost none.

    Returns:
        What to tell people.
    """
    lost = lost_files(folder)
    if not lost:
        return None
    with suppress(OSError):  # then it is found out again the next time
        (folder / WHOLE).unlink(missing_ok=True)
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return EngineError(
        ErrorCode.DEVICE_UNAVAILABLE,
        f"The engine has lost files since it was installed ({lost[0]}{more}), perhaps to a virus scanner: start "
        "Switchyard again, and it gets them anew.",
    )


def give_up_own_part() -> EngineError | None:
    """The same for the part that this process runs from; None if it runs from none."""
    here = Path(__file__).resolve().parents[2]
    try:
        is_part = bundle() is not None and here.parent == parts_dir().resolve()
    except EngineError:
        return None
    return give_up_damaged(here) if is_part else None


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != _MADE_ANEW:
                    yield from _files(entry.path)
            elif entry.is_file():
                yield entry


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
