"""What a watched worker records reaches the client whole, in order, and again after a restart."""

from typing import Any

from pytestqt.qtbot import QtBot

from app.services.engine_client import EngineClient, EngineState
from engine.protocol import TelemetryCounters, TelemetryRequest, TelemetrySpans, encode
from engine.telemetry.records import SPAN, STEP, no_spans, pack, unpack
from tests.app.engine_client.watching import READY, WAIT_MS, Make, worker_saying
from tests.unit.recorded import steps

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
