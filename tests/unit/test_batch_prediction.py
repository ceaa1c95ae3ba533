"""How fast a job will be, before it has run and while it runs."""

import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.batch_files.job_watcher import ComputingClock, PaceMeter
from engine.batch_files.journal import JobManifest, Journal, SafeKeeping
from engine.batch_files.rows import Answer, failed
from engine.bench.report import median_interval
from engine.checkpoint.model_shape import model_names, read_model
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.model_info import ModelInfo
from engine.hardware.machine import machine_names, read_machine
from engine.planner.batch_plan import best_batch, question_of
from engine.planner.batch_prediction import (
    Bottleneck,
    JobPrediction,
    JobRows,
    first_rows,
    predict_on_cpu,
    predicted_on_card,
)
from engine.planner.costs import engine_costs
from engine.planner.plan_parts import BatchPlan, Limits
from engine.planner.schedules import SCHEDULES
from engine.runtime.batch import job_plan
from engine.runtime.batch.job_plan import SampleTime, SweepClock
from engine.tuning.batch_forecast import ForecastQuestion, forecast_of
from engine.tuning.machine_state import MachineLook
from engine.verbs.batch import prediction_text

MODELS = st.sampled_from(model_names())
MACHINES = st.sampled_from(machine_names())
ROWS = st.builds(JobRows, st.integers(1, 5000), st.floats(1, 3000), st.floats(1, 600))


@given(MACHINES, MODELS, ROWS, st.integers(1, 512), st.sampled_from(["bf16", "int8", "int4"]), st.floats(0, 1))
@example("gcp-l4", "gpt-oss-20b", JobRows(1000, 2100.0, 50.0), 256, "int4", 0.95)
def test_more_rows_together_are_never_slower(
    machine: str, model: str, job: JobRows, rows: int, precision: str, share: float
) -> None:
    costs = engine_costs(read_machine(machine), read_model(model), precision)
    few = predict_on_cpu(costs, job, rows, sweep_tokens=1024)
    many = predict_on_cpu(costs, job, 2 * rows, sweep_tokens=1024)
    assert few.batch_rows == min(rows, job.rows)
    assert many.tokens_per_s >= few.tokens_per_s * 0.999
    assert few.low < few.tokens_per_s < few.high
    assert few.seconds_low < job.rows * job.generated_tokens / few.tokens_per_s < few.seconds_high
    from_disk = predict_on_cpu(costs, job, rows, sweep_tokens=1024, disk_share=0.5)
    assert from_disk.tokens_per_s < few.tokens_per_s
    shared = predict_on_cpu(costs, replace(job, shared_tokens=job.prompt_tokens * share), rows, sweep_tokens=1024)
    one = predict_on_cpu(costs, job, 1, sweep_tokens=1024)
    assert one.kv_bytes <= shared.kv_bytes <= few.kv_bytes  # of windows, too, which share nothing that they passed
    assert math.isfinite(shared.tokens_per_s)


PLAN = BatchPlan("Klotski", "klotski", "klotski", 24, 8, 0.0, 0.0, 70, 3, None, False, 310.0)


def test_what_limits_a_job_is_named() -> None:
    costs = engine_costs(read_machine("gcp-l4"), read_model("mixtral-8x7b"), "bf16")
    job = JobRows(1000, 30.0, 200.0)
    assert predict_on_cpu(costs, job, 1, sweep_tokens=1024).bottleneck is Bottleneck.WEIGHTS
    assert predict_on_cpu(costs, job, 256, sweep_tokens=1024).bottleneck is Bottleneck.ARITHMETIC
    assert predict_on_cpu(costs, job, 4, sweep_tokens=1024, disk_share=1.0).bottleneck is Bottleneck.DISK
    of_lanes = [predicted_on_card(job, PLAN, lane, 0.2, costs.model).bottleneck for lane in ("h2d", "gpu", "disk")]
    assert of_lanes == [Bottleneck.LINK, Bottleneck.CARD, Bottleneck.DISK]


