"""A model whose experts do not fit into RAM says what it says when they do."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.gguf.file import read_converted
from engine.checkpoint.library import converted_of, converted_path
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.paths import data_dir
from engine.experts.dispatch import BANK_LAYER
from engine.experts.executor import ExpertExecutor
from engine.experts.prediction.prefetcher import make_prefetcher
from engine.experts.prediction.target import over_disk
from engine.experts.ram_tier import RamTier
from engine.planner import placement
from engine.planner.placement import Budgets, NotEnoughRamError, Placement, Sizes
from engine.runtime.load import weights as from_disk
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from tests.combinations import some
from tests.engine.loaded_tiny import open_model, opened_model
from tests.engine.made_up_records import (
    LARGE,
    SMALL,
    contents_of,
    disk_of,
    flip,
    place_of,
    random_records,
    write_records,
)
from tests.engine.ram_tier_parts import arrived
from tests.engine.slots_in_time import PlantedRoutes
from tests.engine.test_family_parity import PROMPT, decoded_logits, greedy, logits
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused

FAMILIES = (
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "nemotron_h", "dbrx", "llama4", "jetmoe"),
    *("longcat_flash", "granitemoe", "ernie4_5_vl_moe"),
)


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return tiny_checkpoint("mixtral", tmp_path / "mixtral", num_hidden_layers=3)


@pytest.fixture
def turned(tmp_path: Path) -> Path:
    """A model whose experts have to be rearranged."""
    return tiny_checkpoint("gpt_oss", tmp_path / "gpt_oss")


@contextmanager
def on_disk(
    monkeypatch: pytest.MonkeyPatch, folder: Path, precision: Any = "bf16", *, slots: int = 0, policy: str = "auto"
) -> Iterator[LoadedModel]:
    """Loaded with so many slots per layout; with as few as will do if 0."""
    budget = least_budget(folder, precision)
    resolve = placement.resolve

    def with_slots(config: EngineConfig, machine: Budgets, sizes: Sizes) -> Placement:
        found = resolve(config, machine, sizes)
        if not slots:
            return found
        on_disk = [each for each in sizes.weights[0].experts if each.is_on_demand]
        at_least = min(slots, max(each.count for each in on_disk))
        nbytes = sum(slots * record for _, record in {(each.layout, each.record) for each in on_disk})
        return replace(found, ram=replace(found.ram, slots=nbytes, at_least=at_least))

    with monkeypatch.context() as patch:
        patch.setattr(placement, "resolve", with_slots)
        patch.setattr(from_disk, "_POLICY", policy)
        with opened_model(folder, precision, ram_bytes=budget) as model:
            assert model.disk_backed is not None
            yield model


def least_budget(folder: Path, precision: str = "bf16") -> int:
    """The RAM budget below which the model is refused."""
    with pytest.raises(NotEnoughRamError) as caught, opened_model(folder, precision, ram_bytes=1):
        pass
    assert caught.value.code is ErrorCode.NOT_ENOUGH_MEMORY
    assert "disk" in caught.value.message
    return caught.value.needed


def said(model: LoadedModel) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
    with torch.no_grad():
        return logits(model.model), decoded_logits(model.model), greedy(model.model, 8)[0].tolist()


def assert_says(model: LoadedModel, expected: tuple[torch.Tensor, list[torch.Tensor], list[int]], atol: float) -> None:
    prompt, steps, tokens = said(model)
    torch.testing.assert_close(prompt, expected[0], rtol=0, atol=atol)
    for step, other in zip(steps, expected[1], strict=True):
        torch.testing.assert_close(step, other, rtol=0, atol=atol)
    assert tokens == expected[2]


def tiers(model: LoadedModel) -> list[ExpertExecutor]:
    bound = [getattr(module, BANK_LAYER, None) for module in model.model.modules()]
    return [pair[1] for pair in bound if pair is not None and isinstance(pair[1], ExpertExecutor)]


# --- the same answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_quantised_experts_come_from_disk_as_they_are(
    family: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(family, tmp_path / family)
    with opened_model(folder, precision) as in_ram:
        expected = said(in_ram)[:2]
    with on_disk(monkeypatch, folder, precision, slots=5) as model:
        prompt, steps, _ = said(model)
        # Tokens for which a router is undecided may take another expert after a rounding: one of them is no fault.
        off = (prompt - expected[0]).abs().amax(-1).flatten().sort().values
        assert off[-2] < 2e-2
        for step, other in zip(steps, expected[1], strict=True):
            torch.testing.assert_close(step, other, rtol=0, atol=2e-2)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("family", some(FAMILIES, ["dbrx"], every=4))
def test_logits_and_tokens_equal_those_from_ram(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(family, tmp_path / family)
    with opened_model(folder, "fp32") as in_ram:
        assert in_ram.disk_backed is None
        expected, parameters, experts = said(in_ram), in_ram.info.parameters, in_ram.info.experts
        all_bytes = in_ram.info.experts_bytes
    for slots in ((0, 5), (1, 100))[FAMILIES.index(family) % 2]:
        with on_disk(monkeypatch, folder, "fp32", slots=slots) as model:
            assert_says(model, expected, atol=1e-5)
            assert (model.info.parameters, model.info.experts) == (parameters, experts)
            assert model.info.experts_bytes == model.disk_backed.nbytes + model.bank.nbytes
            assert model.info.experts_bytes < all_bytes or slots == 100
            assert "read from disk" in model.info.device_note
            assert len(tiers(model)) == len(model.disk_backed.disk.table.layers)
            assert model.disk_backed.counters.misses


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("policy", some(["auto", "lfru", "lru"], every=4))
def test_what_is_in_ram_does_not_change_an_answer(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    answers = []
    for slots in (1, 3, 16):
        with on_disk(monkeypatch, folder, slots=slots, policy=policy) as model:
            answers += [said(model), said(model)]  # the second time over what the first has left in RAM
    for prompt, steps, tokens in answers[1:]:
        assert torch.equal(prompt, answers[0][0])
        assert all(torch.equal(step, other) for step, other in zip(steps, answers[0][1], strict=True))
        assert tokens == answers[0][2]


@pytest.mark.parametrize("family", some(["mixtral", "gpt_oss", "qwen3_moe", "llama4"], every=4))
def test_bf16_is_near_to_ram(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(family, tmp_path / family)
    with opened_model(folder) as in_ram, torch.no_grad():
        expected = logits(in_ram.model)
    with on_disk(monkeypatch, folder) as model, torch.no_grad():
        # Long steps are rounded in the same places, so not even a near tie in a router falls differently.
        torch.testing.assert_close(logits(model.model).float(), expected.float(), rtol=0, atol=1e-3)


def test_modules_that_compute_by_themselves_stay_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("jetmoe", tmp_path / "jetmoe")
    with on_disk(monkeypatch, folder) as model:
        assert model.bank.layers
        assert all(name.endswith("projections") for name in model.bank.layers)


# --- where it is decided --------------------------------------------------------------------------


def test_enough_ram_needs_no_disk(mixtral: Path) -> None:
    with opened_model(mixtral, ram_bytes=10**9) as model:
        assert model.disk_backed is None
        assert "disk" not in model.info.device_note
    assert not (data_dir() / "converted").exists()


def test_the_least_budget_is_told_truly(mixtral: Path) -> None:
    least = least_budget(mixtral)
    with opened_model(mixtral, ram_bytes=least) as model:
        assert model.disk_backed is not None
        assert model.info.weights_bytes + model.info.experts_bytes <= least
    with pytest.raises(EngineError, match="RAM budget"), opened_model(mixtral, ram_bytes=least - 1):
        pass


# --- what may happen to the files -----------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5, 20])
def test_cancel_while_preparing(mixtral: Path, after: int) -> None:
    asked = iter(range(10**6))
    config = EngineConfig(str(mixtral), device="cpu", precision="bf16", threads=1, ram_bytes=least_budget(mixtral))
    with pytest.raises(RequestCancelled):
        load_model(config, on_progress=lambda done, total: None, cancelled=lambda: next(asked) >= after)
    open_model(config).close()


def damage_everything(path: Path) -> None:
    _, _, tensors = read_converted(path)
    with path.open("r+b") as file:
        for tensor in tensors.values():
            for record in range(tensor.shape[0]):
                file.seek(tensor.offset + record * tensor.shape[1] + 100)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_plain_experts_are_read_from_the_models_own_files(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(family, tmp_path / family)
    with on_disk(monkeypatch, folder, "fp32", slots=1) as model, torch.no_grad():
        logits(model.model)
        assert model.disk_backed.disk.records_read
    assert not converted_of(folder)


def test_damaged_records_are_rebuilt_and_reported(
    turned: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened_model(turned, "fp32") as in_ram:
        expected = said(in_ram)
    with on_disk(monkeypatch, turned, "fp32") as model, caplog.at_level(logging.WARNING):
        assert model.disk_backed is not None
        damage_everything(converted_path(turned, "fp32"))
        assert_says(model, expected, atol=1e-5)
        assert model.disk_backed.disk.records_repaired
        assert model.disk_backed.note == model.disk_backed.disk.note
    assert any(record.name == "engine.experts.disk_tier" for record in caplog.records)


def test_a_file_that_is_no_use_is_made_again_and_told(turned: Path) -> None:
    least = least_budget(turned)
    with opened_model(turned, ram_bytes=least) as model:
        assert "again" not in model.info.device_note
    with converted_path(turned, "bf16").open("r+b") as file:
        file.write(b"nothing")
    with opened_model(turned, ram_bytes=least) as model:
        assert "converted again" in model.info.device_note


def test_a_record_that_cannot_be_made_again_is_one_clear_error(turned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_disk(monkeypatch, turned) as model, torch.no_grad():
        assert model.disk_backed is not None
        damage_everything(converted_path(turned, "bf16"))
        shutil.rmtree(turned)
        for _ in range(2):
            with refused(ErrorCode.CHECKPOINT_DAMAGED):
                logits(model.model)


def test_the_source_may_go_while_the_model_runs(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_model(mixtral, "fp32") as in_ram:
        expected = said(in_ram)
    with on_disk(monkeypatch, mixtral, "fp32") as model:
        shutil.rmtree(mixtral)
        assert_says(model, expected, atol=1e-5)


def test_ids_that_are_no_expert_contribute_nothing(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_disk(monkeypatch, mixtral, "fp32") as model, torch.no_grad():
        compute = tiers(model)[0]
        hidden = torch.randn(PROMPT.shape[1], 32)
        none = torch.full((PROMPT.shape[1], 2), 4)
        assert not compute(hidden, none, torch.ones(none.shape)).any()
        mixed = none.clone()
        mixed[:, 1] = 3
        alone = compute(hidden, mixed[:, 1:], torch.ones(PROMPT.shape[1], 1))
        assert torch.equal(compute(hidden, mixed, torch.ones(none.shape)), alone)


LAYERS = 4
CONTENTS = contents_of([(8, SMALL), (8, SMALL), (3, LARGE), (8, SMALL)])
RECORDS = random_records(CONTENTS)
HIDDEN = 6


class Kernel:
    """What an expert makes of a token depends on every byte of its record."""

    def __init__(self, tier: RamTier, layer: int) -> None:
        self._records = tier.slots(layer).records
        self.calls: list[int] = []

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append(len(hidden_states))
        return hidden_states * digest(self._records[top_k_index[:, 0]])[:, None] * top_k_weights


def digest(records: torch.Tensor) -> torch.Tensor:
    places = torch.arange(records.shape[1]) % 251 + 1.0
    return (records.float() @ places) / records.shape[1] / 1000


class Listener:
    """Stands where a prefetcher would."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int], torch.Size]] = []

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        self.told.append((layer, list(experts), hidden.shape))


