"""The kernels in CUDA C on AMD's cards: what HIP and its compiler are asked for, by a stub in C with their interface.

Where a real compiler is (Debian's libamdhip64-5 is one; it needs no card), it is asked for every kernel.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.card_kernels import Usage, all_kernels
from engine.common.paths import cache_dir
from engine.kernels.cuda import driver
from engine.kernels.cuda.compiled import CompileError, Kernel, arguments_of
from engine.kernels.cuda.driver import AmdCard, DriverError, Hiprtc, compile_for, find_hiprtc
from engine.kernels.cuda.products import product_kernel
from engine.kernels.gpu.modules import NORM_KERNEL
from engine.kernels.native.build import find_compiler
from tests.engine.emulated_cuda_card import needs_compiler

pytestmark = needs_compiler
STREAM = 0x7FEDCBA98760
ARCHITECTURES = ("gfx906", "gfx90a", "gfx1030")
"""That HIP 5.2 compiles for."""


class Seen(ctypes.Structure):
    """As in stub_hip.c."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("threads", "shared_bytes", "launches", "loaded", "compiled", "headers")),
        *((name, ctypes.c_uint64) for name in ("function", "stream")),
        ("code", ctypes.c_uint8 * 16),
        ("parameters", ctypes.c_uint8 * 184),
        ("entry", ctypes.c_char * 32),
        ("options", ctypes.c_char * 160),
    )


def usage_of(code: bytes) -> Usage:
    """What a kernel takes of a card, by the notes in its machine code: vector registers, shared memory, and scratch.

    Raises:
        ValueError: it has no such notes.
    """
    numbers = [_noted(code, name) for name in ("vgpr_count", "group_segment_fixed_size", "private_segment_fixed_size")]
    return Usage(*numbers)


def _noted(code: bytes, name: str) -> int:
    """A number of the notes, which are MessagePack."""
    key = f".{name}".encode()
    at = code.find(bytes([0xA0 + len(key)]) + key)
    if at < 0:
        raise ValueError(f"no {name} in the code")
    at += 1 + len(key)
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(code[at], 0)
    return int.from_bytes(code[at + 1 : at + 1 + width], "big") if width else code[at]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with PyTorch's libraries, as its ROCm builds have them."""
    folder = tmp_path_factory.mktemp("site")
    library = folder / "torch" / "lib" / "libamdhip64.so"
    library.parent.mkdir(parents=True)
    source = str(Path(__file__).parent / "stub_hip.c")
    find_compiler().run("-x", "c", "-shared", "-fPIC", source, "-o", str(library))
    return folder


@pytest.fixture
def stub(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ctypes.CDLL]:
    """PyTorch is a build for ROCm, and says that there is a card with a stream."""
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setattr(driver, "_SYSTEM", ())
    monkeypatch.setattr(torch.version, "hip", "7.2")
    properties = SimpleNamespace(gcnArchName="gfx1100:xnack-", multi_processor_count=48)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    caches = (driver._amd_driver, find_hiprtc, driver._card)
    for each in caches:
        each.cache_clear()
    library = ctypes.CDLL(str(site / "torch" / "lib" / "libamdhip64.so"))
    yield library
    for name in ("failing", "refusing"):
        ctypes.c_int.in_dll(library, name).value = 0
    for each in caches:
        each.cache_clear()


@pytest.fixture
def seen(stub: ctypes.CDLL) -> Seen:
    found = Seen.in_dll(stub, "seen")
    ctypes.memset(ctypes.addressof(found), 0, ctypes.sizeof(found))
    return found


