"""What Windows says of a graphics card's memory: how much this process may use, and what of it lies in RAM.

On Windows a driver does not refuse memory that a card has not got: the system keeps it in RAM ("shared GPU memory"),
where it is slow.  DXGI tells how much that is; its interfaces are called here as COM lays them out: a pointer to a
table of functions, whose first argument is the interface itself.
"""

from __future__ import annotations

import ctypes
import platform
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_RELEASE = 2
_ENUM_ADAPTERS1, _ENUM_OUTPUTS, _GET_DESC1, _QUERY_VIDEO_MEMORY = 12, 7, 10, 14
"""Places in the tables of IDXGIFactory1, IDXGIAdapter, IDXGIAdapter1 and IDXGIAdapter3."""
_QUERY_INTERFACE = 0
_FACTORY1 = uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387")
_ADAPTER3 = uuid.UUID("645967a4-1392-4310-a798-8053ce3e93fd")
_MOST_ADAPTERS = 32


class AdapterDesc(ctypes.Structure):
    """DXGI_ADAPTER_DESC1."""

    _fields_ = (
        ("description", ctypes.c_uint16 * 128),  # UTF-16
        ("ids", ctypes.c_uint32 * 4),
        ("memory", ctypes.c_size_t * 3),
        ("luid", ctypes.c_uint8 * 8),
        ("flags", ctypes.c_uint32),
    )


class MemoryInfo(ctypes.Structure):
    """DXGI_QUERY_VIDEO_MEMORY_INFO, in bytes."""

    _fields_ = (
        ("budget", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("reservable", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What this process uses of a card.

    Attributes:
        budget: bytes on the card that the system lets it use.
        used: bytes that belong on the card.
        in_ram: bytes in RAM that the card reads, pinned ones among them.
    """

    budget: int
    used: int
    in_ram: int


class _Interface:
    """A COM interface, released at the end."""

    def __init__(self, address: int) -> None:
        self._address = address

    def call(self, place: int, *arguments: Any) -> int:
        """The result of the function at this place of its table."""
        table = ctypes.cast(self._address, ctypes.POINTER(ctypes.c_void_p))[0]
        function = ctypes.cast(table or 0, ctypes.POINTER(ctypes.c_void_p))[place]
        # On 64 bits there is one calling convention, whatever it is called.
        kinds = [type(argument) for argument in arguments]
        made = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *kinds)(function or 0)
        return int(made(self._address, *arguments))

    def into(self, place: int, *arguments: Any) -> _Interface | None:
        """The interface that the function at this place gives, as its last argument."""
        made = ctypes.c_void_p()
        failed = self.call(place, *arguments, ctypes.c_void_p(ctypes.addressof(made)))
        return None if failed or not made.value else _Interface(made.value)

    def release(self) -> None:
        self.call(_RELEASE)


class Adapter:
    """A graphics card, as DXGI knows it.

    Attributes:
        name: as its driver calls it.
        luid: eight bytes that name it until the computer is restarted.
        shows_desktop: whether a display is connected to it and used.
    """

    def __init__(self, interface: _Interface, description: AdapterDesc, *, shows_desktop: bool) -> None:
        self._interface = interface
        characters = bytes(description.description).decode("utf-16-le", "replace")
        self.name = characters.partition("\0")[0]
        self.luid = bytes(description.luid)
        self.shows_desktop = shows_desktop

    def memory(self) -> ProcessMemory | None:
        """What this process uses of it now; None if the system does not say."""
        found = [MemoryInfo(), MemoryInfo()]
        for segment, info in enumerate(found):  # on the card, and in RAM
            arguments = (ctypes.c_uint32(0), ctypes.c_uint32(segment), ctypes.c_void_p(ctypes.addressof(info)))
            if self._interface.call(_QUERY_VIDEO_MEMORY, *arguments):
                return None
        return ProcessMemory(int(found[0].budget), int(found[0].used), int(found[1].used))

    def close(self) -> None:
        self._interface.release()


def adapters(library: Any = None) -> Iterator[Adapter]:
    """The cards of this machine, in the order of Windows; none on other systems and before Windows 10."""
    if library is None:
        if platform.system() != "Windows":
            return
        try:
            library = ctypes.CDLL("dxgi.dll")
        except OSError:
            return
    made = ctypes.c_void_p()
    if library.CreateDXGIFactory1(_guid(_FACTORY1), ctypes.byref(made)) or not made.value:
        return
    factory = _Interface(made.value)
    try:
        for number in range(_MOST_ADAPTERS):
            first = factory.into(_ENUM_ADAPTERS1, ctypes.c_uint32(number))
            if first is None:
                return
            found = _described(first)
            if found is not None:
                yield found
    finally:
        factory.release()


def adapter_of(luid: bytes | None, name: str, library: Any = None) -> Adapter | None:
    """The card with this `luid`; without one the only card of this name."""
    found = list(adapters(library))
    fitting = [each for each in found if (each.luid == luid if luid is not None else each.name == name)]
    chosen = fitting[0] if len(fitting) == 1 else None
    for each in found:
        if each is not chosen:
            each.close()
    return chosen


def card_adapter(index: int, name: Callable[[], str]) -> Adapter | None:
    """The card that CUDA numbers and names so; None on other systems."""
    if platform.system() != "Windows":
        return None
    luid = None
    try:
        driver = ctypes.CDLL("nvcuda.dll")
        card, found, mask = ctypes.c_int(), (ctypes.c_uint8 * 8)(), ctypes.c_uint()
        if not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(card), index)):
            luid = None if driver.cuDeviceGetLuid(found, ctypes.byref(mask), card) else bytes(found)
    except (OSError, AttributeError):  # AMD's, or an old driver
        pass
    return adapter_of(luid, name())


def _described(first: _Interface) -> Adapter | None:
    description = AdapterDesc()
    try:
        if first.call(_GET_DESC1, ctypes.c_void_p(ctypes.addressof(description))):
            return None
        output = first.into(_ENUM_OUTPUTS, ctypes.c_uint32(0))
        if output is not None:
            output.release()
        guid = _guid(_ADAPTER3)
        newer = first.into(_QUERY_INTERFACE, ctypes.c_void_p(ctypes.addressof(guid)))
        return None if newer is None else Adapter(newer, description, shows_desktop=output is not None)
    finally:
        first.release()


def _guid(value: uuid.UUID) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * 16)(*value.bytes_le)
