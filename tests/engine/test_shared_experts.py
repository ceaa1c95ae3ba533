"""Experts of each layer shared among cards: the same sums and tokens as on one, each card its own part."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError
from engine.common.falls import FALLS
from engine.devices.device import Device
from engine.devices.emulated import open_emulated
from engine.devices.memory_budget import MemoryCategory
from engine.devices.opening import open_devices
from engine.experts.activations import Activations
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts
from engine.experts.latency import LatencyModel
from engine.experts.record_source import PartOfRecords, RecordSource
from engine.experts.shared import Between, Part, SharedExperts, Ways, parts_of
from engine.experts.vram_cache import VramCache
from engine.hardware.profiles import read_profile
from engine.kernels import choose_kernel
from engine.kernels.native.paged_attention import KvShape, KvType, PagedLayer
from engine.kernels.reference import reference_experts
from engine.planner.schedules import (
    CGOPIPE,
    CPU_EXPERTS,
    CPU_EXPERTS_ON_CARD,
    HYBRID,
    KLOTSKI,
    KLOTSKI_ON_CARD,
    S4,
    Schedule,
)
from engine.runtime.batch.pipeline.device_attention import heads_of
from engine.runtime.batch.pipeline.device_pipeline import DevicePipeline
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.loaded_model import LoadedModel
from tests.engine.hybrid_layers import EVEN, EXPERTS, KINDS, LAYERS, routing
from tests.engine.on_devices import PROMPT, answer, chatting, opened, reference, share_misses
from tests.engine.single_streams import answers_of, rows_of
from tests.engine.test_disk_backed import least_budget
from tests.engine.test_expert_kernels import layer_of
from tests.engine.tiny_families import tiny_checkpoint

_rows = partial(rows_of, [1, 40, 90, 12, 33, 7, 64], 5)


class Uses:
    """Which experts decode steps used, by the layers' numbers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        self.seen.append((layer, list(experts)))


@dataclass
class Shared:
    """Two layers whose experts are cut at these places, a part on each card."""

    devices: Sequence[Device]
    cuts: Sequence[int]
    kind: str = "gated"
    slots: int = 2
    mode: str = "mixed"
    layers: list[SharedExperts] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.module, self.uses = KINDS[self.kind], Uses()
        self.weights = [self.module.weights(torch.float32) for _ in range(LAYERS)]
        banks = [layer_of(self.module, weights) for weights in self.weights]
        layout = banks[0].layout
        latency = LatencyModel("test", layout.nbytes, *EVEN, layout.nbytes / 2e-4)
        self.caches, self.activations, parts = [], [], list[list[HybridExperts]]()
        ranges = [range(first, behind) for first, behind in pairwise([0, *self.cuts, EXPERTS])]
        self.ways = [
            Ways(Between(self.devices[0], other), Between(other, self.devices[0])) for other in self.devices[1:]
        ]

        def make(records: object) -> object:
            return choose_kernel(self.module, records, None)  # type: ignore[arg-type]

        for device, own in zip(self.devices, ranges, strict=True):
            cache = VramCache(
                device,
                layout,
                layers=LAYERS,
                experts=max(1, len(own)),
                slots=min(self.slots, LAYERS * len(own)),
                staging=2,
            )
            activations = Activations(device)
            self.caches.append(cache)
            self.activations.append(activations)
            mine = [
                HybridExperts(
                    cache,
                    index,
                    PartOfRecords(RecordSource(bank, make(bank)), own),
                    make,
                    latency,
                    activations,
                    self.mode,  # type: ignore[arg-type]
                )
                for index, bank in enumerate(banks)
            ]
            mine[0].after = mine[1]
            parts.append(mine)
        self.layers = [
            SharedExperts(
                [
                    Part(part[index], own, ways)
                    for part, own, ways in zip(parts, ranges, [None, *self.ways], strict=True)
                ],
                index,
                self.uses,
            )
            for index in range(LAYERS)
        ]

    def close(self) -> None:
        for each in (*self.ways, *self.activations, *self.caches):
            each.close()
        for device in self.devices:
            assert device.memory.use().used == 0

    def check(self, layer: int, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        result = self.layers[layer](*given)
        wanted = reference_experts(self.module, self.weights[layer], *given)
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)


