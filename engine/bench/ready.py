"""Seconds from opening a model to its first token, against the peers: what they load lazily counts as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from engine.bench.opened import opened
from engine.bench.peers.best_flags import Room, name_with, open_peer
from engine.bench.peers.peer import Beside, PeerError
from engine.bench.report import Report, row
from engine.common.config import EngineConfig, SamplingParams
from engine.runtime.schedule.alone import TIMED_PROMPT, Alone

if TYPE_CHECKING:
    from engine.bench.peers.editions import Flags

_PROMPT = 16


def ready_rows(
    config: EngineConfig, peers: Mapping[Beside, Flags], repeats: int, report: Report, say: Callable[[str], None]
) -> None:
    """Adds rows: seconds to the first token of a short prompt, processes and imports aside, all in turn.

    Args:
        peers: with the flags to run them with.

    Raises:
        EngineError: as `load_model`.
    """
    ours: list[float] = []
    theirs: dict[Beside, list[float]] = {each: [] for each in peers}
    for repeat in range(repeats):
        say(f"ready after opening: repeat {repeat + 1} of {repeats}")
        begun = time.perf_counter()
        with opened(config) as loaded:
            prompt = loaded.tokenizer(TIMED_PROMPT)["input_ids"][:_PROMPT]
            Alone(loaded).generate_from_ids(prompt, SamplingParams(max_tokens=1), end_ids=frozenset())
            ours.append(time.perf_counter() - begun)
        for each in list(theirs):
            try:
                with open_peer(each, torch.get_num_threads(), Room(2 * _PROMPT), peers[each]) as peer:
                    theirs[each].append(peer.opening_s + peer.prefill_seconds(prompt))
            except PeerError as failure:
                report.skip_peer(f"{each.name}, ready after opening", str(failure))
                del theirs[each]
    name = "ready after opening"
    report.rows.append(row(name, ours, "s"))
    for each, seconds in theirs.items():
        peer_name = name_with(each, peers[each])
        report.rows.append(row(name, ours, "s", peer=peer_name, peer_values=seconds, higher_is_better=False))
