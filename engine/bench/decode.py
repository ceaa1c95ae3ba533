"""`switchyard bench decode`: tokens per second at batch 1, against peers in the same run, in turn."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from engine.bench.peers.best_flags import Room, best_flags, name_with, open_peer
from engine.bench.peers.library import LIBRARY, OFFLOAD, TransformersPeer, accelerate_offload
from engine.bench.peers.peer import Beside, GgufPeer, PeerError, files_beside
from engine.bench.ready import ready_rows
from engine.bench.report import Report, row
from engine.bench.synthetic import Cut, resolve_model
from engine.common import clock
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
_HEAD_RUNS = 21
_LIBRARY_READS = 1024
"""The library reads the prompt anew for every run: not a longer one."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What to run.

    Attributes:
        tokens: decoded per repeat, after one warm-up; each repeat goes on where the one before ended.
        peers: the names of those to run as well.
        contexts: tokens of the prompt before them, which is not timed, a row for each; `None`: a sentence.
        cut: what a synthetic model lacks of the one whose shape it has.
    """

    tokens: int
    repeats: int
    peers: Sequence[str] = ()
    contexts: Sequence[int | None] = (None,)
    cut: Cut | None = None


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


_OURS, _MEMORY = "ours", "memory"
"""Reads RAM in turn with the contestants: how fast that is changes with what else a machine does."""


def bench_decode(config: EngineConfig, plan: DecodePlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows to `report`: our decode rate at each context, against each peer and against the memory-bandwidth limit,
    and what of a token is layers and what is the head; with peers also the seconds until the model is ready.

    Every repeat runs all contestants one after the other, so that noise affects all alike.  A model with fewer layers
    than its shape has is run beside one with half as many: what a layer takes is their difference, and the rate of all
    layers together follows from it, for each contestant.

    Raises:
        EngineError: as `load_model`; also `PROMPT_TOO_LONG`.
    """
    fastest: dict[tuple[str, str], Flags] = {}
    with ExitStack() as opened:
        field = opened.enter_context(_Contestants(config, plan, fastest, report, say))
        shorter = None
        if plan.cut is not None and plan.cut.shorter is not None:
            half = replace(config, model=str(resolve_model(plan.cut.shorter, say)))
            shorter = opened.enter_context(_Contestants(half, plan, fastest, report, say))
        for context in plan.contexts:
            _at(context, field, shorter, plan, report, say)
        best: dict[Beside, Flags] = {}
        for each in field.beside:
            first = next((flags for (peer, _), flags in fastest.items() if peer == each.name), None)
            if first is not None:
                best[each] = first
    if plan.peers:
        ready_rows(config, best, min(plan.repeats, 3), report, say)


