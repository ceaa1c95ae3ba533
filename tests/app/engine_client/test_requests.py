"""Requests to real worker processes: each streams and ends once, and what watched workers record arrives whole."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.engine_client import EngineClient, EngineState
from engine.common.errors import ErrorCode
from engine.common.paths import log_dir
from engine.protocol import (
    Cancelled,
    Failed,
    Finished,
    ModelLoaded,
    ModelUnloaded,
    TelemetryCounters,
    TelemetryRequest,
    TelemetrySpans,
    encode,
)
from engine.telemetry.records import SPAN, STEP, no_spans, pack, unpack
from tests.app.engine_client.watching import READY, SCRIPTED, WAIT_MS, Make, Watch, worker_saying
from tests.unit.recorded import steps


@pytest.fixture(scope="module")
def shared(qapp: QApplication) -> Iterator[EngineClient]:
    client = EngineClient(command=SCRIPTED)
    client.start()
    while client.state is not EngineState.READY:
        qapp.processEvents()
        time.sleep(0.005)
    yield client
    client.close_now()
    client.deleteLater()


@pytest.fixture
def running(shared: EngineClient) -> tuple[EngineClient, Watch]:
    """That of other tests of this file."""
    return shared, Watch(shared)


def test_an_answer_streams_and_ends(make: Make, qtbot: QtBot) -> None:
    client, watch = make()
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    load = watch.load("anything")
    answer = watch.ask("count 5")
    assert client.state == EngineState.LOADING
    qtbot.waitUntil(lambda: watch.ended(load, answer), timeout=WAIT_MS)
    assert isinstance(watch.end_of(load), ModelLoaded)
    assert client.model.name == "anything"
    assert watch.text[answer.id] == "1 2 3 4 5 "
    assert watch.end_of(answer) == Finished(answer.id, "stop", 1, 0, 5, 0.1, 10.0)
    assert {p.phase for p in watch.progress} == {"loading", "converting", "prefill"}
    assert watch.states == [EngineState.STARTING, EngineState.READY, *watch.states[2:]]
    assert watch.states[-3:] == [EngineState.LOADING, EngineState.BUSY, EngineState.READY]
    qtbot.waitUntil(lambda: bool(watch.telemetry), timeout=WAIT_MS)
    assert watch.telemetry[-1].kv_tokens == 7
    unload = watch.follow(client.unload())
    qtbot.waitUntil(lambda: watch.ended(unload), timeout=WAIT_MS)
    assert watch.end_of(unload) == ModelUnloaded(unload.id)
    assert client.model is None


def test_reasoning_arrives_apart_from_the_text(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    _client, watch = running
    thoughts = list[str]()
    answer = watch.ask("think 3")
    answer.token.connect(lambda token: thoughts.append(token.reasoning))
    qtbot.waitUntil(lambda: watch.ended(answer), timeout=WAIT_MS)
    assert (thoughts, watch.text[answer.id]) == (["1 ", "2 ", "3 ", ""], "so")
    assert watch.generated[answer.id] == 4


def test_requests_made_while_starting_wait_for_the_worker(make: Make, qtbot: QtBot) -> None:
    client, watch = make()
    client.start()
    assert client.state == EngineState.STARTING
    first, second = watch.ask("count 2"), watch.ask("count 3")
    qtbot.waitUntil(lambda: watch.ended(first, second), timeout=WAIT_MS)
    assert [event.request_id for event in watch.events] == [first.id, second.id]
    assert watch.text == {first.id: "1 2 ", second.id: "1 2 3 "}


def test_a_request_without_an_engine_fails_once_somebody_can_listen(make: Make, qtbot: QtBot) -> None:
    client, watch = make()
    request = watch.ask("count 1")
    assert watch.events == []
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert watch.end_of(request).code == ErrorCode.ENGINE_DIED
    assert client.state == EngineState.STOPPED


def test_cancel_stops_the_running_and_the_waiting(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    _, watch = running
    first, second = watch.ask("count 100000"), watch.ask("count 100000")
    qtbot.waitUntil(lambda: first.id in watch.text, timeout=WAIT_MS)
    second.cancel()
    qtbot.waitUntil(lambda: watch.ended(second), timeout=WAIT_MS)
    assert not watch.ended(first)
    first.cancel()
    qtbot.waitUntil(lambda: watch.ended(first), timeout=WAIT_MS)
    assert watch.end_of(first).finish_reason == watch.end_of(second).finish_reason == "cancelled"
    assert second.id not in watch.text
    first.cancel()  # has ended: without effect
    third = watch.ask("count 1")
    qtbot.waitUntil(lambda: watch.ended(third), timeout=WAIT_MS)
    assert watch.end_of(third).finish_reason == "stop"


def test_stop_while_loading(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    load = watch.load("slow")
    qtbot.waitUntil(lambda: bool(watch.progress), timeout=WAIT_MS)
    load.cancel()
    qtbot.waitUntil(lambda: watch.ended(load), timeout=WAIT_MS)
    assert watch.end_of(load) == Cancelled(load.id)
    assert client.state == EngineState.READY
    assert client.model is None


def test_a_load_that_fails_leaves_no_model(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    good, bad = watch.load("good"), watch.load("missing")
    qtbot.waitUntil(lambda: watch.ended(good, bad), timeout=WAIT_MS)
    assert watch.end_of(bad) == Failed(bad.id, ErrorCode.MODEL_NOT_FOUND, "There is no model 'missing'.")
    assert client.model is None
    assert client.state == EngineState.READY


def test_what_the_engine_raises_ends_the_request_and_quotes_nothing_and_stray_prints_reach_the_log(
    make: Make, qtbot: QtBot
) -> None:
    client, watch = make()
    client.start()
    for prompt, code in (
        ("raise memory", ErrorCode.NOT_ENOUGH_MEMORY),
        ("raise value SECRET", ErrorCode.INTERNAL),
        ("exit", ErrorCode.INTERNAL),
    ):
        failing, next_one = watch.ask(prompt), watch.ask("count 1")
        qtbot.waitUntil(lambda pair=(failing, next_one): watch.ended(*pair), timeout=WAIT_MS)
        assert watch.end_of(failing).code == code
        assert watch.end_of(next_one).finish_reason == "stop"
        said = watch.end_of(failing).message + "".join(path.read_text() for path in log_dir().glob("*.log"))
        assert "SECRET" not in said
        assert code == ErrorCode.NOT_ENOUGH_MEMORY or "scripted_worker.py" in said
    request = watch.ask("print")
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert watch.end_of(request).finish_reason == "stop"
    client.close_now()
    log = (log_dir() / "engine-stderr.log").read_text()
    assert all(stray in log for stray in ("stray print", "stray write", "stray child"))


def test_a_flood_arrives_whole_and_the_event_loop_turns_meanwhile(
    running: tuple[EngineClient, Watch], qtbot: QtBot
) -> None:
    _, watch = running
    request = watch.ask("flood 20000")
    turns = 0
    while not watch.ended(request):
        qtbot.wait(1)
        turns += 1
    assert watch.generated[request.id] == 20_000
    assert watch.text[request.id].split() == [str(n) for n in range(1, 20_001)]
    assert turns > 10


def test_events_of_unknown_requests_are_dropped(make: Make, qtbot: QtBot) -> None:
    client, watch = make(worker_saying(READY, encode(Cancelled("unknown"))))
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    qtbot.wait(50)
    assert watch.events == []


def test_each_request_hears_only_of_itself_and_is_gone_when_it_has_ended(
    running: tuple[EngineClient, Watch], qtbot: QtBot
) -> None:
    client, watch = running
    first, second = watch.ask("count 2"), watch.ask("count 3")
    assert client.answering == (first, second)
    heard: list[str] = []
    first.token.connect(lambda token: heard.append(token.request_id))
    ended: list[object] = []
    first.finished.connect(ended.append)
    gone: list[bool] = []
    first.destroyed.connect(lambda: gone.append(True))
    qtbot.waitUntil(lambda: watch.ended(first, second) and bool(gone), timeout=WAIT_MS)
    assert heard == [first.id] * 2
    assert ended == [watch.end_of(first)]
    first.cancel()  # without effect, but allowed: whoever holds it need not know that it has ended
    assert client.answering == ()


def test_the_client_knows_of_an_end_before_whoever_asked(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    seen: list[object] = []
    load = watch.load("anything")
    load.finished.connect(lambda _event: seen.append((client.model is not None, client.state, client.loading)))
    answer = watch.ask("count 2")
    rates: list[Finished] = []
    client.answered.connect(rates.append)
    answer.finished.connect(lambda _event: seen.append((client.answering, client.state)))
    qtbot.waitUntil(lambda: watch.ended(load, answer), timeout=WAIT_MS)
    assert seen == [(True, EngineState.BUSY, None), ((), EngineState.READY)]
    assert rates == [watch.end_of(answer)]


def test_how_far_a_load_is_belongs_to_the_engine(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    told: list[float | None] = []
    client.loading_changed.connect(lambda: told.append(client.loading))
    load = watch.load("slow")
    qtbot.waitUntil(lambda: any(each is not None for each in told), timeout=WAIT_MS)
    shares = [each for each in told if each is not None]  # before them it is not known what there is to load
    assert 0 <= shares[0] < 1
    assert client.loading_pace.progress.phase == "converting"
    load.cancel()
    qtbot.waitUntil(lambda: watch.ended(load), timeout=WAIT_MS)
    assert client.loading is None


_REQUEST = TelemetryRequest(1, "asked", 5)
_SPANS = TelemetrySpans(10, 2.0, 0, pack(no_spans()), 3)
_STEPS = TelemetryCounters(2, pack(steps((0, 5), (5, 9))), 0)
# Says so only once it is watched, as the worker that users get.
_ONCE_WATCHED = (
    "line = sys.stdin.buffer.readline(); "
    "sys.stdout.buffer.write({said!r} if b'WatchTelemetry' in line else b''); sys.stdout.flush(); sys.stdin.read()"
)


def heard(client: EngineClient) -> list[Any]:
    said: list[Any] = []
    client.recorded.connect(said.append)
    return said


def test_all_that_is_recorded_arrives_in_order(make: Make, qtbot: QtBot) -> None:
    messages = [_REQUEST, _SPANS, _STEPS]
    said = b"".join(encode(message) for message in messages)
    client, _ = make(worker_saying(READY, then=_ONCE_WATCHED.format(said=said)))
    told = heard(client)
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    assert not told
    client.watch_telemetry(on=True, expert_map=True)
    qtbot.waitUntil(lambda: len(told) == len(messages), timeout=WAIT_MS)
    assert told == messages
    assert len(unpack(told[1].packed, SPAN)) == 0
    assert unpack(told[2].packed, STEP)["end_ns"].tolist() == [5, 9]


def test_the_next_worker_is_watched_too(make: Make, qtbot: QtBot) -> None:
    client, _ = make(worker_saying(READY, then=_ONCE_WATCHED.format(said=encode(_STEPS))))
    told = heard(client)
    client.watch_telemetry(on=True)  # before there is anybody to tell
    client.start()
    qtbot.waitUntil(lambda: len(told) == 1, timeout=WAIT_MS)
    client.close_now()
    client.start()
    qtbot.waitUntil(lambda: len(told) == 2, timeout=WAIT_MS)
