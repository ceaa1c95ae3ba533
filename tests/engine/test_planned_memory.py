"""What a plan says is held of each tier, against what the running engine holds."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import EngineConfig
from engine.devices.memory_budget import MemoryCategory
from engine.formats import LADDER, STORED, careful
from engine.hardware.machine import CpuProfile, GpuProfile, HardwareProfile, LinkProfile
from engine.kernels.gpu.linear import quantised_sizes
from engine.kernels.native.build import library_path
from engine.kernels.native.linear import formats_of_linears
from engine.planner.costs import engine_costs
from engine.planner.engine_memory import dense_on_card, engine_memory, sizes_of
from engine.planner.placement import Budgets, NotEnoughRamError, Placement, Sizes, resolve
from engine.planner.plan import make_plan
from engine.planner.plan_parts import Limits
from engine.runtime.load.checkpoint import open_checkpoint
from engine.runtime.load.forms import BLOCKS
from engine.runtime.load.model import open_compute_devices
from engine.runtime.load.plan import Machine, usable_types
from engine.runtime.load.plan import sizes_of as counted_sizes_of
from tests.engine.loaded_tiny import open_model, opened_model
from tests.engine.on_devices import memory_use
from tests.engine.test_stored_precision import type_of
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_gguf import write_model

MODEL = "synthetic:qwen3-moe-small?layers=2&experts=32&vocab=2048"
MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    return make_synthetic(MODEL)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("vram", [64, 40, 24])
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_on_an_emulated_card(folder: Path, vram: int, precision: str) -> None:
    config = EngineConfig(
        str(folder),
        device="emulated:slow-link",
        vram_bytes=vram * MIB,
        precision=precision,
        context_tokens=512,
        threads=1,
    )
    loaded = open_model(config)
    devices = loaded.devices
    assert devices is not None
    try:
        used = memory_use(loaded)[0].by_category
        in_ram = loaded.bank.nbytes if loaded.bank is not None else 0
        is_on_device = loaded.bank is None or not devices.experts.caches[0]
    finally:
        loaded.close()
    planned = engine_memory(
        engine_costs(machine(vram), find_shape(str(folder)), precision, 1), Limits.of(config), on_card=True
    )
    assert planned.card.weights == pytest.approx(used[MemoryCategory.WEIGHTS], rel=0.05)
    assert planned.card.experts + planned.card.staging == pytest.approx(
        used[MemoryCategory.EXPERTS] + used[MemoryCategory.STAGING], rel=0.05
    )
    assert planned.all_experts == is_on_device
    if not planned.all_experts:
        assert planned.ram.experts == pytest.approx(in_ram, rel=0.05)


def test_a_plan_and_loading_decide_alike(folder: Path) -> None:
    """The same function, once with estimates and once with what the checkpoint's headers say; nothing is loaded."""
    shape, seen = find_shape(str(folder)), set()
    for precision in ("auto", "int8"):
        for vram in (0, 64, 24, 1):
            config = EngineConfig(
                str(folder),
                device="emulated:slow-link" if vram else "cpu",
                vram_bytes=vram * MIB or None,
                precision=precision,
            )
            opened, (devices, _) = open_checkpoint(config), open_compute_devices(config)
            try:
                there = Machine.now(config, devices, has_kernels=library_path().exists())
                counted_sizes = counted_sizes_of(config, there, opened, usable_types(there, opened))
            finally:
                for device in devices:
                    device.close()
            costs = engine_costs(machine(vram), shape, LADDER[0])
            planned_sizes = sizes_of(costs, Limits.of(config), LADDER if precision == "auto" else [precision])
            for ram in (64, 24, 16, 8, 5):
                there_is = replace(there.memory, ram_allowed=ram * MIB)
                planned, counted = (_tried(sizes, there_is, config) for sizes in (planned_sizes, counted_sizes))
                seen.add(_outline(planned))
                assert _outline(planned) == _outline(counted), (precision, vram, ram)
                if planned is not None and counted is not None:
                    assert planned.slots == pytest.approx(counted.slots, rel=0.05)
                    assert planned.ram.held == pytest.approx(counted.ram.held, rel=0.05)
    assert len(seen) > 5  # else nothing was compared


def _outline(placement: Placement | None) -> tuple[object, ...]:
    if placement is None:
        return ()
    notes = tuple(note.code for note in placement.notes)
    return placement.precision, placement.reach, placement.all_experts, notes


def _tried(sizes: Sizes, budgets: Budgets, config: EngineConfig) -> Placement | None:
    try:
        return resolve(config, budgets, sizes)
    except NotEnoughRamError:
        return None


