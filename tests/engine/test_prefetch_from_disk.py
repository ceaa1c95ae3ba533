"""The prefetcher over a real RAM tier and a file of records: what it brings is used, and every expert is itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.experts.prediction.prefetcher import make_prefetcher
from engine.experts.prediction.target import over_disk
from engine.experts.ram_tier import RamTier
from tests.engine.made_up_records import LARGE, contents_of, disk_of, random_records, write_records
from tests.engine.ram_tier_parts import arrived
from tests.engine.slots_in_time import PlantedRoutes

LAYERS, EXPERTS, WIDTH = 5, 12, 2


@pytest.mark.parametrize("choice", ["auto", "previous", "correlation"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_experts_are_read_ahead(choice: str, share: float, tmp_path: Path) -> None:
    contents = contents_of([(EXPERTS, LARGE)] * LAYERS)
    write_records(tmp_path / "a.gguf", contents)
    records = random_records(contents)
    with (
        disk_of(tmp_path / "a.gguf", contents, readers=2) as disk,
        RamTier(disk, int(contents.nbytes * share), at_least=2 * WIDTH) as tier,
    ):
        prefetcher = make_prefetcher(
            tier,
            lambda: over_disk(disk, LARGE.nbytes),
            layers=LAYERS,
            experts=EXPERTS,
            per_token=WIDTH,
            choice=choice,
        )
        assert prefetcher is not None
        routes = PlantedRoutes(LAYERS, EXPERTS, WIDTH, follows=0.95)
        for _ in range(120):
            for layer, experts in enumerate(routes.step()):
                held = tier.acquire(layer, experts)
                arrived(held)
                prefetcher.observe(layer, experts)
                for expert in held.rows:
                    assert torch.equal(held.record(expert), records[layer][expert])
                held.release()
        report, counters = prefetcher.report(), tier.counters
        prefetcher.close()
    assert counters.prefetched == report.prefetched
    assert report.used + report.wasted <= report.prefetched
    if choice == "correlation":
        assert report.used > report.wasted
        assert counters.prefetches_used > 0
