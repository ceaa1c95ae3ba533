"""Machine code of the kernels, kept on disk by what it was made from: sources, options, compiler, card and driver.

Structures of arguments are called as in their sources, beside these in `src`.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from engine.common.files import write_whole
from engine.common.paths import cache_dir
from engine.formats.ggml import GRIDS
from engine.kernels.cuda.nvrtc import Machine, Nvrtc, architecture_for, find_nvrtc

STATES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""As `state_at` in states.h has them."""
SOURCES = Path(__file__).resolve().parent / "src"
_MARK = b"switchyard cubin 1\n"
_OPTIONS = ("-std=c++17", "--ptxas-options=-v")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, and what it is compiled for.

    Attributes:
        source: file in `SOURCES`.
        entry: its name there.
        threads: of a block.
        defines: macros and their values.
    """

    source: str
    entry: str
    threads: int
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Its source and values, such as `products-Int4-1`, fit for a file's name."""
        return re.sub(r"\W+", "-", "-".join((Path(self.source).stem, *(value for _, value in self.defines))))


@cache
def _texts() -> dict[str, str]:
    paths = [*sorted(path for path in SOURCES.iterdir() if path.is_file()), GRIDS]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def sources_of(kernel: Kernel) -> tuple[str, dict[str, str], list[str]]:
    """Its source, the headers by name, and the compiler's options for its macros."""
    texts = _texts()
    headers = {name: text for name, text in texts.items() if name.endswith(".h")}
    return texts[kernel.source], headers, [f"-D{name}={value}" for name, value in kernel.defines]


def compile_kernel(kernel: Kernel, architecture: int, nvrtc: Nvrtc) -> Machine:
    """Machine code for cards of compute capability `architecture` (as 89)."""
    source, headers, defines = sources_of(kernel)
    return nvrtc.compile(source, kernel.source, headers, (*_OPTIONS, f"-arch=sm_{architecture}", *defines))


def machine_code(
    kernel: Kernel, capability: tuple[int, int], driver: str, nvrtc: Nvrtc | None = None, *, again: bool = False
) -> bytes:
    """The kernel's machine code for a card, from the cache folder or the compiler.

    Args:
        driver: its version; another one gets code of its own.
        nvrtc: the compiler; by default one that is found and knows the card.
        again: the driver has refused what was kept.

    Raises:
        CompileError: there is no compiler, or it refuses the kernel.
    """
    compiler = nvrtc or find_nvrtc(capability)
    architecture = architecture_for(capability, compiler)
    return kept_code(
        kernel,
        f"sm_{architecture}",
        repr((kernel, _OPTIONS, compiler.version, architecture, driver)),
        lambda: compile_kernel(kernel, architecture, compiler).code,
        again=again,
    )


def kept_code(kernel: Kernel, target: str, made_from: str, make: Callable[[], bytes], *, again: bool) -> bytes:
    """Machine code from the cache folder, or made.

    A file that is incomplete, changed or not ours is ignored and made again.

    Args:
        target: name of the kind of card.
        made_from: what decides about the code besides the sources.
        again: what is kept is of no use.
    """
    digest = hashlib.sha256(made_from.encode())
    for name, text in _texts().items():
        digest.update(f"{name}\0{text}\0".encode())
    folder = cache_dir() / "cuda"
    stem = f"{kernel.name}-{target}-"
    path = folder / f"{stem}{digest.hexdigest()[:24]}.cubin"
    kept = None if again else _read(path)
    if kept is not None:
        return kept
    code = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, _MARK + hashlib.sha256(code).digest() + code)
    except OSError as error:  # it is compiled again at the next start
        _log.warning("the compiled kernel %s could not be kept: %s", path, error)
    for other in folder.glob(f"{stem}*.cubin"):
        if other != path:
            with suppress(OSError):  # another process may have it open
                other.unlink()
    return code


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    begin = len(_MARK) + hashlib.sha256().digest_size
    code = content[begin:]
    is_whole = content[:begin] == _MARK + hashlib.sha256(code).digest()
    return code if is_whole and code else None
