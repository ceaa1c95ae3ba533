"""When one PC stops being sensible: arithmetic, words, and `switchyard plan --rows`."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli import main
from engine.verbs.plan import DAY_S, JobNeeds, Prices, beyond_one_pc


def test_a_hurry_needs_several_pcs_and_a_great_one_a_cluster() -> None:
    few = beyond_one_pc(JobNeeds(100_000, 200, 100, deadline_s=DAY_S), 50.0)
    assert (few.pcs, few.is_sensible) == (3, False)
    assert few.sentence == (
        "This PC answers 100,000 rows in 2.3 days. "
        "To be done within 24 h, 3 PCs like it have to share the rows: endpoints, or Ray."
    )
    many = beyond_one_pc(JobNeeds(1_000_000, 200, 100, deadline_s=DAY_S), 50.0)
    assert many.pcs == 24
    assert "24 PCs like it: that is work for a server" in many.sentence


def test_an_endpoint_is_compared_by_cost_and_by_its_measured_speed() -> None:
    prices = Prices(300, 0.30, 0.05, 0.20, 400.0, "EUR")
    told = beyond_one_pc(JobNeeds(100_000, 200, 100), 50.0, prices)
    assert told.endpoint_cost == pytest.approx(3.0)
    assert told.cost == pytest.approx(5.0)
    assert not told.is_sensible
    assert told.sentence.endswith(
        "The endpoint takes 6.9 h, 8 times as fast and costs 3.00 EUR: less than the electricity here."
    )
    dear = beyond_one_pc(JobNeeds(100_000, 200, 100), 50.0, Prices(300, 0.30, 1.0, 5.0, currency="EUR"))
    assert dear.is_sensible
    assert "more than the electricity here" in dear.sentence
    alike = beyond_one_pc(JobNeeds(100_000, 0, 100), 50.0, Prices(300, 0.30, None, 0.5))
    assert alike.sentence.endswith("The endpoint costs 5.00: about as much as the electricity here.")


@given(
    rows=st.integers(1, 10**9),
    tokens=st.floats(1, 1e5),
    speed=st.floats(0.01, 1e5),
    deadline=st.one_of(st.none(), st.floats(1, 1e8)),
    watts=st.one_of(st.none(), st.floats(0, 5000)),
)
def test_the_figures_agree_with_each_other(
    rows: int, tokens: float, speed: float, deadline: float | None, watts: float | None
) -> None:
    told = beyond_one_pc(JobNeeds(rows, tokens, tokens, deadline), speed, Prices(watts, 0.3))
    assert told.seconds == pytest.approx(rows * tokens / speed)
    if deadline is not None:
        assert told.seconds / told.pcs <= deadline * (1 + 1e-6)
    if watts is not None:
        assert told.kwh is not None
        assert told.kwh * 3.6e6 == pytest.approx(watts * told.seconds)
    assert "nan" not in told.sentence
    assert "inf" not in told.sentence


def test_what_cannot_be_is_refused() -> None:
    for wrong in (lambda: JobNeeds(0, 1, 1), lambda: JobNeeds(1, 1, 0), lambda: JobNeeds(1, -1, 1)):
        with pytest.raises(ValueError, match="must"):
            wrong()
    with pytest.raises(ValueError, match="negative"):
        Prices(watts=-1)
    with pytest.raises(ValueError, match="above 0"):
        beyond_one_pc(JobNeeds(1, 1, 1), math.nan)


def test_plan_says_it_for_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "mixtral-8x7b", "--hardware", "desktop-no-gpu-64gb", "--rows", "200000"]
    prices = ["--deadline", "1d", "--watts", "250", "--per-kwh", "0.30", "--endpoint-price", "0.10,0.40"]
    assert main([*plan, *prices]) == 0
    said = capsys.readouterr().out
    assert "This PC answers 200,000 rows in " in said
    assert "PCs like it" in said
    assert "The endpoint costs " in said
    assert main([*plan, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workload"]["name"] == "batch"
    assert document["beyond_one_pc"]["cost"] is None
    assert document["beyond_one_pc"]["seconds"] > 0


def test_plan_refuses_prices_without_rows_and_what_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "mixtral-8x7b", "--hardware", "desktop-no-gpu-64gb"]
    assert main([*plan, "--watts", "250"]) == 2
    assert "--rows" in capsys.readouterr().err
    assert main([*plan, "--rows", "5", "--deadline", "soon"]) == 2
    assert "'soon' is not a time" in capsys.readouterr().err
