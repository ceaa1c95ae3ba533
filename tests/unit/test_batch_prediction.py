"""How fast a job will be, before it has run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.model_shape import model_names, read_model
from engine.hardware.machine import machine_names, read_machine
from engine.planner.batch_plan import best_batch, question_of
from engine.planner.batch_prediction import Bottleneck, JobRows, predict_on_cpu, predicted_on_card
from engine.planner.costs import engine_costs
from engine.planner.plan_parts import Limits
from engine.planner.schedules import SCHEDULES
from engine.verbs.batch import prediction_text

MODELS = st.sampled_from(model_names())
MACHINES = st.sampled_from(machine_names())
ROWS = st.builds(JobRows, st.integers(1, 5000), st.floats(1, 3000), st.floats(1, 600))


@given(MACHINES, MODELS, ROWS, st.integers(1, 512), st.sampled_from(["bf16", "int8", "int4"]))
def test_more_rows_together_are_never_slower(machine: str, model: str, job: JobRows, rows: int, precision: str) -> None:
    costs = engine_costs(read_machine(machine), read_model(model), precision)
    few = predict_on_cpu(costs, job, rows, sweep_tokens=1024)
    many = predict_on_cpu(costs, job, 2 * rows, sweep_tokens=1024)
    assert few.batch_rows == min(rows, job.rows)
    assert many.tokens_per_s >= few.tokens_per_s * 0.999
    assert few.low < few.tokens_per_s < few.high
    assert few.seconds_low < job.rows * job.generated_tokens / few.tokens_per_s < few.seconds_high
    from_disk = predict_on_cpu(costs, job, rows, sweep_tokens=1024, disk_share=0.5)
    assert from_disk.tokens_per_s < few.tokens_per_s


def test_what_limits_a_job_is_named() -> None:
    costs = engine_costs(read_machine("gcp-l4"), read_model("mixtral-8x7b"), "bf16")
    job = JobRows(1000, 30.0, 200.0)
    assert predict_on_cpu(costs, job, 1, sweep_tokens=1024).bottleneck is Bottleneck.WEIGHTS
    assert predict_on_cpu(costs, job, 256, sweep_tokens=1024).bottleneck is Bottleneck.ARITHMETIC
    assert predict_on_cpu(costs, job, 4, sweep_tokens=1024, disk_share=1.0).bottleneck is Bottleneck.DISK
    of_lanes = [predicted_on_card(job, 64, 4, "Klotski", 10.0, lane, 0.2).bottleneck for lane in ("h2d", "gpu", "disk")]
    assert of_lanes == [Bottleneck.LINK, Bottleneck.CARD, Bottleneck.DISK]


def test_a_prediction_in_a_sentence() -> None:
    predicted = predicted_on_card(JobRows(2000, 50.0, 20.0), 24, 3, "Klotski", 310.0, "h2d", 0.5)
    facts = ("24 rows", "3 chunks", "155 to 465 tokens/s", "the link to the card", "86 s to 4 min", "20 tokens")
    said = prediction_text(predicted)
    assert all(fact in said for fact in facts)
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
