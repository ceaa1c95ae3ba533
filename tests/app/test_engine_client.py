"""The engine client against real worker processes: whatever happens to them, every request ends once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pytestqt.qtbot import QtBot

from app.services.engine_client import EngineClient, EngineState
from engine.config import EngineConfig, SamplingParams
from engine.errors import ErrorCode
from engine.paths import log_dir, python_module
from engine.protocol import (
    PROTOCOL_VERSION,
    Cancelled,
    ChatMessage,
    Failed,
    Finished,
    ModelLoaded,
    ModelUnloaded,
    Ready,
    encode,
)

HERE = Path(__file__).parent
SCRIPTED = [sys.executable, "-P", str(HERE / "scripted_worker.py")]
POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
WAIT_MS = 30_000


class Watch:
    """What a client said, in order."""

    def __init__(self, client: EngineClient) -> None:
        self.states: list[EngineState] = []
        self.events: list[Any] = []
        self.text: dict[str, str] = {}
        self.generated: dict[str, int] = {}
        self.progress: list[Any] = []
        self.telemetry: list[Any] = []
        client.state_changed.connect(self.states.append)
        client.finished.connect(self.events.append)
        client.token.connect(self._on_token)
        client.progress.connect(self.progress.append)
        client.telemetry.connect(self.telemetry.append)

    def _on_token(self, token: Any) -> None:
        self.text[token.request_id] = self.text.get(token.request_id, "") + token.text
        self.generated[token.request_id] = token.generated_tokens

    def ended(self, *request_ids: str) -> bool:
        return set(request_ids) <= {event.request_id for event in self.events}

    def end_of(self, request_id: str) -> Any:
        (event,) = [event for event in self.events if event.request_id == request_id]
        return event


Make = Callable[..., tuple[EngineClient, Watch]]


@pytest.fixture
def make(qtbot: QtBot) -> Iterator[Make]:
    clients: list[EngineClient] = []

    def build(command: list[str] | None = None, **options: Any) -> tuple[EngineClient, Watch]:
        client = EngineClient(command=command or SCRIPTED, **options)
        clients.append(client)
        return client, Watch(client)

    yield build
    for client in clients:
        client.close_now()
        client.deleteLater()


@pytest.fixture
def running(make: Make, qtbot: QtBot) -> tuple[EngineClient, Watch]:
    client, watch = make()
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    return client, watch


def ask(client: EngineClient, prompt: str) -> str:
    return client.generate([ChatMessage("user", prompt)], SamplingParams())


def worker_saying(*lines: bytes, then: str = "sys.stdin.read()") -> list[str]:
    """A worker that is not ours: writes these lines, then does that."""
    script = f"import sys, os, time; sys.stdout.buffer.write({b''.join(lines)!r}); sys.stdout.flush(); {then}"
    return [sys.executable, "-c", script]


READY = encode(Ready(PROTOCOL_VERSION, 1))


def test_an_answer_streams_and_ends(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    load = client.load(EngineConfig("anything"))
    answer = ask(client, "count 5")
    assert client.state == EngineState.LOADING
    qtbot.waitUntil(lambda: watch.ended(load, answer), timeout=WAIT_MS)
    assert isinstance(watch.end_of(load), ModelLoaded)
    assert client.model is not None
    assert client.model.name == "anything"
    assert watch.text[answer] == "1 2 3 4 5 "
    assert watch.end_of(answer) == Finished(answer, "stop", 1, 0, 5, 0.1, 10.0)
    assert {p.phase for p in watch.progress} == {"loading", "prefill"}
    assert watch.states == [EngineState.STARTING, EngineState.READY, *watch.states[2:]]
    assert watch.states[-3:] == [EngineState.LOADING, EngineState.BUSY, EngineState.READY]
    qtbot.waitUntil(lambda: bool(watch.telemetry), timeout=WAIT_MS)
    assert watch.telemetry[-1].kv_tokens == 7
    unload = client.unload()
    qtbot.waitUntil(lambda: watch.ended(unload), timeout=WAIT_MS)
    assert watch.end_of(unload) == ModelUnloaded(unload)
    assert client.model is None


def test_requests_made_while_starting_wait_for_the_worker(make: Make, qtbot: QtBot) -> None:
    client, watch = make()
    client.start()
    assert client.state == EngineState.STARTING
    first, second = ask(client, "count 2"), ask(client, "count 3")
    qtbot.waitUntil(lambda: watch.ended(first, second), timeout=WAIT_MS)
    assert [event.request_id for event in watch.events] == [first, second]
    assert watch.text == {first: "1 2 ", second: "1 2 3 "}


def test_a_request_without_an_engine_fails_after_its_id_is_known(make: Make, qtbot: QtBot) -> None:
    client, watch = make()
    request = ask(client, "count 1")
    assert watch.events == []
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert watch.end_of(request).code == ErrorCode.ENGINE_DIED
    assert client.state == EngineState.STOPPED


def test_cancel_stops_the_running_and_the_waiting(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    first, second = ask(client, "count 100000"), ask(client, "count 100000")
    qtbot.waitUntil(lambda: first in watch.text, timeout=WAIT_MS)
    client.cancel(second)
    qtbot.waitUntil(lambda: watch.ended(second), timeout=WAIT_MS)
    assert not watch.ended(first)
    client.cancel(first)
    qtbot.waitUntil(lambda: watch.ended(first), timeout=WAIT_MS)
    assert watch.end_of(first).finish_reason == watch.end_of(second).finish_reason == "cancelled"
    assert second not in watch.text
    client.cancel(first)  # has ended: without effect
    client.cancel("never heard of")
    third = ask(client, "count 1")
    qtbot.waitUntil(lambda: watch.ended(third), timeout=WAIT_MS)
    assert watch.end_of(third).finish_reason == "stop"


def test_stop_while_loading(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    load = client.load(EngineConfig("slow"))
    qtbot.waitUntil(lambda: bool(watch.progress), timeout=WAIT_MS)
    client.cancel(load)
    qtbot.waitUntil(lambda: watch.ended(load), timeout=WAIT_MS)
    assert watch.end_of(load) == Cancelled(load)
    assert client.state == EngineState.READY
    assert client.model is None


def test_a_load_that_fails_leaves_no_model(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    good, bad = client.load(EngineConfig("good")), client.load(EngineConfig("missing"))
    qtbot.waitUntil(lambda: watch.ended(good, bad), timeout=WAIT_MS)
    assert watch.end_of(bad) == Failed(bad, ErrorCode.MODEL_NOT_FOUND, "There is no model 'missing'.")
    assert client.model is None
    assert client.state == EngineState.READY


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("raise memory", ErrorCode.NOT_ENOUGH_MEMORY),
        ("raise value SECRET", ErrorCode.INTERNAL),
        ("exit", ErrorCode.INTERNAL),
    ],
)
def test_what_the_engine_raises_ends_the_request_and_quotes_nothing(
    running: tuple[EngineClient, Watch], qtbot: QtBot, prompt: str, code: ErrorCode
) -> None:
    client, watch = running
    failing, next_one = ask(client, prompt), ask(client, "count 1")
    qtbot.waitUntil(lambda: watch.ended(failing, next_one), timeout=WAIT_MS)
    assert watch.end_of(failing).code == code
    assert watch.end_of(next_one).finish_reason == "stop"
    said = watch.end_of(failing).message + "".join(path.read_text() for path in log_dir().glob("*.log"))
    assert "SECRET" not in said
    assert code == ErrorCode.NOT_ENOUGH_MEMORY or "scripted_worker.py" in said


def test_stray_prints_reach_the_log_and_not_the_stream(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    request = ask(client, "print")
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert watch.end_of(request).finish_reason == "stop"
    client.close_now()
    log = (log_dir() / "engine-stderr.log").read_text()
    assert all(stray in log for stray in ("stray print", "stray write", "stray child"))


def test_a_flood_arrives_whole_and_the_event_loop_turns_meanwhile(
    running: tuple[EngineClient, Watch], qtbot: QtBot
) -> None:
    client, watch = running
    request = ask(client, "flood 20000")
    turns = 0
    while not watch.ended(request):
        qtbot.wait(1)
        turns += 1
    assert watch.generated[request] == 20_000
    assert watch.text[request].split() == [str(n) for n in range(1, 20_001)]
    assert turns > 10


@POSIX
def test_kill_in_mid_answer_then_restart(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    load = client.load(EngineConfig("anything"))
    answer, waiting = ask(client, "count 100000"), ask(client, "count 1")
    qtbot.waitUntil(lambda: answer in watch.text, timeout=WAIT_MS)
    os.kill(client.worker_pid, signal.SIGKILL)
    qtbot.waitUntil(lambda: client.state == EngineState.DIED and watch.ended(answer, waiting), timeout=WAIT_MS)
    for request in (answer, waiting):
        assert watch.end_of(request).code == ErrorCode.ENGINE_DIED
        assert "killed (signal 9)" in watch.end_of(request).message
    assert "memory" in client.last_error
    assert client.model is None
    assert watch.text[answer].startswith("1 ")
    refused = ask(client, "count 1")
    qtbot.waitUntil(lambda: watch.ended(refused), timeout=WAIT_MS)
    assert watch.end_of(refused).code == ErrorCode.ENGINE_DIED
    assert client.state == EngineState.DIED  # nothing restarts by itself

    reload = client.restart()
    assert reload is not None
    after = ask(client, "count 2")
    qtbot.waitUntil(lambda: watch.ended(reload, after), timeout=WAIT_MS)
    assert watch.end_of(reload).info.name == "anything"
    assert watch.text[after] == "1 2 "
    assert client.last_error == ""
    assert isinstance(watch.end_of(load), ModelLoaded)


@POSIX
def test_a_hanging_worker_is_told_of_and_restarted_only_when_asked(make: Make, qtbot: QtBot) -> None:
    client, watch = make(not_responding_s=2.0)
    said: list[bool] = []
    client.responding_changed.connect(said.append)
    client.start()
    answer = ask(client, "count 100000")
    qtbot.waitUntil(lambda: answer in watch.text, timeout=WAIT_MS)
    stopped = client.worker_pid
    os.kill(stopped, signal.SIGSTOP)
    qtbot.waitUntil(lambda: not client.is_responding, timeout=WAIT_MS)
    assert "not answered" in client.last_error
    assert client.state == EngineState.BUSY
    assert psutil.pid_exists(stopped)
    client.restart()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: not psutil.pid_exists(stopped), timeout=WAIT_MS)
    assert watch.end_of(answer).code == ErrorCode.ENGINE_DIED
    assert said == [False, True]
    assert client.last_error == ""


@POSIX
def test_a_worker_that_answers_again_is_well_again(make: Make, qtbot: QtBot) -> None:
    client, _ = make(not_responding_s=2.0)
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
    request = ask(client, "count 1")
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert client.state == EngineState.DIED
    assert "exit code 7" in client.last_error
    assert watch.states == [EngineState.STARTING, EngineState.DIED]
    client.restart()
    qtbot.waitUntil(lambda: client.state == EngineState.DIED, timeout=WAIT_MS)


def test_a_program_that_is_not_there(make: Make, qtbot: QtBot) -> None:
    client, watch = make(["/nowhere/python"])
    client.start()
    request = ask(client, "count 1")
    qtbot.waitUntil(lambda: watch.ended(request), timeout=WAIT_MS)
    assert client.state == EngineState.DIED
    assert "could not be started" in client.last_error


def test_garbage_before_ready_is_passed_over(make: Make, qtbot: QtBot) -> None:
    client, _ = make(worker_saying(b"Some sitecustomize says hello\n\n", READY))
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((READY, b"garbage\n"), "not understood"),
        ((b"garbage\n" * 200,), "not understood"),
        ((READY, b'{"type":"Token","request_id":"r","text":1,"generated_tokens":1}\n'), "not understood"),
        ((encode(Ready(PROTOCOL_VERSION + 1, 1)),), "two installations"),
    ],
)
def test_a_stream_that_makes_no_sense_ends_the_worker(
    make: Make, qtbot: QtBot, lines: tuple[bytes, ...], sentence: str
) -> None:
    client, watch = make(worker_saying(*lines))
    client.start()
    request = ask(client, "count 1")
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
    request = ask(client, "anything")
    qtbot.waitUntil(lambda: client.state == EngineState.DIED, timeout=WAIT_MS)
    assert watch.text[request] == "x" * 5000
    assert isinstance(watch.end_of(request), Finished)


def test_events_of_unknown_requests_are_dropped(make: Make, qtbot: QtBot) -> None:
    client, watch = make(worker_saying(READY, encode(Cancelled("unknown"))))
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    qtbot.wait(50)
    assert watch.events == []


def test_a_request_made_in_a_slot_of_a_dying_one_ends_too(make: Make, qtbot: QtBot) -> None:
    client, watch = make([sys.executable, "-c", "pass"])
    again: list[str] = []

    def on_finished(_event: object) -> None:
        if len(again) < 3:
            again.append(ask(client, "count 1"))

    client.finished.connect(on_finished)
    client.start()
    ask(client, "count 1")
    qtbot.waitUntil(lambda: len(again) == 3 and watch.ended(*again), timeout=WAIT_MS)
    assert len(watch.events) == 4


def test_shutdown_ends_the_worker_and_open_requests(running: tuple[EngineClient, Watch], qtbot: QtBot) -> None:
    client, watch = running
    pid = client.worker_pid
    answer, waiting = ask(client, "count 100000"), ask(client, "count 1")
    qtbot.waitUntil(lambda: answer in watch.text, timeout=WAIT_MS)
    client.shutdown()
    late = ask(client, "count 1")
    qtbot.waitUntil(lambda: client.state == EngineState.STOPPED, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: watch.ended(answer, waiting, late), timeout=WAIT_MS)
    assert watch.end_of(answer).finish_reason == watch.end_of(waiting).finish_reason == "cancelled"
    assert watch.end_of(late).code == ErrorCode.ENGINE_DIED
    assert not psutil.pid_exists(pid)
    assert client.last_error == ""
    client.start()  # and it can be started again
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)


def test_a_worker_that_ignores_shutdown_is_killed(make: Make, qtbot: QtBot) -> None:
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
        assert window.stdout is not None
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
