"""What a few rows say of a job's speed: their warm sweeps count, not the first ones and not others' time."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.jobs.rows import RowAnswer
from engine.planner.batch_prediction import Bottleneck, JobPrediction, JobRows
from engine.runtime.batch import job_plan
from engine.runtime.batch.job_plan import SampleTime, SweepClock

_LAYERS = 5


class _Sample:
    """Rows of given lengths in sweeps: the first reads their prompts."""

    def __init__(self, cold_s: float, sweep_s: float, lengths: list[int], chats: dict[int, float]) -> None:
        self.now, self.tokens = 0.0, [0] * len(lengths)
        clock = SweepClock(lambda: (len(self.tokens), sum(self.tokens)), lambda: self.now)
        left = list(lengths)
        for sweep in range(max(lengths)):
            for _layer in range(_LAYERS):
                clock.look()
                self.now += (sweep_s if sweep else cold_s) / _LAYERS
            if sweep in chats:
                clock.leave(lambda took=chats[sweep]: setattr(self, "now", self.now + took))  # type: ignore[misc]
            self.tokens = [count + 1 for count, length in zip(self.tokens, left, strict=True) if count + 1 < length]
            left = [length for length in left if length > sweep + 1]
        self.found = clock.time()


@given(
    st.floats(0.1, 60),
    st.floats(0.001, 1),
    st.lists(st.integers(4, 12), min_size=1, max_size=3),
    st.dictionaries(st.integers(0, 1), st.floats(0.5, 9)),
)
def test_warm_sweeps_are_timed(cold_s: float, sweep_s: float, lengths: list[int], chats: dict[int, float]) -> None:
    found = _Sample(cold_s, sweep_s, lengths, chats).found
    assert found.sweep_s == pytest.approx(sweep_s)
    assert 1 <= found.sweep_rows <= len(lengths)
    assert found.seconds == pytest.approx(cold_s + sweep_s * (max(lengths) - 1))


def test_answers_of_one_token_have_no_sweep_to_time() -> None:
    assert _Sample(2.0, 1.0, [1, 1, 1], {}).found == SampleTime(2.0)


@pytest.mark.parametrize("warm_s", [0.05, 0.5])
def test_cold_rows_are_not_taken_for_slow_ones(monkeypatch: pytest.MonkeyPatch, warm_s: float) -> None:
    """A prompt is predicted to take a second, a sweep a tenth of one, whoever shares it."""

    def predicted(rows: JobRows) -> JobPrediction:
        seconds = 1.0 * rows.rows + 0.1 * (rows.generated_tokens - 1)
        rate = rows.rows * rows.generated_tokens / seconds
        return JobPrediction(rows, rows.rows, 1, "", rate, rate, 1.5 * rate, 1.0, 1.0, Bottleneck.WEIGHTS)

    whole = predicted(JobRows(100, 20.0, 16.0))
    monkeypatch.setattr(job_plan, "plan_job", lambda *_: SimpleNamespace(prediction=whole))
    monkeypatch.setattr(job_plan, "plan_rows", lambda rows, *_: SimpleNamespace(prediction=predicted(rows)))
    monkeypatch.setattr(job_plan, "find_shape", lambda _path: None)
    answers = [RowAnswer(row, "", "length", 20, 16) for row in range(3)]
    loaded: Any = SimpleNamespace(info=SimpleNamespace(path=""))
    told = job_plan.predicted_after(None, loaded, answers, SampleTime(500.0, 3, warm_s))  # type: ignore[arg-type]
    assert told is not None
    factor = 0.1 / warm_s
    assert (told.low, told.high) == pytest.approx(
        (0.75 * whole.tokens_per_s * min(1, factor), whole.tokens_per_s * max(1.5, 1.25 * factor))
    )