@contextlib.contextmanager
def cards(count: int) -> Iterator[list[Device]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(open_emulated(read_profile("slow-link"), index)) for index in range(count)]


@pytest.fixture(scope="module")
def four() -> Iterator[list[Device]]:
    with cards(4) as devices:
        yield devices


@settings(max_examples=13, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.integers(1, EXPERTS - 1), min_size=3, max_size=3, unique=True),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(["mixed", "cpu", "fetch", "off"]),
    st.integers(0, 4),
    st.lists(st.sampled_from([1, 2, 7, 80]), min_size=1, max_size=4),
)
def test_sums_are_those_of_the_definition(
    four: list[Device], count: int, cuts: list[int], kind: str, mode: str, slots: int, steps: list[int]
) -> None:
    with closing(Shared(four[:count], sorted(cuts[: count - 1]), kind, slots, mode)) as shared:
        generator = torch.Generator().manual_seed(sum(steps))
        for tokens in steps:
            for layer in range(LAYERS):
                given = routing(generator, tokens, 3)
                shared.check(layer, given)
                if tokens <= 64:
                    used = sorted(set(given[1].flatten().tolist()) - {EXPERTS})
                    assert shared.uses.seen[-1] == (layer, used)


@pytest.mark.parametrize("tokens", [1, 80])
def test_a_card_that_fails_leaves_nothing_behind(
    four: list[Device], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Shared(four[:2], [3])
    generator = torch.Generator().manual_seed(1)
    try:
        shared.check(0, routing(generator, tokens, 3))
        with monkeypatch.context() as patch:

            def fails(*_: object, **__: object) -> object:
                raise EngineError("internal", "This card is gone.")  # type: ignore[arg-type]

            patch.setattr(shared.layers[0].parts[0].experts, "_serve_misses", fails)
            patch.setattr(shared.layers[0].parts[0].experts, "plan_hits", fails)
            patch.setattr(shared.layers[0].parts[0].experts, "compute_hits", fails)
            with pytest.raises(EngineError, match="gone"):
                shared.layers[0](*routing(generator, tokens, 3))
        for layer in range(LAYERS):
            shared.check(layer, routing(generator, tokens, 3))
    finally:
        shared.close()


def test_the_way_between_cards_is_the_one_that_was_measured_to_be_sooner() -> None:
    for name, is_direct in (("emulated:link25-8gbx2", True), ("emulated:link12-12gbx2", None)):
        devices = open_devices(name)
        way = Between(*devices)
        try:
            way.measure()
            assert way.is_direct == (way.direct_s <= way.hosted_s)
            if is_direct is not None:
                assert way.is_direct is is_direct
            tensor = torch.arange(3000, dtype=torch.float32)
            there, arrived = way.carry(tensor)
            arrived.wait()
            assert torch.equal(there, tensor)
            there, arrived = way.carry(torch.zeros(2), landed=torch.ones(2))
            arrived.wait()
            assert there.tolist() == [1, 1]
        finally:
            way.close()
            assert devices[1].memory.use().used == 0
            for device in devices:
                device.close()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("family", "devices", "config"),
    [
        ("mixtral", 2, {}),
        ("qwen3_moe", 4, {"cache_slots": 4}),
        ("qwen3_moe", 2, {"cache_slots": 2, "misses": "fetch"}),
        ("gpt_oss", 2, {"cache_slots": 4, "cache_ways": 1}),
        ("deepseek_v3", 3, {"misses": "cpu", "graphs": "on"}),
    ],
)
def test_tokens_are_those_of_transformers(
    family: str, devices: int, config: dict[str, object], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_misses(monkeypatch)
    expected = reference(family, checkpoints)
    with opened(expected.folder, devices, sharing="experts", **config) as model, chatting(model) as session:
        assert model.devices is not None
        kernels = [module.__dict__[BANK_LAYER][1] for module in model.model.modules() if BANK_LAYER in module.__dict__]
        shared = [kernel for kernel in kernels if isinstance(kernel, SharedExperts)]
        assert shared
        assert all(len(parts_of(kernel)) == devices for kernel in shared)
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert list(answer(session, expected.second_prompt).token_ids) == expected.second
        lookups = [sum(cache.counters.lookups for cache in caches) for caches in model.devices.experts.caches]
        assert all(lookups)


def _batched(
    loaded: LoadedModel,
    schedule: Schedule | None,
    on_text: Callable[[str, int], None] = lambda _text, _count: None,
    **more: Any,
) -> dict[int, tuple[int, ...]]:
    policy = BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=120, micro_batch_rows=2, schedule=schedule, **more)
    answers = answers_of(loaded, [replace(row, on_text=on_text) for row in _rows()], policy)
    assert {len(ids) for ids in answers.values()} == {5}
    return answers


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        *(("mixtral", each) for each in (CGOPIPE, S4, KLOTSKI, CPU_EXPERTS)),
        ("gpt_oss", KLOTSKI_ON_CARD),
        ("qwen3_moe", S4),
        ("deepseek_v3", CPU_EXPERTS_ON_CARD),
    ],
    ids=str,
)
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_batches_on_several_cards_give_the_same_answers(
    family: str, schedule: Schedule, devices: int, checkpoints: Path
) -> None:
    folder = tiny_checkpoint(family, checkpoints / f"batches of {family}", num_hidden_layers=3)
    with opened(folder, 0) as loaded:
        wanted = _batched(loaded, HYBRID)
    with opened(folder, devices, sharing="experts", cache_slots=3) as loaded:
        assert _batched(loaded, schedule) == wanted
        assert FALLS.note == ""
        used = [device.memory.use() for device in loaded.devices.devices]
        assert all(use.by_category[MemoryCategory.EXPERTS] for use in used)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("schedule", [CGOPIPE, KLOTSKI, CPU_EXPERTS], ids=str)
