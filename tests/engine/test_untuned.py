"""A machine that nobody tuned measures itself before it plans: once for a shape of experts, and keeps what it found."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.common.config import EngineConfig
from engine.common.files import take_lock
from engine.common.paths import data_dir
from engine.formats import LADDER
from engine.hardware.measured import Measurements, load_measurements, save_measurements
from engine.hardware.probe import probe
from engine.measure.arithmetic import CpuExperts, NativeCalls
from engine.tuning import untuned
from engine.tuning.untuned import measure_untuned
from tests.engine.tiny_families import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("untuned") / "tiny")


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is fast."""
    whole = untuned._Wanted.measurements

    def little(wanted: untuned._Wanted) -> object:
        found = whole(wanted)
        kept = tuple(each for each in found.measurements if isinstance(each, NativeCalls | CpuExperts))
        return replace(found, cold_bytes=2**20, measurements=kept)

    monkeypatch.setattr(untuned._Wanted, "measurements", little)
    monkeypatch.setattr("engine.measure.measuring._MOST_COLD", 2**20)
    monkeypatch.setattr("engine.measure.measuring._WIDTH", 64)


def measures(model: Path, precision: str = "bf16") -> bool:
    said = list[str]()
    config = EngineConfig(str(model), device="cpu", precision=precision, threads=1)
    has = measure_untuned(config, lambda: said.append("it measures"), lambda: False)
    assert bool(said) is has
    return has


def kept() -> Measurements:
    found = load_measurements(probe())
    assert found is not None
    return found


def test_it_measures_once_for_each_shape_and_precision(model: Path, tmp_path: Path) -> None:
    assert measures(model)
    assert not measures(model)
    first = kept()
    assert first.kind == "brief"
    assert [(row.precision, row.threads) for row in first.experts] == [("bf16", 1)]
    assert measures(model, "int8")
    assert {row.precision for row in kept().experts} == {"int8", "bf16"}
    assert measures(model, "auto")
    assert {row.precision for row in kept().experts} == set(LADDER)
    wider = tiny_checkpoint("qwen3_moe", tmp_path / "wider", moe_intermediate_size=96)
    assert measures(wider)
    assert not measures(wider)
    assert not measures(model)


def test_what_tuning_measured_stands(model: Path) -> None:
    assert measures(model)
    save_measurements(replace(kept(), kind="quick", experts=()))
    assert not measures(model)


def test_what_was_measured_while_others_were_busy_holds_for_a_while(model: Path) -> None:
    assert measures(model)
    for taken_at, holds in (("2020-01-01T00:00:00+00:00", False), ("2999-01-01T00:00:00+00:00", False), ("x", False)):
        save_measurements(replace(kept(), others=0.9, taken_at=taken_at))
        assert measures(model) is not holds
    save_measurements(replace(kept(), others=0.9))
    assert not measures(model)


def test_one_process_measures_at_a_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untuned, "_PATIENCE_S", 0.0)
    data_dir().mkdir(parents=True)
    lock = take_lock(data_dir() / "measuring.lock")
    config = EngineConfig(str(model), device="cpu", precision="bf16")
    assert not measure_untuned(config, lambda: None, lambda: False)
    assert load_measurements(probe()) is None
    lock.release()


def test_a_data_folder_that_cannot_be_written_to_is_no_obstacle(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_found: Measurements) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(untuned, "save_measurements", full)
    config = EngineConfig(str(model), device="cpu", precision="bf16", threads=1)
    assert not measure_untuned(config, lambda: None, lambda: False)
    assert load_measurements(probe()) is None
