"""Timelines of chats and batches: complete, true to the byte, and physically possible; also as traces and tables."""

import csv
import gc
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import cli
from engine.cli import main
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.experts.replay import read_trace
from engine.experts.shares import PromptChoice, PromptWay
from engine.hardware.profiles import DeviceProfile, lent
from engine.planner.schedules import CGOPIPE, SCHEDULES, Schedule
from engine.protocol import IN_RAM, IN_VRAM, ON_DISK
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.telemetry.experts import RoutingRecorder
from engine.runtime.telemetry.model_telemetry import ModelTelemetry
from engine.telemetry.analysis import waiting
from engine.telemetry.lanes import (
    BATCH_STEP,
    CPU_ATTENTION,
    CPU_EXPERTS,
    D2H,
    DECODE,
    DISK,
    GPU,
    H2D,
    PHASE,
    PREFILL,
    SAMPLE,
    SMALL_COPY,
    SWEEPS,
)
from engine.telemetry.recorder import RECORDER
from engine.telemetry.records import Records, unpack
from engine.telemetry.trace_export import collected, trace_events
from tests.combinations import some
from tests.engine.loaded_tiny import opened_model, random_prompt
from tests.engine.on_devices import NEW_TOKENS, PROMPT, answer, chatting, opened, share_misses
from tests.engine.recorded_runs import of_lane, recorded_batch, recorded_chat, total
from tests.engine.single_streams import Alone
from tests.engine.test_disk_backed import least_budget
from tests.engine.tiny_families import tiny_checkpoint, tiny_model
from tests.unit.trace_format import check_trace

U32 = np.dtype("<u4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("telemetry") / "model")
    gc.collect()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"misses": "mixed"},
        {"misses": "fetch"},
        {"misses": "cpu", "prefetch": "previous"},
        {"misses": "layer"},
        {"devices": 2, "cache_ways": 1},
    ],
    ids=str,
)
def test_bytes_are_those_of_the_link_and_of_the_cache(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], seed: int
) -> None:
    share_misses(monkeypatch)
    rng = np.random.default_rng(seed)
    prompt = random_prompt(int(rng.integers(2, 90)), seed)
    with opened(checkpoint, **{"devices": 1, "cache_slots": int(rng.integers(0, 9)), **options}) as model:
        _check_bytes(model, prompt, int(rng.integers(2, 16)), has_whole_layers=options.get("misses") == "layer")


def test_bytes_that_came_ahead_of_a_layer_that_needs_none_are_counted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = cycle([PromptWay.FETCHED, PromptWay.ON_CPU])
    monkeypatch.setattr(PromptChoice, "rests", lambda *_: None)
    monkeypatch.setattr(PromptChoice, "choose", lambda *_: next(ways))
    monkeypatch.setattr(PromptChoice, "way", lambda *_: PromptWay.FETCHED)
    with opened(checkpoint, cache_slots=0) as model:
        _check_bytes(model, PROMPT, 1)
        (staging,) = (cache.staging for cache in model.caches)
        assert staging is not None
        assert any(staging.ahead(layer) for layer in range(len(model.caches[0].layer_numbers)))


def _check_bytes(model: LoadedModel, prompt: list[int], tokens: int, *, has_whole_layers: bool = False) -> None:
    """An answer's copies as the devices, the timeline and the caches count them."""
    for cache in model.caches:
        cache.wait()  # what is known to be used much was sent for when the model was loaded
    before = [replace(cache.counters) for cache in model.caches]
    collection, heard = recorded_chat(model, prompt, tokens)
    after = [cache.counters for cache in model.caches]

    def counted(name: str) -> int:
        return sum(getattr(each, name) for each in after) - sum(getattr(each, name) for each in before)

    spans, steps = collection.spans, collection.steps
    told = Counter({"h2d": 0, "d2h": 0})
    for copy in heard:
        told[copy.direction] += copy.nbytes
    assert total(steps, "h2d_bytes") == told["h2d"]
    assert total(steps, "d2h_bytes") == told["d2h"]
    weights, small = of_lane(spans, H2D), of_lane(spans, SMALL_COPY)
    assert int(small["nbytes"].sum()) == total(steps, "small_copy_bytes")
    assert int(weights["nbytes"].sum() + small["nbytes"].sum()) == told["h2d"] + told["d2h"]
    assert len(weights) + len(small) == len(heard)
    if not has_whole_layers:
        moved = [counted(name) for name in ("fetched_bytes", "post_fetched_bytes", "prefetched_bytes")]
        assert int(weights["nbytes"].sum()) == sum(moved)
    for name in ("hits", "late", "fetched", "evictions", "post_fetches", "prefetched", "prefetches_used"):
        assert total(steps, name) == counted(name), name
    assert total(steps, "on_cpu") == counted("on_cpu")
    check_trace({"displayTimeUnit": "ms", "traceEvents": list(trace_events(spans, steps))})


