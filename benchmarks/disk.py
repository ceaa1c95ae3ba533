"""`switchyard bench disk`: converting a model, loading that, and decoding with half its experts in RAM."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import mmap_peer
from benchmarks.mmap_peer import memory_group
from engine.bench.opened import ForcedText, decode_seconds, opened, random_text
from engine.bench.report import PeerError, Report, in_turn
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import python_module
from engine.experts.disk_tier import DiskTier, Read
from engine.experts.record import ExpertBank
from engine.kernels.native.library import load_kernels
from engine.measure.link import forget_cached, read_rate, write_rate
from engine.runtime.load.checkpoint import read_headers
from engine.runtime.load.conversion import Conversion, Converted, convert
from engine.runtime.load.forms import Forms
from engine.runtime.load.library_models import quiet_library

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.runtime.loaded_model import LoadedModel

_MMAP = "experts in a plain mmap"
_PASS_S = mmap_peer.PASS_S
_LAYERS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What to run: `tokens` decoded per repeat; `expert_ram` bytes of RAM for experts, None for half of them."""

    tokens: int
    repeats: int
    expert_ram: int | None


def bench_disk(config: EngineConfig, plan: DiskPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: each rate against the disk's in the same run, and decoding against plain mmap.

    The converted file is removed again unless it was there before.
    """
    if config.precision == "auto":  # `auto` would avoid the disk
        config = replace(config, precision="int4")
    with torch.no_grad(), quiet_library():
        found = read_headers(Path(config.model), config.precision)
    if not found.sites:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{found.name} has no experts, so there is nothing to convert.")
    kernels = load_kernels(torch.get_num_threads())
    forms = Forms(found, config.precision, has_kernels=kernels is not None)
    conversion = Conversion(forms, [site for site in forms.sites if site.is_on_demand], kernels)
    file = conversion.path
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        if kernels is not None:
            held.callback(kernels.close)
        held.enter_context(disk_errors_explained(file.parent))
        scratch = held.enter_context(_scratch(file.parent))
        require_space(file.parent, 2 * conversion.nbytes)
        was_there = file.exists()
        try:
            _convert_and_load(conversion, scratch, plan, report, say)
            if not was_there:
                os.replace(scratch / "converted.gguf", file)
            _decode(config, conversion, file, plan, report, say)
        finally:
            if not was_there:
                file.unlink(missing_ok=True)


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-", dir=parent) as folder:
        yield Path(folder)


def _convert_and_load(
    conversion: Conversion, scratch: Path, plan: DiskPlan, report: Report, say: Callable[[str], None]
) -> None:
    """Rates in bytes per second of required reads and writes, each beside the disk's own."""
    made, raw = scratch / "converted.gguf", scratch / "raw"
    checkpoint, size = conversion.opened.plan.nbytes, conversion.nbytes
    converted: list[float] = []
    loaded: list[float] = []
    moved: list[float] = []
    reads: list[float] = []
    for repeat in range(plan.repeats):
        say(f"repeat {repeat + 1} of {plan.repeats}: converting, loading, and the disk by itself")
        made.unlink(missing_ok=True)
        write_bps = write_rate(raw, size)
        read_bps = read_rate(raw)
        raw.unlink()
        forget_cached(conversion.opened.directory.glob("*.safetensors"))
        begun_s = time.perf_counter()
        file = convert(conversion, _ignore, _never, path=made)
        converted.append((checkpoint + size) / (time.perf_counter() - begun_s) / 1e9)
        # The time of reading and then writing them.
        moved.append((checkpoint + size) / (checkpoint / read_bps + size / write_bps) / 1e9)
        loaded.append(_load_rate(file) / 1e9)
        reads.append(read_bps / 1e9)
    name = "converting, bytes read and written"
    report.add(name, converted, "GB/s", peer="the disk by itself", peer_values=moved)
    report.add("loading what was converted", loaded, "GB/s", peer="the disk by itself", peer_values=reads)


def load_prepared(disk: DiskTier, bank: ExpertBank, on_progress: Callable[[int, int], None]) -> None:
    """Allocates and fills every layer of an empty bank on the CPU.

    Args:
        on_progress: called with (bytes read, total bytes) on the calling thread; an exception from it stops loading.
    """
    total, done = disk.table.nbytes, 0
    under_way: deque[Read] = deque()
    try:
        for index, spec in enumerate(disk.table.layers):
            records = bank.add_layer(spec.name, spec.num_experts, spec.layout).records
            reads = [disk.read(index, expert, record) for expert, record in enumerate(records)]
            under_way.extend(reads)
            # Request the next layer before this one has arrived, so that the disk never idles.
            while len(under_way) > _LAYERS_AHEAD * len(reads):
                done += _finish(disk, under_way[0])
                under_way.popleft()
                on_progress(done, total)
        while under_way:
            done += _finish(disk, under_way[0])
            under_way.popleft()
            on_progress(done, total)
    except BaseException:
        for read in under_way:  # wait: they write into memory that is about to be freed
            read.exception()
        raise


def _finish(disk: DiskTier, read: Read) -> int:
    read.result()
    return disk.table.layers[read.layer].layout.nbytes


def _load_rate(file: Converted) -> float:
    forget_cached([file.container.path])
    bank = ExpertBank(torch.device("cpu"))
    container, layers = file.container, file.conversion.sites
    try:
        with DiskTier(layers, [container.parts(layer.name) for layer in layers], container) as disk:
            begun_s = time.perf_counter()
            load_prepared(disk, bank, _ignore)
            return disk.table.nbytes / (time.perf_counter() - begun_s)
    finally:
        bank.close()


def _decode(
    config: EngineConfig, source: Conversion, bank: Path, plan: DiskPlan, report: Report, say: Callable[[str], None]
) -> None:
    size = sum(site.nbytes for site in source.sites)
    expert_ram = plan.expert_ram or size // 2
    config = replace(config, ram_bytes=_dense_bytes(source) + expert_ram)
    text = random_text(source.opened.model.config.get_text_config().vocab_size, 32, plan.tokens)
    on_cpu = config.device in ("auto", "cpu")

    def ours(_repeat: int) -> tuple[float, float]:
        with opened(config) as loaded:
            rate, missed = _our_rate(loaded, text)
        return rate, read_rate(bank) / max(missed, 1.0)

    def mapped(_repeat: int) -> tuple[float, float]:
        return _mapped_rate(config, text, bank, expert_ram), 0.0

    name = f"decode, RAM for {expert_ram / size:.0%} of the experts"
    turns = {"ours": ours, **({_MMAP: mapped} if on_cpu else {})}
    found = in_turn(turns, plan.repeats, report, say, warm_ups=0, what=name)
    rates, bounds = ([each[number] for each in found["ours"]] for number in (0, 1))
    say("decoding with as much RAM as there is")
    with opened(replace(config, ram_bytes=None)) as loaded:
        if loaded.disk_backed is None:
            decode_seconds(loaded, text, _PASS_S)
            seconds = decode_seconds(loaded, text, _PASS_S)
            report.add("decode, all experts in RAM", [len(seconds) / sum(seconds)], "tokens/s")
    bound = "the disk's rate over the bytes missed"
    report.add(name, rates, "tokens/s", peer=bound, peer_values=bounds)
    if _MMAP in found:
        report.add(name, rates, "tokens/s", peer=_MMAP, peer_values=[rate for rate, _bound in found[_MMAP]])
    elif not on_cpu:
        report.skip_peer(_MMAP, "compared where the CPU computes: --device cpu")


def _dense_bytes(source: Conversion) -> int:
    """Bytes in memory of everything but the experts; an upper bound if quantised."""
    width = 4 if source.forms.precision == "fp32" else 2
    return sum(width * entry.numel for entry in source.opened.plan.rest.values())


def _our_rate(loaded: LoadedModel, text: ForcedText) -> tuple[float, float]:
    """(tokens per second, bytes read from the disk per token), once the RAM is full."""
    if loaded.disk_backed is None:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"All experts of {loaded.info.name} fit into the RAM that they were given: give less with --expert-ram.",
        )
    decode_seconds(loaded, text, _PASS_S)
    before = loaded.disk_backed.disk.bytes_read
    seconds = decode_seconds(loaded, text, _PASS_S)
    return len(seconds) / sum(seconds), (loaded.disk_backed.disk.bytes_read - before) / len(seconds)


def _mapped_rate(config: EngineConfig, text: ForcedText, bank: Path, expert_ram: int) -> float:
    """Tokens per second of `benchmarks.mmap_peer`."""
    command, own = python_module("benchmarks.mmap_peer")
    try:
        with memory_group() as group:
            done = subprocess.run(
                command,
                env={**os.environ, **own},
                input=mmap_peer.request(config, text, bank, group.folder, expert_ram),
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
        if done.returncode == 0:
            return float(json.loads(done.stdout)["tokens_per_s"])
    except OSError as error:
        raise PeerError(f"its memory cannot be limited here: {error}") from error
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise PeerError(str(error)) from error
    lines = done.stderr.strip().splitlines()
    raise PeerError(lines[-1] if lines else f"it ended with {done.returncode}, perhaps out of memory")


def _ignore(_done: int, _total: int) -> None:
    pass


def _never() -> bool:
    return False
