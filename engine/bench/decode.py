"""`switchyard bench decode`: tokens per second at batch 1, against peers in the same run, in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from engine.bench.llama_cpp import LlamaCppPeer, PeerError
from engine.bench.llama_cpp.peer import files_beside
from engine.bench.peers import OFFLOAD, TransformersPeer, accelerate_offload
from engine.bench.report import Report, row
from engine.common.config import EngineConfig
from engine.measure.arithmetic import read_bandwidth
from engine.runtime.decode.chat_session import TIMED_PROMPT, time_decode
from engine.runtime.load.model import load_model

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel


class Peer(Protocol):
    """A contestant in decoding."""

    @property
    def name(self) -> str: ...
    def decode_rate(self, prompt: Sequence[int], tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What to run.

    Attributes:
        tokens: decoded per repeat, after one warm-up.
        peers: also run transformers and llama.cpp.
        prompt_tokens: of the prompt before them, which is not timed; `None`: a sentence.
    """

    tokens: int
    repeats: int
    peers: bool
    prompt_tokens: int | None = None


def bench_decode(config: EngineConfig, plan: DecodePlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows to `report`: our decode rate, against each peer and against the memory-bandwidth limit.

    Every repeat runs all contestants one after the other, so that noise affects all alike.
    """
    say("loading the model")
    loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        prompt = loaded.tokenizer(TIMED_PROMPT)["input_ids"]
        if plan.prompt_tokens is not None:
            prompt = (prompt * -(-plan.prompt_tokens // len(prompt)))[: plan.prompt_tokens]
        name = "decode" if plan.prompt_tokens is None else f"decode after {plan.prompt_tokens:,} tokens"
        contestants: dict[str, Callable[[], float]] = {
            "ours": lambda: time_decode(loaded, prompt, plan.tokens).tokens_per_s
        }
        with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as scratch, ExitStack() as opened:
            if plan.peers:
                context = len(prompt) + plan.tokens + 1
                peers: list[Peer] = [*_peers(config, loaded, Path(scratch), report, say)]
                peers += _llama_cpp(Path(config.model), loaded, context, opened, report, say)
                for peer in peers:
                    contestants[peer.name] = lambda peer=peer: peer.decode_rate(prompt, plan.tokens)  # type: ignore[misc]
            rates = _rates(contestants, plan.repeats, report, say)
        ours = rates.pop("ours")
        read = _bytes_per_token(loaded) + loaded.info.kv_bytes_per_token * (len(prompt) + plan.tokens / 2)
        limit = read_bandwidth() / read if loaded.info.device == "cpu" else None
        report.rows.append(row(name, ours, "tokens/s", limit=limit))
        report.rows += [row(name, ours, "tokens/s", peer=peer, peer_values=theirs) for peer, theirs in rates.items()]
    finally:
        loaded.close()


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


def _bytes_per_token(loaded: LoadedModel) -> float:
    """Bytes of weights that one token has to read: all except unused experts and the embedding table."""
    info = loaded.info
    used = info.experts_per_token / info.experts if info.experts else 0.0
    output, table = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
    unread = 0
    if table is not None and output is not None and table.weight is not output.weight:
        unread = table.weight.numel() * table.weight.element_size()
    return info.weights_bytes - unread + info.experts_bytes * used


def _peers(
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


def _llama_cpp(
    checkpoint: Path, loaded: LoadedModel, context: int, opened: ExitStack, report: Report, say: Callable[[str], None]
) -> list[LlamaCppPeer]:
    """llama.cpp on the CPU, with as many threads; `opened` closes them."""
    if loaded.device.type == "cuda":
        report.skip_peer("llama.cpp", "compared where we compute on the CPU as well")
        return []
    peers = []
    for name, path in files_beside(checkpoint, loaded.info.precision, report, say).items():
        say(f"loading the peer: {name}")
        try:
            peers.append(opened.enter_context(LlamaCppPeer(name, path, torch.get_num_threads(), context)))
        except PeerError as failure:
            report.skip_peer(name, str(failure))
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
