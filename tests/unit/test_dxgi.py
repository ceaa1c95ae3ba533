"""Windows' words on video memory, read through tables of functions as COM lays them out, which are made here."""

from __future__ import annotations

import ctypes
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from engine.hardware import dxgi
from engine.hardware.dxgi import AdapterDesc, MemoryInfo, ProcessMemory, adapter_of, adapters

GIB = 2**30
_FAILED, _NOT_FOUND = -2147467259, -2005270526


class Interface:
    """An object whose functions are called by their places."""

    def __init__(self, places: dict[int, tuple[Callable[..., int], list[Any]]]) -> None:
        self.references = 0
        self._kept: list[Any] = []
        table = (ctypes.c_void_p * 20)()
        for place, (function, kinds) in {**places, 2: (self._release, [])}.items():
            made = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *kinds)(function)
            self._kept.append(made)
            table[place] = ctypes.cast(made, ctypes.c_void_p)
        self._kept.append(table)
        self._object = ctypes.c_void_p(ctypes.addressof(table))

    def given(self, to: int) -> int:
        self.references += 1
        ctypes.c_void_p.from_address(to).value = ctypes.addressof(self._object)
        return 0

    def _release(self, _this: int) -> int:
        self.references -= 1
        return self.references


class Card(Interface):
    """A card of Windows 10, or of an older one."""

    def __init__(self, name: str, luid: int, *, display: bool = False, is_old: bool = False) -> None:
        self.output = Interface({})
        self.name, self.luid, self.display, self.is_old = name, luid, display, is_old
        self.memory = {0: (10 * GIB, 9 * GIB), 1: (16 * GIB, 2 * GIB)}
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        super().__init__(
            {
                0: (self._query, [pointer, pointer]),
                7: (self._output, [number, pointer]),
                10: (self._describe, [pointer]),
                14: (self._memory, [number, number, pointer]),
            }
        )

    def _query(self, _this: int, which: int, to: int) -> int:
        guid = uuid.UUID(bytes_le=ctypes.string_at(which, 16))
        assert str(guid) == "645967a4-1392-4310-a798-8053ce3e93fd"
        return _FAILED if self.is_old else self.given(to)

    def _output(self, _this: int, number: int, to: int) -> int:
        return self.output.given(to) if self.display and number == 0 else _NOT_FOUND

    def _describe(self, _this: int, to: int) -> int:
        description = AdapterDesc.from_address(to)
        characters = self.name.encode("utf-16-le")
        ctypes.memmove(description.description, characters, len(characters))
        description.luid[:] = list(self.luid.to_bytes(8, "little"))
        return 0

    def _memory(self, _this: int, node: int, segment: int, to: int) -> int:
        assert node == 0
        if segment not in self.memory:
            return _FAILED
        info = MemoryInfo.from_address(to)
        info.budget, info.used = self.memory[segment]
        return 0


class Library:
    """`dxgi.dll`."""

    def __init__(self, *cards: Card, fails: bool = False) -> None:
        self.cards, self.fails = cards, fails
        self.factory = Interface({12: (self._enumerate, [ctypes.c_uint32, ctypes.c_void_p])})

    def CreateDXGIFactory1(self, guid: Any, to: Any) -> int:
        assert uuid.UUID(bytes_le=bytes(guid)) == uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387")
        return _FAILED if self.fails else self.factory.given(ctypes.addressof(to._obj))

    def _enumerate(self, _this: int, number: int, to: int) -> int:
        return self.cards[number].given(to) if number < len(self.cards) else _NOT_FOUND

    @property
    def references(self) -> int:
        return self.factory.references + sum(card.references + card.output.references for card in self.cards)


def test_what_this_process_uses_of_a_card() -> None:
    card = Card("NVIDIA GeForce RTX 4090", 0x1234, display=True)
    library = Library(Card("AMD Radeon(TM) Graphics", 7), card)
    found = adapter_of((0x1234).to_bytes(8, "little"), "", library)
    assert found is not None
    assert (found.name, found.shows_desktop) == ("NVIDIA GeForce RTX 4090", True)
    assert found.memory() == ProcessMemory(10 * GIB, 9 * GIB, 2 * GIB)
    del card.memory[1]
    assert found.memory() is None
    assert library.references == 1
    found.close()
    assert library.references == 0


def test_by_name_only_where_there_is_one_of_it() -> None:
    library = Library(Card("Arc B580", 1), Card("RTX 3060", 2), Card("RTX 3060", 3))
    found = adapter_of(None, "Arc B580", library)
    assert found is not None
    assert not found.shows_desktop
    found.close()
    assert adapter_of(None, "RTX 3060", library) is None
    assert adapter_of(b"\0" * 8, "Arc B580", library) is None
    assert library.references == 0


def test_an_older_windows_says_nothing() -> None:
    assert list(adapters(Library(Card("RTX 3060", 2, is_old=True)))) == []
    assert list(adapters(Library(fails=True))) == []


@pytest.mark.skipif(sys.platform == "win32", reason="there is one")
def test_elsewhere_there_is_no_such_library() -> None:
    assert list(adapters()) == []


def test_a_system_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> None:
        raise OSError

    monkeypatch.setattr(dxgi.platform, "system", lambda: "Windows")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert list(adapters()) == []
