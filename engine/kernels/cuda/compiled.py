"""Machine code of the kernels, kept on disk by what it was made from: sources, options, compiler, card and driver; and
what they are called with, as the sources in `src` declare it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from engine.common.files import write_whole
from engine.common.paths import cache_dir
from engine.formats.ggml import GRIDS

_FOLDERS = (
    *("nvidia/cu13/lib", "nvidia/cu13/bin/x86_64", "nvidia/cu13/bin"),
    *("nvidia/cuda_nvrtc/lib", "nvidia/cuda_nvrtc/bin", "torch/lib"),
)
"""Within site-packages: of CUDA 13's packages, of CUDA 12's, of PyTorch's builds for Windows."""
_PATTERN = "nvrtc64_*_0.dll" if sys.platform == "win32" else "libnvrtc.so.*"


class CompileError(Exception):
    """No machine code came out; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine code for one kind of card.

    Attributes:
        code: a cubin, as drivers load it.
        log: what the compiler said: with `--ptxas-options=-v` registers and spills.
    """

    code: bytes
    log: str


class RunTimeCompiler:
    """One version of a compiler with NVRTC's interface, whose functions begin with another word in AMD's.

    It needs no card, driver, toolkit or C++ compiler; the machine code of a kernel takes it a fraction of a second.
    """

    name: ClassVar[str]
    _prefix: ClassVar[str]
    _code: ClassVar[str]

    def __init__(self, path: Path) -> None:
        if sys.platform == "win32":
            os.add_dll_directory(str(path.parent))  # it loads a library beside it
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._function("Version")(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._function("GetErrorString").restype = ctypes.c_char_p

    def compile(self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> Machine:
        """Machine code of a source.

        Args:
            name: of the source, for messages.
            headers: texts of the headers that it includes, by name.
            options: must name a real architecture (`-arch=sm_89`, `--offload-arch=gfx1100`).
        """
        program = ctypes.c_void_p()
        texts, names = [text.encode() for text in headers.values()], [each.encode() for each in headers]
        strings = ctypes.c_char_p * len(headers)
        made = self._function("CreateProgram")(
            ctypes.byref(program), source.encode(), name.encode(), len(headers), strings(*texts), strings(*names)
        )
        self._checked(made, f"take {name}")
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            result = self._function("CompileProgram")(program, len(options), given)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if result:
                first = next((line for line in log.splitlines() if "error" in line), log[:200] or self._words(result))
                raise CompileError(f"{self.name} {self.version[0]}.{self.version[1]} does not compile {name}: {first}")
            return Machine(self._bytes(program, self._code), log)
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    def _function(self, name: str) -> Any:
        return getattr(self._library, self._prefix + name)

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._checked(self._function(f"Get{what}Size")(program, ctypes.byref(size)), f"give its {what}")
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._checked(self._function(f"Get{what}")(program, buffer), f"give its {what}")
        return buffer.raw[: size.value]

    def _checked(self, result: int, did: str) -> None:
        if result:
            raise CompileError(f"{self.name} cannot {did} ({self._words(result)})")

    def _words(self, result: int) -> str:
        return bytes(self._function("GetErrorString")(result)).decode(errors="replace")


class Nvrtc(RunTimeCompiler):
    """NVIDIA's; its version is CUDA's."""

    name, _prefix, _code = "NVRTC", "nvrtc", "CUBIN"

    def architectures(self) -> list[int]:
        """The compute capabilities that it compiles for, as 75, 80, ..."""
        count = ctypes.c_int()
        self._checked(self._function("GetNumSupportedArchs")(ctypes.byref(count)), "list its architectures")
        numbers = (ctypes.c_int * count.value)()
        self._checked(self._function("GetSupportedArchs")(numbers), "list its architectures")
        return list(numbers)


MISSING = (
    "NVIDIA's compiler NVRTC was not found: it comes with PyTorch's CUDA builds, so run the set-up again, or install "
    "the package nvidia-cuda-nvrtc"
)


def libraries() -> Iterator[Path]:
    """Files of the compiler, those beside the installed PyTorch first."""
    places = [*sys.path]
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        places.insert(0, str(Path(torch.origin).parent.parent))
    seen = set()
    for place in places:
        for folder in _FOLDERS:
            for path in sorted(Path(place or ".", folder).glob(_PATTERN)):
                if path.resolve() not in seen and ".alt." not in path.name and "builtins" not in path.name:
                    seen.add(path.resolve())
                    yield path


def architecture_for(capability: tuple[int, int], nvrtc: Nvrtc) -> int:
    """The newest architecture that the compiler knows and a card runs: cards run code of their own generation.

    Raises:
        CompileError: the card is too old or too new for this compiler.
    """
    wanted = 10 * capability[0] + capability[1]
    known = [each for each in nvrtc.architectures() if each // 10 == capability[0] and each <= wanted]
    if not known:
        raise CompileError(
            f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} makes no code for cards of compute capability "
            f"{capability[0]}.{capability[1]}"
        )
    return max(known)


@cache
def find_nvrtc(capability: tuple[int, int] | None = None) -> Nvrtc:
    """A compiler: the first, or the first that makes code for cards of this compute capability.

    Raises:
        CompileError: there is none.
    """
    refused = ""
    for path in libraries():
        try:
            found = Nvrtc(path)
            if capability is not None:
                architecture_for(capability, found)
        except (OSError, AttributeError) as error:
            refused = f"NVIDIA's compiler {path} could not be loaded ({error})"
        except CompileError as error:
            refused = str(error)
        else:
            return found
    raise CompileError(refused or MISSING)


STATES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""As `state_at` in states.h has them."""
THREADS = 128
"""Of a block, as in card.h."""
SOURCES = Path(__file__).resolve().parent / "src"
_MARK = b"switchyard cubin 1\n"
_OPTIONS = ("-std=c++17", "--ptxas-options=-v")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, and what it is compiled for.

    Attributes:
        source: file in `SOURCES`.
        defines: macros and their values.
    """

    source: str
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def entry(self) -> str:
        """Its name in the source."""
        return _entry_of(self.source)[0]

    @property
    def name(self) -> str:
        """Its source and values, such as `products-Int4-1`, fit for a file's name."""
        return re.sub(r"\W+", "-", "-".join((Path(self.source).stem, *(value for _, value in self.defines))))


@cache
def _texts() -> dict[str, str]:
    paths = [*sorted(path for path in SOURCES.iterdir() if path.is_file()), GRIDS]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@cache
def _entry_of(source: str) -> tuple[str, type[ctypes.Structure]]:
    """The kernel in a source, and the structure that it takes."""
    found = re.search(r"__global__ .*?(\w+)\(const (\w+) arguments\)", _texts()[source])
    assert found is not None, source
    return found[1], _structure(found[2])


_NUMBERS: dict[str, Any] = {"int": ctypes.c_int, "i64": ctypes.c_int64, "float": ctypes.c_float}
_DECLARED = re.compile(r"^ +(?:const )?(\w+)(\*?) ([^;]+);", re.MULTILINE)


@cache
def _structure(name: str) -> type[ctypes.Structure]:
    found = (re.search(rf"^struct {name} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL) for text in _texts().values())
    fields = []
    for kind, is_pointer, names in _DECLARED.findall(next(filter(None, found))[1]):
        of_field: Any = ctypes.c_void_p if is_pointer else _NUMBERS.get(kind) or _structure(kind)
        for each in names.split(", "):
            own, _, count = each.rstrip("]").partition("[")
            fields.append((own, of_field * int(count) if count else of_field))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_AS_THEY_ARE = {type(None), bool, int, float}

Argument = dict[str, "Argument"] | torch.Tensor | torch.dtype | tuple[int, ...] | float | None
"""A tensor stands for where it lies, a type for its number, nothing for a null pointer."""


def arguments_of(kernel: Kernel, values: dict[str, Argument]) -> ctypes.Structure:
    """What a kernel is called with, by the names in its source; what is left out is 0."""
    return _filled(_entry_of(kernel.source)[1], values)


def _filled(structure: type[ctypes.Structure], values: dict[str, Argument]) -> ctypes.Structure:
    given: dict[str, Any] = {}
    for name, value in values.items():
        if type(value) in _AS_THEY_ARE:  # before asking for a tensor, which takes longer than all else here
            given[name] = value
        elif isinstance(value, torch.Tensor):
            given[name] = value.data_ptr()
        elif isinstance(value, torch.dtype):
            given[name] = STATES[value]
        elif isinstance(value, dict):
            given[name] = _filled(_structure(_declared(structure)[name]), value)
        else:
            given[name] = value
    if not given.keys() <= _declared(structure).keys():  # ctypes would take them, and leave them out
        raise TypeError(f"{structure.__name__} has no {', '.join(given.keys() - _declared(structure).keys())}")
    return structure(**given)


@cache
def _declared(structure: type[ctypes.Structure]) -> dict[str, str]:
    """The types of its fields by their names."""
    return {name: kind.__name__ for name, kind, *_ in structure._fields_}


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