def test_copies_and_computations_overlap_and_no_engine_copies_twice_at_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_misses(monkeypatch)
    with opened(checkpoint, cache_slots=6) as model:
        collection, _ = recorded_chat(model, tokens=24)
    spans = collection.spans
    weights = of_lane(spans, H2D)
    assert (weights["start_ns"][1:] >= weights["end_ns"][:-1]).all()
    overlapping = 0
    for lane in (GPU, CPU_EXPERTS):
        for busy in of_lane(spans, lane):
            overlapping += int(((weights["start_ns"] < busy["end_ns"]) & (weights["end_ns"] > busy["start_ns"])).sum())
    assert overlapping


@pytest.mark.parametrize("devices", [0, 1])
def test_phases_tile_a_request_and_every_moment_of_a_step_is_accounted_for(checkpoint: Path, devices: int) -> None:
    with opened(checkpoint, devices) as model:
        collection, _ = recorded_chat(model)
    steps, spans = collection.steps[:-1], collection.spans
    assert (steps["start_ns"][1:] == steps["end_ns"][:-1]).all()
    assert [int(name) for name in steps["name"][1:]] == [PREFILL, SAMPLE, *[DECODE] * (NEW_TOKENS - 1)]
    assert total(steps[1:2], "tokens") == len(PROMPT)
    wall_s = int(steps["end_ns"][-1] - steps["start_ns"][0]) / 1e9
    waited = waiting(spans, steps)
    assert waited.seconds == pytest.approx(wall_s, rel=0.02)
    assert sum(waited.share.values()) == pytest.approx(1)
    for step in steps.reshape(-1, 1):
        one = waiting(spans, step)
        assert one.seconds == pytest.approx(int(step["end_ns"][0] - step["start_ns"][0]) / 1e9, rel=0.02)
    assert {int(number) for number in spans["step"]} <= {-1, *collection.steps["step"].tolist()}
    assert len(of_lane(spans, PHASE)) == len(collection.steps)


def test_layers_on_the_cpu_are_recorded_by_number_with_their_experts(checkpoint: Path) -> None:
    with opened(checkpoint, 0) as model:
        telemetry = ModelTelemetry(model)
        collection, _ = recorded_chat(model)
        layers = [layer.number for layer in telemetry._layers]
        per_token = model.info.experts_per_token
    decoded = collection.steps[collection.steps["name"] == DECODE][:-1]
    experts = of_lane(collection.spans, CPU_EXPERTS)
    for step in decoded["step"]:
        mine = experts[experts["step"] == step]
        assert mine["layer"].tolist() == layers
        assert mine["count"].tolist() == [per_token] * len(layers)
    assert decoded["on_cpu"].tolist() == [per_token * len(layers)] * len(decoded)
    assert len(of_lane(collection.spans, CPU_ATTENTION))
    assert not len(of_lane(collection.spans, GPU))


def test_the_map_knows_uses_hits_and_whereabouts(checkpoint: Path) -> None:
    with opened(checkpoint, cache_slots=6) as model:
        telemetry = ModelTelemetry(model)
        telemetry.start()
        with chatting(model) as session, collected() as collection:
            answer(session, PROMPT, 20)
        model.devices.devices[0].synchronize()
        found, report = telemetry.expert_map(), telemetry.cache_report(collection.spans, collection.steps)
        telemetry.stop()
        cache = model.devices.experts.caches[0][0]
        shape = len(found.layers), found.experts
        uses, hits = unpack(found.uses, U32).reshape(shape), unpack(found.hits, U32).reshape(shape)
        places = unpack(found.places, np.dtype("u1")).reshape(shape)
        assert int(uses.sum()) == cache.counters.lookups
        assert int(hits.sum()) == cache.counters.hits
        assert (places & IN_RAM).all()
        for layer in range(shape[0]):
            assert set(np.flatnonzero(places[layer] & IN_VRAM)) == set(cache.residents(layer))
        assert unpack(found.heat, np.dtype("u1")).max() == 255
        assert report.tiers[0].slots == cache.slots
        assert report.lookups_per_step == pytest.approx(uses.sum() / 19)
        for place in {part.place for part in report.memory}:
            parts = {part.purpose: part.nbytes for part in report.memory if part.place == place}
            assert parts.pop("total") == sum(parts.values())
        telemetry.resize("vram", 2)
        assert cache.slots <= 2
        telemetry.resize("vram", 10**9)
        assert cache.slots >= shape[0] * shape[1]


