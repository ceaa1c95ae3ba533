"""What goes wrong with a card before, while and after it is used, and what a person is told: one clear sentence.

Told elsewhere: drivers that are missing, broken or hang (`test_hardware_gpus`), that are too old for a card
(`test_torch_builds`, `test_doctor`), cards that stop in the middle of answers (`test_lost_card`), other programs that
take a card's memory (`test_memory_of_others`), a compiler that is missing or knows no such card, and kept kernels that
are half written or somebody else's (`test_cuda_compiled`).
"""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import cache_dir
from engine.devices.card import CardClock, CardKind, CardStream, open_card
from engine.devices.device import CopyLog
from engine.devices.failures import is_out_of_memory
from engine.devices.host_memory import HostMemory
from engine.devices.opening import CARD_KINDS, open_automatic
from engine.kernels.cuda import compiled, driver
from engine.kernels.cuda.compiled import machine_code
from engine.kernels.cuda.driver import DriverError, NvidiaCard
from engine.kernels.cuda.products import product_kernel
from engine.runtime.engine import Engine
from tests.engine.on_devices import PROMPT, Reference, reference
from tests.engine.test_cuda_compiled import AMPERE, INT4, CountingNvrtc, kept
from tests.engine.test_lost_card import FAULT, Card, ask, tokens
from tests.fake_cards import FakeCards
from tests.refusals import refused

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def kind(cards: FakeCards, *, is_built: bool = True) -> CardKind:
    return CardKind(
        "cpu",
        cards,
        lambda _place: HostMemory(),
        lambda _index: "fake",
        is_built=lambda: is_built,
        variables=VARIABLES,
    )


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def cards_are(monkeypatch: pytest.MonkeyPatch, cards: FakeCards, *, is_built: bool = True) -> None:
    monkeypatch.setitem(CARD_KINDS, "cuda", kind(cards, is_built=is_built))
    monkeypatch.setitem(CARD_KINDS, "xpu", kind(FakeCards(names=[]), is_built=False))


@pytest.mark.parametrize(
    "value", ["", "-1", "7", "none", " ", "GPU-8a2c", "MIG-61ce7ae6-0a77-5b75-a5ac-f53c1c23c60e", "GPU-x/0/0"]
)
def test_a_variable_that_hides_all_cards_is_named(
    monkeypatch: pytest.MonkeyPatch, no_variables: None, value: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    cards_are(monkeypatch, FakeCards(names=[]))
    devices, note = open_automatic()
    assert devices == []
    assert note == (
        f"The variable CUDA_VISIBLE_DEVICES is {value!r}, which shows this program no graphics card: remove it to use "
        "one."
    )
    with refused(ErrorCode.DEVICE_UNAVAILABLE, match="CUDA_VISIBLE_DEVICES is"):
        open_card(CARD_KINDS["cuda"])


def test_a_driver_that_breaks_when_it_is_asked_has_no_cards() -> None:
    cards = FakeCards()
    cards.device_count = lambda: (_ for _ in ()).throw(RuntimeError("CUDA driver initialization failed"))  # type: ignore[method-assign]
    assert kind(cards).count() == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might", "has no memory left: close other programs"),
        ("CUDA-capable device(s) is/are busy or unavailable", r"does not respond \(CUDA-capable device\(s\)"),
        ("", r"does not respond \(RuntimeError\)"),
    ],
)
def test_a_card_that_cannot_be_opened_leaves_the_work_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, said: str, words: str
) -> None:
    cards = FakeCards(broken=said or " ")
    with pytest.raises(EngineError, match=words) as caught:
        open_card(kind(cards))
    assert caught.value.code is ErrorCode.DEVICE_UNAVAILABLE
    assert "\n" not in caught.value.message
    cards_are(monkeypatch, cards)
    assert open_automatic() == ([], caught.value.message)


def test_one_broken_card_of_two_leaves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(FakeCards):
        def mem_get_info(self, place: torch.device) -> tuple[int, int]:
            if place.index == 0:
                raise RuntimeError("CUDA error: unknown error")
            return super().mem_get_info(place)

    cards_are(monkeypatch, Half(names=["a", "b"]))
    devices, note = open_automatic()
    assert [device.name for device in devices] == ["cpu:1"]
    assert "cpu:0 does not respond" in note
    devices[0].close()


