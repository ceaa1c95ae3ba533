"""Loads the native kernels, with the best instruction set that works on this machine.

Some virtual machines advertise instructions that they trap on, so every instruction set has to pass its self-test in a
child process once; the result is stored beside the library.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import write_whole
from engine.common.installed import bundle
from engine.kernels.native.build import library_path, outdated_libraries
from engine.kernels.native.structs import StampCountsStruct
from engine.telemetry.layer_log import STAMP, Stamped

_AT_ONCE = 2**12
_MOST_CHOSEN = 2**16
"""Experts that one call takes: more than any step chooses."""


class NativeStamps:
    """Where native code stamps its steps: one ring for all of the process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.switchyard_stamps.restype = ctypes.POINTER(StampCountsStruct)
        library.switchyard_take_stamps.restype = ctypes.c_int64
        library.switchyard_take_stamps.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._library = library
        self._counts = StampCountsStruct()
        # Kept: to map and unmap as much memory several times a second would halt the threads that compute.
        self._some, self._ids = np.empty(_AT_ONCE, STAMP), np.empty(_MOST_CHOSEN, np.int32)

    def switch(self, on: bool) -> None:
        """Steps are stamped from now on, or no more; without memory for them, none are."""
        counts = self._library.switchyard_stamps(int(on))
        if counts:
            self._counts = counts.contents

    @property
    def written(self) -> int:
        """Stamps so far."""
        return int(self._counts.written)

    @property
    def dropped(self) -> int:
        """Those that were not taken in time."""
        return int(self._counts.dropped)

    @property
    def chosen(self) -> int:
        """Experts that all steps have chosen."""
        return int(self._counts.chosen)

    @property
    def ended_ns(self) -> int:
        """End of the last step."""
        return int(self._counts.ended_ns)

    @property
    def taken(self) -> int:
        """Stamps that have been taken."""
        return int(self._counts.taken)

    def take(self, most: int) -> tuple[Stamped, NDArray[np.int32]]:
        """The oldest stamps, at most `most`, and the experts that they chose, one after the other.

        One caller at a time.
        """
        stamps, chosen = [np.empty(0, STAMP)], [np.empty(0, np.int32)]
        some, ids = self._some, self._ids
        while most > 0:
            wanted = min(most, _AT_ONCE)
            taken = self._library.switchyard_take_stamps(wanted, some.ctypes.data, len(ids), ids.ctypes.data)
            stamps.append(some[:taken].copy())
            chosen.append(ids[: int(some["count"][:taken].sum())].copy())
            most -= taken
            if not taken:
                break
        return np.concatenate(stamps), np.concatenate(chosen)


_ABI = 27
_SELF_TEST = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).switchyard_self_test(int(sys.argv[2])))"


class Isa(IntEnum):
    """Instruction sets with kernels, numbered as in the library."""

    PORTABLE = 0
    AVX2 = 1
    AVX_VNNI = 2
    AVX512 = 3
    AVX512_VNNI = 4
    AVX512_BF16 = 5
    AMX = 6
    NEON = 16
    NEON_DOT = 17
    NEON_I8MM = 18