def test_reads_from_disk_are_the_banks_to_the_byte(checkpoint: Path) -> None:
    with opened_model(checkpoint, "fp32", ram_bytes=least_budget(checkpoint, "fp32")) as model:
        read_before = model.disk_backed.disk.bytes_read
        collection, _ = recorded_chat(model, tokens=20)
        disk, ram = model.disk_backed.disk, model.disk_backed.counters
        reads = of_lane(collection.spans, DISK)
        assert int(reads["nbytes"].sum()) == disk.bytes_read - read_before == total(collection.steps, "disk_bytes")
        assert len(reads)
        assert total(collection.steps, "ram_hits") == ram.hits
        telemetry = ModelTelemetry(model)
        found = telemetry.expert_map()
        places = unpack(found.places, np.dtype("u1"))
        assert (places & ON_DISK).all()
        assert 0 < np.count_nonzero(places & IN_RAM) < len(places)
        assert telemetry.cache_report(collection.spans, collection.steps).tiers[0].tier == "ram"


def test_recording_changes_no_token(checkpoint: Path) -> None:
    answers = []
    for on in (False, True):
        with opened(checkpoint, cache_slots=4) as model, chatting(model) as session:
            if on:
                with collected():
                    answers.append(answer(session, PROMPT).token_ids)
            else:
                answers.append(answer(session, PROMPT).token_ids)
    assert answers[0] == answers[1]


LENGTHS = [1, 40, 90, 12, 33, 7]


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tiny_checkpoint("mixtral", tmp_path_factory.mktemp("batch-telemetry"), num_hidden_layers=3)
    gc.collect()


def policy(schedule: Schedule | None, rows: int = 2) -> BatchPolicy:
    return BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=120, micro_batch_rows=rows, schedule=schedule)


def check_steps(spans: Records, steps: Records) -> None:
    """Sweeps follow each other without gaps, and all that they took is accounted for."""
    sweeps = steps[steps["name"] == BATCH_STEP]
    assert len(sweeps) > 1
    assert (sweeps["start_ns"][1:] == sweeps["end_ns"][:-1]).all()
    assert total(sweeps, "tokens") == sum(LENGTHS) + 3 * len(LENGTHS)
    for sweep in sweeps.reshape(-1, 1):
        waited = waiting(spans, sweep)
        assert waited.seconds == pytest.approx(int(sweep["end_ns"][0] - sweep["start_ns"][0]) / 1e9, rel=0.02)
    assert {int(number) for number in spans["step"]} <= {-1, *steps["step"].tolist()}
    assert {int(number) for number in spans["request"]} <= {0, int(sweeps["request"][0])}
    assert len(of_lane(spans, PHASE)) == len(steps)
    check_trace({"displayTimeUnit": "ms", "traceEvents": list(trace_events(spans, steps))})


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("schedule", some([None, *SCHEDULES.values()], every=4), ids=str)
def test_bytes_are_the_links_and_no_engine_copies_twice_at_once(three_layers: Path, schedule: Schedule | None) -> None:
    with opened(three_layers, cache_slots=3) as model:
        collection, heard = recorded_batch(model, LENGTHS, policy(schedule))
    spans, steps = collection.spans, collection.steps
    told = Counter({"h2d": 0, "d2h": 0})
    for copy in heard:
        told[copy.direction] += copy.nbytes
    assert told["h2d"]
    assert total(steps, "h2d_bytes") == told["h2d"]
    assert total(steps, "d2h_bytes") == told["d2h"]
    copies = spans[np.isin(spans["lane"], (H2D, D2H, SMALL_COPY))]
    assert int(copies["nbytes"].sum()) == told["h2d"] + told["d2h"]
    assert len(copies) == len(heard)
    weights = of_lane(spans, H2D)
    assert (weights["start_ns"][1:] >= weights["end_ns"][:-1]).all()
    check_steps(spans, steps)


def test_copies_and_computations_overlap(three_layers: Path) -> None:
    """By the card's clock: weights are on the link, which takes its time, while the CPU attends."""
    drip = DeviceProfile("drip", "for tests", 2**26, 0.002, 0.25, 100.0)
    with lent(drip), opened(three_layers, cache_slots=0, device="emulated:drip") as model:
        collection, _ = recorded_batch(model, LENGTHS, policy(CGOPIPE))
    weights = of_lane(collection.spans, H2D)
    attended = of_lane(collection.spans, CPU_ATTENTION)
    assert any(
        ((weights["start_ns"] < each["end_ns"]) & (weights["end_ns"] > each["start_ns"])).any() for each in attended
    )