def test_experts_on_disk_are_shared_too(schedule: Schedule, checkpoints: Path) -> None:
    folder = tiny_checkpoint("mixtral", checkpoints / "batches of mixtral", num_hidden_layers=3)
    with opened(folder, 0) as loaded:
        wanted = _batched(loaded, HYBRID)
    least = least_budget(folder, "fp32")
    with opened(folder, 2, sharing="experts", cache_slots=3, ram_bytes=least) as loaded:
        assert loaded.disk_backed is not None
        assert _batched(loaded, schedule) == wanted
        assert FALLS.note == ""
        with chatting(loaded) as session:
            assert list(answer(session, _rows()[2].ids, 5).token_ids) == list(wanted[2])


def _most_held(monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, category: MemoryCategory) -> list[int]:
    """Bytes of each card, at most, in any sweep from now on."""
    cards, sweep = loaded.devices.devices, DevicePipeline.sweep
    most = [0] * len(cards)

    def swept(pipeline: DevicePipeline, batches: Sequence[Any], schedule: Schedule) -> Iterator[None]:
        for step in sweep(pipeline, batches, schedule):
            for number, card in enumerate(cards):
                most[number] = max(most[number], card.memory.use().by_category.get(category, 0))
            yield step

    monkeypatch.setattr(DevicePipeline, "sweep", swept)
    return most


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("family", "schedule", "policy"),
    [
        ("mixtral", S4, {"cached": 0.5, "resident": 0.5}),
        ("mixtral", CPU_EXPERTS_ON_CARD, {"resident": 0.25, "cached": 1.0}),
        ("gpt_oss", KLOTSKI_ON_CARD, {"cached": 1.0}),
        ("qwen3_moe", S4, {"cached": 0.4, "kv_type": KvType.INT8}),
        ("qwen3_moe", None, {"cached": 0.5, "resident": 0.5, "planned": S4}),
        ("deepseek_v3", S4, {"cached": 0.5}),
    ],
    ids=["halves", "experts on the host", "klotski", "int8", "planned", "latents"],
)
@pytest.mark.parametrize("devices", [2, 3])
def test_what_is_planned_to_stay_is_shared_by_the_cards(
    family: str,
    schedule: Schedule | None,
    policy: dict[str, Any],
    devices: int,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_checkpoint(family, checkpoints / f"batches of {family}", num_hidden_layers=3)
    plain = {name: policy[name] for name in policy if name == "kv_type"}
    with opened(folder, 0) as loaded:
        wanted = _batched(loaded, HYBRID, **plain)
    with opened(folder, devices, sharing="experts", cache_slots=3) as loaded:
        held = _most_held(monkeypatch, loaded, MemoryCategory.KV)
        assert _batched(loaded, schedule, row_tokens=96, **policy) == wanted
        assert FALLS.note == ""
        heads = heads_of(loaded.model.config.num_key_value_heads, devices) if family != "deepseek_v3" else [range(1)]
        assert [bool(nbytes) for nbytes in held][: len(heads)] == [True] * len(heads)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(("after", "number", "left"), [(1, 0, 2**17), (4, 1, 2**17), (4, 1, 2**18), (9, 1, 2**17)])
def test_one_of_the_cards_that_fills_up_in_mid_job_changes_no_answer(
    after: int, number: int, left: int, checkpoints: Path
) -> None:
    folder = tiny_checkpoint("mixtral", checkpoints / "batches of mixtral", num_hidden_layers=3)
    with opened(folder, 0) as loaded:
        wanted = _batched(loaded, HYBRID)
    with opened(folder, 2, sharing="experts", cache_slots=3) as loaded:
        card, written = loaded.devices.devices[number], [0]
        total = card.memory.total

        def wrote(_text: str, _count: int) -> None:
            written[0] += 1
            if written[0] == after:
                use = card.memory.use().by_category
                card.memory.limit(use[MemoryCategory.WEIGHTS] + use[MemoryCategory.ACTIVATIONS] + left)

        found = _batched(loaded, S4, wrote, cached=0.5, resident=0.25, row_tokens=96)
        card.memory.limit(total)
    assert found == wanted
    assert "gives way to keys and values in RAM: others need" in FALLS.note


def test_pages_that_one_of_the_cards_has_no_room_for_stay_in_ram(checkpoints: Path) -> None:
    folder = tiny_checkpoint("mixtral", checkpoints / "batches of mixtral", num_hidden_layers=3)
    with opened(folder, 0) as loaded:
        wanted = _batched(loaded, HYBRID)
    with opened(folder, 2, sharing="experts", cache_slots=3) as loaded:
        second = loaded.devices.devices[1].memory
        total = second.total
        second.limit(second.use().used + 2**16)
        assert _batched(loaded, S4, cached=1.0, row_tokens=2**12) == wanted
        second.limit(total)
    assert "gives way to keys and values in RAM: the graphics card has no room" in FALLS.note


def test_batches_of_cards_that_share_layers_say_what_they_do_without(checkpoints: Path) -> None:
    folder = tiny_checkpoint("mixtral", checkpoints / "batches of mixtral", num_hidden_layers=3)
    with opened(folder, 2, sharing="layers", cache_slots=3) as loaded:
        _batched(loaded, CGOPIPE)
    assert "pipeline of batches gives way" in FALLS.note
    assert "--sharing experts" in FALLS.note


@given(st.integers(1, 16), st.integers(1, 5), st.integers(1, 4))
def test_heads_of_pages_are_cut_without_a_copy(kv_heads: int, cards: int, group: int) -> None:
    layer = PagedLayer(KvShape(kv_heads * group, kv_heads, 8, 6), KvType.FP32, 3)
    parts = [layer.of_heads(own) for own in heads_of(kv_heads, cards)]
    assert len(parts) == min(kv_heads, cards)
    assert sum(part.shape.kv_heads for part in parts) == kv_heads
    assert sum(part.shape.heads for part in parts) == kv_heads * group
    for number, part in enumerate(parts):
        part.keys.fill_(number)
        part.values.fill_(number)
    told = [number for number, part in enumerate(parts) for _ in range(part.shape.kv_heads)]
    assert layer.keys[0, :, 0, 0].tolist() == layer.values[2, :, 1, 5].tolist() == told
