"""A model whose experts do not fit into RAM says what it says when they do."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.gguf.file import read_converted
from engine.checkpoint.library import converted_of, converted_path
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.paths import data_dir
from engine.experts.dispatch import BANK_LAYER
from engine.experts.executor import ExpertExecutor
from engine.planner import placement
from engine.planner.placement import Budgets, NotEnoughRamError, Placement, Sizes
from engine.runtime.load import weights as from_disk
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from tests.combinations import some
from tests.engine.test_family_parity import PROMPT, decoded_logits, greedy, logits
from tests.engine.tiny_families import tiny_checkpoint

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
def loaded(folder: Path, precision: Any = "bf16", **options: Any) -> Iterator[LoadedModel]:
    config = EngineConfig(model=str(folder), device="cpu", precision=precision, threads=1, **options)
    model = load_model(config, on_progress=lambda done, total: None, cancelled=lambda: False)
    try:
        yield model
    finally:
        model.close()


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
        with loaded(folder, precision, ram_bytes=budget) as model:
            assert model.disk_backed is not None
            yield model


def least_budget(folder: Path, precision: str = "bf16") -> int:
    """The RAM budget below which the model is refused."""
    with pytest.raises(NotEnoughRamError) as caught, loaded(folder, precision, ram_bytes=1):
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
    with loaded(folder, precision) as in_ram:
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
    with loaded(folder, "fp32") as in_ram:
        assert in_ram.disk_backed is None
        expected, parameters, experts = said(in_ram), in_ram.info.parameters, in_ram.info.experts
        all_bytes = in_ram.info.experts_bytes
    for slots in ((0, 5), (1, 100))[FAMILIES.index(family) % 2]:
        with on_disk(monkeypatch, folder, "fp32", slots=slots) as model:
            assert_says(model, expected, atol=1e-5)
            assert (model.info.parameters, model.info.experts) == (parameters, experts)
            assert model.disk_backed is not None
            assert model.bank is not None
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
    with loaded(folder) as in_ram, torch.no_grad():
        expected = logits(in_ram.model)
    with on_disk(monkeypatch, folder) as model, torch.no_grad():
        # Long steps are rounded in the same places, so not even a near tie in a router falls differently.
        torch.testing.assert_close(logits(model.model).float(), expected.float(), rtol=0, atol=1e-3)


def test_modules_that_compute_by_themselves_stay_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("jetmoe", tmp_path / "jetmoe")
    with on_disk(monkeypatch, folder) as model:
        assert model.bank is not None
        assert model.bank.layers
        assert all(name.endswith("projections") for name in model.bank.layers)


# --- where it is decided --------------------------------------------------------------------------


def test_enough_ram_needs_no_disk(mixtral: Path) -> None:
    with loaded(mixtral, ram_bytes=10**9) as model:
        assert model.disk_backed is None
        assert "disk" not in model.info.device_note
    assert not (data_dir() / "converted").exists()


def test_the_least_budget_is_told_truly(mixtral: Path) -> None:
    least = least_budget(mixtral)
    with loaded(mixtral, ram_bytes=least) as model:
        assert model.disk_backed is not None
        assert model.info.weights_bytes + model.info.experts_bytes <= least
    with pytest.raises(EngineError, match="RAM budget"), loaded(mixtral, ram_bytes=least - 1):
        pass


# --- what may happen to the files -----------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5, 20])
def test_cancel_while_preparing(mixtral: Path, after: int) -> None:
    asked = iter(range(10**6))
    config = EngineConfig(str(mixtral), device="cpu", precision="bf16", threads=1, ram_bytes=least_budget(mixtral))
    with pytest.raises(RequestCancelled):
        load_model(config, on_progress=lambda done, total: None, cancelled=lambda: next(asked) >= after)
    load_model(config, on_progress=lambda done, total: None, cancelled=lambda: False).close()


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
        assert model.disk_backed is not None
        assert model.disk_backed.disk.records_read
    assert not converted_of(folder)


def test_damaged_records_are_rebuilt_and_reported(
    turned: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded(turned, "fp32") as in_ram:
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
    with loaded(turned, ram_bytes=least) as model:
        assert "again" not in model.info.device_note
    with converted_path(turned, "bf16").open("r+b") as file:
        file.write(b"nothing")
    with loaded(turned, ram_bytes=least) as model:
        assert "converted again" in model.info.device_note


def test_a_record_that_cannot_be_made_again_is_one_clear_error(turned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_disk(monkeypatch, turned) as model, torch.no_grad():
        assert model.disk_backed is not None
        damage_everything(converted_path(turned, "bf16"))
        shutil.rmtree(turned)
        for _ in range(2):
            with pytest.raises(EngineError) as caught:
                logits(model.model)
            assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED


def test_the_source_may_go_while_the_model_runs(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(mixtral, "fp32") as in_ram:
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
