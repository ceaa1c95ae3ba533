"""Opens cards, and starts compiled kernels on them, through the driver and on PyTorch's streams.

AMD's are compiled by hiprtc and started through HIP, both as PyTorch's ROCm builds have them: their interfaces are
NVRTC's and the driver's with other names; what the sources need besides is in `src/hip.h`.  None of this has run on
AMD's cards.  As on NVIDIA's, each kernel is tried before it is used.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import torch

from engine.kernels.cuda.compiled import (
    THREADS,
    Argument,
    CompileError,
    Kernel,
    Machine,
    RunTimeCompiler,
    arguments_of,
    find_nvrtc,
    kept_code,
    machine_code,
    sources_of,
)


class Launcher(Protocol):
    """Something that runs kernels."""

    @property
    def multiprocessors(self) -> int: ...
    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        """Queues a kernel on the current stream."""


class OnCard:
    """What starts some kernels on one card."""

    def __init__(self, card: Launcher) -> None:
        self.card = card

    def start(self, kernel: Kernel, grid: tuple[int, int, int], **values: Argument) -> None:
        """Queues a kernel with these arguments, which have the names of its source."""
        self.card.launch(kernel, grid, arguments_of(kernel, values))


class DriverError(Exception):
    """A driver refused something; the message is one sentence."""


class Card(ABC):
    """One of PyTorch's cards."""

    _prefix: ClassVar[str]
    """Of the driver's functions that load kernels."""
    _launching: ClassVar[str]
    """The driver's function that starts them."""
    _telling: ClassVar[str]
    """The one that tells its version."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._functions: dict[Kernel, ctypes.c_void_p] = {}
        self._modules: list[ctypes.c_void_p] = []  # what functions are part of
        version = ctypes.c_int()
        self._checked(getattr(self._library(), self._telling)(ctypes.byref(version)), "tell its version")
        self.driver = str(version.value)
        self._properties = torch.cuda.get_device_properties(self._device)

    @classmethod
    def _bound(cls, library: ctypes.CDLL) -> ctypes.CDLL:
        """A driver whose functions know what they are given."""
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        getattr(library, cls._launching).argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        getattr(library, f"{cls._prefix}ModuleGetFunction").argtypes = [pointer, pointer, ctypes.c_char_p]
        return library

    @property
    def multiprocessors(self) -> int:
        """Units that run blocks of threads."""
        return int(self._properties.multi_processor_count)

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compiles kernels at the same time, so that nobody waits for them one by one."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(self._code, kernels))

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        """Queues a kernel on PyTorch's current stream of this card."""
        with torch.cuda.device(self._device):
            self._enter()
            function = self._functions.get(kernel) or self._load(kernel)
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            stream = torch.cuda.current_stream(self._device).cuda_stream
            start = getattr(self._library(), self._launching)
            started = start(function, *grid, THREADS, 1, 1, 0, stream, parameters, None)
        self._checked(started, f"start {kernel.name}")

    def _load(self, kernel: Kernel) -> ctypes.c_void_p:
        library, module, function = self._library(), ctypes.c_void_p(), ctypes.c_void_p()
        load = getattr(library, f"{self._prefix}ModuleLoadData")
        if load(ctypes.byref(module), self._code(kernel)):  # it was kept by another driver, perhaps
            self._checked(load(ctypes.byref(module), self._code(kernel, again=True)), f"load {kernel.name}")
        self._modules.append(module)
        find = getattr(library, f"{self._prefix}ModuleGetFunction")
        self._checked(find(ctypes.byref(function), module, kernel.entry.encode()), f"find {kernel.entry}")
        self._functions[kernel] = function
        return function

    def _enter(self) -> None:  # noqa: B027  AMD's driver asks for nothing
        """Makes this card the calling thread's, as far as the driver wants to be told."""

    @abstractmethod
    def _library(self) -> ctypes.CDLL:
        """The driver.  Raises `DriverError` where there is none."""

    @abstractmethod
    def _checked(self, result: int, did: str) -> None:
        """Raises `DriverError` if the driver could not do something."""

    @abstractmethod
    def _code(self, kernel: Kernel, *, again: bool = False) -> bytes:
        """Machine code for this card; `again`: the driver has refused what was kept."""


_FOLDERS = ("torch/lib", "_rocm_sdk_core/lib", "_rocm_sdk_core/bin")
"""Within site-packages: of PyTorch's wheels, and of the packages that newer ones need."""
_SYSTEM = ("/opt/rocm/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu")
_COMPILERS = ("hiprtc0*.dll", "hiprtc.dll") if sys.platform == "win32" else ("libhiprtc.so*", "libhiprtc-*.so*")
_DRIVERS = ("amdhip64*.dll",) if sys.platform == "win32" else ("libamdhip64.so*", "libamdhip64-*.so*")
_OPTIONS = ("-std=c++17", "-O3")
MISSING = (
    "AMD's compiler hiprtc was not found: it comes with PyTorch's ROCm builds, so run the set-up again, or install ROCm"
)


class Hiprtc(RunTimeCompiler):
    """AMD's; its version is its own."""

    name, _prefix, _code = "hiprtc", "hiprtc", "Code"


def _libraries(patterns: Sequence[str]) -> Iterator[Path]:
    """Files of these names, those beside the installed PyTorch first."""
    places = [*map(Path, filter(None, sys.path))]
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        places.insert(0, Path(found.origin).parent.parent)
    folders = [place / folder for place in places for folder in _FOLDERS]
    if sys.platform == "linux":
        folders += map(Path, _SYSTEM)
    for folder in dict.fromkeys(folders):
        for pattern in patterns:
            yield from (path for path in sorted(folder.glob(pattern)) if "builtins" not in path.name)


