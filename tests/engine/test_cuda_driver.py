"""What NVIDIA's driver is asked for, by a stub in C that has its interface: no card has to be there."""

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kernels.cuda import driver
from engine.kernels.cuda.compiled import Kernel, arguments_of
from engine.kernels.cuda.driver import DriverError, NvidiaCard
from engine.kernels.cuda.products import product_kernel
from engine.kernels.native.build import find_compiler
from tests.engine.emulated_cuda_card import needs_compiler

pytestmark = needs_compiler
STREAM = 0x7FEDCBA98760


class Seen(ctypes.Structure):
    """As in stub_driver.c."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("threads", "shared_bytes", "launches", "loaded")),
        *((name, ctypes.c_uint64) for name in ("function", "stream", "context")),
        ("code", ctypes.c_uint8 * 16),
        ("parameters", ctypes.c_uint8 * 184),
        ("entry", ctypes.c_char * 32),
    )


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    source = str(Path(__file__).parent / "stub_driver.c")
    find_compiler().run("-x", "c", "-shared", "-fPIC", source, "-o", str(library))
    return ctypes.CDLL(str(library))


@pytest.fixture
def seen(stub: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """What the stub saw; PyTorch says that there is a card with a stream."""
    driver._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: stub)
    properties = SimpleNamespace(major=8, minor=6, multi_processor_count=28)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(driver, "machine_code", machine_code)
    found = Seen.in_dll(stub, "seen")
    ctypes.memset(ctypes.addressof(found), 0, ctypes.sizeof(found))
    yield found
    ctypes.c_int.in_dll(stub, "failing").value = 0
    driver._driver.cache_clear()


def machine_code(kernel: Kernel, capability: tuple[int, int], version: str, *, again: bool) -> bytes:
    assert (capability, version, again) == ((8, 6), "13010", False)
    return b"\x7fELF\0" + kernel.name.encode()


def test_a_launch_reaches_the_driver_as_it_was_meant(seen: Seen) -> None:
    card = NvidiaCard(2)
    assert card.multiprocessors == 28
    given = {"x": 0x7F1111111110, "slots": 5, "splits": 3, "pairing": 2, "bias_at": -1}
    arguments = arguments_of(product_kernel("Int4", 2), given)
    card.launch(product_kernel("Int4", 2), (8, 48, 3), arguments)
    assert (list(seen.grid), seen.threads, seen.shared_bytes) == ([8, 48, 3], 128, 0)
    assert (seen.stream, seen.context, seen.function) == (STREAM, 0x7F0000000000 + 42, 0x7F1234567890 + 1)
    assert bytes(seen.code).startswith(b"\x7fELF\0products-I")
    assert seen.entry == b"product_kernel"
    assert bytes(seen.parameters) == bytes(arguments)
    card.launch(product_kernel("Int4", 2), (1, 1, 1), arguments)
    card.launch(product_kernel("Int4", 4), (1, 1, 1), arguments)
    assert (seen.launches, seen.loaded) == (3, 2)  # each kernel is loaded once


def test_arguments_have_the_names_of_the_source() -> None:
    kernel, x = product_kernel("Int4", 1), torch.zeros(4)
    made: Any = arguments_of(kernel, {"x": x, "ids": None, "activation": {"kind": -1, "limit": 1.5}})
    assert (made.x, made.ids, made.slots) == (x.data_ptr(), None, 0)
    assert (made.activation.kind, made.activation.limit, made.activation.alpha) == (-1, 1.5, 0)
    for wrong in ({"ex": x}, {"activation": {"kinds": 2}}):
        with pytest.raises(TypeError, match=r"has no (ex|kinds)$"):
            arguments_of(kernel, wrong)  # type: ignore[arg-type]


def test_what_the_driver_refuses_is_said_in_a_sentence(seen: Seen, stub: ctypes.CDLL) -> None:
    card = NvidiaCard(0)
    for error, words in ((700, "an illegal memory access"), (999, "error 999")):
        ctypes.c_int.in_dll(stub, "failing").value = error
        with pytest.raises(DriverError, match=rf"^The card's driver could not start products-Int4-1: {words}$"):
            card.launch(product_kernel("Int4", 1), (1, 1, 1), arguments_of(product_kernel("Int4", 1), {}))
    assert seen.launches == 0


def test_memory_of_the_host_has_an_address_on_the_card(seen: Seen, stub: ctypes.CDLL) -> None:
    card, memory = NvidiaCard(0), torch.zeros(8)
    assert card.address_of(memory) == memory.data_ptr() + 0x1000
    ctypes.c_int.in_dll(stub, "failing").value = 700
    with pytest.raises(DriverError, match="map the host's memory: an illegal"):
        card.address_of(memory)


def test_without_a_driver_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def there_is_none(name: str) -> None:
        raise OSError(f"{name} was not found")

    driver._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", there_is_none)
    with pytest.raises(DriverError, match=r"^NVIDIA's driver could not be loaded \(.*was not found\)$"):
        NvidiaCard(0)
