"""The simulator's timeline beneath the real one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.history.history import History
from app.services.predicted_timeline import (
    Predicted,
    RequestShape,
    predict,
    request_before,
)
from app.views.monitor.second import SecondTimeline, aligned_ns, assumptions, speeds
from app.widgets.timeline.view import TimelineView
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.telemetry.lanes import DECODE, PREFILL
from engine.telemetry.predicted import lengthened
from engine.telemetry.records import STEP, Records
from tests.app.recorded import STEP_NS, decoded

START_NS = 10**12
PREFILL_NS = 300_000_000


def asked(steps: int, prompt: int = 40, request: int = 1, start_ns: int = START_NS) -> tuple[Records, Records]:
    """A request: a prompt that is read, then decode steps."""
    spans, made = decoded(steps, start_ns + PREFILL_NS)
    first = np.zeros(1, STEP)
    first["start_ns"], first["end_ns"], first["name"] = start_ns, start_ns + PREFILL_NS, PREFILL
    first["tokens"], first["request"], made["request"], spans["request"] = prompt, request, request, request
    made["step"] += 1
    spans["step"] += 1
    return spans, np.concatenate((first, made))


def history_of(*requests: tuple[Records, Records]) -> History:
    history = History()
    for spans, steps in requests:
        history.add_spans(spans)
        history.add_steps(steps)
    return history


def tiny_checkpoint(folder: Path) -> Path:
    """Configuration and headers of a small mixture of experts; its tensors have no bytes."""
    hidden, inner, layers, experts = 64, 96, 3, 8
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
        "max_position_embeddings": 2048,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, hidden), "lm_head.weight": (256, hidden)}
    for layer in range(layers):
        base = f"model.layers.{layer}."
        for name, width in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2), ("o", hidden)):
            shapes[f"{base}self_attn.{name}_proj.weight"] = (width, hidden)
        shapes[f"{base}block_sparse_moe.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            own = f"{base}block_sparse_moe.experts.{expert}."
            shapes |= {
                f"{own}w1.weight": (inner, hidden),
                f"{own}w3.weight": (inner, hidden),
                f"{own}w2.weight": (hidden, inner),
            }
    header, offset = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def shape(checkpoint: Path, device: str = "cpu", tokens: int = 50) -> RequestShape:
    return RequestShape(EngineConfig(str(checkpoint), device=device, precision="bf16", threads=2), "tiny", 40, tokens)


# --- the prediction -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulated:slow-link#0"])
def test_a_request_is_predicted_step_by_step(checkpoint: Path, switchyard_home: Path, device: str) -> None:
    found = predict(shape(checkpoint, device))
    assert len(found.steps_ns) == 50
    assert found.steps_ns[0] == pytest.approx(1e9 * found.ttft_s, rel=1e-3)
    last = found.history.last_request(2**62)[-1]
    assert last.tokens == 50
    took_s = (last.end_ns - found.steps_ns[-13]) / 1e9
    assert 13 / took_s == pytest.approx(found.tokens_per_s, rel=0.35)
    assert found.history.has_copies == (device != "cpu")
    assert "cpu" in (*found.measured, *found.assumed)


def test_a_model_that_is_not_here_is_a_sentence(switchyard_home: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        predict(RequestShape(EngineConfig(str(tmp_path / "gone"), device="cpu"), "gone", 4, 4))


@given(simulated=st.integers(1, 30), wanted=st.integers(1, 90))
def test_a_long_answer_repeats_the_last_steps(simulated: int, wanted: int) -> None:
    spans, steps = asked(simulated)
    more_spans, more = lengthened(spans, steps, wanted)
    decode = more[more["name"] == DECODE]
    assert len(decode) == wanted
    assert (np.diff(more["step"]) == 1).all()
    assert (decode["start_ns"][1:] == decode["end_ns"][:-1]).all()
    assert set(more_spans["step"].tolist()) == set(decode["step"].tolist())
    for name in ("start_ns", "end_ns"):  # every step holds the same spans at the same places
        inside = more_spans[name] - START_NS - PREFILL_NS - (more_spans["step"] - 1) * STEP_NS
        assert (inside >= 0).all()
        assert (inside <= STEP_NS).all()


# --- at the same step -----------------------------------------------------------------------------


def test_the_request_in_sight_is_found() -> None:
    history = history_of(asked(30, 40, 1), asked(20, 9, 2, START_NS + 10**10))
    assert request_before(history, START_NS + 5 * 10**9) == (40, 30)
    assert request_before(history, 2**62) == (9, 20)
    assert request_before(history, START_NS) is None


@given(st.integers(0, 29), st.integers(0, STEP_NS - 1), st.integers(1_000_000, 100_000_000))
def test_both_show_the_same_step_at_the_same_place(step: int, inside_ns: int, predicted_ns: int) -> None:
    history = history_of(asked(31))
    steps_ns = [7_000_000 + number * predicted_ns for number in range(31)]
    real_ns = START_NS + PREFILL_NS + step * STEP_NS - inside_ns
    start = aligned_ns(history, real_ns, real_ns + 10**8, steps_ns)
    if real_ns < START_NS + PREFILL_NS:  # the prompt is in sight: both begin together
        assert start == real_ns - START_NS
    else:
        assert start == steps_ns[step] - inside_ns


def test_what_began_in_sight_begins_together() -> None:
    history = history_of(asked(30))
    assert aligned_ns(history, START_NS - 10**9, START_NS + 10**9, [5, 10]) == -(10**9)
    assert aligned_ns(History(), 0, 10**9, [5]) is None


# --- beneath the real one -------------------------------------------------------------------------


def test_it_stands_beneath_the_real_one(
    qtbot: QtBot, qapp: QApplication, checkpoint: Path, switchyard_home: Path
) -> None:
    found: Predicted = predict(shape(checkpoint))
    first = TimelineView()
    second = SecondTimeline(first)
    for widget in (first, second):
        qtbot.addWidget(widget)
        widget.resize(900, 300)
        widget.show()
    first.navigator.set_source(history_of(asked(50)), recorded=True)
    second.show_predicted(found, 98.1)
    assert "98.1 measured" in second.caption.text()
    assert "aligned at the same step" in second.said.text()
    at = START_NS + PREFILL_NS + 20 * STEP_NS
    first.navigator.show(at, at + 5 * STEP_NS)
    viewport, mine = first.navigator.viewport, second.view.navigator.viewport
    assert mine.span_ns == viewport.span_ns
    inside = (START_NS + PREFILL_NS + 20 * STEP_NS - viewport.start_ns) % STEP_NS
    assert min(abs(mine.start_ns + inside - step) for step in found.steps_ns) < 2
    first.set_cursor(viewport.at(100))
    assert second.view.cursor_ns == pytest.approx(mine.start_ns + 100 * viewport.column_ns)
    assert not second.grab().isNull()
    second.dismiss()
    assert second.predicted is None


def test_what_was_assumed_is_said(checkpoint: Path, switchyard_home: Path) -> None:
    found = predict(shape(checkpoint, "emulated:slow-link#0"))
    said = assumptions(found)
    assert "40 tokens read and 50 written" in said
    assert "From data sheets" in said
    assert speeds(found, None).count("tokens/s") == 1
