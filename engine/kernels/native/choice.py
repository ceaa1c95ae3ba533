"""Which instruction set each kind of work uses on this machine: measured once, in about a second.

The newest instructions are not the fastest of every processor: some split wide vectors or slow their clock down.  What
was measured is kept in the data folder, for this processor and these kernels.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.common.choice import clearly_least
from engine.common.files import new_folder, write_whole
from engine.common.paths import data_dir
from engine.formats import FORMATS
from engine.kernels.native.build import library_path
from engine.kernels.native.library import Isa, NativeKernels, is_forced, processor, usable_isas
from engine.kernels.native.structs import MatrixStruct

FEW, MANY = 0, 1
"""Uses, numbered as in the library."""

_ROWS, _COLUMNS = 1024, 2048
_TOKENS = {FEW: 1, MANY: 64}
_WORDS = {FEW: "one token", MANY: "many tokens"}
_COLD_BYTES = 160 * 2**20
"""Weights that calls go through in turn: beyond the caches of most processors."""
_BYTES = {0: 2.0, 1: 1.0}
"""Of a weight, by the format's number; half a byte in the others."""
_ROUNDS = 7
_HOPELESS = 1.6
"""Candidates that are so much slower than the best after the first round are not measured again."""
_BURST_S = {FEW: 0.003, MANY: 0.004}
_CLEARLY = 0.074
"""The newest instructions stay in use unless others take less time by this share."""
_STEADY = 1.35
"""Median over best of the newest ones' bursts: above, other programs are running, and nothing is believed."""


@dataclass(frozen=True, slots=True)
class Use:
    """A kind of work: a weight format with one token, or with many.

    Attributes:
        kind: `FEW` or `MANY`.
        format: number of the format in the library.
    """

    kind: int
    format: int

    def __str__(self) -> str:
        name = next(name for name, each in FORMATS.items() if each.native == self.format)
        return f"{name} with {_WORDS[self.kind]}"


Choice = Mapping[Use, Isa]
"""Where another instruction set than the newest is faster."""

USES = tuple(
    Use(kind, each.native) for kind, each in itertools.product((FEW, MANY), FORMATS.values()) if each.native is not None
)


def choose(isas: list[Isa], seconds_of: Callable[[Use, Isa], float], rounds: int = _ROUNDS) -> Choice | None:
    """What is clearly faster than the newest instruction set; `None` if the machine is too busy to tell.

    Args:
        isas: those that work, newest last.
        seconds_of: does a fixed amount of work; candidates take turns, so that noise meets all of them.
    """
    newest = isas[-1]
    candidates: list[Isa] = [isa for isa in isas if isa is not Isa.PORTABLE] or [newest]
    chosen: dict[Use, Isa] = {}
    for use in USES if len(candidates) > 1 else ():
        times: dict[Isa, list[float]] = {isa: [] for isa in reversed(candidates)}
        for _ in range(rounds):
            for isa, found in times.items():
                found.append(seconds_of(use, isa))
            least = min(min(found) for found in times.values())
            hopeful = [isa for isa, found in times.items() if isa is newest or min(found) < _HOPELESS * least]
            times = {isa: times[isa] for isa in hopeful}
        best = {isa: min(found) for isa, found in times.items()}
        if statistics.median(times[newest]) > _STEADY * best[newest]:
            return None
        # Both by their best and by their typical burst, so that a single lucky one decides nothing.
        typical = {isa: statistics.median(found) for isa, found in times.items()}
        fastest = clearly_least(best, newest, _CLEARLY)
        if clearly_least({newest: typical[newest], fastest: typical[fastest]}, newest, _CLEARLY) is not newest:
            chosen[use] = fastest
    return chosen


def measure(kernels: NativeKernels, isas: list[Isa]) -> Choice | None:
    """The choice for these kernels' threads, on cold weights; see `choose`.  Takes 160 MiB of RAM for a second."""
    with _Work(kernels) as work:
        return choose(isas, work.seconds)


def ensure_measured(kernels: NativeKernels) -> None:
    """Measures, saves and uses the choice for these kernels' threads, unless that has been done.

    On a busy machine nothing is saved, and the newest instructions stay in use until the next time.  An instruction set
    that the environment names is not questioned.
    """
    isas = usable_isas()
    if is_forced() or len(isas) < 2 or kernels.threads in load_choices():
        return
    try:
        choice = measure(kernels, isas)
    except (OSError, MemoryError, ValueError):  # no memory to measure in
        return
    if choice is not None:
        save_choice(kernels.threads, choice)
        apply(kernels, choice, isas)


