"""Chats that are asked while a job runs get a first token within one layer, and the job goes on beside them."""

import json
from pathlib import Path

import pytest

from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.process.batch import BatchService
from engine.process.chats import ChatService
from engine.process.requests import RequestQueue
from engine.protocol import (
    BatchFinished,
    BatchPlanned,
    BatchRows,
    ChatMessage,
    Event,
    Finished,
    Generate,
    SampleBatch,
    StartBatch,
    Token,
)
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.engine import Engine
from tests.engine.tiny_families import tiny_checkpoint

_ROWS, _SAMPLED, _ASKED_AFTER, _TOKENS = 30, 3, (3, 4, 17), 20
"""Layers after which a chat is asked; its tokens."""


@pytest.mark.parametrize("sampled", [False, True], ids=["job", "sample"])
def test_chats_and_a_job_go_on_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sampled: bool
) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Row {row}"}) + "\n" for row in range(_ROWS)))
    job = BatchJob(str(rows), str(tmp_path / "out.jsonl"), sampling=SamplingParams(max_tokens=6))
    folder = tiny_checkpoint("mixtral", tmp_path / "model", num_hidden_layers=4)
    engine, sent, layers = Engine(), list[Event](), 0
    asked = dict[str, int]()
    own = PackedModel._step
    requests = RequestQueue(sent.append)

    def step(self: PackedModel, index: int, batch: object) -> None:
        nonlocal layers
        own(self, index, batch)  # type: ignore[arg-type]
        layers += 1
        if layers in _ASKED_AFTER:
            name = f"chat {layers}"
            asked[name] = layers
            sampling = SamplingParams(max_tokens=_TOKENS, stop=("never",))
            requests.accept(Generate(name, (ChatMessage("user", "Hello"),), sampling))

    seen: dict[str, list[int]] = {}

    def send(event: Event) -> None:
        sent.append(event)
        if isinstance(event, Token):
            seen.setdefault(event.request_id, []).append(layers)

    monkeypatch.setattr(PackedModel, "_step", step)
    config = EngineConfig(str(folder), device="cpu", precision="fp32", threads=1)
    engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        chats = ChatService(requests, send, engine, lambda _name: None, lambda _tokens: None)
        service = BatchService(requests, sent.append, chats)
        requests.accept(SampleBatch("job", job, _SAMPLED) if sampled else StartBatch("job", job))
        request = requests.take()
        if sampled:
            assert isinstance(request, SampleBatch)
            ending = service.sample(engine, request)
        else:
            assert isinstance(request, StartBatch)
            engine.on_news = requests.look_after_others
            service.start(engine, request)
            while service.are_running:
                chats.answer(lambda: not service.are_running)
            (ending,) = [event for event in sent if isinstance(event, BatchFinished)]
        chats.answer()
    finally:
        engine.unload()
    assert (ending.finished, ending.done, ending.failed) == (True, _SAMPLED if sampled else _ROWS, 0)
    shown = sorted(row.row for event in sent if isinstance(event, BatchRows) for row in event.rows)
    assert len(set(shown)) == len(shown)
    assert not sampled or shown == list(range(_SAMPLED))
    finished = [event for event in sent if isinstance(event, Finished)]
    assert {event.request_id for event in finished} == set(asked)
    assert all(event.generated_tokens == len(seen[event.request_id]) for event in finished)
    # Before another layer, if it is the first; one that shares sweeps with it within two of their own.
    firsts = {name: min(layers for layers in seen[name]) - asked[name] for name in asked}
    assert firsts["chat 3"] == 0
    assert all(waited <= 2 * 4 for waited in firsts.values())
    # The job did not stand still meanwhile.
    assert any(max(layers) > min(layers) for layers in seen.values())
    (planned,) = [event for event in sent if isinstance(event, BatchPlanned)]
    assert (planned.prediction.job.rows, planned.prediction.batch_rows) == (_ROWS, _ROWS)
    assert planned.prediction.low > 0
    assert planned.prediction.is_measured is sampled