@pytest.mark.parametrize(
    "said", ["CUDA error: out of memory", "HIP error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"]
)
def test_a_drivers_want_of_memory_is_not_a_fault(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield reference("qwen3_moe", tmp_path_factory.mktemp("bad"))
    reference.cache_clear()


def test_a_laptop_that_has_switched_its_cards(monkeypatch: pytest.MonkeyPatch, expected: Reference) -> None:
    cards_are(monkeypatch, FakeCards(names=["GeForce RTX 4060 Laptop GPU", "eGPU"]))
    devices, note = open_automatic()
    assert (len(devices), note) == (2, "")
    for device in devices:
        device.close()
    cards_are(monkeypatch, FakeCards(names=["GeForce RTX 4060 Laptop GPU"]))  # the other one was unplugged
    devices, note = open_automatic()
    assert (len(devices), note) == (1, "")
    devices[0].close()
    engine = Engine()
    config = EngineConfig(str(expected.folder), device="cuda:1", precision="fp32", threads=1)
    with refused(ErrorCode.DEVICE_UNAVAILABLE, match="This machine has no graphics card number 1: use cpu"):
        engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    cards_are(monkeypatch, FakeCards(names=[]))  # and now the built-in one sleeps
    assert open_automatic() == ([], "")


def test_a_card_without_memory_is_left_alone_and_the_model_says_so(
    monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    cards_are(monkeypatch, FakeCards(free=10_000))
    engine = Engine()
    config = EngineConfig(str(expected.folder), precision="fp32", threads=1)
    try:
        info = engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        assert info.device == "cpu"
        assert info.device_note.startswith("Runs on the CPU: even without its experts the model needs")
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
    finally:
        engine.unload()


def test_a_broken_card_is_said_once_with_the_model(monkeypatch: pytest.MonkeyPatch, expected: Reference) -> None:
    cards_are(monkeypatch, FakeCards(broken="CUDA error: unknown error"))
    engine = Engine()
    config = EngineConfig(str(expected.folder), precision="fp32", threads=1)
    try:
        info = engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        assert info.device == "cpu"
        assert info.device_note.count("does not respond (CUDA error: unknown error)") == 1
    finally:
        engine.unload()


@pytest.mark.parametrize(
    "fault", [DriverError("The card's driver could not start rows: error 999"), RuntimeError(FAULT)]
)
def test_after_a_suspend_a_lost_context_is_a_lost_card(
    monkeypatch: pytest.MonkeyPatch, expected: Reference, fault: Exception
) -> None:
    card, engine = Card(monkeypatch), Engine()
    config = EngineConfig(str(expected.folder), device="xpu", precision="fp32", threads=1, cache_slots=5)
    try:
        engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        card.torch.is_lost = True  # the computer slept between two answers
        card.fails_at(engine, 0)
        monkeypatch.setattr("tests.engine.test_lost_card.FAULT", str(fault))
        assert tokens(ask(engine, [expected.second_prompt])[0]) == expected.second
        assert engine.info.device == "cpu"
    finally:
        engine.unload()


def test_a_clock_that_jumps_by_hours_leaves_times_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now() + slept[0])
    cards, log = FakeCards(), CopyLog()
    place = torch.device("cpu")
    stream = CardStream("cpu:0 h2d", cards.Stream(place, priority=0), cards, CardClock(cards, place), log)
    spans = []
    for jump in (0.0, 8 * 3600.0, 0.0, 90 * 86_400.0):
        slept[0] += jump
        begun_s = time.perf_counter()
        event = stream.submit(lambda: None)
        event.wait()
        assert begun_s - 1e-3 <= event.started_s <= event.ended_s <= time.perf_counter() + 1e-3
        spans.append(event.ended_s)
    assert spans == sorted(spans)
    stream.close()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    return cache_dir() / "cuda"


@pytest.mark.parametrize("failing", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_takes_no_kernel_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, folder: Path, failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_path: Path, _content: bytes) -> None:
        raise OSError(failing, "no")

    monkeypatch.setattr(compiled, "write_whole", refuse)
    compiler = CountingNvrtc()
    for _ in range(2):
        assert machine_code(INT4, AMPERE, "13000", compiler)
    assert compiler.made == 2
    assert kept() == []
    assert "could not be kept" in caplog.text


def test_two_programs_that_compile_at_once_both_get_whole_kernels(folder: Path) -> None:
    found: list[bytes] = []

    def compile_all() -> None:
        compiler = CountingNvrtc()
        found.extend(machine_code(product_kernel("Int4", rows), AMPERE, "13000", compiler) for rows in (1, 2, 4, 8))

    threads = [threading.Thread(target=compile_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 32
    assert len(kept()) == 4
    again = CountingNvrtc()
    for rows in (1, 2, 4, 8):
        assert machine_code(product_kernel("Int4", rows), AMPERE, "13000", again) in found
    assert again.made == 0


class Driver:
    """Refuses what another driver kept: whole, and not for it."""

    def __init__(self, refused: set[bytes]) -> None:
        self.refused = refused

    def cuModuleLoadData(self, _module: object, code: bytes) -> int:
        return 200 if code in self.refused else 0

    def cuModuleGetFunction(self, _function: object, _module: object, _name: bytes) -> int:
        return 0

    def cuGetErrorString(self, _error: int, words: object) -> int:
        words._obj.value = b"device kernel image is invalid"  # type: ignore[attr-defined]
        return 0


def test_a_kept_kernel_that_the_driver_refuses_is_compiled_again(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    compiler = CountingNvrtc()
    old = machine_code(INT4, AMPERE, "13000", compiler)
    monkeypatch.setattr(compiled, "find_nvrtc", lambda _capability: compiler)
    card = object.__new__(NvidiaCard)
    card.__dict__.update(SimpleNamespace(capability=AMPERE, driver="13000", _functions={}, _modules=[]).__dict__)
    refused = {old}
    monkeypatch.setattr(driver, "_driver", lambda: Driver(refused))
    card._load(INT4)
    assert compiler.made == 2
    assert machine_code(INT4, AMPERE, "13000", compiler) != old  # what is kept now is the new one
    refused.update(f"products.cu {number}".encode() for number in range(9))
    monkeypatch.setattr(Driver, "cuModuleLoadData", lambda *_: 200)
    with pytest.raises(DriverError, match=r"could not load products-Int4-1: device kernel image is invalid$"):
        card._load(INT4)