def apply(kernels: NativeKernels, choice: Choice, isas: Iterable[Isa]) -> None:
    """Uses the chosen instruction sets, as far as they work here."""
    usable = set(isas)
    kernels.use(kernels.isa)
    for use, isa in choice.items():
        if isa in usable:
            kernels.use_for(use.kind, use.format, isa)


def choice_for(threads: int) -> Choice | None:
    """What was measured with as many threads, or else with the most; `None` if nothing was."""
    choices = load_choices()
    return choices.get(threads, choices[max(choices)]) if choices else None


def choice_file() -> Path:
    """Where choices are kept."""
    return data_dir() / "kernel-choice.json"


def load_choices() -> dict[int, Choice]:
    """Threads -> what was measured with them, by these kernels on this processor; empty if the file is damaged."""
    try:
        document = json.loads(choice_file().read_text(encoding="utf-8"))
        if document["machine"] != _machine():
            return {}
        return {int(threads): _parsed(choice) for threads, choice in document["threads"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_choice(threads: int, choice: Choice) -> None:
    """Adds a choice to the file; a folder that cannot be written to is none."""
    choices = {**load_choices(), threads: choice}
    rows = {
        str(count): [[use.kind, use.format, int(isa)] for use, isa in each.items()] for count, each in choices.items()
    }
    document = {"machine": _machine(), "threads": rows}
    with suppress(OSError):
        new_folder(choice_file().parent)
        write_whole(choice_file(), json.dumps(document))


def _parsed(choice: Any) -> Choice:
    found = {Use(int(kind), int(number)): Isa(isa) for kind, number, isa in choice}
    if not set(found) <= set(USES):
        raise ValueError("not a use of these kernels")
    return found


def _machine() -> str:
    return f"{processor()} {library_path().stem}"


class _Work:
    """Products of cold matrices with vectors; all memory is one mapping, freed at the end."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        tokens = max(_TOKENS.values())
        self._room = mmap.mmap(-1, _COLD_BYTES + 2**20)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # as banks of weights have them
                self._room.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset(self._address, 60, _COLD_BYTES)  # small numbers, both as weights and as scales
        self._x = (ctypes.c_uint16 * (tokens * _COLUMNS))(*([0x3C00, 0xBC10] * (tokens * _COLUMNS // 2)))
        self._out = (ctypes.c_uint16 * (tokens * _ROWS))()
        self._at = 0
        self._calls: dict[Use, int] = {}

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, *_error: object) -> None:
        self._kernels.use(self._kernels.isa)
        with suppress(BufferError):
            self._room.close()

    def seconds(self, use: Use, isa: Isa) -> float:
        """Seconds of a burst of calls, as many for every instruction set."""
        self._kernels.use(self._kernels.isa)
        self._kernels.use_for(use.kind, use.format, isa)
        if use not in self._calls:
            self._burst(use, 1)
            once = self._burst(use, 2) / 2
            self._calls[use] = max(1, min(200, round(_BURST_S[use.kind] / max(once, 1e-7))))
        return self._burst(use, self._calls[use])

    def _burst(self, use: Use, calls: int) -> float:
        multiply = self._kernels.linear if use.kind == FEW else self._kernels.linear_rows
        begun_s = time.perf_counter()
        for _ in range(calls):
            matrix = self._next_matrix(use.format)
            multiply(self._kernels.pool, ctypes.addressof(matrix), _TOKENS[use.kind], self._x, None, 0, self._out)
        return time.perf_counter() - begun_s

    def _next_matrix(self, number: int) -> MatrixStruct:
        """All formats' parts lie in the same memory: what the numbers are does not matter."""
        nbytes = int(_BYTES.get(number, 0.5) * _ROWS * _COLUMNS)
        if self._at + 2 * nbytes > _COLD_BYTES:
            self._at = 0
        weights = self._address + self._at
        self._at += nbytes + nbytes // 8  # and the scales
        tiled = weights + nbytes if number else None
        return MatrixStruct(weights, tiled, tiled, tiled, _ROWS, _COLUMNS, number, 0)
