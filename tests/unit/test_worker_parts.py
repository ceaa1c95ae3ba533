"""The worker's queue, writer, reader and sentences, each without a process."""

import errno
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.process.failures import as_engine_error, log_failure
from engine.process.requests import RequestQueue
from engine.process.streams import EventWriter
from engine.process.telemetry import TelemetryService
from engine.protocol import (
    Cancel,
    Cancelled,
    ChatMessage,
    Event,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    LineReader,
    LoadModel,
    ModelUnloaded,
    Shutdown,
    Telemetry,
    TerminalEvent,
    Token,
    UnloadModel,
    decode,
    encode,
)
from engine.telemetry.recorder import Recorder
from engine.worker import read_commands


def generate(request_id: str) -> Generate:
    return Generate(request_id, (ChatMessage("user", "hello"),), SamplingParams())


def load(request_id: str) -> LoadModel:
    return LoadModel(request_id, EngineConfig("m"))


# --- the queue ------------------------------------------------------------------------------------


@pytest.fixture
def sent() -> list[TerminalEvent]:
    return []


@pytest.fixture
def requests(sent: list[TerminalEvent]) -> RequestQueue:
    return RequestQueue(sent.append)


def test_a_waiting_request_that_is_cancelled_never_runs(requests: RequestQueue, sent: list[TerminalEvent]) -> None:
    for request in (generate("a"), load("b"), generate("c")):
        requests.accept(request)
    requests.cancel("a")
    requests.cancel("b")
    assert sent == [Finished("a", "cancelled", 0, 0, 0, 0.0, 0.0), Cancelled("b")]
    assert requests.take() == generate("c")
    requests.cancel("c")
    assert requests.is_cancelled("c")
    assert len(sent) == 2
    requests.end(Cancelled("c"))
    assert not requests.is_cancelled("c")


def test_unloading_cannot_be_cancelled(requests: RequestQueue, sent: list[TerminalEvent]) -> None:
    requests.accept(UnloadModel("u"))
    requests.cancel("u")
    requests.close()
    assert requests.take() == UnloadModel("u")
    requests.end(ModelUnloaded("u"))
    assert sent == [ModelUnloaded("u")]
    assert requests.take() is None


def test_closing_cancels_what_runs_what_waits_and_what_comes(requests: RequestQueue, sent: list[TerminalEvent]) -> None:
    requests.accept(generate("running"))
    requests.take()
    requests.accept(load("waiting"))
    requests.close()
    requests.accept(generate("late"))
    assert requests.is_cancelled("running")
    assert {event.request_id for event in sent} == {"waiting", "late"}
    assert requests.take() is None


# --- the writer -----------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for fd in (read_end, write_end):
        try:
            os.close(fd)
        except OSError:
            continue


def read_until(fd: int, last: Event) -> list[Event]:
    reader, events = LineReader(), []
    while last not in events:
        data = os.read(fd, 65536)
        assert data, "the stream ended"
        events += [decode(line) for line in reader.feed(data)]
    return [event for event in events if not isinstance(event, Heartbeat)]


def sample(kv_tokens: int) -> Telemetry:
    return Telemetry(1, 1, 1, 1, kv_tokens, 0.0)


