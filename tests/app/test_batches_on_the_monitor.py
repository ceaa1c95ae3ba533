"""What the Monitor says while a batch runs, and while other programs keep the processor busy."""

from dataclasses import replace

import numpy as np
import pytest

from app.models.cache_figures import token_figures
from app.services.analyser import waiting_for_last
from app.services.history.history import History
from engine.telemetry.lanes import BATCH_STEP, PREFILL
from engine.telemetry.records import Records
from tests.app.recorded import STEP_NS, decoded, sample

START = 10**12
ROWS = 12


def batch(steps: int, start_ns: int = START, rows: int = ROWS) -> tuple[Records, Records]:
    """Steps of many rows, whose experts the engine counts as those of a prefill."""
    spans, made = decoded(steps, start_ns)
    made["name"], made["tokens"], made["request"] = BATCH_STEP, rows, 2
    made["prefill_on_cpu"], made["on_cpu"] = 20 * rows, 0
    spans["request"] = 2
    return spans, made


def history_of(*parts: tuple[Records, Records]) -> History:
    found = History()
    for spans, steps in parts:
        found.add_spans(spans)
        found.add_steps(steps)
    return found


def test_the_experts_of_a_batch_are_counted() -> None:
    history = history_of(batch(50))
    edges = np.linspace(START, START + 50 * STEP_NS, 6)
    hit, fetched, on_cpu = history.experts(edges)
    assert (on_cpu > 0.99).all()
    assert not hit.any()
    assert not fetched.any()


def test_what_a_chat_reads_is_not_counted_as_its_tokens_experts() -> None:
    spans, steps = batch(50)
    steps["name"] = PREFILL
    assert not history_of((spans, steps)).experts(np.linspace(START, START + 50 * STEP_NS, 6)).any()


def test_figures_of_a_token_are_of_what_ran_last() -> None:
    chat, later = decoded(100, START), batch(30, START + 100 * STEP_NS)
    before = token_figures(history_of(chat))
    during = token_figures(history_of(chat, later))
    assert before is not None
    assert during is not None
    assert (before.is_batch, during.is_batch) == (False, True)
    assert (during.tokens, during.steps) == (30 * ROWS, 30)
    assert before.used == during.used == 20.0  # a token of a batch uses as many experts as one of a chat


def test_the_headline_follows_a_batch_and_comes_back_to_a_chat() -> None:
    chat, later = decoded(100, START), batch(30, START + 100 * STEP_NS)
    history = history_of(chat, later)
    waited = waiting_for_last(history, 200)
    assert waited.is_batch
    assert waited.steps == 17  # as many as have made 200 tokens
    assert waited.tokens == 17 * ROWS
    assert waited.seconds == pytest.approx(17 * STEP_NS / 1e9)
    assert waited.most == "cpu_experts"
    for part, add in zip(decoded(5, START + 130 * STEP_NS), (history.add_spans, history.add_steps), strict=True):
        add(part)
    again = waiting_for_last(history, 200)
    assert not again.is_batch
    assert again.tokens == 105


@pytest.mark.parametrize(("busy", "ours", "others"), [(0.97, 0.06, 0.94), (0.5, 1.0, 0.0), (0.9, 1.6, 0.1)])
def test_what_other_programs_take_is_told(busy: float, ours: float, others: float) -> None:
    history = history_of(decoded(100, START))
    for at_ns in range(START, START + 100 * STEP_NS, 4 * 10**8):
        history.add_sample(at_ns, replace(sample(busy=busy), cpu_ours=ours))
    assert waiting_for_last(history, 200).others == pytest.approx(others, abs=0.01)
