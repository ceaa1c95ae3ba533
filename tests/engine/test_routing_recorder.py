"""Recorded routing is what the library's routers chose, token by token, in every layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cli import main
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError
from engine.experts.replay import read_trace
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.telemetry.routing_recorder import RoutingRecorder
from tests.engine.single_streams import Alone
from tests.engine.tiny_families import tiny_checkpoint, tiny_model


def _load(path: Path, precision: str = "fp32") -> LoadedModel:
    config = EngineConfig(str(path), precision=precision, threads=1)  # type: ignore[arg-type]
    return load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_trace_is_what_the_routers_chose(family: str, tmp_path: Path) -> None:
    loaded = _load(tiny_checkpoint(family, tmp_path / "model"))
    try:
        recorder = RoutingRecorder(loaded)
        recorder.begin_sequence()
        prompt = list(range(5, 17))
        answer = Alone(loaded).generate_from_ids(prompt, SamplingParams(max_tokens=6), end_ids=frozenset())
        tokens = recorder.save(tmp_path / "routing.npz")
    finally:
        loaded.close()
    trace = read_trace(tmp_path / "routing.npz")
    ids = [*prompt, *answer.token_ids[:-1]]  # the last token was chosen, but not read any more
    assert trace.tokens == tokens == len(ids)
    with torch.no_grad():
        asked = tiny_model(family)(torch.tensor([ids]), output_router_logits=True).router_logits
    routed = [logits.reshape(len(ids), -1) for logits in asked]
    assert trace.layers == len(routed)
    for layer, logits in enumerate(routed):
        wanted = logits.topk(trace.per_token, dim=-1).indices.sort(dim=-1).values.numpy()
        assert (np.sort(trace.experts[:, layer], axis=-1) == wanted).all()


def test_recording_does_not_change_the_answer(tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen3_moe", tmp_path)
    answers = []
    for record in (False, True):
        loaded = _load(path, "bf16")
        try:
            if record:
                RoutingRecorder(loaded)
            done = Alone(loaded).generate_from_ids(
                list(range(9, 30)), SamplingParams(max_tokens=8), end_ids=frozenset()
            )
            answers.append(done.token_ids[:4])
        finally:
            loaded.close()
    assert answers[0] == answers[1]


def test_a_dense_model_routes_nothing(tmp_path: Path) -> None:
    loaded = _load(tiny_checkpoint("llama", tmp_path))
    try:
        with pytest.raises(EngineError, match="no experts"):
            RoutingRecorder(loaded)
    finally:
        loaded.close()


def test_the_verb_writes_a_trace_that_can_be_replayed(tmp_path: Path) -> None:
    model = str(tiny_checkpoint("mixtral", tmp_path / "model"))
    trace = str(tmp_path / "routing.npz")
    assert main(["chat", "--model", model, "--prompt", "hello", "--max-tokens", "4", "--record-routing", trace]) == 0
    assert main(["cache", trace, "--policy", "lru"]) == 0
    absent = str(tmp_path / "absent" / "routing.npz")
    assert main(["chat", "--model", model, "--prompt", "hello", "--record-routing", absent]) == 2
