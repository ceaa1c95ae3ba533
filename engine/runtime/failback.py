"""When a model that left its graphics cards may return to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from engine.common.errors import EngineError
from engine.devices.card_proof import CardProof, prove_cards
from engine.devices.device import Device
from engine.devices.memory_budget import MemoryCategory
from engine.runtime.load.devices import ModelDevices

_log = logging.getLogger(__name__)

FIRST_S: Final = 10.0
"""A card is asked so long after the model left it, and then after twice as long each time."""
_MOST_S: Final = 600.0
_SOON_S: Final = 900.0
"""A card that the model leaves again within this time after it returned is waited for twice as long."""

Open = Callable[[], tuple[Sequence[Device], str]]
Prove = Callable[[], list[CardProof] | None]


class Failback:
    """Asks the cards that a model was loaded on whether they compute, and have memory for it.

    A process whose card has failed cannot use it again on most systems, even where another process can.  So a process
    of its own tries cards that do not answer this one, while requests go on.

    Args:
        devices: of the model, just loaded.
        open_devices: opens them anew; their owner closes them.
        prove: see `prove_cards`.
    """

    def __init__(self, devices: ModelDevices, open_devices: Open, prove: Prove = prove_cards) -> None:
        self._open, self._prove = open_devices, prove
        uses = {device.name: device.memory.use() for device in devices.devices}
        # With half of its experts a model is worth moving.
        self._needed = {name: use.used - use.by_category[MemoryCategory.EXPERTS] // 2 for name, use in uses.items()}
        self._wait_s, self._next_s = FIRST_S, float("inf")
        self._returned_s = float("-inf")
        self._proving: threading.Thread | None = None
        self._is_lost = self._is_proven = False

    @property
    def is_for_others(self) -> bool:
        """Whether the cards compute again, but only for a process that begins now."""
        return self._is_proven

    def left(self, now_s: float, *, is_lost: bool) -> None:
        """The model has left the cards.

        Args:
            now_s: of a clock that never goes back.
            is_lost: whether a card does not respond any more; otherwise others have taken its memory.
        """
        self._is_lost = is_lost
        self._wait_s = min(2 * self._wait_s, _MOST_S) if now_s < self._returned_s + _SOON_S else FIRST_S
        self._next_s = now_s + self._wait_s

    def returned(self, now_s: float) -> None:
        """The model is on the cards again."""
        self._returned_s, self._next_s, self._is_proven = now_s, float("inf"), False

    def is_open(self, now_s: float) -> bool:
        """Whether the model may return now; nothing is asked before it is time."""
        if now_s < self._next_s or self._is_proven:
            return False
        self._wait_s = min(2 * self._wait_s, _MOST_S)
        self._next_s = now_s + self._wait_s
        try:
            with ExitStack() as opened:
                devices, _ = self._open()
                for device in devices:
                    opened.callback(device.close)
                answering = {device.name: device for device in devices if device.responds()}
                if answering.keys() >= self._needed.keys():
                    return all(_has_room(answering[name], nbytes) for name, nbytes in self._needed.items())
        except (EngineError, RuntimeError) as error:
            _log.info("the graphics card does not answer yet: %s", error)
        if self._is_lost:
            self._begin_proof()
        return False

    def close(self) -> None:
        """What a process of its own says is not wanted any more."""
        self._next_s, self._proving = float("inf"), None

    def _begin_proof(self) -> None:
        if self._proving is None or not self._proving.is_alive():
            self._proving = threading.Thread(target=self._try_apart, name="card proof", daemon=True)
            self._proving.start()

    def _try_apart(self) -> None:
        proofs = self._prove() or []
        if self._proving is threading.current_thread():
            self._is_proven = sum(not proof.failed for proof in proofs) >= len(self._needed)


def _has_room(device: Device, nbytes: int) -> bool:
    if device.memory.total < nbytes:
        return False
    return device.watch is None or device.watch.free >= nbytes + device.watch.reserve