class Model:
    """All layers over one tier."""

    def __init__(self, path: Path, slots: int) -> None:
        self.disk = disk_of(path, CONTENTS, readers=3)
        self.tier = RamTier(self.disk, budget_of(slots), at_least=1, policy="lru")
        self.listener = Listener()
        self.kernels = [Kernel(self.tier, layer) for layer in range(LAYERS)]
        self.layers = [
            ExpertExecutor(self.tier.source(layer, kernel), layer, ahead=self.tier)
            for layer, kernel in enumerate(self.kernels)
        ]
        for layer in self.layers:
            layer.observer = self.listener

    def close(self) -> None:
        self.tier.close()


def budget_of(slots: int) -> int:
    """Room for so many of the 24 small records, and for the large ones in proportion."""
    return slots * SMALL.nbytes + max(1, slots // 8) * LARGE.nbytes


def expected(layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    for token, experts in enumerate(index.tolist()):
        for place, expert in enumerate(experts):
            if expert < CONTENTS.tensors[layer].num_experts:
                out[token] += weights[token, place] * digest(RECORDS[layer][expert][None]) * hidden[token]
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("converted") / "a.gguf"
    write_records(file, CONTENTS)
    return file


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with closing(Model(path, 12)) as model:
        yield model


def check(model: Model, layer: int, tokens: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=draw)
    count = CONTENTS.tensors[layer].num_experts + 1  # one that is none
    index = torch.stack([torch.randperm(count, generator=draw)[:3] for _ in range(tokens)])
    weights = torch.rand(tokens, 3, generator=draw)
    torch.testing.assert_close(
        model.layers[layer](hidden, index, weights), expected(layer, hidden, index, weights), rtol=1e-4, atol=1e-4
    )


@given(
    slots=st.integers(1, 24),
    steps=st.lists(st.tuples(st.integers(1, 20), st.none() | st.integers(0, 24)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=8)
def test_any_steps_with_any_slots(path: Path, slots: int, steps: list[tuple[int, int | None]], seed: int) -> None:
    with closing(Model(path, slots)) as model:
        for step, (tokens, resized) in enumerate(steps):
            for layer in range(LAYERS):
                if resized is not None and layer == 1:
                    model.tier.resize(budget_of(resized))
                check(model, layer, tokens, seed + step)
        counters = model.tier.counters
        assert counters.failures == 0
        assert all(not group.pool._pins for group in model.tier._groups.values())


def test_a_prompt_reads_the_next_layer_ahead_and_leaves_decoding_its_experts(model: Model) -> None:
    for layer in (3, 0):
        arrived(model.tier.acquire(layer, [0]))  # in use, as it were, by decoding
    tokens = torch.randn(40, HIDDEN)
    index = torch.arange(40)[:, None] % 8
    for layer in (0, 1):
        model.layers[layer](tokens, index, torch.ones(40, 1))
    counters = model.tier.counters
    assert counters.prefetched
    assert counters.prefetches_used
    assert {0} <= model.tier.resident(3).keys()
    assert model.listener.told == []


def test_a_step_that_fails_gives_all_slots_back(tmp_path: Path) -> None:
    write_records(tmp_path / "b.gguf", CONTENTS)
    flip(tmp_path / "b.gguf", place_of(CONTENTS, 0, 5) + 3)
    with closing(Model(tmp_path / "b.gguf", 4)) as model:
        for tokens in (1, 40):
            with pytest.raises(EngineError, match="Expert 5"):
                model.layers[0](torch.randn(tokens, HIDDEN), torch.arange(8).expand(tokens, 8), torch.ones(tokens, 8))
        assert all(not group.pool._pins for group in model.tier._groups.values())
        check(model, 1, 3, 0)


LAYERS_OF_PREFETCH_FROM_DISK, EXPERTS, WIDTH = 5, 12, 2


@pytest.mark.parametrize("choice", ["auto", "previous", "correlation"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_experts_are_read_ahead(choice: str, share: float, tmp_path: Path) -> None:
    contents = contents_of([(EXPERTS, LARGE)] * LAYERS_OF_PREFETCH_FROM_DISK)
    write_records(tmp_path / "a.gguf", contents)
    records = random_records(contents)
    with (
        disk_of(tmp_path / "a.gguf", contents, readers=2) as disk,
        RamTier(disk, int(contents.nbytes * share), at_least=2 * WIDTH) as tier,
    ):
        prefetcher = make_prefetcher(
            tier,
            lambda: over_disk(disk, LARGE.nbytes),
            layers=LAYERS_OF_PREFETCH_FROM_DISK,
            experts=EXPERTS,
            per_token=WIDTH,
            choice=choice,
        )
        routes = PlantedRoutes(LAYERS_OF_PREFETCH_FROM_DISK, EXPERTS, WIDTH, follows=0.95)
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


def test_a_closed_model_raises(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_disk(monkeypatch, mixtral) as model:
        module = next(m for m in model.model.modules() if getattr(m, BANK_LAYER, None) is not None)
        kernel = tiers(model)[0]
        model.close()
        model.close()
    hidden, index, weights = torch.zeros(1, 32), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)
    for computes in (module, kernel):
        with refused(ErrorCode.INTERNAL):
            computes(hidden, index, weights)
