"""What a load resolves is what it builds: tiers, bytes, precision and room on disk, for drawn models and machines."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.library import converted_of
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.devices.memory_budget import MemoryCategory
from engine.formats import STORED
from engine.kernels.native import linear
from engine.kernels.native.library import usable_isas
from engine.planner import placement as placing
from engine.planner.costs import engine_costs
from engine.planner.engine_memory import engine_memory
from engine.planner.plan_parts import Limits
from engine.runtime.load import conversion
from engine.runtime.load.plan import Plan
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import open_model
from tests.engine.on_devices import memory_use
from tests.engine.test_planned_memory import machine, stored_model
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not usable_isas(), reason="no native kernels here")

CARD = "emulated:slow-link"
MIB = 2**20
WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 512}


@dataclass(frozen=True)
class Case:
    """A model, and what a machine has for it."""

    name: str
    precision: str
    vram: int | None
    ram: int | None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experts as ranges of files, as tensors that a library turns round, and as blocks that are used in place."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        family: tiny_checkpoint(family, folder / family, dtype=torch.bfloat16, **WIDE)
        for family in ("mixtral", "gpt_oss")
    }
    return {**found, "gguf": stored_model(folder, "qwen3_moe"), "dense": stored_model(folder, "llama")}


@pytest.fixture(autouse=True)
def all_is_worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "WORTH_KEEPING", 0)
    monkeypatch.setattr(conversion, "_LEFT_FREE", 0)
    monkeypatch.setattr(linear, "SMALLEST", 256)


def load(path: Path, case: Case) -> LoadedModel:
    return open_model(
        path,
        case.precision,
        device=CARD if case.vram else "cpu",
        vram_bytes=case.vram,
        ram_bytes=case.ram,
        context_tokens=256,
    )


def tried(path: Path, case: Case) -> LoadedModel | ErrorCode:
    """The model, or why there is none."""
    try:
        return load(path, case)
    except EngineError as error:
        return error.code


def with_least_ram(path: Path, name: str, precision: str) -> LoadedModel | ErrorCode:
    """With little more than is needed where experts are read from disk."""
    for ram in range(MIB // 2, 16 * MIB, MIB // 4):
        found = tried(path, Case(name, precision, None, ram))
        if found is not ErrorCode.NOT_ENOUGH_MEMORY:
            return found
    raise AssertionError("nothing is enough")


cases = st.builds(
    Case,
    st.sampled_from(("mixtral", "gpt_oss", "gguf", "dense")),
    st.sampled_from(("auto", "bf16", "int8", "int4")),
    st.sampled_from((None, None, 8 * MIB, 3 * MIB, 2 * MIB)),
    st.one_of(st.none(), st.integers(MIB // 2, 8 * MIB)),
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases)
def test_what_is_planned_is_built(models: dict[str, Path], planned: list[Plan], case: Case) -> None:
    planned.clear()
    path = models[case.name]
    for left in converted_of(path):
        left.unlink()
    loaded = tried(path, case)
    if isinstance(loaded, ErrorCode):
        assert loaded is ErrorCode.NOT_ENOUGH_MEMORY
        assert not planned  # refused before anything was read
        return
    try:
        assert_built(planned[-1], loaded, path)
    finally:
        loaded.close()


def assert_built(plan: Plan, loaded: LoadedModel, path: Path) -> None:
    placed, info = plan.placement, loaded.info
    assert info.precision == placed.precision
    assert (loaded.devices is not None) == bool(placed.devices)
    held = loaded.bank.nbytes if loaded.bank is not None else 0
    planned_nbytes = sum(site.nbytes for site in plan.resident)
    if plan.forms.in_place and plan.in_whole_files:  # where records are not padded to pages
        padding = sum(end - begin for site in plan.resident for begin, end in site.num_experts * site.layout.padding)
        assert held == planned_nbytes - padding
    else:
        assert held == planned_nbytes
    assert (loaded.disk_backed is not None) == (placed.on_disk > 0)
    if loaded.disk_backed is not None:
        assert loaded.disk_backed.disk.table.nbytes == placed.on_disk
        records = sum(layout.nbytes for layout in {site.layout for site in plan.on_disk})
        assert placed.ram.slots - records < loaded.disk_backed.nbytes <= placed.ram.slots
    elif not placed.all_experts:
        assert placed.ram.experts == planned_nbytes
    if loaded.devices is not None:
        used = memory_use(loaded)[0].by_category
        (device,) = placed.devices
        assert used[MemoryCategory.WEIGHTS] == device.dense
        experts = used[MemoryCategory.EXPERTS] + used[MemoryCategory.STAGING]
        slot = max((site.layout.nbytes for site in plan.sites), default=0)
        assert experts == pytest.approx(device.experts + device.staging, rel=0.05, abs=slot)
    elif not plan.forms.in_place and placed.precision in ("int8", "int4", STORED):
        assert info.weights_bytes <= 1.02 * placed.ram.dense + 8192  # until they are quantised they take more
    else:
        assert info.weights_bytes == pytest.approx(placed.ram.dense, rel=0.02, abs=8192)
    kept = converted_of(path)
    assert sum(file.stat().st_size for file in kept) == (plan.conversion.contents.size if plan.conversion else 0)
    assert placed.converted == (plan.conversion.nbytes if plan.conversion is not None else 0)


def test_room_on_disk_is_needed_where_the_plan_says_so(
    models: dict[str, Path], planned: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are ranges of the model's files are read from disk without a copy; no others are."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("engine.experts.container.shutil.disk_usage", lambda _folder: usage._replace(free=4096))
    for name, precision, needs_room in (
        ("mixtral", "bf16", False),
        ("gguf", "auto", False),
        ("gpt_oss", "bf16", True),
        ("mixtral", "int4", True),
    ):
        path = models[name]
        for left in converted_of(path):
            left.unlink()
        found = with_least_ram(path, name, precision)
        placed = planned[-1].placement
        assert placed.on_disk
        assert (placed.written > 0) == placed.must_be_kept == needs_room, name
        assert converted_of(path) == []
        if isinstance(found, ErrorCode):
            assert needs_room
            assert found is ErrorCode.DISK_FULL
        else:
            assert not needs_room
            found.close()


@pytest.mark.parametrize(("name", "precision"), [("mixtral", "bf16"), ("mixtral", "int4"), ("gguf", "stored")])
def test_the_planner_wants_the_same_room(
    models: dict[str, Path], planned: list[Plan], name: str, precision: str
) -> None:
    """From a model's shape alone, before its files are opened."""
    shape = find_shape(str(models[name])).in_place()
    found = with_least_ram(models[name], name, precision)
    found.close()
    placed, told = planned[-1].placement, None
    assert placed.on_disk
    for ram in range(MIB // 2, 16 * MIB, MIB // 4):
        config = EngineConfig(str(models[name]), device="cpu", precision=precision, ram_bytes=ram, threads=1)
        told = engine_memory(engine_costs(machine(0), shape, precision, 1), Limits.of(config), on_card=False)
        if told is not None:
            break
    assert told.disk == pytest.approx(placed.on_disk, rel=0.3)  # of gate and up in two types both count as the larger
    assert (told.written > 0) == (placed.written > 0)
    assert told.written == pytest.approx(placed.written, rel=0.15)
