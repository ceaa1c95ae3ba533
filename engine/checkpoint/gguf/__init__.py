"""Which GGUF file a path means; imports nothing heavy."""

from __future__ import annotations

import os
import re
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import open_untrusted

SUFFIX = ".gguf"
MAGIC = b"GGUF"
"""How every such file begins."""
MOST_PARTS = 999
PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
"""The name of a part of a model."""
LABEL = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:IQ[1-4]_[A-Z]+|Q[2-8]_K(?:_[A-Z]+)?|Q[1-8]_[01](?:_\d+)*|TQ[12]_0|BF16|FP?16|FP?32"
    r"|MXFP4(?:_MOE)?|NVFP4))(?![A-Z0-9])"
)
"""The mixture of types in the name of a file, in capitals: `Q4_K_M`."""


def stem_of(path: Path) -> str:
    """The name of a GGUF file without its ending, and without the number of a part."""
    part = PART.match(path.name)
    return part["stem"] if part else path.stem


def gguf_at(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder without safetensors; of parts the first.

    A file with another ending (Ollama's have none) is one if it begins like one.

    Returns:
        `None` if it means something else.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if a folder has several, of which none is meant more than the others.
    """
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return first_part(path)
    try:
        names = sorted(entry.name for entry in os.scandir(path) if not entry.name.startswith("."))
    except NotADirectoryError:
        return path if _begins_like_gguf(path) else None
    except OSError:
        return None
    files = [path / name for name in names if name.lower().endswith(SUFFIX)]
    if not files or any(name.endswith(".safetensors") for name in names):
        return None
    firsts = sorted({first_part(file) for file in files if not file.name.lower().startswith("mmproj")})
    if len(firsts) > 1:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{path} has several GGUF files ({', '.join(file.name for file in firsts[:3])}, ...): give one of them.",
        )
    return firsts[0] if firsts else files[0]


def _begins_like_gguf(path: Path) -> bool:
    try:
        with open_untrusted(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def first_part(path: Path) -> Path:
    """The file that a model begins with, given any of its files, by its name."""
    part = PART.match(path.name)
    return path.with_name(f"{part['stem']}-00001-of-{part['count']}{path.suffix}") if part else path


def all_parts(path: Path) -> list[Path]:
    """The files of the model that begins with this one, by its name."""
    part = PART.match(path.name)
    return named_parts(path, min(int(part["count"]), MOST_PARTS)) if part else [path]


def named_parts(path: Path, count: int) -> list[Path]:
    return [path.with_name(f"{stem_of(path)}-{at:05}-of-{count:05}{path.suffix}") for at in range(1, count + 1)]
