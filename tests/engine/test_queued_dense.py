"""Timelines of devices that dense work is only queued on, as on a card: it is seen by marks in the queue."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.common import clock
from engine.common.errors import EngineError, ErrorCode
from engine.devices import opening
from engine.devices.cpu import InlineStream
from engine.devices.device import Device, Event
from engine.devices.emulated import open_emulated
from engine.experts.dispatch import BANK_LAYER, bound_kernel
from engine.experts.dispatcher import HybridExperts
from engine.runtime.telemetry.model_telemetry import ModelTelemetry
from engine.telemetry.analysis import lane_seconds
from engine.telemetry.lanes import CPU_EXPERTS, DECODE, DENSE, EXPERTS, GPU, GRAPH, HEAD, PREFILL
from engine.telemetry.recorder import RECORDER
from engine.telemetry.trace_export import Collection, collected, trace_events
from tests.engine.graph_cases import graphs_of, step_of
from tests.engine.on_devices import NEW_TOKENS, PROMPT, answer, chatting, opened, reference, share_misses
from tests.engine.recorded_runs import of_lane, recorded_chat
from tests.unit.trace_format import check_trace


class _Marked(InlineStream):
    """Counts its marks, and can fail like a card that is lost."""

    marks = 0
    lost = False

    def record(self) -> Event:
        _Marked.marks += 1
        if _Marked.lost:
            self._failure = EngineError(ErrorCode.DEVICE_UNAVAILABLE, "The card has gone.")
        return super().record()


@pytest.fixture(autouse=True)
def queueing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated devices whose compute stream is in order with the caller's operators."""

    def opened_like_a_card(*args: Any, **options: Any) -> Device:
        device = open_emulated(*args, **options)
        compute = _Marked(device.compute_stream.name, device.copy_log)

        def close() -> None:
            compute.close()
            device.close()

        return replace(device, streams=(compute, *device.streams[1:]), compute_follows_caller=True, on_close=close)

    monkeypatch.setattr(opening, "open_emulated", opened_like_a_card)
    monkeypatch.setattr(_Marked, "lost", False)
    monkeypatch.setattr(_Marked, "marks", 0)
    share_misses(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("queued")
    reference.cache_clear()
    gc.collect()


def check_device_lane(collection: Collection) -> None:
    """No two spans at once, none outside its step, and a strict viewer takes it."""
    spans, steps = collection.spans, collection.steps
    busy = of_lane(spans, GPU)
    assert (busy["end_ns"] >= busy["start_ns"]).all()
    assert (busy["start_ns"][1:] >= busy["end_ns"][:-1]).all()
    for step in steps[:-1]:
        mine = busy[busy["step"] == step["step"]]
        if len(mine):
            assert mine["start_ns"].min() >= step["start_ns"]
            assert mine["end_ns"].max() <= step["end_ns"]
            assert (mine["end_ns"] - mine["start_ns"]).sum() <= step["end_ns"] - step["start_ns"]
    check_trace({"displayTimeUnit": "ms", "traceEvents": list(trace_events(spans, steps))})


def named(spans: Any, name: int) -> Any:
    return spans[spans["name"] == name]


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    "options",
    [{"misses": "mixed"}, {"misses": "fetch"}, {"misses": "cpu"}, {"misses": "layer"}, {"cache_slots": 0}, {}],
    ids=str,
)
def test_dense_work_of_every_layer_and_the_head_are_seen(folder: Path, options: dict[str, Any]) -> None:
    expected = reference("qwen3_moe", folder)
    with opened(expected.folder, graphs="off", **({"cache_slots": 4, **options} if options else {})) as model:
        layers = [layer.number for layer in ModelTelemetry(model)._layers]
        collection, _ = recorded_chat(model)
        assert RECORDER.queued is None
    check_device_lane(collection)
    forwards = collection.steps[np.isin(collection.steps["name"], (PREFILL, DECODE))][:-1]
    assert len(forwards) == NEW_TOKENS
    busy = of_lane(collection.spans, GPU)
    for step in forwards["step"]:
        mine = busy[busy["step"] == step]
        assert named(mine, DENSE)["layer"].tolist() == layers
        assert named(mine, HEAD)["layer"].tolist() == [-1]
        assert (mine["end_ns"] > mine["start_ns"])[np.isin(mine["name"], (DENSE, HEAD))].all()
    assert lane_seconds(collection.spans, 0, 2**62)["gpu"] > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_pieces_of_graphs_are_seen_with_their_layers(family: str, folder: Path) -> None:
    expected = reference(family, folder)
    with opened(expected.folder, graphs="on", cache_slots=3, speculation="off") as model, chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected.first
        telemetry = ModelTelemetry(model)
        numbers = [layer.number for layer in telemetry._layers]
        telemetry.start()
        try:
            with collected() as collection:
                assert list(answer(session, expected.second_prompt).token_ids) == expected.second
        finally:
            telemetry.stop()
        spans = step_of(graphs_of(session)).spans
    check_device_lane(collection)
    assert len(spans) == len(numbers) + 1
    assert spans[-1] == (HEAD, -1, 1)
    assert sum(count for _, _, count in spans[:-1]) == numbers[-1] + 1
    assert [first + count - 1 for _, first, count in spans[:-1]] == numbers
    assert spans[0][0] == (GRAPH if numbers[0] else DENSE)
    busy = of_lane(collection.spans, GPU)
    decoded = collection.steps[collection.steps["name"] == DECODE]
    assert len(decoded) == NEW_TOKENS - 1
    for number in decoded["step"]:
        mine = busy[(busy["step"] == number) & np.isin(busy["name"], (DENSE, GRAPH, HEAD))]
        assert [tuple(each) for each in mine[["name", "layer", "count"]].tolist()] == spans