_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_MULTIPLY = [_POINTER, _POINTER, _I32, _POINTER, _POINTER, _I32, _POINTER]
_ATTEND = [*[_POINTER] * 4, _I32, *[_POINTER] * 3, _I32, _I64, _POINTER]
_CALLS: dict[str, tuple[list[Any], Any]] = {
    "use_isa_for": ([_I32] * 3, None),
    "pool_create": ([_I32], _POINTER),
    "pool_destroy": ([_POINTER], None),
    "experts": ([_POINTER, _POINTER, _I32, _I32, *[_POINTER] * 4], _I32),
    "linear": (_MULTIPLY, _I32),
    "linear_rows": (_MULTIPLY, _I32),
    "sparse_step": ([_POINTER, _POINTER, _I32, *[_POINTER] * 4], _I32),
    "attention_step": (_ATTEND, _I32),
    "latent_step": (_ATTEND, _I32),
    "delta_step": ([*[_POINTER] * 4, _I32, _POINTER, _POINTER], _I32),
    "delta_rows": ([_POINTER] * 6, _I32),
    "model_step": ([_POINTER, _POINTER, _I32, _I32, *[_POINTER] * 3], _I32),
    "quantise": ([_POINTER, _POINTER, _POINTER, _I32], _I32),
    "dequantise": ([_POINTER, _POINTER, _I64, _I64, _POINTER], _I32),
    "repack": ([_POINTER, _POINTER, _I64, _I32], _I32),
    "unpack": ([_POINTER, _POINTER, _I64, _I64, _I32, _POINTER], _I32),
    "paged_attention": ([_POINTER, _POINTER, _POINTER, _I32, *[_POINTER] * 4], _I32),
    "attention_rows": ([*[_POINTER] * 4, _I32, _POINTER, _POINTER, _POINTER, _I64, _POINTER], _I32),
    "prompt_attention": ([_POINTER] * 3, _I32),
    "read_memory": ([_POINTER, _POINTER, _I64], ctypes.c_uint64),
    "route_rows": ([_POINTER, _POINTER, _I32, *[_POINTER] * 4], _I32),
    "exchange_bytes": ([_POINTER], _I64),
    "exchange_create": ([*[_POINTER] * 4, _I64], _POINTER),
    "exchange_destroy": ([_POINTER], None),
    "exchange_in_turn": ([_POINTER], None),
    "exchange_change": ([_POINTER, _I32, _I32, _I32], None),
    "exchange_start": ([_POINTER], ctypes.c_uint64),
    "exchange_end": ([_POINTER], _I32),
    "exchange_layout": ([_POINTER, _POINTER], None),
    "exchange_wait": ([_POINTER, _I64], _I32),
    "exchange_cancel": ([_POINTER], None),
    "exchange_records": ([_POINTER], _POINTER),
}
"""Of switchyard_kernels.h and switchyard_exchange.h, without `switchyard_`: what they take and return."""


class NativeKernels:
    """The loaded library and one pool of threads; the calls of `_CALLS` are attributes."""

    def __init__(self, library: ctypes.CDLL, isa: Isa, threads: int) -> None:
        self.isa = isa
        self.threads = threads
        for name, (arguments, result) in _CALLS.items():
            call = getattr(library, f"switchyard_{name}")
            call.argtypes, call.restype = arguments, result
        library.switchyard_use_isa(int(isa))
        self._library = library
        self.pool: int = library.switchyard_pool_create(threads)
        self.stamps = NativeStamps(library)

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            raise AttributeError(name)
        call = getattr(self._library, f"switchyard_{name}")
        setattr(self, name, call)
        return call

    def use(self, isa: Isa) -> None:
        """All later calls, of any pool, use this instruction set."""
        self._library.switchyard_use_isa(int(isa))

    def use_for(self, kind: int, number: int, isa: Isa) -> None:
        """The same for one kind of work with a format's weights alone; both numbered as in the library."""
        self._library.switchyard_use_isa_for(kind, number, int(isa))

    def close(self) -> None:
        """Ends the pool's threads.  No kernel may be called after this."""
        if self.pool:
            self._library.switchyard_pool_destroy(self.pool)
            self.pool = 0


def out_of_memory() -> EngineError:
    """What to raise when a kernel had no memory for its buffers."""
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to compute a layer.")


def load_kernels(threads: int) -> NativeKernels | None:
    """The native kernels with `threads` threads, or `None` if they are not built or do not work.

    `SWITCHYARD_NATIVE=0` in the environment disables them; `SWITCHYARD_ISA=avx2` (or another name of `Isa`) limits
    them.
    """
    isas = usable_isas()
    if not isas:
        return None
    kernels = NativeKernels(_open(library_path()), isas[-1], threads)
    if not is_forced():
        from engine.kernels.native import choice  # which needs kernels to measure

        choice.apply(kernels, choice.choice_for(threads) or {}, isas)
    return kernels


