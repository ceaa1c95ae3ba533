"""`switchyard bench startup --model M`: a start that finds the model prepared, against reading the prepared files.

The first start prepares them, in a folder that is removed afterwards.  Each later one is an engine process of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.bench.prepared_apart import prepared_apart
from engine.bench.report import Report, row
from engine.bench.startup import phases_of
from engine.common.errors import EngineError, ErrorCode
from engine.measure.disk import forget_cached, read_rate

if TYPE_CHECKING:
    from engine.common.config import EngineConfig

_PIECE = 8 * 2**20


def bench_second_start(config: EngineConfig, repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: seconds until the model is there, with its prepared files on disk alone and in the page cache, and
    where they go.

    A reader of the same files takes turns with each: cold, the faster of one past the page cache with several reads in
    flight and one through it; warm, one that copies them from there into memory that it uses again and again.

    Raises:
        EngineError: as `load_model`; `INVALID_REQUEST` if nothing of the model is prepared in this precision.
    """
    with prepared_apart() as folder:
        say("first start: prepares the model, which takes a while")
        phases_of(config)
        files = sorted(folder.glob("*.gguf"))
        nbytes = sum(file.stat().st_size for file in files)
        if not files:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"Nothing of {Path(config.model).name} is kept for a second start: choose another --precision, such as "
                "int4, or a larger model.",
            )
        cold: list[dict[str, float]] = []
        warm: list[dict[str, float]] = []
        past: list[float] = []
        through: list[float] = []
        cached: list[float] = []
        for repeat in range(repeats):
            say(f"repeat {repeat + 1} of {repeats}: reading the prepared files, and starting")
            past.append(sum(file.stat().st_size / read_rate(file) for file in files))
            forget_cached(files)
            through.append(_copied(files))
            forget_cached(files)
            cold.append(phases_of(config))
            cached.append(_copied(files))
            warm.append(phases_of(config))
    fastest = [min(pair) for pair in zip(past, through, strict=True)]
    _add(report, f"ready, {nbytes / 1e9:.1f} GB of prepared files on disk", cold, "reading them", fastest)
    _add(report, "ready, the same in the page cache", warm, "reading them from there", cached)


def _add(report: Report, name: str, runs: list[dict[str, float]], peer: str, peer_values: list[float]) -> None:
    totals = [sum(run.values()) for run in runs]
    report.rows.append(row(name, totals, "s", peer=peer, peer_values=peer_values, higher_is_better=False))
    for phase in runs[0]:
        report.rows.append(row(f"  of that: {phase}", [run[phase] for run in runs], "s", higher_is_better=False))


def _copied(files: Sequence[Path]) -> float:
    """Seconds of reading files through the page cache, one after the other."""
    buffer = bytearray(_PIECE)
    begun_s = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - begun_s
