"""A chat that is asked while a job runs is answered within one layer, by the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.batch_files.messages import BatchFinished, BatchPlanned, BatchRows, SampleBatch, StartBatch
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.process.batch import BatchService
from engine.process.requests import RequestQueue
from engine.protocol import ChatMessage, Event, Finished, Generate
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.engine import Engine
from tests.engine.tiny_families import tiny_checkpoint

_ROWS, _SAMPLED, _ASKED_AFTER = 30, 3, (3, 4, 17)
"""Layers after which a chat is asked."""


@pytest.mark.parametrize("sampled", [False, True], ids=["job", "sample"])
def test_a_chat_waits_for_no_more_than_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sampled: bool
) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Row {row}"}) + "\n" for row in range(_ROWS)))
    job = BatchJob(str(rows), str(tmp_path / "out.jsonl"), sampling=SamplingParams(max_tokens=6))
    folder = tiny_checkpoint("mixtral", tmp_path / "model", num_hidden_layers=4)
    engine, sent, layers = Engine(), list[Event](), 0
    asked, answered = dict[str, int](), dict[str, int]()
    requests = RequestQueue(sent.append)
    own = PackedModel._step

    def step(self: PackedModel, index: int, batch: object) -> None:
        nonlocal layers
        own(self, index, batch)  # type: ignore[arg-type]
        layers += 1
        if layers in _ASKED_AFTER:
            name = f"chat {layers}"
            asked[name] = layers
            requests.accept(Generate(name, (ChatMessage("user", "Hello"),), SamplingParams(max_tokens=3)))

    def answer_next() -> None:
        request = requests.take()
        assert isinstance(request, Generate)
        answered[request.request_id] = layers
        found = engine.generate(
            request.messages,
            request.sampling,
            on_progress=lambda _done, _total: None,
            on_text=lambda _text, _tokens: None,
            cancelled=lambda: False,
        )
        assert found.generated_tokens
        requests.end(Finished(request.request_id, "stop", 1, 0, 1, 0.1, 1.0))

    monkeypatch.setattr(PackedModel, "_step", step)
    config = EngineConfig(str(folder), device="cpu", precision="fp32", threads=1)
    engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        service = BatchService(requests, sent.append, answer_next)
        requests.accept(SampleBatch("job", job, _SAMPLED) if sampled else StartBatch("job", job))
        request = requests.take()
        if sampled:
            assert isinstance(request, SampleBatch)
            ending = service.sample(engine, request)
        else:
            assert isinstance(request, StartBatch)
            ending = service.run(engine, request)
    finally:
        engine.unload()
    assert isinstance(ending, BatchFinished)
    assert (ending.finished, ending.done, ending.failed) == (True, _SAMPLED if sampled else _ROWS, 0)
    shown = sorted(row.row for event in sent if isinstance(event, BatchRows) for row in event.rows)
    assert len(set(shown)) == len(shown)
    assert not sampled or shown == list(range(_SAMPLED))
    assert answered == asked  # before another layer
    (planned,) = [event for event in sent if isinstance(event, BatchPlanned)]
    assert (planned.rows, planned.rows_together) == (_ROWS, _ROWS)
    assert planned.tokens_per_s_low > 0
    assert planned.is_measured is sampled