def usable_isas() -> list[Isa]:
    """The instruction sets that `load_kernels` may use, the best of all last."""
    path = library_path()
    if os.environ.get("SWITCHYARD_NATIVE") == "0" or not path.exists():
        return []
    isas = proven(path)
    return [isa for isa in isas if isa <= Isa[_wanted()]] if is_forced() else isas


def watch_file(address: int, nbytes: int, sentence: str) -> Callable[[], None]:
    """Where the file mapped there loses data while it is read, the process ends with this sentence and exit code 2.

    Without the kernels, or on Windows, it ends as the system has it.
    """
    path = library_path()
    with suppress(OSError, AttributeError):
        library = _open(path)
        if library.switchyard_abi() == _ABI:
            library.switchyard_watch_file.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int32]
            number = library.switchyard_watch_file(address, nbytes, f"\n{sentence}\n".encode(), 2)
            return partial(library.switchyard_unwatch_file, number)
    return lambda: None


def is_forced() -> bool:
    """Whether the environment names the instruction set."""
    return _wanted() in Isa.__members__


def _wanted() -> str:
    return os.environ.get("SWITCHYARD_ISA", "").upper()


def missing_note() -> str:
    """A note for users without these kernels; empty if the environment disables them."""
    if os.environ.get("SWITCHYARD_NATIVE") == "0":
        return ""
    slower = "so PyTorch's operators are used, several times slower"
    if bundle() is not None:
        return f"The fast CPU kernels do not work on this processor or are missing, {slower}: install Switchyard again."
    if library_path().exists():
        return f"The fast CPU kernels fail their self-test on this processor, {slower}: run the set-up again."
    if outdated_libraries():
        return f"The fast CPU kernels were built for another version or machine, {slower}: run the set-up again."
    return f"The fast CPU kernels are missing, {slower}: install a C++ compiler and run the set-up again."


def prove(path: Path) -> Isa | None:
    """The best working instruction set."""
    isas = proven(path)
    return isas[-1] if isas else None


def proven(path: Path) -> list[Isa]:
    """The instruction sets that pass their self-test here, best last; tested once per machine and library."""
    verdict_path = path.with_suffix(".proven.json")
    machine = f"{platform.node()} {processor()}"
    try:
        verdict = json.loads(verdict_path.read_text())
        if verdict["machine"] == machine:
            return [Isa(isa) for isa in verdict["isas"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    passed = {isa: _passes(path, isa) for isa in _advertised(path)}
    isas = [isa for isa, passes in passed.items() if passes]
    if None in passed.values():
        return isas
    with suppress(OSError):  # a read-only installation: test again next time
        write_whole(verdict_path, json.dumps({"machine": machine, "isas": isas}))
    return isas


def _advertised(path: Path) -> list[Isa]:
    try:
        library = _open(path)
        if library.switchyard_abi() != _ABI:
            return []
        library.switchyard_advertised_isas.restype = ctypes.c_uint32
        advertised: int = library.switchyard_advertised_isas()
    except (OSError, AttributeError):
        return []
    return [isa for isa in Isa if advertised >> isa & 1]


def _passes(path: Path, isa: Isa) -> bool | None:
    """Whether the self-test passes; `None` if it timed out, as on a suspended or busy machine."""
    command = [sys.executable, "-I", "-S", "-c", _SELF_TEST, str(path), str(int(isa))]
    for _ in range(2):
        try:
            return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            continue
    return None


@cache
def _open(path: Path) -> ctypes.CDLL:
    # Not PyDLL, which holds the GIL: other threads (heartbeats, the command reader) must run meanwhile.
    return ctypes.CDLL(str(path))


def processor() -> str:
    """Identifies this CPU: a migrated virtual machine may lose instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    instructions = fields.get("flags") or fields.get("Features") or ""
    name = fields.get("model name") or fields.get("CPU part") or platform.processor()
    return f"{name} {hashlib.sha256(instructions.encode()).hexdigest()[:16]}"