def test_a_launch_reaches_hip_as_it_was_meant(seen: Seen) -> None:
    card = driver.card_of(torch.device("cuda", 1))
    assert isinstance(card, AmdCard)
    assert (card.multiprocessors, card.architecture, card.driver) == (48, "gfx1100", "70213010")
    given = {"x": 0x7F1111111110, "slots": 5, "splits": 3, "pairing": 2, "bias_at": -1}
    arguments = arguments_of(product_kernel("Int4", 2), given)
    card.launch(product_kernel("Int4", 2), (8, 48, 3), arguments)
    assert (list(seen.grid), seen.threads, seen.shared_bytes) == ([8, 48, 3], 128, 0)
    assert (seen.stream, seen.function, seen.entry) == (STREAM, 0x7F1234567890 + 1, b"product_kernel")
    assert bytes(seen.parameters) == bytes(arguments)
    assert bytes(seen.code).startswith(b"\x7fELF for a card")
    assert seen.options == b"-std=c++17 -O3 --offload-arch=gfx1100 -DSWITCHYARD_FORMAT=Int4 -DSWITCHYARD_ROWS=2"
    assert seen.headers > 4
    card.launch(product_kernel("Int4", 2), (1, 1, 1), arguments)
    card.launch(product_kernel("Int4", 4), (1, 1, 1), arguments)
    assert (seen.launches, seen.loaded, seen.compiled) == (3, 2, 2)  # each kernel is compiled and loaded once
    AmdCard(1).launch(product_kernel("Int4", 4), (1, 1, 1), arguments)
    assert (seen.loaded, seen.compiled) == (3, 2)  # and kept on disk
    assert len(list((cache_dir() / "cuda").glob("products-Int4-?-gfx1100-*"))) == 2


def test_what_hip_refuses_is_said_in_a_sentence(seen: Seen, stub: ctypes.CDLL) -> None:
    card = AmdCard(0)
    ctypes.c_int.in_dll(stub, "failing").value = 700
    with pytest.raises(DriverError, match=r"^HIP could not start norm: an illegal memory access$"):
        card.launch(NORM_KERNEL, (1, 1, 1), arguments_of(NORM_KERNEL, {}))
    ctypes.c_int.in_dll(stub, "refusing").value = 6
    with pytest.raises(CompileError, match=r"^hiprtc 9\.0 does not compile products\.cu: .*error: nothing is right$"):
        card.prepare([product_kernel("Int8", 8)])
    assert seen.launches == 0


def test_modules_ask_an_amd_card_for_its_kernels(seen: Seen) -> None:
    assert driver.card_of(torch.device("cuda", 0)) is not None
    assert driver.nvidia_card(torch.device("cuda", 0)) is None
    assert driver.card_of(torch.device("cpu")) is None


def test_without_hip_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, stub: ctypes.CDLL, site: Path) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(site)])
    with pytest.raises(CompileError, match="hiprtc was not found"):
        find_hiprtc()
    with pytest.raises(DriverError, match=r"^AMD's HIP could not be loaded \(it was not found\)$"):
        AmdCard(0)
    assert driver.card_of(torch.device("cuda", 0)) is None


def test_what_the_notes_say() -> None:
    notes = b"\x83\xb9.group_segment_fixed_size\xcd\x10\x00\xbb.private_segment_fixed_size\x08\xab.vgpr_count\xcc\x90"
    assert usage_of(b"\x7fELF" + notes + b"more") == Usage(144, 4096, 8)
    with pytest.raises(ValueError, match="no vgpr_count"):
        usage_of(b"\x7fELF")


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_for_amds_cards_without_scratch(
    architecture: str, record_property: Callable[[str, object], None]
) -> None:
    try:
        compiler = find_hiprtc()
    except CompileError as error:
        pytest.skip(str(error))
    assert isinstance(compiler, Hiprtc)

    def taken(kernel: Kernel) -> Usage:
        return usage_of(compile_for(kernel, architecture, compiler).code)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # as cards prepare them
        usages = dict(zip(kernels := all_kernels(), pool.map(taken, kernels), strict=True))
    for kernel, usage in usages.items():
        record_property(kernel.name, f"{usage.registers} registers, {usage.shared_bytes} bytes shared")
        assert usage.shared_bytes <= 64 * 1024
    scratch = {kernel: usage.spilled_bytes for kernel, usage in usages.items() if usage.spilled_bytes}
    # A few words of those for prompts, on gfx906.
    assert {kernel.name: size for kernel, size in scratch.items() if kernel.source != "group_products.cu"} == {}
