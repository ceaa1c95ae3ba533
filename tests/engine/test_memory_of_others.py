"""A second program takes a card's memory and leaves it: the budget follows, answers stay, and it is said once."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.config import EngineConfig
from engine.common.model_info import ModelInfo
from engine.devices import cuda, emulated, memory_budget
from engine.devices.card import HEADROOM_BYTES, CardKind, hard_fraction, open_card, reserve_bytes
from engine.devices.host_memory import HostMemory, allocate_host
from engine.devices.memory_budget import CALM_LOOKS, LOOK_EVERY_S, MemoryBudget, MemoryCategory, MemoryWatch, Room
from engine.hardware.dxgi import ProcessMemory
from engine.runtime.engine import Engine
from tests.engine.on_devices import MIB, PROMPT, Reference, reference
from tests.engine.test_lost_card import ask, tokens
from tests.fake_cards import GIB, FakeCards

PLANNED = 20 * GIB


class Card:
    """A watched budget of 20 GiB, a reserve of one, and whatever room is said to be there."""

    def __init__(self) -> None:
        self.room = Room(GIB)
        self.budget = MemoryBudget("cuda:0", PLANNED, allocate_host)
        self.enforced: list[int] = []
        self.watch = MemoryWatch(self.budget, lambda: self.room, GIB, self.enforced.append)
        self.experts = self.budget.reserve(12 * GIB, MemoryCategory.EXPERTS)
        self.now_s = 0.0

    def look(self, free: int, spilled: int = 0, times: int = 1) -> int:
        """The budget after so many looks that found this."""
        self.room = Room(free, spilled)
        for _ in range(times):
            self.now_s += LOOK_EVERY_S
            self.watch.look(self.now_s)
        return self.budget.total


def test_a_budget_falls_at_once_and_rises_calmly() -> None:
    card = Card()
    assert card.look(9 * GIB) == PLANNED
    assert card.look(GIB // 2) == PLANNED  # the reserve is there to be used
    assert not card.watch.note
    assert card.look(0) == 12 * GIB - GIB // 2
    assert card.watch.note.startswith("cuda:0 has less memory left than was planned with, as other programs")
    card.experts.resize(11 * GIB)
    assert card.look(3 * GIB, times=CALM_LOOKS - 1) == 12 * GIB - GIB // 2
    assert card.look(GIB) == 12 * GIB - GIB // 2  # it was not free for good
    assert card.look(3 * GIB, times=CALM_LOOKS) == 13 * GIB
    assert card.look(30 * GIB, times=CALM_LOOKS) == PLANNED
    assert not card.watch.note
    assert card.enforced == [12 * GIB - GIB // 2, 13 * GIB, PLANNED]


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 12), st.integers(0, 20)), max_size=40))
def test_any_sequence_keeps_the_budget_between_nothing_and_the_plan(seen: list[tuple[int, int, int]]) -> None:
    card = Card()
    rises = 0
    for quarters, spilled, wanted in seen:
        before, used = card.budget.total, card.budget.use().used
        free = quarters * GIB // 4
        total = card.look(free, max(0, spilled - 8) * GIB)
        assert 0 <= total <= PLANNED
        assert bool(card.watch.note) == (total < PLANNED)
        if total > before:
            assert total <= used + free - GIB or total == before
            rises += 1
        if free < GIB // 4:
            assert total <= max(0, used + free - GIB // 2)
        wished = min(wanted * GIB, card.budget.total)
        card.experts.resize(wished)
    assert rises <= len(seen) // CALM_LOOKS


def kind(cards: FakeCards, **options: object) -> CardKind:
    return CardKind("cpu", cards, lambda _place: HostMemory(), lambda _index: "fake", **options)  # type: ignore[arg-type]


def test_torch_may_allocate_no_more_than_is_planned_with() -> None:
    cards = FakeCards(free=5 * GIB, total=5 * GIB)
    with open_card(kind(cards)) as device:
        cards.emptied = 0
        assert device.memory.total == 5 * GIB - HEADROOM_BYTES
        assert cards.fraction == hard_fraction(device.memory.total, cards.total)
        held = device.memory.reserve(3 * GIB, MemoryCategory.EXPERTS)
        cards.free = HEADROOM_BYTES // 8
        device.watch.look(0.0)
        assert device.memory.excess == HEADROOM_BYTES // 2 - HEADROOM_BYTES // 8
        assert cards.fraction == hard_fraction(device.memory.total, cards.total)
        assert cards.emptied == 1  # what torch kept for later is of use to others now
        held.release()
    with open_card(kind(cards), vram_bytes=0) as device:
        assert device.memory.total == 0


@pytest.mark.parametrize(
    ("shows_desktop", "used", "expected"),
    [
        (False, GIB, 3 * GIB // 4),
        (None, 0, GIB),
        (True, 0, GIB),
        (True, GIB, GIB + GIB // 4),
        (True, 9 * GIB, 3 * GIB // 2),
    ],
)
def test_a_card_with_a_display_leaves_the_desktop_room_to_grow(
    shows_desktop: bool | None, used: int, expected: int
) -> None:
    assert reserve_bytes(24 * GIB, 24 * GIB - used, shows_desktop=shows_desktop) == expected
    cards = FakeCards(free=24 * GIB - used, total=24 * GIB)
    with open_card(kind(cards, shows_desktop=lambda _index: shows_desktop)) as device:
        assert device.memory.total == cards.free - expected


def test_memory_that_windows_moved_to_ram_is_noticed_and_pinned_memory_is_not() -> None:
    cards = FakeCards(free=5 * GIB, total=5 * GIB)
    in_ram = [GIB]
    memory = HostMemory()
    made = CardKind("cpu", cards, lambda _place: memory, lambda _index: "fake", in_ram=lambda _index: lambda: in_ram[0])
    with open_card(made) as device:
        cards.emptied = 0
        held = device.memory.reserve(3 * GIB, MemoryCategory.EXPERTS)
        assert device.watch is not None
        memory.pinned_bytes = 2 * GIB
        in_ram[0] = 3 * GIB + GIB // 8  # what there was at the start, and what is pinned
        device.watch.look(0.0)
        assert device.memory.excess == 0
        in_ram[0] += GIB
        device.watch.look(10.0)
        assert device.memory.total < 3 * GIB
        assert "to RAM" in device.watch.note
        assert cards.emptied == 1
        held.release()


def test_windows_says_how_much_it_moved_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter:
        said: ProcessMemory | None = ProcessMemory(budget=10, used=14, in_ram=3)
        shows_desktop = True
        closed = 0

        def memory(self) -> ProcessMemory | None:
            return self.said

        def close(self) -> None:
            self.closed += 1

    adapter = Adapter()
    monkeypatch.setattr(cuda, "_adapter", lambda _index: adapter)
    count = cuda.counts_in_ram(0)
    assert count() == 3 + 4
    adapter.said = None
    assert count() is None
    assert cuda.shows_desktop(0) is True
    assert adapter.closed == 1
    monkeypatch.setattr(cuda, "_adapter", lambda _index: None)
    assert cuda.counts_in_ram(0) is None


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield reference("qwen3_moe", tmp_path_factory.mktemp("others"))
    reference.cache_clear()


@pytest.mark.parametrize("misses", ["mixed", "fetch"])
def test_answers_stay_the_same_while_another_program_takes_the_memory_and_leaves(
    monkeypatch: pytest.MonkeyPatch, expected: Reference, misses: str
) -> None:
    monkeypatch.setattr(memory_budget, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(emulated, "OTHERS", {})
    engine, said = Engine(), list[ModelInfo]()
    engine.on_moved = said.append
    config = EngineConfig(
        str(expected.folder), device="emulated:slow-link", precision="fp32", threads=1, vram_bytes=8 * MIB,
        cache_slots=16, misses=misses,
    )  # fmt: skip
    try:
        before = engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        devices = engine._loaded.devices
        device = devices.devices[0]
        slots = devices.experts.slots
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        assert said == []
        watch = device.watch
        total = watch._room().free + device.memory.use().used
        emulated.OTHERS[device.name] = total - device.memory.use().used + device.memory.use().by_category[
            MemoryCategory.EXPERTS
        ] // 2  # fmt: skip
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        assert 0 < devices.experts.slots < slots
        assert device.memory.excess == 0
        assert ["moved memory" in info.device_note for info in said] == [True]
        del emulated.OTHERS[device.name]
        for _ in range(2):
            assert tokens(ask(engine, [PROMPT] * 2)[0]) == expected.first
        assert devices.experts.slots == slots
        # Beside what was said before there may be what a batch that began meanwhile does without.
        assert [info.device_note.endswith(before.device_note) for info in said[1:]] == [True]
        assert tokens(ask(engine, [expected.second_prompt])[0]) == expected.second
    finally:
        engine.unload()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 30))])
def test_programs_that_come_and_go_at_any_moment(
    monkeypatch: pytest.MonkeyPatch, expected: Reference, seed: int
) -> None:
    monkeypatch.setattr(memory_budget, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(emulated, "OTHERS", {})
    dice, engine, said = random.Random(seed), Engine(), list[ModelInfo]()
    engine.on_moved = said.append
    cards = dice.choice([1, 2])
    config = EngineConfig(
        str(expected.folder), device=f"emulated:slow-linkx{cards}", precision="fp32", threads=1, vram_bytes=8 * MIB,
        cache_slots=16, misses=dice.choice(["mixed", "fetch", "cpu"]),
    )  # fmt: skip

    def come_or_go(_text: str, _count: int) -> None:
        name = f"emulated:slow-link#{dice.randrange(cards)}"
        emulated.OTHERS.pop(name, None)
        device = next((each for each in devices.devices if each.name == name), None)
        if device is not None and device.watch is not None and dice.random() < 0.6:
            experts = device.memory.use().by_category[MemoryCategory.EXPERTS]
            emulated.OTHERS[name] = device.watch._room().free + int(experts * dice.random())

    try:
        engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        assert engine._loaded.devices is not None
        devices = engine._loaded.devices
        slots = devices.experts.slots
        for _ in range(4):
            count = dice.choice([1, 1, 3])
            for outcome in ask(engine, [PROMPT] * count, come_or_go):
                assert tokens(outcome) == expected.first
        emulated.OTHERS.clear()
        if engine.info is not None and engine.info.device != "cpu":
            for _ in range(40):  # as often as a program that came again and again is waited for
                ask(engine, [PROMPT])
                if devices.experts.slots == slots:
                    break
            assert devices.experts.slots == slots
        assert tokens(ask(engine, [expected.second_prompt])[0]) == expected.second
    finally:
        engine.unload()


@pytest.mark.parametrize("count", [1, 2])
def test_where_a_program_takes_everything_answers_go_on_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, expected: Reference, count: int
) -> None:
    monkeypatch.setattr(memory_budget, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(emulated, "OTHERS", {})
    engine, said = Engine(), list[ModelInfo]()
    engine.on_moved = said.append
    config = EngineConfig(
        str(expected.folder), device="emulated:slow-link", precision="fp32", threads=1, vram_bytes=8 * MIB
    )
    try:
        engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        emulated.OTHERS["emulated:slow-link#0"] = 2**50
        for prompt, answer in ((PROMPT, expected.first), (expected.second_prompt, expected.second)):
            assert [tokens(outcome) for outcome in ask(engine, [prompt] * count)] == [answer] * count
        assert said[-1].device == "cpu"
        assert "Other programs use the graphics card's memory, so the model runs on the CPU" in said[-1].device_note
        assert len(said) <= 2  # that experts had to go, and that it did not help
        if count == 1:  # it returns once there is room for half of its experts
            monkeypatch.setattr("engine.runtime.engine._FIRST_S", 0.0)
            engine._failback.left(0.0, is_lost=False)
            emulated.OTHERS["emulated:slow-link#0"] = 2**40
            assert tokens(ask(engine, [PROMPT])[0]) == expected.first
            assert engine.info.device == "cpu"
            emulated.OTHERS.clear()
            engine._failback.left(0.0, is_lost=False)
            assert tokens(ask(engine, [expected.second_prompt])[0]) == expected.second
            assert said[-1].device == "emulated:slow-link#0"
            assert "Other programs" not in said[-1].device_note
    finally:
        engine.unload()
