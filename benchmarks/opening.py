"""`switchyard bench opening`: from a model's files on disk to a loaded model, against the disk's own rate; memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.peer import GgufPeer
from engine.bench.opened import files_of, opened
from engine.bench.report import PeerError, Report, in_turn
from engine.checkpoint.gguf import gguf_at
from engine.common.errors import EngineError, ErrorCode
from engine.measure.link import forget_cached, read_rate
from engine.protocol import LoadModel, decode, encode
from engine.runtime.load.model import load_model

if TYPE_CHECKING:
    from engine.common.config import EngineConfig

_DISK = "the disk by itself"
_MB = 1e6
_PROMPT = (1, 2, 3, 4)
"""Ids: what is loaded lazily is loaded for them."""


def bench_opening(
    config: EngineConfig, repeats: int, report: Report, say: Callable[[str], None], *, peers: bool = False
) -> None:
    """Adds rows: bytes of the model's files per second of opening it, the seconds before the first weights, and, on
    Linux, the memory of a process that opens it and reads four tokens.

    The files are dropped from the page cache before every turn, where the system allows it.

    Args:
        peers: whether llama.cpp opens the same file, too.
    """
    files = files_of(Path(config.model))
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
    if peak_nbytes("self") is not None:
        _add_memory(config, nbytes, report, say, peers=peers)


def _add_memory(config: EngineConfig, nbytes: int, report: Report, say: Callable[[str], None], *, peers: bool) -> None:
    say("memory of a process that opens it")
    asked = encode(LoadModel("load", replace(config, model=str(Path(config.model).absolute()))))
    command, root = [sys.executable, "-m", "benchmarks.opening"], Path(__file__).parents[1]
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, cwd=root, check=False)
    if done.returncode:
        raise EngineError(ErrorCode.INTERNAL, "The process that opened the model ended before it had.")
    weights, besides, peak, threads = json.loads(done.stdout)
    report.add("weights in memory", [weights / _MB], "MB", limit=nbytes / _MB, higher_is_better=False)
    report.add("memory besides, since the imports", [besides / _MB], "MB")
    against: dict[str, Any] = {}
    if peers:
        file, name = gguf_at(Path(config.model)), "llama.cpp, same file"
        try:
            if file is None:
                raise PeerError("the model is no GGUF file")
            say(name)
            with GgufPeer(name, file, threads, 64) as peer:
                peer.prefill_seconds(_PROMPT)
                against = {"peer": name, "peer_values": [(peak_nbytes(peer.pid) or 0) / _MB]}
        except PeerError as failure:
            report.skip_peer(name, str(failure))
    report.add("highest memory", [peak / _MB], "MB", higher_is_better=False, **against)


def _tell_memory() -> None:
    """Writes bytes of the model's weights, of the memory besides, and of the most until then; and how many threads."""
    asked = decode(sys.stdin.buffer.readline())
    assert isinstance(asked, LoadModel)
    before = peak_nbytes("self") or 0
    with opened(asked.config) as loaded, torch.inference_mode():
        loaded.model(torch.tensor([_PROMPT], device=loaded.device), use_cache=False)
        weights = loaded.info.weights_bytes + loaded.info.experts_bytes
        besides = (_status("self", "VmRSS") or 0) - before - weights
        sys.stdout.write(json.dumps([weights, besides, peak_nbytes("self"), loaded.info.threads]))


def peak_nbytes(pid: int | str) -> int | None:
    """The most memory that a process has had, pages of mapped files included; None where the system is not Linux."""
    return _status(pid, "VmHWM")


def _status(pid: int | str, key: str) -> int | None:
    file = Path(f"/proc/{pid}/status")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else ()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


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


if __name__ == "__main__":
    _tell_memory()
