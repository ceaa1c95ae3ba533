"""The prefetcher over a real RAM tier and a file of records: what it brings is used, and every expert is itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.experts.latency import LatencyModel
from engine.experts.prediction.prefetcher import make_prefetcher
from engine.experts.prediction.target import over_disk, over_link
from engine.experts.ram_tier import RamTier
from engine.experts.vram_cache import VramCounters
from tests.engine.made_up_records import LARGE, SMALL, contents_of, disk_of, random_records, write_records
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


def test_layers_of_two_layouts_do_not_take_each_others_slots(tmp_path: Path) -> None:
    contents = contents_of([(EXPERTS, SMALL), (EXPERTS, LARGE), (EXPERTS, SMALL), (EXPERTS, LARGE)])
    write_records(tmp_path / "a.gguf", contents)
    with (
        disk_of(tmp_path / "a.gguf", contents, readers=2) as disk,
        RamTier(disk, contents.nbytes // 2, at_least=WIDTH) as tier,
    ):
        prefetcher = make_prefetcher(
            tier,
            lambda: over_disk(disk, LARGE.nbytes),
            layers=4,
            experts=EXPERTS,
            per_token=WIDTH,
            choice="correlation",
            pools=[0, 1, 0, 1],
        )
        assert prefetcher is not None
        routes = PlantedRoutes(4, EXPERTS, WIDTH, follows=0.95)
        for _ in range(60):
            for layer, experts in enumerate(routes.step()):
                held = tier.acquire(layer, experts)
                arrived(held)
                prefetcher.observe(layer, experts)
                held.release()
        assert prefetcher.report().used > 0


def test_times_over_a_link_follow_how_misses_are_met() -> None:
    latency = LatencyModel("bf16", 10_000_000, 1e-3, 1e-4, 1e-4, 8, 1e-5, 1e-5, 5e9)
    on_cpu = over_link(latency, [VramCounters(on_cpu=10)])
    assert on_cpu.miss_s == pytest.approx(latency.cpu_s(1))
    assert on_cpu.urgent_share == 0
    fetched = over_link(latency, [VramCounters(fetched=10)])
    assert fetched.miss_s == pytest.approx(latency.transfer_s + latency.gpu_s(1))
    both = over_link(latency, [VramCounters(on_cpu=5, fetched=5)])
    assert both.miss_s < on_cpu.miss_s
    assert both.hit_s == latency.gpu_s(1)
    nothing_yet = over_link(latency, [VramCounters()])
    assert nothing_yet.urgent_share == float(not latency.prefers_cpu(1))