def test_a_step_that_is_one_graph_is_one_span_and_its_capture_too(folder: Path) -> None:
    expected = reference("qwen3_moe", folder)
    with opened(expected.folder, graphs="on", speculation="off") as model:
        kernels = _never_wait(model)
        collection, _ = recorded_chat(model)
    layers = len(kernels)
    check_device_lane(collection)
    busy = of_lane(collection.spans, GPU)
    steps = collection.steps[collection.steps["name"] == DECODE]["step"][1:-1]  # the first is computed both ways
    for step in steps:
        mine = busy[busy["step"] == step]
        assert mine[["name", "layer", "count"]].tolist() == [(GRAPH, 0, layers)]
    prefill = busy[busy["step"] == collection.steps[collection.steps["name"] == PREFILL]["step"][0]]
    assert len(named(prefill, EXPERTS)) == len(named(prefill, DENSE)) == layers
    assert not len(of_lane(collection.spans, CPU_EXPERTS))


def test_a_lost_card_is_no_error_of_the_recording(folder: Path) -> None:
    expected = reference("qwen3_moe", folder)
    with opened(expected.folder, graphs="off", cache_slots=4) as model, chatting(model) as session:
        device = model.devices.devices[0]
        telemetry = ModelTelemetry(model)
        telemetry.start()
        try:
            with collected() as collection:
                _Marked.lost = True
                with pytest.raises(EngineError, match="has gone"):
                    answer(session, PROMPT)
                _Marked.lost = False
                device.recover()
                session.clear()
                assert list(answer(session, PROMPT).token_ids) == expected.first
        finally:
            telemetry.stop()
        check_device_lane(collection)
        telemetry.start()
        queued = RECORDER.queued
        device.close()
        queued.begin()
        assert queued.experts_begin(device.torch_device) is None
        queued.head(HEAD, -1, 1)
        telemetry.stop()


@pytest.mark.parametrize("every", [2, 3, 5])
def test_recording_may_begin_and_end_in_the_middle_of_a_forward(
    folder: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    expected = reference("qwen3_moe", folder)
    real, calls, since_ns = HybridExperts.__call__, 0, 0
    taken: list[Any] = []

    def switching(self: HybridExperts, *args: torch.Tensor) -> torch.Tensor:
        nonlocal calls, since_ns
        calls += 1
        if calls % every == 0 and RECORDER.on:
            RECORDER.stop()
            taken.append(of_lane(RECORDER.take_spans(), GPU))
            assert (taken[-1]["start_ns"] >= since_ns).all()
        elif calls % every == 0:
            since_ns = clock.now_ns()
            RECORDER.start()
        return real(self, *args)

    monkeypatch.setattr(HybridExperts, "__call__", switching)
    with opened(expected.folder, graphs="on", cache_slots=3) as model, chatting(model) as session:
        telemetry = ModelTelemetry(model)
        telemetry.start()
        RECORDER.start()
        try:
            assert list(answer(session, PROMPT).token_ids) == expected.first
        finally:
            RECORDER.stop()
            telemetry.stop()
    busy = of_lane(np.concatenate(taken), GPU)
    assert len(busy)
    assert (busy["start_ns"][1:] >= busy["end_ns"][:-1]).all()


def _never_wait(model: Any) -> list[Any]:
    """Experts that are all on the device, by kernels that can be captured."""
    kernels = []
    for module in model.model.modules():
        if BANK_LAYER in module.__dict__:
            layer, kernel = bound_kernel(module)
            kernels.append(_WaitsForNothing(kernel))
            setattr(module, BANK_LAYER, (layer, kernels[-1]))
    return kernels


class _WaitsForNothing:
    """All experts of a layer for a single token, those that are not wanted with weight 0."""

    is_capturable = True

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        compute = self._kernel if len(hidden) > 1 else self._kernel._one_token_all_experts
        result: torch.Tensor = compute(hidden, index, weights)
        return result
