"""The devices that a model runs on: its weights, its expert caches and its KV, each within the device's budget."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.device import Device
from engine.devices.failures import is_out_of_memory
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory, Reservation
from engine.experts.activations import Activations
from engine.experts.card_tokens import CardTokens
from engine.experts.shared import Ways
from engine.experts.vram_cache import VramCache
from engine.experts.whole_layer import LayerBuffers
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import PAGE_TOKENS, LayerPages, StatePages
from engine.runtime.decoder_layers import LayerDevices
from engine.runtime.kv.library_caches import KvCost, LibraryCaches
from engine.runtime.kv.paged_cache import PagedCaches


class CardLoss(Enum):
    CARD = auto()
    MEMORY = auto()


@dataclass
class DeviceExperts:
    """The expert caches of a model, and what else was opened for them.

    Attributes:
        caches: of each device, one for each layout of records.
        activations: of each device, on their way.
        layer_buffers: in place of caches, where whole layers are fetched.
        ways: between the first device and each of the others, where they share each layer's experts.
        kernels: the native ones that compute for emulated devices.
        tokens: those that a device computes by itself, if it does.
        shortages: sentences for the user about what did not fit when the model was loaded.
    """

    devices: Sequence[Device]
    caches: list[list[VramCache]] = field(init=False)
    activations: list[Activations] = field(default_factory=list)
    kernels: NativeKernels | None = None
    tokens: CardTokens | None = None
    layer_buffers: list[LayerBuffers] = field(default_factory=list)
    ways: list[Ways] = field(default_factory=list)
    shortages: list[str] = field(default_factory=list)
    _wanted: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = [[] for _ in self.devices]

    @property
    def all_caches(self) -> list[VramCache]:
        return [cache for caches in self.caches for cache in caches]

    @property
    def notes(self) -> list[str]:
        said = [cache.note for cache in self.all_caches]
        return [*self.shortages, *(note for note in said if note is not None)]

    @property
    def slots(self) -> int:
        return sum(cache.slots for cache in self.all_caches)

    def add(self, index: int, cache: VramCache) -> None:
        self.caches[index].append(cache)
        self._wanted[id(cache)] = cache.slots

    def give_back(self, index: int, nbytes: int) -> int:
        """Makes the caches of a device smaller by at least so many bytes, if they have them.

        Returns:
            Bytes that are free now and were not before.
        """
        freed = 0
        for cache in sorted(self.caches[index], key=lambda cache: -cache.nbytes):
            if freed >= nbytes:
                break
            before = cache.nbytes
            fewer = -(-(nbytes - freed) // cache.layout.nbytes)
            cache.resize(max(0, cache.slots - fewer))
            freed += before - cache.nbytes
        return freed

    def make_room(self) -> bool:
        """Has caches give up what others need of their devices, and say so; whether they gave up anything."""
        before = sum(cache.nbytes for cache in self.all_caches)
        for cache in self.all_caches:
            cache.make_room()
        return sum(cache.nbytes for cache in self.all_caches) < before

    def resize(self, slots: int) -> int:
        """So many slots on all devices from now on, shared as they are now, as far as there is memory; how many."""
        caches = self.all_caches if not self.layer_buffers else []
        shares = [cache.slots for cache in caches] if self.slots else [1] * len(caches)
        for cache, share in zip(caches, shares, strict=True):
            self._wanted[id(cache)] = cache.resize(round(slots * share / sum(shares)))
        return self.slots

    def take_back(self) -> None:
        """Gives memory back to caches that had to give some up, as far as it is free."""
        for device, caches in zip(self.devices, self.caches, strict=True):
            for cache in caches:
                missing = self._wanted[id(cache)] - cache.slots
                fitting = device.memory.free // cache.layout.nbytes
                if missing > 0 and fitting > 0:
                    cache.resize(cache.slots + min(missing, fitting))

    def settle_for_less(self) -> None:
        for cache in self.all_caches:
            self._wanted[id(cache)] = cache.slots

    def close(self) -> None:
        if self.tokens is not None:
            self.tokens.close()
            self.tokens = None
        for buffers in self.layer_buffers:
            buffers.close()
        self.layer_buffers = []
        for ways in self.ways:
            ways.close()
        self.ways = []
        for cache in self.all_caches:
            cache.close()
        for activations in self.activations:
            with contextlib.suppress(EngineError):
                activations.close()
        self.caches, self.activations = [[] for _ in self.devices], []
        if self.kernels is not None:
            self.kernels.close()
            self.kernels = None


class ModelDevices:
    """Owns the devices and all that was allocated on them; made empty, and filled while the model is loaded.

    Args:
        layers: what is where; by default all of it is on the first device.

    Attributes:
        experts: the expert caches and what computes from them.
        kv: what a cache takes on each device.
    """

    def __init__(self, devices: Sequence[Device], layers: LayerDevices | None = None) -> None:
        self.devices = tuple(devices)
        self.layers = layers or LayerDevices()
        self.experts = DeviceExperts(self.devices)
        self.kv: tuple[KvCost, ...] = (KvCost(),) * len(self.devices)
        self._fixed: list[Reservation] = []
        self._heeded = self._budgets()

    def have_news(self, now_s: float) -> bool:
        """Whether other programs have taken memory of the devices, or left it, since that was heeded last.

        Args:
            now_s: of a clock that never goes back.
        """
        for device in self.devices:
            if device.watch is not None:
                device.watch.look(now_s)
        return self._budgets() != self._heeded

    def are_short(self, now_s: float) -> bool:
        watches = [device.watch for device in self.devices if device.watch is not None]
        try:
            for watch in watches:
                watch.look_again(now_s)
        except RuntimeError:  # it has failed: its next use says how
            return False
        return bool(self.short)

    def loss(self, error: BaseException) -> CardLoss | None:
        """What an error says of the devices: one has stopped responding, or others have taken memory that is needed."""
        if not isinstance(error, Exception) or isinstance(error, RequestCancelled):
            return None
        code = error.code if isinstance(error, EngineError) else ErrorCode.INTERNAL
        if is_out_of_memory(error) or code is ErrorCode.NOT_ENOUGH_MEMORY:
            return CardLoss.MEMORY if self.are_short(time.monotonic()) else None
        if code not in (ErrorCode.INTERNAL, ErrorCode.DEVICE_UNAVAILABLE):
            return None
        return None if all(device.responds() for device in self.devices) else CardLoss.CARD

    @property
    def short(self) -> list[Device]:
        return [each for each in self.devices if each.memory.excess or (each.watch is not None and each.watch.note)]

    @property
    def note(self) -> str:
        notes = [device.watch.note for device in self.devices if device.watch is not None]
        return next(filter(None, notes), "")

    def heed(self, now_s: float) -> Sequence[int]:
        """Between steps: caches grow where there is memory again; by themselves they shrink, before their next step.

        Returns:
            Bytes that the devices may use now: others than before are news to whoever asks.
        """
        if self.have_news(now_s):
            before, self._heeded = self._heeded, self._budgets()
            if any(now > then for now, then in zip(self._heeded, before, strict=True)):
                self.experts.take_back()
        return self._heeded

    def _budgets(self) -> list[int]:
        return [device.memory.total for device in self.devices]

    def memory(self) -> tuple[int, int, int]:
        uses = [device.memory.use() for device in self.devices]
        experts = sum(
            use.by_category[kind] for use in uses for kind in (MemoryCategory.EXPERTS, MemoryCategory.STAGING)
        )
        return sum(use.total for use in uses), sum(use.used for use in uses), experts

    def count(self, index: int, nbytes: int, category: MemoryCategory) -> None:
        self._fixed.append(self.devices[index].memory.reserve(nbytes, category))

    def count_weights(self, sizes: Mapping[str, int]) -> None:
        dense = [0] * len(self.devices)
        for name, nbytes in sizes.items() if dense else ():
            dense[self.layers.of(name)] += nbytes
        for index, nbytes in enumerate(dense):
            self.count(index, nbytes, MemoryCategory.WEIGHTS)

    def expert_budgets(self, context_tokens: int, activations: Sequence[int]) -> list[int]:
        """Bytes of each device for experts, once there is room for a context and for a chunk of a prompt."""
        return [
            max(0, device.memory.free - kv.fixed - context_tokens * kv.per_token - room)
            for device, kv, room in zip(self.devices, self.kv, activations, strict=True)
        ]

    def expect_kv(self, cost: KvCost, cache_layers: int) -> None:
        """How much a cache of all layers will take; they are taken to be alike."""
        shares = [0] * len(self.devices)
        for layer in range(cache_layers):
            shares[self.layers.of_cache_layer(layer)] += 1
        layers = max(cache_layers, 1)
        self.kv = tuple(
            KvCost(-(-cost.per_token * share // layers), -(-cost.fixed * share // layers)) for share in shares
        )

    def context_room(self, wanted: int, fewest: int, activations: Sequence[int]) -> int:
        """The longest context, up to `wanted` tokens, that all devices can hold if their experts give way.

        Raises:
            DeviceMemoryError: one has not even room for `fewest` tokens.
        """
        room = wanted
        for device, caches, kv, needed in zip(self.devices, self.experts.caches, self.kv, activations, strict=True):
            counted = device.memory.use().by_category[MemoryCategory.ACTIVATIONS]
            left = device.memory.free + sum(cache.nbytes for cache in caches) + counted - needed
            least = kv.fixed + min(wanted, fewest) * kv.per_token
            if left < least:
                raise DeviceMemoryError(device.name, MemoryCategory.KV, least, max(left, 0))
            room = min(room, (left - kv.fixed) // kv.per_token) if kv.per_token else room
        return room

    def spare(self, index: int) -> int:
        """Bytes of a device that are free, or that experts and what steps needed would give up."""
        use, experts = self.devices[index].memory.use(), self.experts
        held = sum(cache.nbytes for cache in experts.caches[index])
        return use.total - use.used + held + sum(each.nbytes for each in experts.activations[index : index + 1])

    def resize_kv(self, index: int, reservation: Reservation, nbytes: int, tokens: int) -> None:
        """Memory of a device for a context of so many tokens, from experts if need be; no step may be under way.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`: not even all slots of the expert caches would do.
        """
        try:
            reservation.resize(nbytes)
            return
        except DeviceMemoryError as error:
            short, experts = error.asked - error.free + self.devices[index].memory.excess, self.experts
            if experts.give_back(index, short) < short and index < len(experts.activations):
                experts.activations[index].shrink()  # what earlier steps needed
        try:
            reservation.resize(nbytes)
        except DeviceMemoryError as error:
            raise EngineError(
                ErrorCode.NOT_ENOUGH_MEMORY,
                f"A context of {tokens:,} tokens needs another {rounded_up(error.asked)} of "
                f"{self.devices[index].name}, which has {rounded_down(error.free)} left: start a new chat, "
                "allow it more with --vram, or use --device cpu.",
            ) from None

    def shrink(self) -> bool:
        """After a device has run out of memory: gives up a quarter of the slots, for good if nobody holds the rest."""
        freed = 0
        for index, caches in enumerate(self.experts.caches):
            held = sum(cache.nbytes for cache in caches)
            if held:
                freed += self.experts.give_back(index, max(held // 4, 1))
        if not self.are_short(time.monotonic()):
            self.experts.settle_for_less()
        return freed > 0

    def close(self) -> None:
        self.experts.close()
        for reservation in self._fixed:
            reservation.release()
        self._fixed = []
        for device in self.devices:
            device.close()


class PageRoom:
    """What pages take of a model's devices: as many have memory there as are in use.

    Args:
        caches: of the pages, all of which there may ever be if the CPU reads them: memory comes as it is written to.
            Where they are the library's, pages count their tokens.
        longest: pages of the longest context, which there is room for once experts have given way.
    """

    def __init__(self, devices: ModelDevices, caches: PagedCaches | LibraryCaches, longest: int) -> None:
        self._devices, self._caches, self._longest = devices, caches, longest
        self._page, self._window, self._state = ([0] * len(devices.devices) for _ in range(3))
        if isinstance(caches, LibraryCaches):
            self._page = [PAGE_TOKENS * kv.per_token for kv in devices.kv]
            self._state = [-(-kv.fixed // 2) for kv in devices.kv]  # a row has two, which share most of it
            layers: Sequence[tuple[LayerPages | None, LayerPages | None]] = ()
        else:
            layers = list(zip(caches.in_full, caches.in_windows, strict=True))
        for number, (full, in_windows) in enumerate(layers):
            index = devices.layers.of_cache_layer(number)
            if full is not None:
                (self._state if isinstance(full, StatePages) else self._page)[index] += full.page_bytes
            if in_windows is not None:
                self._window[index] += in_windows.page_bytes
        self._reservations = [device.memory.reserve(0, MemoryCategory.KV) for device in devices.devices]
        self.pages = self.windows = self.states = 0
        """That have memory."""

    @property
    def name(self) -> str:
        return ", ".join(device.name for device in self._devices.devices)

    @property
    def nbytes(self) -> int:
        return sum(reservation.nbytes for reservation in self._reservations)

    @staticmethod
    def most(devices: ModelDevices, page_bytes: int) -> int:
        """Pages that there is memory for on all devices, half of which stays for experts."""
        whole = sum(kv.per_token for kv in devices.kv)
        found = [
            devices.spare(index) * whole // (2 * page_bytes * kv.per_token)
            for index, kv in enumerate(devices.kv)
            if kv.per_token
        ]
        return min(found, default=0)

    def resize(self, *, pages: int, windows: int, states: int) -> None:
        """Memory for so many of each, and for some more where there is enough.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`: not even all slots of the expert caches would do.
        """
        if pages > self.pages:
            wanted = max(pages, min(2 * self.pages, max(self._longest, pages + pages // 8)))
            pages = min(wanted, pages + self._more(self._page))
        if windows > self.windows:
            windows += min(windows // 8, self._more(self._window))
        if states > self.states:  # whenever they move, steps are captured again
            states += min(max(2, states // 4), self._more(self._state))
        before, counts = (self.pages, self.windows, self.states), (pages, windows, states)
        try:
            for index, reservation in enumerate(self._reservations):
                self._devices.resize_kv(index, reservation, self._bytes(index, *counts), pages * PAGE_TOKENS)
            if isinstance(self._caches, PagedCaches) and self._caches.are_of_card:
                self._caches.resize(*counts)
        except (EngineError, RuntimeError) as error:
            # Some layers may have theirs, others not.
            self.pages, self.windows, self.states = least = tuple(map(min, before, counts))
            for index, reservation in enumerate(self._reservations):
                reservation.resize(min(reservation.nbytes, self._bytes(index, *least)))
            if isinstance(error, EngineError) or not is_out_of_memory(error):
                raise
            raise EngineError(
                ErrorCode.NOT_ENOUGH_MEMORY,
                f"{self.name} refused memory for a context of {pages * PAGE_TOKENS:,} tokens that its budget allows: "
                "close other programs that use it, or allow the model less with --vram.",
            ) from None
        self.pages, self.windows, self.states = counts
        if any(now < then for now, then in zip(counts, before, strict=True)):
            self._devices.experts.take_back()

    def _more(self, each: Sequence[int]) -> int:
        """How many more fit into half of what is spare, of so many bytes on each device."""
        more = [self._devices.spare(index) // (2 * nbytes) for index, nbytes in enumerate(each) if nbytes]
        return max(0, min(more, default=0))

    def _bytes(self, index: int, pages: int, windows: int, states: int) -> int:
        return pages * self._page[index] + windows * self._window[index] + states * self._state[index]

    def release(self) -> None:
        """The pages are gone: their memory is the experts' again."""
        for reservation in self._reservations:
            reservation.release()
        self._devices.experts.take_back()


_LEFT_TO_CPU = re.compile(r"operator '([\w:.]+)' is not currently supported on the MPS")


@contextlib.contextmanager
def left_to_cpu() -> Iterator[list[str]]:
    """Collects the operators that torch computes on the CPU because these graphics cannot; each once."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield found
        finally:
            told = [(str(each.message), each) for each in said]
            names = [match[1] for text, _ in told if (match := _LEFT_TO_CPU.search(text))]
            found += dict.fromkeys(names)
    for text, each in told:
        if not _LEFT_TO_CPU.search(text):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def left_note(operators: list[str]) -> str:
    """A sentence for the user on operators from `left_to_cpu`; empty without any."""
    if not operators:
        return ""
    return f"PyTorch computes a part on the CPU, which is slower, as these graphics cannot: {', '.join(operators)}."
