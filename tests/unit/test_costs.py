"""One cost model: measurements beat data sheets, observations correct both, and more work never takes less."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.model_shape import read_model
from engine.common.costs import Cost, CostModel, Source
from engine.hardware.machine import machine_names, read_machine
from engine.planner.costs import engine_costs

_seconds = st.floats(1e-6, 1.0)
_kind = Cost.CPU_EXPERT


def _line(base_s: float, each_s: float) -> CostModel:
    costs = CostModel()
    costs.know(_kind, lambda size: base_s + each_s * size, Source.DATA_SHEET)
    return costs


@given(_seconds, st.floats(0, 1.0), st.lists(st.tuples(st.integers(1, 64), _seconds), max_size=40))
def test_more_work_never_takes_less_whatever_was_observed(
    base_s: float, each_s: float, observed: list[tuple[int, float]]
) -> None:
    costs = _line(base_s, each_s)
    for size, seconds in observed:
        costs.observe(_kind, size, seconds)
    times = [costs.predict(_kind, size) for size in range(1, 65)]
    assert times == sorted(times)
    assert times[0] > 0


@given(_seconds, _seconds, st.sampled_from([Source.ASSUMED, Source.DATA_SHEET]))
def test_what_is_measured_beats_the_data_sheet(sheet_s: float, measured_s: float, other: Source) -> None:
    for order in ((other, Source.MEASURED), (Source.MEASURED, other)):
        costs = CostModel()
        for source in order:
            costs.know(_kind, lambda _, s=source: measured_s if s is Source.MEASURED else sheet_s, source)  # type: ignore[misc]
        assert costs.predict(_kind) == measured_s
        assert costs.source(_kind) is Source.MEASURED


@given(st.floats(0.1, 10.0), st.integers(0, 99), st.integers(1, 32))
def test_what_is_observed_decides_in_the_end_and_outliers_hardly_count(factor: float, seed: int, size: int) -> None:
    costs, dice = _line(1e-3, 1e-4), random.Random(seed)
    known_s = costs.predict(_kind, size)
    for _ in range(400):
        outlier = 50 if dice.random() < 0.02 else 1
        costs.observe(_kind, size, factor * known_s * dice.uniform(0.95, 1.05) * outlier)
    assert costs.source(_kind) is Source.OBSERVED
    assert costs.predict(_kind, size) == pytest.approx(factor * known_s, rel=0.25)
    assert costs.predict(_kind, 2 * size) > costs.predict(_kind, size)


def test_of_what_nothing_is_known_its_own_times_are_averaged() -> None:
    costs = CostModel()
    assert costs.predict(Cost.BETWEEN) == 0.0
    assert costs.source(Cost.BETWEEN) is Source.ASSUMED
    for seconds in [1.0] * 20 + [100.0]:
        costs.observe(Cost.BETWEEN, 1, seconds)
    assert costs.predict(Cost.BETWEEN) < 1.06
    costs.learn(Cost.BETWEEN, fades=0.9)
    costs.observe(Cost.BETWEEN, 1, 1.0)
    assert costs.predict(Cost.BETWEEN) == pytest.approx(0.9)
    assert costs.predict(Cost.BETWEEN) == pytest.approx(0.81)  # or it would never be done again


def test_larger_work_is_told_in_terms_of_small() -> None:
    costs = CostModel()
    costs.learn(Cost.STEP, weight=0.25, further=0.4, raw=1)
    assert costs.ratio(Cost.STEP, 1) == 1.0
    assert costs.ratio(Cost.STEP, 3) == pytest.approx(1.8)
    costs.observe(Cost.STEP, 4, 2.5)
    assert costs.ratio(Cost.STEP, 4) == pytest.approx(2.2)  # there is nothing to compare with yet
    for _ in range(60):
        costs.observe(Cost.STEP, 1, 1.0)
        costs.observe(Cost.STEP, 4, 2.5)
    assert costs.ratio(Cost.STEP, 4) == pytest.approx(2.5, rel=0.01)
    assert costs.ratio(Cost.STEP, 3) == pytest.approx(2.0, rel=0.01)
    assert costs.predict(Cost.STEP, 7) == pytest.approx(4.0, rel=0.01)
    costs.observe(Cost.STEP, 4, 100.0)  # busy for a while: averaged, not believed at once
    assert costs.ratio(Cost.STEP, 4) < 3.5


@given(st.sampled_from(machine_names()), st.sampled_from(["int4", "bf16"]), st.integers(1, 4096), st.integers(2, 16))
def test_a_planner_s_costs_are_the_same_model_and_grow_with_size(
    name: str, precision: str, size: int, times: int
) -> None:
    machine = read_machine(name)
    costs = engine_costs(machine, read_model("qwen3-30b-a3b"), precision)
    kinds = [Cost.CPU_EXPERT, Cost.CPU_LAYER, Cost.DISK]
    if machine.gpu is not None:
        kinds += [Cost.CARD_EXPERT, Cost.CARD_LAYER, Cost.H2D, Cost.H2D_PAGEABLE, Cost.D2H]
    for kind in kinds:
        assert 0 < costs.predict(kind, size) <= costs.predict(kind, times * size)
        assert costs.by_kind.source(kind) is Source.DATA_SHEET