class _Contestants:
    """We and the peers, all with one model.  Use it as a context manager.

    Args:
        fastest: the flags that were best, by the peer's name and that of the figure; added to.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: DecodePlan,
        fastest: dict[tuple[str, str], Flags],
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._fastest, self._report, self._say = plan, fastest, report, say
        self._opened = ExitStack()
        self._library: list[TransformersPeer] = []
        self._peers: dict[Beside, GgufPeer] = {}
        self.beside: list[Beside] = []
        say("loading the model")
        self.loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        self._opened.callback(self.loaded.close)
        try:
            check_length(max(context or 0 for context in plan.contexts) + plan.tokens, self.loaded.context_tokens)
            scratch = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="switchyard-bench-"))
            if LIBRARY in plan.peers:
                self._library = _library(config, self.loaded, Path(scratch), report, say)
            if self.loaded.device.type == "cuda" and plan.peers:
                report.skip_peer("llama.cpp, ik_llama.cpp", "compared where we compute on the CPU as well")
            else:
                precision = self.loaded.info.precision
                self.beside = files_beside(Path(config.model), precision, report, say, plan.peers)
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()

    def at(self, prompt: list[int], name: str, ours: _Ours) -> dict[str, Callable[[], float]]:
        """What each measures, by its name: tokens per second after a prompt."""
        plan, report = self._plan, self._report
        room = Room(len(prompt) + (plan.repeats + 1) * plan.tokens + _TRIED + 2)
        found: dict[str, Callable[[], float]] = {_OURS: lambda: ours.rate(plan.tokens)}
        for peer in self._library:
            if len(prompt) > _LIBRARY_READS:
                report.skip_peer(f"{peer.name}, {name}", "it reads the prompt anew for every run")
                continue
            found[peer.name] = lambda peer=peer: peer.decode_rate(prompt, plan.tokens)  # type: ignore[misc]
        for each in self.beside:
            try:
                if each not in self._peers:
                    self._peers[each] = self._opened.enter_context(open_peer(each, torch.get_num_threads(), room))
                flags = self._flags(each, prompt, room, name)
            except PeerError as failure:
                report.skip_peer(f"{each.name}, {name}", str(failure))
                continue
            running = self._peers[each]
            found[name_with(each, flags)] = lambda running=running: running.decode_rate(prompt, plan.tokens)  # type: ignore[misc]
        return found

    def _flags(self, beside: Beside, prompt: list[int], room: Room, name: str) -> Flags:
        """Those that the peer runs with from now on: the best ones, or on a shorter model those of the longer one."""
        peer = self._peers[beside]
        known = self._fastest.get((beside.name, name))
        if known is not None:
            peer.set_up(known, room.tokens, room.sequences)
            return known
        self._say(f"{name}, finding the best flags: {beside.name}")
        flags = best_flags(beside, peer, lambda peer: peer.decode_rate(prompt, _TRIED), room, self._say)
        return self._fastest.setdefault((beside.name, name), flags)


def _at(
    context: int | None,
    field: _Contestants,
    shorter: _Contestants | None,
    plan: DecodePlan,
    report: Report,
    say: Callable[[str], None],
) -> None:
    """The rows of one length of context."""
    loaded = field.loaded
    prompt: list[int] = loaded.tokenizer(TIMED_PROMPT)["input_ids"]
    name = "decode"
    if context is not None:
        prompt = (prompt * -(-context // len(prompt)))[:context]
        name = f"decode after {context:,} tokens"
    with ExitStack() as opened:
        fields = [field, *([shorter] if shorter is not None else [])]
        ours = [_Ours(each.loaded, prompt) for each in fields]
        for each in ours:
            opened.callback(each.close)
        contestants = [each.at(prompt, name, mine) for each, mine in zip(fields, ours, strict=True)]
        reader = opened.enter_context(MemoryReader())
        if loaded.info.device == "cpu":
            memory = cold_memory()
            contestants[0][_MEMORY] = lambda: memory.nbytes / reader.seconds(memory)
        rates = _rates(contestants, plan.repeats, report, say)
    values, reads = rates[0].pop(_OURS), rates[0].pop(_MEMORY, None)
    read = bytes_per_token(loaded) + loaded.info.kv_bytes_per_token * (len(prompt) + plan.tokens / 2)
    limit = statistics.median(reads) / read if reads else None
    if reads:
        report.machine["read_bandwidth_gb_per_s"] = statistics.median(reads) / 1e9
        report.machine["read_bandwidth_spread"] = spread_of(reads)
    cut = plan.cut
    label = f"{name}, {cut.words}" if cut is not None else name
    report.rows.append(row(label, values, "tokens/s", limit=limit))
    report.rows += [row(label, values, "tokens/s", peer=peer, peer_values=theirs) for peer, theirs in rates[0].items()]
    if cut is None:
        if loaded.device.type == "cpu":
            _head_row(name, loaded, values, report)
    elif shorter is not None:
        _whole_rows(name, cut, {_OURS: values, **rates[0]}, rates[1], report)
    else:
        report.skip_peer(f"{name} of all {cut.whole_layers} layers", "one layer alone does not say what a layer takes")


def _whole_rows(
    name: str,
    cut: Cut,
    rates: dict[str, list[float]],
    halved: dict[str, list[float]],
    report: Report,
) -> None:
    """What a layer takes, what the rest does, and the rate of all layers, from runs in pairs."""
    between = cut.layers - cut.layers // 2
    whole = f"{name} of all {cut.whole_layers} layers"
    missing, same_words = cut.whole_layers - cut.layers, cut.vocabulary == cut.whole_vocabulary
    per_layer: dict[str, list[float]] = {}
    for who in [who for who in rates if who in halved]:
        found = [(1 / long - 1 / short) / between for long, short in zip(rates[who], halved[who], strict=True)]
        if min(found) > 0:
            per_layer[who] = found
        else:  # whatever is made of this would flatter
            report.skip_peer(f"{who}, {whole}", "half of the layers took as long: too noisy")
    if _OURS not in per_layer:
        return
    words = "" if same_words else f", but {cut.vocabulary:,} of {cut.whole_vocabulary:,} words"
    labels = (f"{name}: a layer", f"{name}: head and the rest{words}", f"{whole}{words}")
    figures = {
        who: (
            [1000 * each for each in values],
            [1000 * (1 / rate - cut.layers * each) for rate, each in zip(rates[who], values, strict=True)],
            [1 / (1 / rate + missing * each) for rate, each in zip(rates[who], values, strict=True)],
        )
        for who, values in per_layer.items()
    }
    for number, (label, unit) in enumerate(zip(labels, ("ms", "ms", "tokens/s"), strict=True)):
        ours = figures[_OURS][number]
        if min(ours) <= 0:
            report.skip_peer(label, "all of a token went into layers: too noisy")
            continue
        report.rows.append(row(label, ours, unit))
        for who, each in figures.items():
            if who != _OURS and min(each[number]) > 0:
                higher = unit == "tokens/s"
                theirs = each[number]
                report.rows.append(row(label, ours, unit, peer=who, peer_values=theirs, higher_is_better=higher))


def _head_row(name: str, loaded: LoadedModel, rates: list[float], report: Report) -> None:
    """What of our time is the head, which is run alone, and what is left for the layers."""
    head = loaded.model.get_output_embeddings()
    if head is None:
        return
    weight = next(loaded.model.get_decoder().norm.parameters(), None) if hasattr(loaded.model, "get_decoder") else None
    if weight is None:
        return
    hidden = torch.full((1, 1, weight.numel()), 0.01, dtype=weight.dtype)
    seconds = []
    with torch.inference_mode():
        for _ in range(_HEAD_RUNS):
            begun = clock.now_ns()
            head(hidden)
            seconds.append((clock.now_ns() - begun) / 1e9)
    alone = statistics.median(seconds)
    report.rows.append(row(f"{name}: head", [1000 * alone], "ms"))
    report.rows.append(row(f"{name}: layers and the rest", [1000 * max(0.0, 1 / rate - alone) for rate in rates], "ms"))


def _rates(
    contestants: list[dict[str, Callable[[], float]]], repeats: int, report: Report, say: Callable[[str], None]
) -> list[dict[str, list[float]]]:
    """Of each group of contestants; those of one name run right after each other."""
    rates: list[dict[str, list[float]]] = [{name: [] for name in group} for group in contestants]
    for repeat in range(repeats + 1):
        say(f"repeat {repeat} of {repeats}" if repeat else "warm-up")
        for name in list(rates[0]):
            try:
                found = [group[name]() for group in contestants if name in group]
            except PeerError as failure:
                report.skip_peer(name, str(failure))
                for each in rates:
                    each.pop(name, None)
                continue
            if repeat:
                for each, rate in zip((each for each in rates if name in each), found, strict=True):
                    each[name].append(rate)
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