def machine(vram: int) -> HardwareProfile:
    found = HardwareProfile(
        "test", "", "", None, LinkProfile(2e9, 2e9, 2e9), CpuProfile("", 2, 1e11, 3e10, 24 * 2**30), 1e9
    )
    return replace(found, gpu=GpuProfile("emulated:slow-link", vram * MIB, 1e11, 1e10)) if vram else found


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_dense_weights_on_a_real_card(folder: Path, precision: str, tied: bool) -> None:
    """As the engine counts them before it loads: no card is needed for that."""
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shape = replace(find_shape(str(folder)), tied_embeddings=tied)
    shape = replace(shape, other_weights=shape.other_weights - (shape.vocabulary * shape.hidden if tied else 0))
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    sizes = {name: value.nbytes for name, value in model.named_parameters() if name not in experts}
    formats = formats_of_linears(model, careful(precision, shape.total_weights))
    held = quantised_sizes(model, formats, sizes)
    gpu = GpuProfile("a card", 2**30, 1e12, 1e11)
    costs = engine_costs(replace(machine(64), gpu=gpu), shape, precision, 1)
    assert dense_on_card(costs) == pytest.approx(sum(held.values()), rel=0.05)


def stored_model(folder: Path, family: str, *, tied: bool = False, layers: int | None = None) -> Path:
    """A small model in a GGUF file, of several types."""
    sizes = {
        "hidden_size": 256,
        "head_dim": 64,
        "vocab_size": 512,
        "num_key_value_heads": 4,
        "tie_word_embeddings": tied,
    }
    own = {"intermediate_size": 512} if family == "llama" else {"moe_intermediate_size": 256, "norm_topk_prob": True}
    own |= {"num_hidden_layers": layers} if layers is not None else {}
    made = tiny_checkpoint(family, folder / family, **sizes, **own)
    return write_model(made, folder / f"{family}.gguf", family.replace("_", ""), quantised=type_of)


@pytest.mark.parametrize(("family", "tied"), [("qwen3_moe", False), ("llama", False), ("llama", True)])
def test_what_is_stored_is_planned_as_it_is_loaded(tmp_path: Path, family: str, tied: bool) -> None:
    """Every precision that `auto` chooses from, and of each the bytes that a card would hold; none is needed."""
    file = stored_model(tmp_path, family, tied=tied)
    config, shape = EngineConfig(str(file)), find_shape(str(file))
    opened = open_checkpoint(config)
    card: Any = SimpleNamespace(torch_device=torch.device("cuda:0"))
    counted = counted_sizes_of(config, Machine([card], Budgets(2**40), has_kernels=False), opened, frozenset())
    gpu = GpuProfile("a card", 2**30, 1e12, 1e11)
    costs = engine_costs(replace(machine(64), gpu=gpu), shape, shape.precisions[0], 1)
    planned = sizes_of(costs, Limits.of(config), shape.precisions)

    assert [weights.precision for weights in planned.weights] == [weights.precision for weights in counted.weights]
    ours, theirs = planned.weights[0], counted.weights[0]
    assert ours.precision == STORED
    if family == "qwen3_moe":
        assert [(each.record, each.count, each.layer) for each in ours.experts] == [
            (each.record, each.count, each.layer) for each in theirs.experts
        ]
        assert len({each.record for each in ours.experts}) == len({each.layout for each in theirs.experts}) == 2
        assert shape.expert_bytes(STORED) == pytest.approx(
            sum(each.record for each in theirs.experts) / len(theirs.experts), rel=0.02
        )
    dense = [sum(weights.dense_layers) + weights.dense_elsewhere for weights in (ours, theirs)]
    assert dense[0] == pytest.approx(dense[1], rel=0.001)
    assert ours.dense_layers == pytest.approx(theirs.dense_layers, rel=0.01)
    assert ours.dense_in_ram == pytest.approx(theirs.dense_in_ram, rel=0.001)
    assert planned.kv_per_token == counted.kv_per_token
    blocks = counted_sizes_of(config, Machine([card], Budgets(2**40), has_kernels=True), opened, BLOCKS).weights[0]
    passing = sizes_of(replace(costs, model=shape.in_place()), Limits.of(config), shape.precisions).weights[0]
    for found in (passing, blocks):  # a few matrices at a time
        assert 0 < found.working_for_devices < found.dense_in_ram
    assert passing.working_for_devices == pytest.approx(blocks.working_for_devices, rel=0.5)
    on_cpu = engine_costs(machine(0), shape, STORED, 1)
    assert on_cpu.host_dense_bytes == pytest.approx(dense[1], rel=0.01)


def test_what_is_not_quantised_is_stored_in_16_bits(folder: Path) -> None:
    shape = find_shape(str(folder))
    as_it_is, plain = (make_plan(machine(0), shape, limits=Limits(precision=name)) for name in (STORED, "bf16"))
    assert as_it_is == replace(plain, limits=as_it_is.limits)


def test_the_plan_of_what_is_stored_loads(tmp_path: Path) -> None:
    file = stored_model(tmp_path, "qwen3_moe")
    plan = make_plan(machine(0), find_shape(str(file)))
    assert plan.precision == STORED
    assert plan.words(plan.precision) == "as stored (4-bit, 6-bit and 8-bit)"
    with opened_model(plan.engine_config(str(file))) as loaded:
        assert loaded.info.precision == STORED
        # Of gate and up rows in two types, the plan counts both as the larger one.
        assert loaded.info.experts_bytes <= plan.ram.experts < 1.3 * loaded.info.experts_bytes
        assert plan.ram.weights == pytest.approx(loaded.info.weights_bytes, rel=0.01)
