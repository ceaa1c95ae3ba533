"""The models that benchmarks run: the user's, and synthetic ones; nothing that is prepared of these is left behind.

Also what else a checkout has to measure with: `benchmarks`, beside `engine`, and not packaged.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.checkpoint.library import converted_dir, resolve
from engine.checkpoint.staging import staging_folder
from engine.checkpoint.synthetic import is_synthetic, make_synthetic
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained
from engine.common.paths import PREPARED_VARIABLE

_FILE_TYPE = "gguf="
_ROOT = Path(__file__).resolve().parents[2]


def from_checkout(module: str) -> Any:
    """The module of `benchmarks`; `None` where Switchyard is installed without it."""
    if not (_ROOT / "benchmarks" / f"{module}.py").is_file():
        return None
    if str(_ROOT) not in sys.path:  # `switchyard` as a command knows only what is packaged
        sys.path.append(str(_ROOT))
    return importlib.import_module(f"benchmarks.{module}")


def resolve_model(model: str, say: Callable[[str], None]) -> Path:
    """The checkpoint of a bench's model: as elsewhere, or a synthetic one; with `gguf=Q4_K_M`, as such a GGUF file.

    Raises:
        EngineError: as `engine.checkpoint.library.resolve`, `make_synthetic` and `make_synthetic_gguf`.
    """
    if not is_synthetic(model):
        return resolve(model)
    plain, kind = without_file_type(model)
    if not kind:
        return make_synthetic(model, say)
    writer = from_checkout("gguf")
    if writer is None:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"Only a checkout writes synthetic models as {kind} files.")
    file: Path = writer.make_synthetic_gguf(plain, kind, say)
    return file


def without_file_type(model: str) -> tuple[str, str]:
    """The same without `gguf=TYPE`, and that type, or ""."""
    name, _, query = model.partition("?")
    parts = query.split("&") if query else []
    kinds = [part.removeprefix(_FILE_TYPE) for part in parts if part.startswith(_FILE_TYPE)]
    rest = "&".join(part for part in parts if not part.startswith(_FILE_TYPE))
    return (f"{name}?{rest}" if rest else name), kinds[-1] if kinds else ""


@contextlib.contextmanager
def prepared_apart() -> Iterator[Path]:
    """A folder, empty at first, where this process and those that it starts find and keep prepared weights meanwhile.

    It is on the same disk as ever, and removed at the end, also after Ctrl+C; one that a killed bench left is removed
    by the next one.

    Raises:
        EngineError: the data folder cannot be written to.
    """
    before = os.environ.get(PREPARED_VARIABLE)
    usual = converted_dir()
    with contextlib.ExitStack() as held:
        with disk_errors_explained(usual):
            folder = held.enter_context(staging_folder(usual))
        os.environ[PREPARED_VARIABLE] = str(folder)
        try:
            yield folder
        finally:
            if before is None:
                del os.environ[PREPARED_VARIABLE]
            else:
                os.environ[PREPARED_VARIABLE] = before
