"""The prediction of strategies: what must hold for any routing and any latencies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared_experts import LayerStep
from benchmarks.strategies import StepCosts, StrategyModel
from engine.bench.report import Report, median_interval, row
from engine.experts.latency import LatencyModel

FREE = StepCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
seconds = st.floats(1e-6, 1e-2)


def latency(cpu_s: float, gpu_s: float, transfer_s: float) -> LatencyModel:
    return LatencyModel("bf16", 1000, cpu_s, 0.0, gpu_s, 64, 0.0, 0.0, 1000 / transfer_s)


def step(hits: int, on_cpu: int, fetched: int, backlog: int = 0) -> LayerStep:
    return LayerStep(hits + on_cpu + fetched, hits, on_cpu, fetched, backlog, 0.0)


def test_both_sides_work_at_once_and_the_later_one_counts() -> None:
    model = StrategyModel(latency(2.0, 1.0, 4.0), FREE, 16)
    assert model.seconds_per_token("mixed", [step(3, 1, 0)], 1) == pytest.approx(3.0)
    assert model.seconds_per_token("mixed", [step(1, 3, 0)], 1) == pytest.approx(6.0)
    # It arrives after 4 s, is computed in 1, while the CPU has long ended.
    assert model.seconds_per_token("mixed", [step(1, 1, 1)], 1) == pytest.approx(5.0)
    assert model.seconds_per_token("mixed", [step(1, 1, 1, backlog=2)], 1) == pytest.approx(13.0)


@given(cpu_s=seconds, gpu_s=seconds, transfer_s=seconds, needed=st.integers(1, 12), layers=st.integers(1, 60))
def test_the_best_mix_is_never_predicted_slower_than_either_side_alone(
    cpu_s: float, gpu_s: float, transfer_s: float, needed: int, layers: int
) -> None:
    model = StrategyModel(latency(cpu_s, gpu_s, transfer_s), FREE, 64)
    steps = [step(0, needed, 0)]
    off = model.seconds_per_token("off", steps, layers)
    assert off <= model.seconds_per_token("cpu", steps, layers) * (1 + 1e-9)
    assert off <= model.seconds_per_token("fetch", steps, layers) * (1 + 1e-9)


def test_a_row_says_how_far_the_measurement_is_from_the_prediction() -> None:
    report = Report({})
    report.rows.append(row("decode", [10.0], "tokens/s", peer="another", peer_values=[5.0], predicted=1.6))
    report.rows.append(row("decode", [10.0], "tokens/s", predicted=20.0))
    ratio, value = report.rows
    assert ratio.deviation == pytest.approx(0.25)
    assert value.deviation == pytest.approx(-0.5)
    assert "+25%" in report.text()
    assert report.document()["rows"][0]["predicted"] == 1.6


def test_a_row_says_how_far_single_pairs_of_runs_differ() -> None:
    report = Report({})
    peers = [1.0] * 9
    report.rows.append(row("decode", [float(n) for n in range(1, 10)], "tokens/s", peer="p", peer_values=peers))
    report.rows.append(row("few", [1.0, 2.0], "tokens/s", peer="p", peer_values=[1.0, 1.0]))
    report.rows.append(row("one", [1.0], "tokens/s", peer="p", peer_values=[1.0]))
    many, few, one = report.text().splitlines()[1:]
    assert many.endswith("5.00x  pairs 1.00 to 9.00, 95%: 2.00 to 8.00")
    assert few.endswith("pairs 1.00 to 2.00")
    assert one.endswith("1.00x")
    assert report.document()["rows"][0]["likely"] == (2.0, 8.0)


@pytest.mark.parametrize(("count", "left_out"), [(6, 0), (7, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (25, 7)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, left_out: int) -> None:
    """Tables of the binomial distribution, as in Conover 1999, table A3."""
    values = [float(number) for number in range(count)]
    assert median_interval(values) == (values[left_out], values[-1 - left_out])
    assert median_interval(values[:5]) is None


@given(cpu_s=seconds, gpu_s=seconds, transfer_s=seconds, needed=st.integers(1, 12), rest_s=seconds, layer_s=seconds)
def test_constants_are_added_once(
    cpu_s: float, gpu_s: float, transfer_s: float, needed: int, rest_s: float, layer_s: float
) -> None:
    free = StrategyModel(latency(cpu_s, gpu_s, transfer_s), FREE, 64)
    costly = StrategyModel(latency(cpu_s, gpu_s, transfer_s), StepCosts(rest_s, layer_s, 0.0, 0.0, 0.0, 0.0), 64)
    steps = [step(0, needed, 0)]
    for misses in ("cpu", "fetch", "off", "mixed"):
        more = costly.seconds_per_token(misses, steps, 5) - free.seconds_per_token(misses, steps, 5)
        assert more == pytest.approx(rest_s + 5 * layer_s, abs=1e-9)
