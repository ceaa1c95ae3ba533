"""The client's requests: answered, failed, cancelled, cut off by the end of the process, and what is told of each."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services import engine_client, worker_process
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import Request
from engine.common import installed
from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.common.installed import note_files
from engine.common.model_info import ModelInfo
from engine.common.paths import log_dir, python_module
from engine.protocol import (
    PROTOCOL_VERSION,
    Cancelled,
    Failed,
    Finished,
    ModelLoaded,
    ModelMoved,
    ModelUnloaded,
    Ready,
    TelemetryCounters,
    TelemetryRequest,
    TelemetrySpans,
    encode,
)
from engine.telemetry.records import SPAN, STEP, no_spans, pack, unpack
from tests.app.engine_client.watching import HERE, POSIX, READY, SCRIPTED, WAIT_MS, Make, Watch, worker_saying
from tests.bundles import make_bundle, make_part
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
def kept(shared: EngineClient) -> tuple[EngineClient, Watch]:
    """One that other tests use too, and that none may end."""
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


def test_reasoning_arrives_apart_from_the_text(kept: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    _client, watch = kept
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


def test_cancel_stops_the_running_and_the_waiting(kept: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    _, watch = kept
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


def test_stop_while_loading(kept: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = kept
    load = watch.load("slow")
    qtbot.waitUntil(lambda: bool(watch.progress), timeout=WAIT_MS)
    load.cancel()
    qtbot.waitUntil(lambda: watch.ended(load), timeout=WAIT_MS)
    assert watch.end_of(load) == Cancelled(load.id)
    assert client.state == EngineState.READY
    assert client.model is None


def test_a_load_that_fails_leaves_no_model(kept: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = kept
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
    kept: tuple[EngineClient, Watch], qtbot: QtBot
) -> None:
    _, watch = kept
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
    kept: tuple[EngineClient, Watch], qtbot: QtBot
) -> None:
    client, watch = kept
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


def test_the_client_knows_of_an_end_before_whoever_asked(kept: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = kept
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


def test_how_far_a_load_is_belongs_to_the_engine(kept: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = kept
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


@POSIX
def test_kill_in_mid_answer_then_restart(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    load = watch.load("anything")
    answer, waiting = watch.ask("count 100000"), watch.ask("count 1")
    qtbot.waitUntil(lambda: answer.id in watch.text, timeout=WAIT_MS)
    os.kill(client.worker_pid, signal.SIGKILL)
    qtbot.waitUntil(lambda: client.state == EngineState.DIED and watch.ended(answer, waiting), timeout=WAIT_MS)
    for request in (answer, waiting):
        assert watch.end_of(request).code == ErrorCode.ENGINE_DIED
        assert "killed (signal 9)" in watch.end_of(request).message
    assert "memory" in client.last_error
    assert client.model is None
    assert watch.text[answer.id].startswith("1 ")
    refused = watch.ask("count 1")
    qtbot.waitUntil(lambda: watch.ended(refused), timeout=WAIT_MS)
    assert watch.end_of(refused).code == ErrorCode.ENGINE_DIED
    assert client.state == EngineState.DIED  # nothing restarts by itself

    reload = client.restart()
    assert reload is not None
    watch.follow(reload)
    after = watch.ask("count 2")
    qtbot.waitUntil(lambda: watch.ended(reload, after), timeout=WAIT_MS)
    assert watch.end_of(reload).info.name == "anything"
    assert watch.text[after.id] == "1 2 "
    assert client.last_error == ""
    assert isinstance(watch.end_of(load), ModelLoaded)


@pytest.fixture
def impatient(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineClient, Watch]:
    """Looks often, so that little more than a missed heartbeat is noticed."""
    for module in (engine_client, worker_process):
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    return make(not_responding_s=1.3)


@POSIX
def test_a_hanging_worker_is_told_of_and_restarted_only_when_asked(
    impatient: tuple[EngineClient, Watch], qtbot: QtBot
) -> None:
    client, watch = impatient
    said: list[bool] = []
    client.responding_changed.connect(said.append)
    client.start()
    answer = watch.ask("count 100000")
    qtbot.waitUntil(lambda: answer.id in watch.text, timeout=WAIT_MS)
    stopped = client.worker_pid
    said.clear()  # on a busy machine a worker may take longer to start than it has here
    os.kill(stopped, signal.SIGSTOP)
    qtbot.waitUntil(lambda: not client.is_responding, timeout=WAIT_MS)
    assert "not responded" in client.last_error
    assert client.state == EngineState.BUSY
    assert psutil.pid_exists(stopped)
    client.restart()
    assert said == [False, True]
    assert client.last_error == ""
    assert watch.end_of(answer).code == ErrorCode.ENGINE_DIED
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: not psutil.pid_exists(stopped), timeout=WAIT_MS)


@POSIX
def test_a_worker_that_answers_again_is_well_again(impatient: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, _ = impatient
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    os.kill(client.worker_pid, signal.SIGSTOP)
    qtbot.waitUntil(lambda: not client.is_responding, timeout=WAIT_MS)
    os.kill(client.worker_pid, signal.SIGCONT)
    qtbot.waitUntil(lambda: client.is_responding, timeout=WAIT_MS)
    assert client.last_error == ""


def test_a_worker_that_exits_at_start_does_not_spin(make: Make, qtbot: QtBot) -> None:
    client, watch = make([sys.executable, "-c", "import sys; sys.exit(7)"])
    client.start()
    request = watch.ask("count 1")
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert client.state == EngineState.DIED
    assert "code 7" in client.last_error
    assert watch.states == [EngineState.STARTING, EngineState.DIED]
    client.restart()
    qtbot.waitUntil(lambda: client.state == EngineState.DIED, timeout=WAIT_MS)


def test_a_worker_that_lost_a_file_says_of_which_model(make: Make, qtbot: QtBot) -> None:
    client, watch = make(worker_saying(READY, then="sys.stdin.readline(); sys.exit(2)"))
    client.start()
    load = watch.load("some/model.gguf")
    qtbot.waitUntil(lambda: watch.ended(load), timeout=WAIT_MS)
    assert client.last_error.startswith("A file of some/model.gguf became shorter, or its disk failed")


def test_a_program_that_is_not_there(make: Make, qtbot: QtBot) -> None:
    client, watch = make(["/nowhere/python"])
    client.start()
    request = watch.ask("count 1")
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert client.state == EngineState.DIED
    assert "could not be started" in client.last_error


def test_garbage_before_ready_is_passed_over(make: Make, qtbot: QtBot) -> None:
    client, _ = make(worker_saying(b"Some sitecustomize says hello\n\n", READY))
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)


def test_a_model_that_had_to_move_is_shown_where_it_is_now(make: Make, qtbot: QtBot) -> None:
    info = ModelInfo("big", "/", "fake", "cpu", "int4", 1, 1, 1, 0, 0, 100, 1, 1, 1, device_note="The card stopped.")
    client, _ = make(worker_saying(READY, encode(ModelMoved(info))))
    with qtbot.waitSignal(client.model_loaded, timeout=WAIT_MS) as moved:
        client.start()
    assert moved.args == [info]
    assert client.model == info


def test_what_a_process_can_no_longer_use_is_loaded_by_another(make: Make, qtbot: QtBot) -> None:
    info = ModelInfo("big", "/", "fake", "cpu", "int4", 1, 1, 1, 0, 0, 100, 1, 1, 1, needs_restart=True)
    client, _ = make(worker_saying(READY, encode(ModelMoved(info))))
    with qtbot.waitSignal(client.model_loaded, timeout=WAIT_MS):
        client.start()
    before = client.worker_pid
    client.load(EngineConfig("big"))
    assert client.worker_pid not in (0, before)
    assert client.model is None


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((READY, b"garbage\n"), "invalid message"),
        ((b"garbage\n" * 200,), "invalid message"),
        ((READY, b'{"type":"Token","request_id":"r","text":1,"generated_tokens":1}\n'), "invalid message"),
        ((encode(Ready(PROTOCOL_VERSION + 1, 1)),), "two installations"),
    ],
)
def test_a_stream_that_makes_no_sense_ends_the_worker(
    make: Make, qtbot: QtBot, lines: tuple[bytes, ...], sentence: str
) -> None:
    client, watch = make(worker_saying(*lines))
    client.start()
    request = watch.ask("count 1")
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert client.state == EngineState.DIED
    assert sentence in client.last_error
    assert watch.end_of(request).code == ErrorCode.ENGINE_DIED


def test_what_was_said_before_the_end_still_counts(make: Make, qtbot: QtBot) -> None:
    script = (
        "import sys, json\n"
        f"sys.stdout.buffer.write({READY!r}); sys.stdout.flush()\n"
        "request = json.loads(sys.stdin.readline())['request_id']\n"
        "for n in range(5000): print(json.dumps("
        "{'type': 'Token', 'request_id': request, 'text': 'x', 'generated_tokens': n}))\n"
        "print(json.dumps({'type': 'Finished', 'request_id': request, 'finish_reason': 'stop', 'prompt_tokens': 1,"
        " 'reused_tokens': 0, 'generated_tokens': 5000, 'ttft_s': 0.1, 'tokens_per_s': 1.0}))\n"
    )
    client, watch = make([sys.executable, "-c", script])
    client.start()
    request = watch.ask("anything")
    qtbot.waitUntil(lambda: client.state == EngineState.DIED, timeout=WAIT_MS)
    assert watch.text[request.id] == "x" * 5000
    assert isinstance(watch.end_of(request), Finished)


def test_a_request_made_in_a_slot_of_a_dying_one_ends_too(make: Make, qtbot: QtBot) -> None:
    client, watch = make([sys.executable, "-c", "pass"])
    again: list[Request] = []

    def on_finished(_event: object) -> None:
        if len(again) < 3:
            again.append(watch.ask("count 1"))
            again[-1].finished.connect(on_finished)

    client.start()
    watch.ask("count 1").finished.connect(on_finished)
    qtbot.waitUntil(lambda: len(again) == 3 and watch.ended(*again), timeout=WAIT_MS)
    assert len(watch.events) == 4


def test_shutdown_ends_the_worker_and_open_requests(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    pid = client.worker_pid
    answer, waiting = watch.ask("count 100000"), watch.ask("count 1")
    qtbot.waitUntil(lambda: answer.id in watch.text, timeout=WAIT_MS)
    client.shutdown()
    late = watch.ask("count 1")
    qtbot.waitUntil(lambda: client.state == EngineState.STOPPED, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: watch.ended(answer, waiting, late), timeout=WAIT_MS)
    assert watch.end_of(answer).finish_reason == watch.end_of(waiting).finish_reason == "cancelled"
    assert watch.end_of(late).code == ErrorCode.ENGINE_DIED
    assert not psutil.pid_exists(pid)
    assert client.last_error == ""
    client.start()  # and it can be started again
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)


def test_a_worker_that_ignores_shutdown_is_killed(make: Make, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "SHUTDOWN_S", 0.2)
    client, _ = make(worker_saying(READY, then="time.sleep(600)"))
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    pid = client.worker_pid
    client.shutdown()
    qtbot.waitUntil(lambda: client.state == EngineState.STOPPED, timeout=WAIT_MS)
    assert not psutil.pid_exists(pid)


@POSIX
@pytest.mark.parametrize(
    "prompt",
    [
        "count 100000",
        pytest.param("stuck", marks=pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")),
    ],
)
def test_the_worker_vanishes_with_its_window(prompt: str) -> None:
    command, variables = python_module("unused")
    script = [*command[:-2], str(HERE / "window_script.py"), *SCRIPTED, prompt]
    with subprocess.Popen(script, stdout=subprocess.PIPE, env={**os.environ, **variables}) as window:
        worker = psutil.Process(int(window.stdout.readline()))
        assert worker.is_running()
        window.kill()
        window.wait()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE  # init may be slow to reap it


@POSIX
def test_the_worker_ends_with_an_application_that_quits() -> None:
    command, variables = python_module("unused")
    script = (
        "import sys\n"
        "from PySide6.QtCore import QCoreApplication\n"
        "from app.services.engine_client import EngineClient\n"
        "application = QCoreApplication([])\n"
        "client = EngineClient(command=sys.argv[1:])\n"
        "def on_state(state):\n"
        "    if state.name == 'READY':\n"
        "        print(client.worker_pid, flush=True)\n"
        "        application.quit()\n"
        "client.state_changed.connect(on_state)\n"
        "client.start()\n"
        "application.exec()\n"
        "print('left')\n"
    )
    done = subprocess.run(
        [*command[:-2], "-c", script, *SCRIPTED], capture_output=True, text=True, env={**os.environ, **variables}
    )
    pid, left = done.stdout.split()
    assert left == "left"
    assert not psutil.pid_exists(int(pid))
    assert "Destroyed while process" not in done.stderr


def _file_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program whose engine was installed whole; one file of that engine."""
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(make_bundle(tmp_path / "program")))
    part = make_part("engine-0.2.0-cpu")
    file = part / "torch.so"
    file.write_text("here")
    note_files(part)
    return file


def test_an_engine_that_lost_files_and_does_not_start_says_so(
    make: Make, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _file_of_the_engine(tmp_path, monkeypatch)
    client, _ = make([sys.executable, "-c", "raise SystemExit(3)"])
    client.start()
    qtbot.waitUntil(lambda: "exited unexpectedly (code 3)" in client.last_error, timeout=WAIT_MS)
    file.unlink()
    client.start()
    qtbot.waitUntil(lambda: "has lost files since it was installed (torch.so)" in client.last_error, timeout=WAIT_MS)
    assert client.state is EngineState.DIED
    assert installed.needs_engine()
