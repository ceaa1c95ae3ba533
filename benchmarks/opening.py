"""`switchyard bench opening`: from a model's files on disk to a loaded model, against the disk's own rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.bench.report import Report, in_turn
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry
from engine.checkpoint.shards import read_tensors
from engine.measure.disk import forget_cached, read_rate
from engine.runtime.load.model import load_model

if TYPE_CHECKING:
    from engine.common.config import EngineConfig

_DISK = "the disk by itself"


def bench_opening(config: EngineConfig, repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: bytes of the model's files per second of opening it, and the seconds before the first weights.

    The files are dropped from the page cache before every turn, where the system allows it.

    Raises:
        EngineError: as `load_model`.
    """
    files = _files(read_tensors(Path(config.model)).values())
    nbytes = sum(file.stat().st_size for file in files)

    def disk(_repeat: int) -> float:
        rate = nbytes / sum(file.stat().st_size / read_rate(file) for file in files) / 1e9
        forget_cached(files)
        return rate

    turns: dict[str, Callable[[int], Any]] = {_DISK: disk, "opening the model": lambda _repeat: _seconds(config)}
    found = in_turn(turns, repeats, report, say, warm_ups=0)
    rates = [nbytes / total_s / 1e9 for total_s, _before_s in found["opening the model"]]
    report.add("opening the model", rates, "GB/s", peer=_DISK, peer_values=found[_DISK])
    report.add("of that, before the first weights", [before for _total, before in found["opening the model"]], "s")


def _seconds(config: EngineConfig) -> tuple[float, float]:
    """Of opening the model, and of what happens before its first weights are there."""
    first_s: float | None = None

    def on_progress(done: int, _total: int) -> None:
        nonlocal first_s
        if done and first_s is None:
            first_s = time.perf_counter() - begun_s

    begun_s = time.perf_counter()
    loaded = load_model(config, on_progress=on_progress, cancelled=lambda: False)
    total_s = time.perf_counter() - begun_s
    loaded.close()
    return total_s, total_s if first_s is None else first_s


def _files(entries: Iterable[TensorEntry]) -> list[Path]:
    stored = (entry.sources if isinstance(entry, PackedEntry) else (entry,) for entry in entries)
    return sorted({source.file for sources in stored for source in sources})
