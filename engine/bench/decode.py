"""`switchyard bench decode`: tokens per second at batch 1, against peers in the same run, in turn."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.bench.peers.best_flags import Room, best_flags, name_with, open_peer
from engine.bench.peers.library import LIBRARY, OFFLOAD, TransformersPeer, accelerate_offload
from engine.bench.peers.peer import Beside, GgufPeer, PeerError, files_beside
from engine.bench.ready import ready_rows
from engine.bench.report import Report, row
from engine.common.config import EngineConfig, SamplingParams
from engine.measure.arithmetic import MemoryReader, cold_memory, spread_of
from engine.runtime.decode.prompt import check_length
from engine.runtime.load.model import load_model
from engine.runtime.schedule.alone import TIMED_PROMPT, Alone

if TYPE_CHECKING:
    from engine.bench.peers.editions import Flags
    from engine.runtime.loaded_model import LoadedModel

_TRIED = 8
"""Tokens decoded with each of a peer's flags, to find its best."""
_LIBRARY_READS = 1024
"""The library reads the prompt anew for every run: not a longer one."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What to run.

    Attributes:
        tokens: decoded per repeat, after one warm-up; each repeat goes on where the one before ended.
        peers: the names of those to run as well.
        contexts: tokens of the prompt before them, which is not timed, a row for each; `None`: a sentence.
    """

    tokens: int
    repeats: int
    peers: Sequence[str] = ()
    contexts: Sequence[int | None] = (None,)


class _Ours:
    """Our own decoding after a prompt, which is read once."""

    def __init__(self, loaded: LoadedModel, prompt: Sequence[int]) -> None:
        self._session = Alone(loaded)
        self._goes_on = not loaded.model.config.is_encoder_decoder
        self._ids = list(prompt)

    def rate(self, tokens: int) -> float:
        """Tokens per second of `tokens` steps, as a chat makes them, past any end token."""
        sampling = SamplingParams(max_tokens=tokens + 1)
        done = self._session.generate_from_ids(self._ids, sampling, end_ids=frozenset())
        if self._goes_on:
            self._ids += done.token_ids
        return done.tokens_per_s

    def close(self) -> None:
        self._session.clear()


_MEMORY = "memory"
"""Reads RAM in turn with the contestants: how fast that is changes with what else a machine does."""


