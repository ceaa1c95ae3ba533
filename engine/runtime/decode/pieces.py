"""How much of a prompt is computed at once where experts come over a link: each piece brings them all.

A longer piece shares each copy among more tokens, until computing takes as long as copying.  Beyond the piece that room
was left for when the model was loaded, its activations take memory from the expert caches, while the prompt is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.common.footprint import activation_token_bytes
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory, Reservation
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import STEP_ELEMENTS
from engine.experts.latency import LatencyModel
from engine.experts.misses import OnCpu
from engine.experts.shared import parts_of
from engine.runtime.loaded_model import LoadedModel

_MOST_TIMES = 4
"""The longest piece: so often the one that room was left for."""
_CACHE_SHARE = 4
"""Its activations may take one part in so many of a device's expert caches."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers whose experts a device has in part.

    Attributes:
        experts: of all of them; absent: those that have no slot.
        per_token: experts of a token in one layer; count: of layers.
    """

    latency: LatencyModel
    experts: int
    absent: int
    per_token: int
    count: int

    def copying_s(self) -> float:
        return self.absent * self.latency.transfer_s

    def computing_s(self, tokens: int) -> float:
        """Of a piece of so many tokens, which are taken to use all experts alike."""
        each = tokens * self.per_token * self.count // self.experts
        return self.experts * self.latency.gpu_s(each)


def wanted_tokens(layers: Sequence[Layers], usual: int, most: int, left: int) -> int:
    """Tokens of a piece.

    Args:
        usual: of a piece that there is room for; most: of any.
        left: to be read.
    """
    tokens = usual
    while tokens < min(most, left) and sum(each.copying_s() - each.computing_s(tokens) for each in layers) > 0:
        tokens = min(2 * tokens, most)
    return tokens


class PromptPieces:
    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        caches = loaded.caches
        bound = [module.__dict__.get(BANK_LAYER) for module in loaded.model.modules()] if caches else []
        self._experts = [experts for each in bound if each is not None for experts in parts_of(each[1])]
        config = loaded.model.config.get_text_config()
        width = int(getattr(config, "hidden_size", 0))
        per_token = max(1, loaded.info.experts_per_token)
        self._token_bytes = activation_token_bytes(width, per_token, loaded.model.dtype.itemsize)
        self._most = STEP_ELEMENTS // max(1, per_token * width)

    def longest(self, usual: int) -> int:
        """Tokens of the longest piece that there may be.

        Args:
            usual: as in `of`.
        """
        return max(usual, min(_MOST_TIMES * usual, self._most)) if self._experts else usual

    @contextmanager
    def of(self, tokens: int, usual: int) -> Iterator[int]:
        """Within, so many tokens of a prompt may be computed at once, and the memory for them is set aside.

        Args:
            tokens: of the prompt that are to be read.
            usual: that there is room for anyway.
        """
        longest = usual
        if self._experts and tokens > usual:
            longest = wanted_tokens(self._layers(), usual, self.longest(usual), tokens)
        held = self._set_aside((longest - usual) * self._token_bytes, tokens) if longest > usual else None
        try:
            yield longest if held is not None else usual
        finally:
            if held is not None:
                for reservation in held:
                    reservation.release()
                assert self._loaded.devices is not None
                self._loaded.devices.experts.take_back()

    def _layers(self) -> list[Layers]:
        per_token = max(1, self._loaded.info.experts_per_token)
        found = []
        for cache in self._loaded.caches:
            mine = [each for each in self._experts if each.cache is cache and each.mode != OnCpu.name]
            if mine:
                every = sum(each.source.num_experts for each in mine)
                absent = max(0, every - cache.slots)
                found.append(Layers(mine[0].latency, every, absent, per_token, len(mine)))
        return found

    def _set_aside(self, nbytes: int, tokens: int) -> list[Reservation] | None:
        """Memory of each device, from its caches if need be; None if one has too little to read so many tokens then."""
        devices = self._loaded.devices
        assert devices is not None
        held: list[Reservation] = []
        for index, device in enumerate(devices.devices):
            lacking = nbytes - device.memory.free
            of_caches = sum(cache.nbytes for cache in devices.experts.caches[index])
            # The context takes its memory as it grows, from what is free and from the caches: that must be left to it.
            kv, held_kv = devices.kv[index], device.memory.use().by_category.get(MemoryCategory.KV, 0)
            there = max(0, held_kv - kv.fixed) // kv.per_token if kv.per_token else 0
            capacity = max(there + tokens, min(2 * there, self._loaded.context_tokens))
            promised = kv.fixed + kv.per_token * capacity - held_kv
            if lacking > of_caches // _CACHE_SHARE or promised > of_caches - lacking:
                break
            try:
                if lacking > 0:
                    devices.experts.give_back(index, lacking)
                held.append(device.memory.reserve(nbytes, MemoryCategory.ACTIVATIONS))
            except DeviceMemoryError:
                break
        if len(held) == len(devices.devices):
            return held
        for reservation in held:
            reservation.release()
        devices.experts.take_back()
        return None
