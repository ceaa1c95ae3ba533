"""A peer with the flags that are fastest for what is asked: each way to run it is tried, the best one is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.bench.peers.editions import Flags
from engine.bench.peers.peer import Beside, GgufPeer, PeerError

Task = Callable[[GgufPeer], float]
"""Runs something, and returns its rate: higher is better."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much is asked of a context: tokens of all sequences together, and sequences."""

    tokens: int
    sequences: int = 1


def name_with(beside: Beside, flags: Flags) -> str:
    """Its name in a report, with its flags."""
    return f"{beside.name}, {flags.words}"


def open_peer(beside: Beside, threads: int, room: Room, flags: Flags | None = None) -> GgufPeer:
    """Its process, with an empty context.

    Raises:
        PeerError: it cannot be run.
    """
    edition = beside.edition
    return GgufPeer(
        beside.name, beside.file, threads, room.tokens, sequences=room.sequences, edition=edition, flags=flags
    )


def best_flags(
    beside: Beside, peer: GgufPeer, task: Task, room: Room, say: Callable[[str], None] = lambda _text: None
) -> Flags:
    """The fastest flags for a task; the peer is left with them, its context empty.

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
        say(f"{name_with(beside, flags)}: {rates[flags]:.1f} tokens/s")
    if not rates:
        raise refusal
    best = max(rates, key=rates.__getitem__)
    peer.set_up(best, room.tokens, room.sequences)
    return best