@cache
def find_hiprtc() -> Hiprtc:
    """The compiler.

    Raises:
        CompileError: there is none.
    """
    refused = ""
    for path in _libraries((*_COMPILERS, *_DRIVERS)):  # older drivers are the compiler, too
        try:
            return Hiprtc(path)
        except (OSError, AttributeError) as error:
            refused = f"AMD's compiler {path} could not be loaded ({error})"
    raise CompileError(refused or MISSING)


def compile_for(kernel: Kernel, architecture: str, hiprtc: Hiprtc) -> Machine:
    """Machine code for cards of an architecture, such as gfx1100."""
    source, headers, defines = sources_of(kernel)
    options = (*_OPTIONS, f"--offload-arch={architecture}", *defines)
    return hiprtc.compile(source, kernel.source, headers, options)


@cache
def _amd_driver() -> ctypes.CDLL:
    refused = "it was not found"
    for path in _libraries(_DRIVERS):
        try:
            library = AmdCard._bound(ctypes.CDLL(str(path)))
        except OSError as error:
            refused = str(error)
            continue
        library.hipGetErrorString.restype = ctypes.c_char_p
        return library
    raise DriverError(f"AMD's HIP could not be loaded ({refused})")


class AmdCard(Card):
    """One of AMD's; the version of its driver is HIP's."""

    _prefix, _launching, _telling = "hip", "hipModuleLaunchKernel", "hipRuntimeGetVersion"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.architecture = str(self._properties.gcnArchName).partition(":")[0]

    def _library(self) -> ctypes.CDLL:
        return _amd_driver()

    def _checked(self, result: int, did: str) -> None:
        if result:
            words = _amd_driver().hipGetErrorString(result) or f"error {result}".encode()
            raise DriverError(f"HIP could not {did}: {words.decode(errors='replace')}")

    def _code(self, kernel: Kernel, *, again: bool = False) -> bytes:
        compiler, target = find_hiprtc(), self.architecture
        made_from = repr((kernel, _OPTIONS, compiler.version, target, self.driver))
        return kept_code(kernel, target, made_from, lambda: compile_for(kernel, target, compiler).code, again=again)


_log = logging.getLogger(__name__)


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = NvidiaCard._bound(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"))
    except OSError as error:
        raise DriverError(f"NVIDIA's driver could not be loaded ({error})") from None
    pointer = ctypes.c_void_p
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuMemHostGetDevicePointer_v2.argtypes = [pointer, pointer, ctypes.c_uint]
    return library


def card_of(device: torch.device) -> Card | None:
    """The card that is this device, whoever made it, where kernels can be compiled for it."""
    if device.type != "cuda":
        return None
    return _card(device.index if device.index is not None else torch.cuda.current_device())


Kernels = TypeVar("Kernels")


def on_card(device: torch.device, make: Callable[[Launcher], Kernels]) -> Kernels | None:
    """The kernels of a card, if it runs any."""
    card = card_of(device)
    return make(card) if card is not None else None


def nvidia_card(device: torch.device) -> NvidiaCard | None:
    """The same, if NVIDIA made it: for kernels that wait for what the host writes."""
    card = card_of(device)
    return card if isinstance(card, NvidiaCard) else None


@cache
def _card(index: int) -> Card | None:
    try:
        return open_card(index)
    except (CompileError, DriverError) as error:
        _log.info("card %d runs no kernels in CUDA C: %s", index, error)
        return None


def open_card(index: int) -> Card:
    """The card of this index among torch's: AMD's cards have the names of NVIDIA's there.

    Raises:
        CompileError: there is no compiler for it.
        DriverError: its driver does not open it.
    """
    if torch.version.hip is not None:
        find_hiprtc()
        return AmdCard(index)
    find_nvrtc(torch.cuda.get_device_capability(index))
    return NvidiaCard(index)


class NvidiaCard(Card):
    """One of NVIDIA's; the version of its driver is that of CUDA that it knows."""

    _prefix, _launching, _telling = "cu", "cuLaunchKernel", "cuDriverGetVersion"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.capability = (self._properties.major, self._properties.minor)
        # PyTorch's own: a thread that has not called CUDA's runtime yet has none.
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._checked(_driver().cuInit(0), "start")
        self._checked(_driver().cuDeviceGet(ctypes.byref(device), index), "find the card")
        self._checked(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device), "open the card")

    def address_of(self, memory: torch.Tensor) -> int:
        """Where the card has pinned and mapped memory of the host, which its kernels read and write while they run."""
        found = ctypes.c_void_p()
        self._enter()
        done = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), memory.data_ptr(), 0)
        self._checked(done, "map the host's memory")
        return found.value or 0

    def _enter(self) -> None:
        self._checked(_driver().cuCtxSetCurrent(self._context), "use the card")

    def _library(self) -> ctypes.CDLL:
        return _driver()

    def _checked(self, result: int, did: str) -> None:
        if result:
            words = ctypes.c_char_p()
            _driver().cuGetErrorString(result, ctypes.byref(words))
            said = words.value.decode(errors="replace") if words.value else f"error {result}"
            raise DriverError(f"The card's driver could not {did}: {said}")

    def _code(self, kernel: Kernel, *, again: bool = False) -> bytes:
        return machine_code(kernel, self.capability, self.driver, again=again)
