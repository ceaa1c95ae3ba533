"""The RAM tier: whatever happens in whatever order, an expert that is held is there, and it is that expert."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError
from engine.experts.ram_tier import RamPressure, RamTier
from engine.experts.record import CAN_GIVE_BACK, RecordMemory
from tests.engine.made_up_records import LARGE, disk_of, flip, place_of, write_records
from tests.engine.ram_tier_parts import BUDGET, CONTENTS, POLICIES, RECORDS, HeldDisk, arrived, make_tier


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_many_threads_on_a_real_disk(policy: str, tmp_path: Path) -> None:
    """Every record that is there is the right one, damaged ones are told, and nobody waits for ever."""
    path = tmp_path / "a.gguf"
    write_records(path, CONTENTS)
    flip(path, place_of(CONTENTS, 2, 4) + 99)
    wrong: list[str] = []
    damaged: list[tuple[int, int]] = []

    def use(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            layer = dice.randrange(3)
            left = dice.sample(range(CONTENTS.tensors[layer].num_experts), dice.randint(1, 3))
            while left:
                acquired = tier.acquire(layer, left)
                try:
                    arrived(acquired)
                    wrong.extend(
                        f"{layer} {expert}"
                        for expert in acquired.rows
                        if not torch.equal(acquired.record(expert), RECORDS[layer][expert])
                    )
                except EngineError as error:
                    damaged.append((layer, 4 if "Expert 4" in error.message else -1))
                left = acquired.left
                acquired.release()
                if not acquired.arriving:
                    time.sleep(0)
            if dice.random() < 0.5:
                ahead = (layer + 1) % 3
                dead = [(layer, expert) for expert in range(3)]
                tier.prefetch(ahead, dice.sample(range(3), 2), dead)
            if dice.random() < 0.1:
                tier.resize(dice.randrange(2 * BUDGET))

    with disk_of(path, CONTENTS, readers=3) as disk, make_tier(disk, BUDGET, policy) as tier:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tier.close()
        counters = tier.counters
        assert counters.kept_bytes + counters.post_fetched_bytes + counters.prefetched_bytes == disk.bytes_read
    assert wrong == []
    assert set(damaged) <= {(2, 4)}
    assert counters.failures > 0
    assert counters.hits
    assert counters.misses
    assert counters.evictions


# --- how much RAM it has


def test_memory_that_is_refused_is_asked_for_again_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = list[int]()

    def allocate(count: int, nbytes: int) -> Any:
        if count > 4:
            refused.append(count)
            raise MemoryError("no")
        return RecordMemory(count, nbytes)

    monkeypatch.setattr("engine.experts.ram_tier.RecordMemory", allocate)
    tier = make_tier(HeldDisk(), CONTENTS.nbytes)
    assert refused
    assert tier.note
    assert 0 < tier.nbytes <= CONTENTS.nbytes // 2
    tier.close()


def full_tier(disk: HeldDisk, **options: Any) -> RamTier:
    """Every expert is in RAM."""
    tier = RamTier(disk, CONTENTS.nbytes, policy="lru", **options)  # type: ignore[arg-type]
    for layer in range(3):
        acquired = tier.acquire(layer, range(CONTENTS.tensors[layer].num_experts))
        for read in list(disk.waiting):
            disk.end(read)
        acquired.release()
    return tier


@pytest.mark.skipif(not CAN_GIVE_BACK, reason="memory stays with us here")
def test_another_program_takes_the_ram_and_gives_it_back() -> None:
    free, now_s = 10**9, 0.0
    whole = CONTENTS.nbytes
    pressure = RamPressure(whole, 2 * LARGE.nbytes, available=lambda: free, clock=lambda: now_s)
    disk = HeldDisk()
    tier = full_tier(disk, pressure=pressure)
    assert not tier.note
    held = tier.acquire(1, [0])

    def step() -> None:
        nonlocal now_s
        now_s += 1.0
        tier.acquire(0, [0]).release()
        for read in list(disk.waiting):
            disk.end(read)

    step()
    assert tier.nbytes == whole
    free = 0
    step()
    smaller = tier.nbytes
    assert smaller <= whole - 2 * LARGE.nbytes
    assert "Other programs need RAM" in str(tier.note)
    assert held.rows.items() <= tier.resident(1).items()
    free = 10**9
    step()
    assert tier.nbytes == smaller  # whoever took it may want more
    now_s += 20
    for _ in range(3):
        step()
    assert tier.nbytes == whole
    assert not tier.note
    held.release()
    tier.close()


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_what_is_left_to_others_ends_above_the_reserve(data: st.DataObject) -> None:
    """Whatever others take, the cache makes room for it as far as it has any."""
    mib = 2**20
    total, others, now_s = 10_000, 1000, 0.0
    budget, reserve = data.draw(st.integers(100, 8000)), data.draw(st.integers(10, 500))
    filled = 0

    def available() -> int:
        return (total - others - filled) * mib

    pressure = RamPressure(budget * mib, reserve * mib, available=available, clock=lambda: now_s)
    allowed = budget
    for _ in range(data.draw(st.integers(1, 30))):
        others = data.draw(st.integers(0, 9000))
        filled = data.draw(st.integers(0, allowed))
        now_s += data.draw(st.floats(0.3, 30.0))
        advised = pressure.advise(allowed * mib, filled * mib)
        if advised is None:
            assert available() >= reserve * mib or now_s == 0
            continue
        assert 0 <= advised <= budget * mib
        allowed = advised // mib
        if allowed < filled:
            assert available() < reserve * mib
            filled = allowed
            assert available() >= reserve * mib or allowed == 0
        assert pressure.advise(allowed * mib, filled * mib) is None  # asked again at once
