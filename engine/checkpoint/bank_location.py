"""Where the prepared experts of a checkpoint are stored, so that they are found again and removed with it."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from engine.common.paths import data_dir


def bank_path(directory: Path, precision: str) -> Path:
    """The bank file of a checkpoint directory: in the data folder, as it is as large as the model."""
    return _banks_dir() / f"{directory.name}-{precision}-{_where(directory)}.bank"


def banks_of(directory: Path) -> list[Path]:
    """The existing bank files of a checkpoint directory, finished or not, in all precisions."""
    middle = f"-{_where(directory)}.bank"
    try:
        return [file for file in _banks_dir().iterdir() if middle in file.name and file.is_file()]
    except OSError:
        return []


def remove_banks(files: list[Path]) -> int:
    """Deletes them and returns the bytes freed.  A file in use stays, on systems that lock open files."""
    freed = 0
    for file in files:
        with contextlib.suppress(OSError):
            size = file.stat().st_size
            file.unlink()
            freed += size
    return freed


def _banks_dir() -> Path:
    return data_dir() / "banks"


def _where(directory: Path) -> str:
    return hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
