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

from engine.common.files import write_whole
from engine.common.installed import bundle
from engine.kernels.native.build import library_path, outdated_libraries
from engine.kernels.native.stamps import NativeStamps

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


class ExchangeCalls:
    """The calls of switchyard_exchange.h."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        for name, arguments, result in (
            ("bytes", [pointer], i64),
            ("create", [pointer, pointer, pointer, pointer, i64], pointer),
            ("destroy", [pointer], None),
            ("in_turn", [pointer], None),
            ("change", [pointer, i32, i32, i32], None),
            ("start", [pointer], ctypes.c_uint64),
            ("end", [pointer], i32),
            ("layout", [pointer, pointer], None),
            ("wait", [pointer, i64], i32),
            ("cancel", [pointer], None),
            ("records", [pointer], pointer),
        ):
            call = getattr(library, f"switchyard_exchange_{name}")
            call.argtypes, call.restype = arguments, result
        self.bytes = library.switchyard_exchange_bytes
        self.create = library.switchyard_exchange_create
        self.destroy = library.switchyard_exchange_destroy
        self.in_turn = library.switchyard_exchange_in_turn
        self.change = library.switchyard_exchange_change
        self.start = library.switchyard_exchange_start
        self.end = library.switchyard_exchange_end
        self.layout = library.switchyard_exchange_layout
        self.wait = library.switchyard_exchange_wait
        self.cancel = library.switchyard_exchange_cancel
        self.records = library.switchyard_exchange_records


class NativeKernels:
    """The loaded library and one pool of threads."""

    def __init__(self, library: ctypes.CDLL, isa: Isa, threads: int) -> None:
        self.isa = isa
        self.threads = threads
        library.switchyard_use_isa_for.argtypes = [ctypes.c_int32] * 3
        library.switchyard_use_isa_for.restype = None
        library.switchyard_use_isa(int(isa))
        library.switchyard_pool_create.restype = ctypes.c_void_p
        library.switchyard_pool_destroy.argtypes = [ctypes.c_void_p]
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        library.switchyard_experts.argtypes = [pointer, pointer, i32, i32, pointer, pointer, pointer, pointer]
        library.switchyard_linear.argtypes = [pointer, pointer, i32, pointer, pointer, i32, pointer]
        library.switchyard_sparse_step.argtypes = [pointer, pointer, i32, *[pointer] * 4]
        for step in (library.switchyard_attention_step, library.switchyard_latent_step):
            step.argtypes = [*[pointer] * 4, i32, *[pointer] * 3, i32, i64, pointer]
        library.switchyard_delta_step.argtypes = [*[pointer] * 4, i32, pointer, pointer]
        library.switchyard_delta_rows.argtypes = [pointer] * 6
        library.switchyard_model_step.argtypes = [pointer, pointer, i32, i32, *[pointer] * 3]
        library.switchyard_quantise.argtypes = [pointer, pointer, pointer, i32]
        library.switchyard_dequantise.argtypes = [pointer, pointer, i64, i64, pointer]
        library.switchyard_repack.argtypes = [pointer, pointer, i64, i32]
        library.switchyard_unpack.argtypes = [pointer, pointer, i64, i64, i32, pointer]
        library.switchyard_paged_attention.argtypes = [pointer, pointer, pointer, i32, *[pointer] * 4]
        library.switchyard_attention_rows.argtypes = [*[pointer] * 4, i32, pointer, pointer, pointer, i64, pointer]
        library.switchyard_linear_rows.argtypes = [pointer, pointer, i32, pointer, pointer, i32, pointer]
        library.switchyard_prompt_attention.argtypes = [pointer, pointer, pointer]
        library.switchyard_read_memory.argtypes = [pointer, pointer, i64]
        library.switchyard_read_memory.restype = ctypes.c_uint64
        library.switchyard_route_rows.argtypes = [pointer, pointer, i32, *[pointer] * 4]
        self._library = library
        self.pool: int = library.switchyard_pool_create(threads)
        self.experts = library.switchyard_experts
        self.linear = library.switchyard_linear
        self.sparse_step = library.switchyard_sparse_step
        self.attention_step = library.switchyard_attention_step
        self.latent_step = library.switchyard_latent_step
        self.delta_step = library.switchyard_delta_step
        self.delta_rows = library.switchyard_delta_rows
        self.model_step = library.switchyard_model_step
        self.quantise = library.switchyard_quantise
        self.dequantise = library.switchyard_dequantise
        self.repack = library.switchyard_repack
        self.unpack = library.switchyard_unpack
        self.paged_attention = library.switchyard_paged_attention
        self.attention_rows = library.switchyard_attention_rows
        self.linear_rows = library.switchyard_linear_rows
        self.prompt_attention = library.switchyard_prompt_attention
        self.read_memory = library.switchyard_read_memory
        self.route_rows = library.switchyard_route_rows
        self.stamps = NativeStamps(library)
        self.exchange = ExchangeCalls(library)

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

    Returns:
        What ends that.
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
