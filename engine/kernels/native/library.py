"""Loads the native kernels, with the best instruction set that was seen to work on this very machine.

Some virtual machines advertise instructions that they trap on, so every instruction set has to pass its self-test in
a child process once; the verdict is kept beside the library.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from enum import IntEnum
from functools import cache
from pathlib import Path

from engine.kernels.native.build import library_path

_ABI = 2
_SELF_TEST = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).switchyard_self_test(int(sys.argv[2])))"


class Isa(IntEnum):
    """Instruction sets that kernels exist for, as the library numbers them."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


class ExpertsStruct(ctypes.Structure):
    """`SwitchyardExperts` of switchyard_kernels.h."""

    _fields_ = (
        ("records", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("gate_up_offset", ctypes.c_int64),
        ("down_offset", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("inner", ctypes.c_int32),
    )


class SparseBlockStruct(ctypes.Structure):
    """`SwitchyardSparseBlock` of switchyard_kernels.h."""

    _fields_ = (
        ("norm", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("experts", ExpertsStruct),
        ("epsilon", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("normalise", ctypes.c_int32),
        ("bf16_shares", ctypes.c_int32),
    )


class AttentionStruct(ctypes.Structure):
    """`SwitchyardAttention` of switchyard_kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "q", "k", "v", "o", "q_norm", "k_norm")),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim")),
    )


class NativeKernels:
    """The loaded library and one pool of threads."""

    def __init__(self, library: ctypes.CDLL, isa: Isa, threads: int) -> None:
        self.isa = isa
        self.threads = threads
        library.switchyard_use_isa(int(isa))
        library.switchyard_pool_create.restype = ctypes.c_void_p
        library.switchyard_pool_destroy.argtypes = [ctypes.c_void_p]
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        library.switchyard_experts_bf16.argtypes = [pointer, pointer, i32, i32, pointer, pointer, pointer, pointer]
        library.switchyard_linear_bf16.argtypes = [pointer, pointer, i64, i64, pointer, pointer, pointer]
        library.switchyard_sparse_step_bf16.argtypes = [pointer] * 6
        library.switchyard_attention_step_bf16.argtypes = [*[pointer] * 7, i64, i64, pointer]
        self._library = library
        self.pool: int = library.switchyard_pool_create(threads)
        self.experts_bf16 = library.switchyard_experts_bf16
        self.linear_bf16 = library.switchyard_linear_bf16
        self.sparse_step_bf16 = library.switchyard_sparse_step_bf16
        self.attention_step_bf16 = library.switchyard_attention_step_bf16

    def close(self) -> None:
        """Ends the pool's threads.  No kernel may be called afterwards."""
        if self.pool:
            self._library.switchyard_pool_destroy(self.pool)
            self.pool = 0


def load_kernels(threads: int) -> NativeKernels | None:
    """The native kernels with `threads` threads, or `None` where they are not built or do not work.

    `SWITCHYARD_NATIVE=0` in the environment leaves them out; `SWITCHYARD_ISA=avx2` (or `portable`) holds them back.
    """
    path = library_path()
    if os.environ.get("SWITCHYARD_NATIVE") == "0" or not path.exists():
        return None
    isa = prove(path)
    if isa is None:
        return None
    wanted = os.environ.get("SWITCHYARD_ISA", "").upper()
    if wanted in Isa.__members__:
        isa = min(isa, Isa[wanted])
    return NativeKernels(_open(path), isa, threads)


def missing_note() -> str:
    """What to tell whoever computes on the CPU without these kernels; nothing if the environment left them out."""
    if os.environ.get("SWITCHYARD_NATIVE") == "0":
        return ""
    return (
        "The fast CPU kernels are not there, so PyTorch's operators compute, some times slower: "
        "install a C++ compiler and run the set-up again."
    )


def prove(path: Path) -> Isa | None:
    """The best instruction set that passes its self-test here; tested once per machine and library."""
    verdict_path = path.with_suffix(".proven.json")
    machine = f"{platform.node()} {_cpu_name()}"
    try:
        verdict = json.loads(verdict_path.read_text())
        if verdict["machine"] == machine:
            return None if verdict["isa"] is None else Isa(verdict["isa"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    isa = _best_working(path)
    temporary = verdict_path.with_suffix(f".{os.getpid()}.part")
    try:
        temporary.write_text(json.dumps({"machine": machine, "isa": isa}))
        temporary.replace(verdict_path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a read-only installation: prove it again next time
    return isa


def _best_working(path: Path) -> Isa | None:
    try:
        library = _open(path)
        if library.switchyard_abi() != _ABI:
            return None
        advertised = library.switchyard_advertised_isa()
    except OSError:
        return None
    for isa in sorted(Isa, reverse=True):
        if isa > advertised:
            continue
        command = [sys.executable, "-I", "-S", "-c", _SELF_TEST, str(path), str(int(isa))]
        try:
            if subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0:
                return isa
        except (OSError, subprocess.TimeoutExpired):
            continue
    return None


@cache
def _open(path: Path) -> ctypes.CDLL:
    # PyDLL would hold the GIL: other threads (heartbeats, the reader of commands) must run meanwhile.
    return ctypes.CDLL(str(path))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
