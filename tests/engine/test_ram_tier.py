"""The RAM tier: whatever happens in whatever order, an expert that is held is there, and it is that expert."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.common.errors import EngineError
from engine.experts.record_source import Held
from tests.engine.made_up_records import disk_of, flip, place_of, write_records
from tests.engine.ram_tier_parts import BUDGET, CONTENTS, POLICIES, RECORDS, HeldDisk, arrived, make_tier


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


def test_a_prefetch_that_is_wanted_is_hurried_and_counted() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    assert tier.prefetch(0, [1, 2, 2]) == 2
    acquired = tier.acquire(0, [1])
    assert disk.hurried == disk.waiting[:1]
    assert not acquired.arriving[1].done()
    counters = tier.counters
    assert (counters.late, counters.hits, counters.misses, counters.prefetches_used) == (1, 0, 0, 1)
    for read in list(disk.waiting):
        disk.end(read)
    arrived(acquired)
    acquired.release()
    tier.acquire(0, [3, 4, 5])  # all slots are taken now: the next two take the places of the first two
    tier.acquire(2, [0, 1])
    assert tier.counters.prefetches_wasted == 1
    for read in list(disk.waiting):
        disk.end(read)
    tier.close()


def test_it_waits_for_prefetches_that_have_all_slots() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    tier.prefetch(1, [0, 1])
    given: list[Held] = []
    thread = threading.Thread(target=lambda: given.append(tier.acquire(1, [2])))
    thread.start()
    disk.end(disk.waiting[0])
    thread.join()
    assert list(given[0].rows) == [2]
    for read in list(disk.waiting):
        disk.end(read)
    tier.close()


def test_a_closed_disk_fails_what_is_asked_for_and_nothing_hangs() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    disk.closed = True
    acquired = tier.acquire(0, [1])
    with pytest.raises(EngineError, match="closed"):
        arrived(acquired)
    assert tier.prefetch(0, [2]) == 0
    acquired.release()
    assert tier.counters.failures == 2
    tier.close()
    tier.close()
    with pytest.raises(EngineError, match="closed"):
        cast(Any, tier).acquire(0, [1])