def test_a_prediction_in_a_sentence() -> None:
    predicted = predicted_on_card(JobRows(2000, 50.0, 20.0), PLAN, "h2d", 0.5, read_model("mixtral-8x7b"))
    assert predicted.kv_bytes == 24 * 96 * read_model("mixtral-8x7b").kv_bytes_per_token()
    facts = ("24 rows", "3 chunks", "155 to 465 tokens/s", "the link to the card", "86 s to 4 min", "20 tokens")
    said = prediction_text(predicted)
    assert all(fact in said for fact in (*facts, "context takes up to 302 MB"))
    alone = predict_on_cpu(
        engine_costs(read_machine("gcp-l4"), read_model("mixtral-8x7b"), "bf16"),
        JobRows(1, 50.0, 20.0),
        64,
        sweep_tokens=1024,
    )
    assert prediction_text(alone).startswith("one row at a time")


def test_no_rows_cannot_be_predicted() -> None:
    costs = engine_costs(read_machine("gcp-l4"), read_model("mixtral-8x7b"), "bf16")
    with pytest.raises(ValueError, match="no rows"):
        predict_on_cpu(costs, JobRows(0, 10.0, 10.0), 4, sweep_tokens=1024)


@given(MACHINES, MODELS, ROWS)
@settings(max_examples=6, deadline=None)
def test_a_plan_of_a_card_has_no_more_rows_than_the_job(machine: str, model: str, job: JobRows) -> None:
    found = best_batch(question_of(read_machine(machine), read_model(model), Limits(), "int4", job))
    if found is None:
        return
    plan, lane = found
    assert 1 <= plan.micro_batch <= plan.sequences <= min(job.rows, 512)
    assert plan.batches == -(-plan.sequences // plan.micro_batch)
    assert plan.tokens_per_s > 0
    assert 0 <= plan.weights_on_card <= 1
    prefill, decode = SCHEDULES[plan.prefill], SCHEDULES[plan.decode]
    assert prefill.order is not None
    assert decode.order is not None
    assert plan.cache_on_card == 0 or (prefill.attends_on_card and decode.attends_on_card)
    assert lane


FORECAST_ROWS = 40
MODEL = "olmoe-1b-7b"
"""Its shape is known by name; nothing of it needs to be here."""


LOADED = ModelInfo("OLMoE", MODEL, "olmoe", "cpu", "bf16", 2, 1, 1, 1, 1, 8192, 1, 1, 1)


@pytest.fixture
def question(tmp_path: Path, switchyard_home: Path) -> ForecastQuestion:
    file = tmp_path / "in.csv"
    file.write_text("text\n" + "".join(f"some words about row {n}\n" for n in range(FORECAST_ROWS)), encoding="utf-8")
    job = BatchJob(str(file), str(tmp_path / "out.csv"), sampling=SamplingParams(max_tokens=48))
    return ForecastQuestion(job, LOADED, None, None)


def test_rows_together_are_faster_than_alone(question: ForecastQuestion) -> None:
    found = forecast_of(question)
    plan = found.plan
    assert (plan.job.rows, plan.batch_rows, plan.job.generated_tokens) == (
        FORECAST_ROWS,
        FORECAST_ROWS,
        48,
    )
    assert 0 < plan.low < plan.high
    assert 0 < found.alone_tokens_per_s < plan.high
    assert 0 < plan.seconds_low < plan.seconds_high
    assert not plan.is_measured
    counted = forecast_of(replace(question, total=100_000))
    assert counted.plan.job.rows == 100_000
    assert counted.plan.batch_rows < 1000


def test_choices_are_short_answers(question: ForecastQuestion) -> None:
    found = forecast_of(replace(question, job=replace(question.job, choices=("good", "bad"))))
    assert found.plan.job.generated_tokens == 2


def test_rows_of_a_file_that_is_read_piece_by_piece_are_counted(question: ForecastQuestion) -> None:
    text = "text\n" + "".join(f"row {n}\n" for n in range(300))
    Path(question.job.input).write_text(text, encoding="utf-8")
    found = forecast_of(question)
    assert found is not None
    assert found.plan.job.rows == 300
    pieces = [(piece / 10, row) for piece in range(1, 11) for row in range(100)]
    assert [first_rows(iter(pieces[:count]))[1] for count in (30, 60, 1000)] == [30, 600, 1000]
    each = ((row / 1000, row) for row in range(1, 1001))
    assert first_rows(each) == ([*range(1, 49)], 1000)


def test_what_all_prompts_begin_with_is_read_once(question: ForecastQuestion) -> None:
    plain, told = (
        forecast_of(replace(question, job=replace(question.job, template=f"{words}{{{{text}}}}")))
        for words in ("", "Say whether this is good or bad. " * 40)
    )
    assert plain is not None
    assert told is not None
    assert told.plan.job.shared_tokens > 300
    assert told.plan.job.own_tokens == pytest.approx(plain.plan.job.own_tokens, abs=2)
    assert told.plan.tokens_per_s > 0.5 * plain.plan.tokens_per_s
    apart = replace(told.plan.job, shared_tokens=0)
    costs = engine_costs(read_machine("gcp-l4"), read_model(MODEL), "bf16")
    shared, read = (predict_on_cpu(costs, job, 40, sweep_tokens=1024) for job in (told.plan.job, apart))
    assert shared.tokens_per_s > 2 * read.tokens_per_s
    assert 0 < 2 * shared.kv_bytes < read.kv_bytes
    for name in model_names():  # of layers with a window a long beginning holds no more than that
        costs = engine_costs(read_machine("gcp-l4"), read_model(name), "bf16")
        held = predict_on_cpu(costs, JobRows(100, 6000, 200, 5900), 40, sweep_tokens=1024).kv_bytes
        assert (
            costs.model.context_bytes(6200, in_pages=True)
            <= held
            <= 40 * costs.model.context_bytes(6200, in_pages=True)
        )


def test_a_job_of_a_model_that_is_read_from_disk_waits_for_the_disk(
    question: ForecastQuestion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(ram_bytes: int | None, disk: float) -> JobPrediction:
        machine = MachineLook.machine
        with monkeypatch.context() as patch:
            patch.setattr(MachineLook, "machine", lambda *asked: replace(machine(*asked), disk_bytes_per_s=disk))
            found = forecast_of(replace(question, config=EngineConfig(MODEL, device="cpu", ram_bytes=ram_bytes)))
        assert found is not None
        return found.plan

    budget = 6 * 2**30  # of 14 GB
    quick, slow, in_ram = rate(budget, 3e9), rate(budget, 0.1e9), rate(None, 0.1e9)
    assert slow.bottleneck is Bottleneck.DISK
    assert in_ram.tokens_per_s > quick.tokens_per_s > 4 * slow.tokens_per_s


@pytest.mark.parametrize("machine", ["desktop-rtx-4090-24gb", "desktop-rtx-3060-12gb"])
def test_a_disk_that_is_another_leads_to_another_plan(machine: str) -> None:
    """Of a model larger than RAM, whose experts each sweep reads again."""
    pc, rows = read_machine(machine).with_memory(ram_bytes=48 * 2**30), JobRows(512, 256, 64)
    found = [
        best_batch(question_of(replace(pc, disk_bytes_per_s=disk), read_model("qwen3-30b-a3b"), Limits(), "bf16", rows))
        for disk in (30e9, 3e9, 0.1e9)
    ]
    plans = [each[0] for each in found if each is not None]
    assert [each[1] for each in found if each is not None][2] == "disk"
    rates = [plan.tokens_per_s for plan in plans]
    assert rates[0] > 1.1 * rates[1] > 11 * rates[2]
    sizes = [(plan.sequences, plan.micro_batch, plan.weights_on_card, plan.cache_on_card) for plan in plans]
    assert sizes[0] != sizes[1] != sizes[2]


def test_of_what_is_not_known_nothing_is_said(question: ForecastQuestion, tmp_path: Path) -> None:
    assert forecast_of(replace(question, model=replace(LOADED, path=str(tmp_path / "gone")))) is None
    assert forecast_of(replace(question, job=replace(question.job, input=str(tmp_path / "gone.csv")))) is None
    assert forecast_of(replace(question, job=replace(question.job, template="{{nobody}}"))) is None
    assert forecast_of(replace(question, model=replace(question.model, device="cuda:0"))) is None


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
    answers = [Answer(row, "", "length", 20, 16) for row in range(3)]
    loaded: Any = SimpleNamespace(info=SimpleNamespace(path=""))
    told = job_plan.predicted_after(None, loaded, answers, SampleTime(500.0, 3, warm_s))  # type: ignore[arg-type]
    factor = 0.1 / warm_s
    assert (told.low, told.high) == pytest.approx(
        (0.75 * whole.tokens_per_s * min(1, factor), whole.tokens_per_s * max(1.5, 1.25 * factor))
    )


_MANIFEST = JobManifest("hash", "{{text}}", "", "model", "bf16", "{}", "", "{}")


def test_a_steady_pace_is_told_with_a_range_that_holds_it() -> None:
    meter = PaceMeter(done=10, failed=1, now=0.0)
    assert meter.pace(110, 0.0).remaining_low_s is None
    for second in range(1, 61):
        meter.ended(failed=False, generated_tokens=20)
        pace = meter.pace(110, float(second))
    assert (pace.done, pace.failed, pace.total) == (70, 1, 110)
    assert pace.tokens_per_s == 20
    assert pace.remaining_low_s is not None
    assert pace.remaining_high_s is not None
    assert pace.remaining_low_s <= 40 <= pace.remaining_high_s


@given(
    st.lists(
        st.tuples(st.floats(0.01, 500), st.booleans(), st.integers(0, 500), st.booleans()), min_size=1, max_size=60
    ),
    st.integers(0, 1000),
)
def test_no_pace_is_negative_and_ranges_are_in_order(steps: list[tuple[float, bool, int, bool]], total: int) -> None:
    meter, now = PaceMeter(0, 0, 0.0), 0.0
    for elapsed, ends, tokens, bad in steps:
        now += elapsed
        if ends:
            meter.ended(failed=bad, generated_tokens=tokens)
        pace = meter.pace(total, now)
        assert pace.tokens_per_s >= 0
        if pace.remaining_low_s is not None and pace.remaining_high_s is not None:
            assert 0 <= pace.remaining_low_s <= pace.remaining_high_s


@given(st.integers(1, 400), st.integers(1, 400), st.integers(10, 100))
def test_no_job_takes_longer_than_if_every_answer_were_as_long_as_it_may_be(ended: int, left: int, tokens: int) -> None:
    meter = PaceMeter(0, 0, 0.0, most_tokens=100)
    meter.pace(ended + left, 0.0)
    for _ in range(ended):
        meter.ended(failed=False, generated_tokens=tokens)
    pace = meter.pace(ended + left, 60.0)
    assert pace.remaining_low_s is not None
    assert pace.remaining_high_s is not None
    assert pace.remaining_low_s <= pace.remaining_high_s <= left * 100 / pace.tokens_per_s + 1e-6


def test_waiting_is_no_computing_and_sinks_no_rate() -> None:
    now = [100.0]
    clock = ComputingClock(lambda: now[0])
    meter = PaceMeter(0, 0, clock.now())
    for _ in range(10):
        now[0] += 2
        meter.ended(failed=False, generated_tokens=100)
    before = meter.pace(20, clock.now())
    with clock.stopped():
        now[0] += 1000
        with clock.stopped():
            now[0] += 1000
        assert meter.pace(20, clock.now()) == before
    assert meter.pace(20, clock.now()) == before
    now[0] += 2
    assert clock.now() == 22


class _FullFor:
    """A journal on a disk that is full for the first so many writes."""

    def __init__(self, journal: Journal, refusals: int) -> None:
        self._journal = journal
        self.refusals = refusals

    def record(self, answers: list[Answer]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise EngineError(ErrorCode.DISK_FULL, "The disk is full.")
        self._journal.record(answers)


def test_a_full_disk_delays_answers_and_loses_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job", _MANIFEST)
    full = _FullFor(journal, 3)
    keeping = SafeKeeping(full, clock=lambda: 0.0)  # type: ignore[arg-type]
    for row in range(100):
        keeping.keep(Answer(row, "x", "stop") if row % 2 else failed(row, "is odd"))
    assert keeping.problem == "The disk is full."
    assert full.refusals == 2, "a disk that is full is asked again when its owner says so, not for every answer"
    assert [keeping.flush() for _ in range(3)] == [False, False, True]
    assert keeping.problem == ""
    assert [answer.row for answer in journal.answers()] == list(range(100))
    journal.close()


def test_it_holds_the_true_median_about_as_often_as_it_says() -> None:
    dice = random.Random(1)
    held = 0
    for _ in range(2000):
        sure = median_interval(sorted(dice.lognormvariate(0, 1) for _ in range(41)))
        held += sure[0] <= 1 <= sure[1]
    assert 0.93 < held / 2000 < 0.985


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=80))
def test_the_median_lies_within(values: list[float]) -> None:
    sure = median_interval(sorted(values))
    assert sure is not None
    low, high = sure
    assert min(values) <= low <= statistics.median(values) <= high <= max(values)