def test_a_window_slow_to_read_holds_up_nobody_and_loses_nothing(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    writer = EventWriter(write_end, on_broken=lambda: None)
    writer.start()
    tokens = [Token("r", "x" * 100, n) for n in range(5_000)]  # more than any pipe takes
    for n, token in enumerate(tokens):
        writer.send(token)
        writer.send(sample(n))
    last = Cancelled("r")
    writer.send(last)
    assert not writer.flush(0.05)  # nobody has read yet, and still everything above has returned
    events = read_until(read_end, last)
    assert [event for event in events if not isinstance(event, Telemetry)] == [*tokens, last]
    assert sum(isinstance(event, Telemetry) for event in events) < 50
    writer.close()
    assert writer.flush(0)


# --- the reader -----------------------------------------------------------------------------------


class Sink:
    """An EventWriter that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, event: Event) -> None:
        self.events.append(event)


def read_all(stream: bytes, requests: RequestQueue, sink: Sink, pipe: tuple[int, int]) -> bool:
    read_end, write_end = pipe
    os.write(write_end, stream)
    os.close(write_end)
    telemetry = TelemetryService(sink.send, Recorder())
    return read_commands(read_end, requests, sink, telemetry)  # type: ignore[arg-type]


def test_commands_until_shutdown(requests: RequestQueue, sent: list[TerminalEvent], pipe: tuple[int, int]) -> None:
    commands = (load("a"), generate("b"), Cancel("b"), UnloadModel("c"), Shutdown(), generate("after"))
    assert read_all(b"".join(map(encode, commands)), requests, Sink(), pipe)
    assert requests.take() == load("a")
    assert requests.take() == UnloadModel("c")
    assert [event.request_id for event in sent] == ["b"]


def test_the_end_of_the_stream_is_no_shutdown(requests: RequestQueue, pipe: tuple[int, int]) -> None:
    assert not read_all(encode(Shutdown())[:-1], requests, Sink(), pipe)


def test_a_bad_command_fails_alone(requests: RequestQueue, pipe: tuple[int, int]) -> None:
    bad = b'{"type":"Generate","request_id":"bad","messages":[],"sampling":{"beams":0}}\n'
    unknown = b'{"type":"Later","request_id":"newer"}\n'
    sink = Sink()
    read_all(b"\xff\xff\n" + bad + unknown + encode(Heartbeat(1.0)) + encode(generate("good")), requests, sink, pipe)
    assert requests.take() == generate("good")
    assert [(event.request_id, event.code) for event in sink.events if isinstance(event, Failed)] == [
        ("bad", ErrorCode.INVALID_REQUEST),
        ("newer", ErrorCode.PROTOCOL),
    ]


# --- the sentences --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), ErrorCode.NOT_ENOUGH_MEMORY),
        (OSError(errno.ENOMEM, "x"), ErrorCode.NOT_ENOUGH_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), ErrorCode.NOT_ENOUGH_MEMORY),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), ErrorCode.NOT_ENOUGH_MEMORY),
        (OSError(errno.ENOSPC, "x"), ErrorCode.DISK_FULL),
        (OSError(errno.EACCES, "x"), ErrorCode.INTERNAL),
        (RuntimeError("shapes"), ErrorCode.INTERNAL),
        (SystemExit(1), ErrorCode.INTERNAL),
        (ModuleNotFoundError("x", name="torch"), ErrorCode.INTERNAL),
        (EngineError(ErrorCode.PROMPT_TOO_LONG, "Too long."), ErrorCode.PROMPT_TOO_LONG),
    ],
)
def test_any_exception_is_one_sentence(error: BaseException, code: ErrorCode) -> None:
    told = as_engine_error(error, "answering")
    assert told.code == code
    assert "\n" not in told.message
    assert told.message.endswith(".")


def test_the_log_has_the_place_and_not_the_text(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("SECRET")

    with pytest.raises(ValueError, match="SECRET") as caught:
        fails()
    with caplog.at_level(logging.INFO):
        log_failure(caught.value, "answering")
    assert "ValueError" in caplog.text
    assert "in fails" in caplog.text
    assert "SECRET" not in as_engine_error(caught.value, "answering").message


def test_a_window_that_is_gone_is_noticed(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    os.close(read_end)
    broken = threading.Event()
    writer = EventWriter(write_end, on_broken=broken.set)
    writer.start()
    writer.send(Cancelled("r"))
    assert broken.wait(30)
    writer.close()


def test_heartbeats_come_by_themselves(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.streams.HEARTBEAT_S", 0.01)
    read_end, write_end = pipe
    writer = EventWriter(write_end, on_broken=lambda: None)
    writer.start()
    reader, beats = LineReader(), []
    while len(beats) < 3:
        beats += [decode(line) for line in reader.feed(os.read(read_end, 65536))]
    assert all(isinstance(beat, Heartbeat) for beat in beats)
    writer.close()