@pytest.mark.parametrize("rows", [1, 8])
def test_sweeps_on_the_cpu(three_layers: Path, rows: int) -> None:
    with opened(three_layers, 0) as model:
        collection, _ = recorded_batch(model, LENGTHS, policy(None, rows))
    check_steps(collection.spans, collection.steps)
    assert {int(lane) for lane in np.unique(collection.spans["lane"])} == {PHASE, CPU_EXPERTS, CPU_ATTENTION, SWEEPS}
    sweeps = collection.steps[collection.steps["name"] == BATCH_STEP]
    # Each token uses two experts in each of three layers, however many rows share a step.
    assert (sweeps["on_cpu"] + sweeps["prefill_on_cpu"] == 2 * 3 * sweeps["tokens"]).all()
    assert of_lane(collection.spans, SWEEPS)["count"].sum() == sweeps["tokens"].sum()
    assert not any(total(collection.steps, name) for name in ("h2d_bytes", "d2h_bytes", "disk_bytes"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral", max_position_embeddings=4096)


def chat(tiny: Path, *arguments: str, device: str = "cpu") -> int:
    options = ("--device", device, "--precision", "fp32", "--threads", "1", "--prompt", "secret words", "--json")
    return cli.main(["chat", "--model", str(tiny), *options, "--max-tokens", "6", *arguments])


@pytest.mark.parametrize("device", ["cpu", "emulated:slow-link"])
def test_an_answer_as_a_trace(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    path = tmp_path / "answer.json"
    assert chat(tiny, "--trace", str(path), device=device) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)  # stdout is still one document
    assert "ui.perfetto.dev" in told.err
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    check_trace(document)
    assert document["otherData"] == {"model": "tiny-mixtral", "device": answer["device"], "precision": "fp32"}
    events = document["traceEvents"]
    assert sum(event["name"] == "token" for event in events) == answer["generated_tokens"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks >= ({"phase", "cpu_attention"} if device == "cpu" else {"phase", "gpu"})
    assert "secret" not in text
    assert not RECORDER.on


def test_an_answer_as_a_table(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answer.csv"
    assert chat(tiny, "--trace", str(path)) == 0
    count = int(capsys.readouterr().err.split(" spans")[0].rsplit(" ", 1)[1].replace(",", ""))
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == count > 10
    assert {"prefill", "sample"} <= {row["name"] for row in rows}
    assert all(int(row["end_ns"]) >= int(row["start_ns"]) for row in rows)


def test_a_trace_that_cannot_be_written_is_refused_at_once(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(tiny, "--trace", str(tmp_path / "nowhere" / "t.json")) == 2
    refusal = json.loads(capsys.readouterr().out)["error"]
    assert refusal["code"] == "invalid_request"
    assert "folder" in refusal["message"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_trace_is_what_the_routers_chose(family: str, tmp_path: Path) -> None:
    with opened_model(tiny_checkpoint(family, tmp_path / "model"), "fp32") as loaded:
        recorder = RoutingRecorder(loaded)
        recorder.begin_sequence()
        prompt = list(range(5, 17))
        answer = Alone(loaded).generate_from_ids(prompt, SamplingParams(max_tokens=6), end_ids=frozenset())
        tokens = recorder.save(tmp_path / "routing.npz")
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
        with opened_model(path, "bf16") as loaded:
            if record:
                RoutingRecorder(loaded)
            done = Alone(loaded).generate_from_ids(
                list(range(9, 30)), SamplingParams(max_tokens=8), end_ids=frozenset()
            )
            answers.append(done.token_ids[:4])
    assert answers[0] == answers[1]


def test_a_dense_model_routes_nothing(tmp_path: Path) -> None:
    with (
        opened_model(tiny_checkpoint("llama", tmp_path), "fp32") as loaded,
        pytest.raises(EngineError, match="no experts"),
    ):
        RoutingRecorder(loaded)


def test_the_verb_writes_a_trace_that_can_be_replayed(tmp_path: Path) -> None:
    model = str(tiny_checkpoint("mixtral", tmp_path / "model"))
    trace = str(tmp_path / "routing.npz")
    assert main(["chat", "--model", model, "--prompt", "hello", "--max-tokens", "4", "--record-routing", trace]) == 0
    assert main(["cache", trace, "--policy", "lru"]) == 0
    absent = str(tmp_path / "absent" / "routing.npz")
    assert main(["chat", "--model", model, "--prompt", "hello", "--record-routing", absent]) == 2