def bench_decode(config: EngineConfig, plan: DecodePlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows to `report`: our decode rate at each context, against each peer and against the memory-bandwidth limit;
    with peers also the seconds until the model is ready.

    Every repeat runs all contestants one after the other, so that noise affects all alike.

    Raises:
        EngineError: as `load_model`; also `PROMPT_TOO_LONG`.
    """
    say("loading the model")
    loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    beside: list[Beside] = []
    fastest: dict[Beside, Flags] = {}
    try:
        check_length(max(context or 0 for context in plan.contexts) + plan.tokens, loaded.context_tokens)
        with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as scratch, ExitStack() as opened:
            library: list[TransformersPeer] = []
            if LIBRARY in plan.peers:
                library = _library(config, loaded, Path(scratch), report, say)
            if loaded.device.type == "cuda" and plan.peers:
                report.skip_peer("llama.cpp, ik_llama.cpp", "compared where we compute on the CPU as well")
            else:
                beside = files_beside(Path(config.model), loaded.info.precision, report, say, plan.peers)
            peers: dict[Beside, GgufPeer] = {}
            for context in plan.contexts:
                _at(context, loaded, plan, library, beside, peers, fastest, opened, report, say)
    finally:
        loaded.close()
    if plan.peers:
        ready_rows(config, fastest, min(plan.repeats, 3), report, say)


def _at(
    context: int | None,
    loaded: LoadedModel,
    plan: DecodePlan,
    library: list[TransformersPeer],
    beside: list[Beside],
    peers: dict[Beside, GgufPeer],
    fastest: dict[Beside, Flags],
    opened: ExitStack,
    report: Report,
    say: Callable[[str], None],
) -> None:
    """The rows of one length of context.

    Args:
        peers: the processes that run, by what they run; added to, and closed by `opened`.
        fastest: the flags that were best at the first of all contexts; added to.
    """
    prompt: list[int] = loaded.tokenizer(TIMED_PROMPT)["input_ids"]
    name = "decode"
    if context is not None:
        prompt = (prompt * -(-context // len(prompt)))[:context]
        name = f"decode after {context:,} tokens"
    room, threads = Room(len(prompt) + (plan.repeats + 1) * plan.tokens + _TRIED + 2), torch.get_num_threads()
    ours = _Ours(loaded, prompt)
    opened.callback(ours.close)
    contestants: dict[str, Callable[[], float]] = {"ours": lambda: ours.rate(plan.tokens)}
    for peer in library:
        if len(prompt) > _LIBRARY_READS:
            report.skip_peer(f"{peer.name}, {name}", "it reads the prompt anew for every run")
            continue
        contestants[peer.name] = lambda peer=peer: peer.decode_rate(prompt, plan.tokens)  # type: ignore[misc]
    for each in beside:
        say(f"{name}, finding the best flags: {each.name}")
        try:
            if each not in peers:
                peers[each] = opened.enter_context(open_peer(each, threads, room))
            flags = best_flags(each, peers[each], lambda peer: peer.decode_rate(prompt, _TRIED), room, say)
        except PeerError as failure:
            report.skip_peer(f"{each.name}, {name}", str(failure))
            continue
        fastest.setdefault(each, flags)
        running = peers[each]
        contestants[name_with(each, flags)] = lambda running=running: running.decode_rate(prompt, plan.tokens)  # type: ignore[misc]
    with MemoryReader() as reader:
        if loaded.info.device == "cpu":
            memory = cold_memory()
            contestants[_MEMORY] = lambda: memory.nbytes / reader.seconds(memory)
        rates = _rates(contestants, plan.repeats, report, say)
    ours.close()
    values, reads = rates.pop("ours"), rates.pop(_MEMORY, None)
    read = bytes_per_token(loaded) + loaded.info.kv_bytes_per_token * (len(prompt) + plan.tokens / 2)
    limit = statistics.median(reads) / read if reads else None
    if reads:
        report.machine["read_bandwidth_gb_per_s"] = statistics.median(reads) / 1e9
        report.machine["read_bandwidth_spread"] = spread_of(reads)
    report.rows.append(row(name, values, "tokens/s", limit=limit))
    report.rows += [row(name, values, "tokens/s", peer=peer, peer_values=theirs) for peer, theirs in rates.items()]


def _rates(
    contestants: dict[str, Callable[[], float]], repeats: int, report: Report, say: Callable[[str], None]
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        say(f"repeat {repeat} of {repeats}" if repeat else "warm-up")
        for name in list(rates):
            try:
                rate = contestants[name]()
            except PeerError as failure:
                report.skip_peer(name, str(failure))
                del rates[name]
                continue
            if repeat:
                rates[name].append(rate)
    return rates


def bytes_per_token(loaded: LoadedModel) -> float:
    """Bytes of weights that one token has to read: all except unused experts and the embedding table."""
    info = loaded.info
    used = info.experts_per_token / info.experts if info.experts else 0.0
    output, table = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
    unread = 0
    if table is not None and output is not None and table.weight is not output.weight:
        unread = table.weight.numel() * table.weight.element_size()
    return info.weights_bytes - unread + info.experts_bytes * used


def _library(
    config: EngineConfig, loaded: LoadedModel, scratch: Path, report: Report, say: Callable[[str], None]
) -> list[TransformersPeer]:
    checkpoint, dtype = Path(config.model), next(loaded.model.parameters()).dtype
    wanted: dict[str, Callable[[], TransformersPeer]] = {
        OFFLOAD: lambda: accelerate_offload(checkpoint, dtype, config.vram_bytes)
    }
    if torch.cuda.is_available() and loaded.device.type == "cuda":
        report.skip_peer("transformers on the CPU", "compared where we compute on the CPU as well")
    else:
        wanted |= _on_cpu(checkpoint, dtype, loaded.info.experts, scratch, report, say)
    peers: list[TransformersPeer] = []
    for name, load in wanted.items():
        say(f"loading the peer: {name}")
        try:
            peers.append(load())
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            report.skip_peer(name, str(error).splitlines()[0])
    return peers


def _on_cpu(
    checkpoint: Path, dtype: torch.dtype, experts: int, scratch: Path, report: Report, say: Callable[[str], None]
) -> dict[str, Callable[[], TransformersPeer]]:
    default, eager = "transformers (default experts)", "transformers (eager experts)"
    wanted = {default: lambda: TransformersPeer(default, checkpoint, dtype)}
    if experts:
        wanted[eager] = lambda: TransformersPeer(eager, checkpoint, dtype, "eager")
    parent = "transformers, dense parent"
    if checkpoint.name == "starter":
        from engine.checkpoint.starter import build_dense_parent

        say("building the starter's dense parent")
        build_dense_parent(scratch / "parent")
        wanted[parent] = lambda: TransformersPeer(parent, scratch / "parent", dtype)
    else:
        report.skip_peer(parent, "only the starter model has one")
    return wanted
